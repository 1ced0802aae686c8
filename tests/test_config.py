"""What a user may write, and the sentence that answers a mistake."""

import json
from pathlib import Path

import pytest

from echo_p2p.config import NodeConfig, dump_config, load_config
from echo_p2p.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "node.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_without_file_and_flags_the_defaults_hold():
    assert load_config(None) == NodeConfig()


PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNTXdxNUAjRhGCe1UBFSd2HYpfhAnG5BKCUZwW8AAvXvh"


def test_flags_go_over_the_file_and_the_file_over_defaults(write):
    path = write('swarm = "lab"\n[run]\nseed = 7\nmax_lag = 2\n[run.sampling]\ntemperature = 0.5\n')
    config = load_config(path, {"run.seed": 9, "run.sampling.top_k": 20, "network.peers": [PEER]})
    assert (config.swarm, config.run.seed, config.run.max_lag) == ("lab", 9, 2)
    assert (config.run.sampling.temperature, config.run.sampling.top_k) == (0.5, 20)
    assert config.network.peers == (PEER,)
    assert config.run.group_size == NodeConfig().run.group_size


def test_a_whole_number_serves_as_a_decimal_and_names_the_same_run(write):
    config = load_config(write("[run.sampling]\ntemperature = 1\n"))
    assert config.run.sampling.hash() == NodeConfig().run.sampling.hash()


@pytest.mark.parametrize(
    ("text", "path", "cure"),
    [
        ('swram = "x"', "`swram`", "did you mean `swarm`?"),
        ("[run]\nmaxlag = 2", "`run.maxlag`", "did you mean `run.max_lag`?"),
        ("[run.sampling]\ntemprature = 1.0", "`run.sampling.temprature`", "did you mean `run.sampling.temperature`?"),
        ("[trainer]\nzzz = 1", "`trainer.zzz`", "known keys: buffer_bytes, "),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_a_hint(write, text, path, cure):
    with pytest.raises(ConfigError) as raised:
        load_config(write(text))
    assert f"node.toml: unknown key {path}; " in str(raised.value)
    assert cure in str(raised.value)


def test_settings_of_a_task_are_the_task_s_own(write):
    config = load_config(write("[run.task.settings]\nsize = 6\nanything = true\n"))
    assert config.run.task.settings == {"size": 6, "anything": True}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[run]\nseed = "one"', "`run.seed`: Expected `int`, got `str`."),
        ("[run]\nmax_lag = -1", "`run.max_lag`: Expected `int` >= 0."),
        ("[run]\nmax_lag = true", "`run.max_lag`: Expected `int`, got `bool`."),
        ("[run.sampling]\ntemperature = nan", "`run.sampling.temperature`: Expected `float` > 0.0."),
        ('role = "pirate"', "`role`: Invalid enum value 'pirate'."),
        ("run = 3", "`run`: Expected `object`, got `int`."),
        ('[network]\npeers = ["a", 2]', "`network.peers[1]`: Expected `str`, got `int`."),
        ("[run]\nseed = 9007199254740993", "`run.seed`: Expected `int` <= 9007199254740992."),
        ('swarm = "a b"', "`swarm`: Expected `str` matching regex"),
        ('swarm = "ab\\n"', "`swarm`: Expected `str` matching regex"),
        (
            "[run]\ngroup_size = 1024\n[run.sampling]\nmax_new_tokens = 4096",
            "`run`: 1024 answers of 4096 tokens are over",
        ),
        (
            "[run.algorithm]\ncorrection_bounds = [2.0, 0.5]",
            "`run.algorithm`: correction_bounds (2.0, 0.5) are the wrong",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_path(write, text, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(write(text))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_flag_is_named_too():
    with pytest.raises(ConfigError, match=r"the command line: `run\.seed`: Expected `int`, got `str`"):
        load_config(None, {"run.seed": "x"})
    with pytest.raises(ConfigError, match=r"unknown key `run\.sede`; did you mean `run\.seed`"):
        load_config(None, {"run.sede": 1})


def test_a_value_where_a_table_belongs_is_named(write):
    with pytest.raises(ConfigError, match="`run` must be a table"):
        load_config(write("run = 3"), {"run.seed": 1})


def test_a_missing_file_is_named_with_the_cure(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file or directory; check the path"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="check the path"):
        load_config(tmp_path)


def test_bad_toml_is_named_with_its_place(write, tmp_path):
    with pytest.raises(ConfigError, match=r"node\.toml is not valid TOML: .*line 1"):
        load_config(write("swarm = = 3"))
    (tmp_path / "latin.toml").write_bytes(b'swarm = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml is not valid TOML"):
        load_config(tmp_path / "latin.toml")


def test_the_resolved_configuration_is_written_whole():
    written = json.loads(dump_config(NodeConfig()))
    assert written["run"]["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 32}
