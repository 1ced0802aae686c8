"""The command line as a person meets it: answers on stdout, one sentence on stderr, exit status."""

import json
import re
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from echo_node.cli import main
from echo_node.places import find_places, only_node


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), *arguments])


def commands() -> list[str]:
    return main.list_commands(click.Context(main))


@pytest.mark.parametrize("command", commands())
def test_every_command_explains_itself_and_all_its_options(tmp_path: Path, command: str) -> None:
    result = run(tmp_path, command, "--help")
    assert result.exit_code == 0
    assert main.commands[command].help
    for option in main.commands[command].params:
        assert isinstance(option, click.Option)
        assert option.help, option.name
        assert option.show_envvar, option.name


def test_every_command_is_named_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text() + (
        Path(__file__).parent.parent / "node" / "README.md"
    ).read_text()
    for command in commands():
        if not main.commands[command].hidden:
            assert re.search(rf"(echo-node|make) {command}\b|`{command}`", readme), command


@pytest.mark.parametrize("command", [("join", "--role", "trainer"), ("co-located",), ("demo",)])
def test_an_algorithm_that_nobody_knows_is_said_before_anything_is_loaded(tmp_path: Path, command: list[str]) -> None:
    result = run(tmp_path, *command, "--set", "run.algorithm.name=magic")
    assert result.exit_code == 2
    assert "'magic': the trainer knows grpo, dr-grpo, dapo, gspo" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_id_is_made_once_and_then_kept(tmp_path: Path) -> None:
    first = run(tmp_path, "id")
    assert first.exit_code == 0
    assert re.fullmatch(r"12D3Koo\w+\n", first.stdout)
    again = json.loads(run(tmp_path, "id", "--json").stdout)
    assert again == {"peer": first.stdout.strip(), "identity": str(tmp_path / "identity.key")}
    assert (tmp_path / "identity.key").stat().st_mode & 0o777 == 0o600


def test_an_identity_that_others_can_read_is_refused_with_the_cure(tmp_path: Path) -> None:
    run(tmp_path, "id")
    (tmp_path / "identity.key").chmod(0o644)
    result = run(tmp_path, "id")
    assert result.exit_code == 1
    assert "chmod 600" in result.stderr
    assert result.stderr.count("\n") == 1


def test_status_without_a_node_says_so_in_one_sentence(tmp_path: Path) -> None:
    for command in ("status", "peers"):
        result = run(tmp_path, command)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "run.max_lg=3"], "unknown key `run.max_lg`; did you mean `run.max_lag`?"),
        (["--set", "run.max_lag=many"], "`run.max_lag`: Expected `int`, got `str`"),
        (["--set", "nonsense"], "write KEY=VALUE"),
        (["--config", "missing.toml"], "can't read the configuration missing.toml"),
    ],
)
def test_wrong_configuration_is_one_sentence_with_the_path_of_the_key(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = run(tmp_path, "join", "--role", "trainer", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNTXdxNUAjRhGCe1UBFSd2HYpfhAnG5BKCUZwW8AAvXvh"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inference", "--peer", "127.0.0.1:4001"], "--peer 127.0.0.1:4001 is no address"),
        (["inference", "--peer", "/ip4/127.0.0.1/tcp/4001"], "is no address"),
        (["inference", "--peer", "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWxxxx"], "is no address"),
        (["inference", "--peer", PEER.replace("tcp", "tpc")], "is no address"),
        (["inference", "--peer", PEER, "--host", "999.1.1.1"], "999.1.1.1 is no IP address"),
        (["inference", "--peer", PEER, "--owner", "bla"], "--owner bla is no PeerID"),
        (["inference"], "needs a swarm to join"),
    ],
)
def test_wrong_addresses_are_said_at_once(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = run(tmp_path, "join", "--role", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["--port", "--gossip-port"])
def test_a_port_that_is_taken_is_said_with_its_flag(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run(tmp_path, "bootstrap", "--host", "127.0.0.1", flag, port)
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 can't be used" in result.stderr
    assert flag in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainer", "--model", "./nosuchfolder"], 'No model "./nosuchfolder"'),
        (["trainer", "--model", "/"], "/ holds no config.json"),
        (["inference", "--peer", PEER, "--set", "inference.model=./nosuchfolder"], "inference.model=./nosuchfolder is"),
    ],
)
def test_a_model_that_does_not_exist_is_said_before_joining(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = run(tmp_path / "home", "join", "--role", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("name=nosuchtask", 'Unknown task "nosuchtask"'),
        ("name=rg:nosuchset", 'no data set "nosuchset"'),
        ("settings={colour=3}", "no setting colour"),
        ("settings={size=10}", "has 10 prompts, the run asks for"),
    ],
)
@pytest.mark.parametrize("command", [("join", "--role", "trainer"), ("demo",)])
def test_a_task_that_can_not_be_had_is_said_before_joining(
    tmp_path: Path, command: list[str], setting: str, words: str
) -> None:
    result = run(tmp_path / "home", *command, "--set", f"run.task.{setting}")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("role", ["trainer", "inference", "bootstrap"])
def test_an_http_port_that_is_taken_is_said_before_joining(tmp_path: Path, role: str) -> None:
    command = ["bootstrap"] if role == "bootstrap" else ["join", "--role", role, "--peer", PEER]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run(tmp_path / "home", *command, "--http-port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "is taken by another program; choose another with --http-port" in result.stderr
    assert not (tmp_path / "home").exists()


def test_a_second_node_in_one_home_is_refused(tmp_path: Path) -> None:
    places = find_places(str(tmp_path))
    with only_node(places):
        result = run(tmp_path, "bootstrap", "--host", "127.0.0.1")
    assert result.exit_code == 2
    assert "a node already runs in" in result.stderr
    with only_node(places):
        pass  # the lock has gone with its holder


@pytest.mark.parametrize(
    "arguments", [["--seconds", "-5"], ["--seconds", "abc"], ["--steps", "0"], ["--slow", "-1"], ["--set", "foo=1"]]
)
def test_wrong_demo_options_are_refused_at_once(tmp_path: Path, arguments: list[str]) -> None:
    result = run(tmp_path, "demo", *arguments)
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_flags_win_over_set_and_set_wins_over_the_file(tmp_path: Path) -> None:
    from echo_node.cli import node_config

    file = tmp_path / "run.toml"
    file.write_text("[run]\nmax_lag = 1\nprotocol = 'async'\nseed = 7\n")
    flags = dict.fromkeys(["swarm", "host", "port", "gossip_port", "http_port"])
    flags |= {"peers": (), "announce": (), "config": file, "protocol": "sequential"}
    config = node_config("trainer", flags | {"settings": ("run.max_lag=2", "run.protocol=async")})
    assert (config.run.max_lag, config.run.protocol, config.run.seed) == (2, "sequential", 7)
