"""`echo-node doctor`: each failed check says the cure, and a machine that is fine is told so."""

import contextlib
import io
import json
import socket
from pathlib import Path

import pytest

from echo_node import machine_check
from echo_node.doctor import line_of, run_doctor
from echo_node.machine_check import Check
from echo_node.network_check import Asked, check_bootstraps, check_clock, check_reach, check_relays
from echo_node.places import find_places
from echo_node.state import NodeState, PeerView
from echo_node.status import REACH_WORDS, status_lines
from echo_p2p.config import InferenceConfig, NetworkConfig, NodeConfig
from echo_p2p.net.reach import DialBackAnswer, Finding, Heard, Reach

ADDRESS = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWNTXdxNUAjRhGCe1UBFSd2HYpfhAnG5BKCUZwW8AAvXvh"


def heard(clock_ahead_s: float) -> Heard:
    return Heard(DialBackAnswer(0.0), clock_ahead_s, 0.1)


def test_a_clock_is_judged_by_the_nearest_and_its_error_has_a_cure() -> None:
    assert check_clock({}).ok is None
    assert check_clock({"one": heard(0.2)}).ok
    assert check_clock({"wrong": heard(900.0), "right": heard(-0.2)}).ok
    late = check_clock({"one": heard(7.0)})
    assert late.ok is False
    assert "7.0 s behind" in late.says
    assert "set-ntp" in late.cure
    assert "ahead" in check_clock({"one": heard(-7.0)}).says


@pytest.mark.parametrize(
    ("reach", "role", "ok"),
    [
        ("public", "inference", True),
        ("relayed", "inference", True),
        ("relayed", "trainer", False),
        ("none", "inference", False),
        ("unknown", "inference", None),
    ],
)
def test_reach_is_enough_or_says_which_port_to_forward(reach: Reach, role: str, ok: bool | None) -> None:
    config = NodeConfig(role=role, network=NetworkConfig(port=4001))  # type: ignore[arg-type]
    check = check_reach(Finding(reach), config)
    assert check.ok is ok
    assert ("TCP port 4001" in check.cure) is (ok is False)


def test_loopback_is_this_machine_and_not_the_world() -> None:
    here = REACH_WORDS["this machine only"]
    found = Finding("public", ("/ip4/127.0.0.1/tcp/4001",), 1)
    assert check_reach(found, NodeConfig()).says.startswith(here)
    assert check_reach(Finding("public"), NodeConfig(), "this machine only").says == here
    assert check_reach(Finding("public"), NodeConfig()).says == REACH_WORDS["public"]


def test_a_relay_that_carries_next_to_nothing_is_no_relay() -> None:
    assert check_relays({}).ok is None
    assert check_relays({"one": None, "other": 1 << 40}).ok
    assert check_relays({"one": None, "other": 131072}).ok is False


def test_bootstraps_that_are_silent_are_named_in_one_line() -> None:
    asked = Asked()
    assert ADDRESS in check_bootstraps(asked, [ADDRESS]).says
    asked.silent["peer"] = "all dials failed\n  * one\n  * other"
    assert check_bootstraps(asked, [ADDRESS]).says == "all dials failed * one * other"
    asked.heard["peer"] = heard(0.0)
    assert check_bootstraps(asked, [ADDRESS]) == Check(name="bootstrap", ok=True, says="1 of 1 bootstrap answered")


def test_each_failed_check_of_the_machine_says_the_cure(tmp_path: Path) -> None:
    greedy = NodeConfig(inference=InferenceConfig(store_bytes=1 << 60, device="mps"))
    key = tmp_path / "identity.key"
    key.write_bytes(b"no key")
    key.chmod(0o600)
    places = find_places(str(tmp_path))
    checks = [
        machine_check.memory(greedy, 1 << 20),
        machine_check.disk(greedy, places),
        machine_check.home(places),
        machine_check.device(greedy),
    ]
    assert [check.ok for check in checks] == [False] * 4
    for check in checks:
        assert check.cure
        assert check.says
        assert line_of(check).startswith("FAILED")


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    places = find_places(str(tmp_path / "new" / "home"))
    assert machine_check.home(places).ok
    assert not (tmp_path / "new").exists()


def test_a_port_that_is_taken_fails_and_json_has_every_check(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        config = NodeConfig(network=NetworkConfig(host="127.0.0.1", port=int(port)))
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            status = run_doctor(config, find_places(str(tmp_path)), as_json=True)
    report = json.loads(shown.getvalue())
    assert status == 1
    assert report["healthy"] is False
    by_name = {check["name"]: check for check in report["checks"]}
    assert list(by_name) == [
        "python", "packages", "memory", "home", "disk", "port", "device", "bootstrap", "clock", "reach",
    ]  # fmt: skip
    assert [name for name, check in by_name.items() if check["ok"] is False] == ["port"]
    assert port in by_name["port"]["says"]
    assert "--port" in by_name["port"]["says"]


def test_status_says_how_the_node_is_reached_in_a_sentence() -> None:
    def lines(reach: str) -> list[str]:
        own = PeerView(peer="12D3", role="inference", reach="public", reach_text=reach, ours=True)
        state = NodeState(
            peer="12D3", role="inference", swarm="echo", software="", pid=1, started_at=0.0, now=1.0, peers=(own,)
        )
        return list(status_lines(state))

    for reach, words in REACH_WORDS.items():
        assert words in lines(reach)
    assert not set(REACH_WORDS.values()) & set(lines("something newer"))
