"""The demo with nodes that only pretend: what it starts, shows and sums up, and that it leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
import trio
from rich.console import Console

from echo_node.charts import bytes_text, duration_text, moving_mean, sparkline
from echo_node.demo import DemoOptions, run_demo
from echo_node.fleet import Ending, Fleet
from echo_node.runlog import lag_histogram, read_config, read_steps, state_from_log
from echo_node.screen import DemoView, NodeStatus, death_lines, phase_text, progress_line, render
from echo_node.state import InferenceView, NodeState, RunView, TrainerView
from echo_node.summary import Summary, summarise
from echo_p2p.config import RunConfig
from echo_p2p.errors import EchoError

# A node that pretends. The words before the node's own command say how it behaves.
FAKE_NODE = """
import http.server, json, os, pathlib, signal, subprocess, sys, threading, time
behaviours = set(sys.argv[1].split(","))
command, arguments = sys.argv[2], sys.argv[3:]
home = pathlib.Path(os.environ["ECHO_HOME"])
home.joinpath("arguments.json").write_text(json.dumps([command, *arguments]))
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
if "stubborn" in behaviours:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(sleeper) if "parent" in behaviours else None
if "runaway" in behaviours:
    subprocess.Popen(sleeper, start_new_session=True)
role = arguments[arguments.index("--role") + 1] if "--role" in arguments else command
role = "trainer" if role == "co-located" else role
if role in behaviours:
    print("first line")
    sys.exit("it broke: the last line")
state = {"peer": f"peer-{home.name}", "role": role, "swarm": "s", "software": "x", "pid": os.getpid(),
         "started_at": 0, "now": 1, "connected": True, "refused": {"malformed": 1}}
if role == "trainer":
    steps = int(arguments[arguments.index("--steps") + 1]) if "--steps" in arguments else 4
    folder = home / "runs" / "r1"
    folder.mkdir(parents=True)
    folder.joinpath("config.json").write_text('{"role": "trainer", "run": {"group_size": 8, "max_lag": 4}}')
    with folder.joinpath("steps.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            group = {"worker": "peer-whole", "counter": step, "version": "0.0", "lag": step % 3, "reward_mean": 0.5}
            log.write(json.dumps({"step": step, "version": "0.0", "reward_mean": step / 10, "groups": [group],
                "release_bytes": 100 * step, "model_bytes_bf16": 10000, "policy_hash": f"hash{step}".rjust(64, "0"),
                "waited_s": 1.0, "step_s": 3.0, "idle_share": 0.25, "wall_s": step, "figures": {}}) + "\\n")
    state["run"] = {"run_id": "r1", "model": "tiny", "task": "t", "algorithm": "grpo", "protocol": "async",
                    "max_lag": 4, "group_size": 8, "groups_per_step": 8}
    state["trainer"] = {"step": steps, "version": "0.4", "done": "--steps" in arguments, "model_bytes_bf16": 10000}
if command == "co-located":
    sys.exit(0)
if role == "inference":
    state["inference"] = {"span": "0-2", "activity": "generating"}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(state).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
here = {"pid": os.getpid(), "peer": state["peer"], "role": role, "swarm": "s", "http": f"http://127.0.0.1:{server.server_port}"}
draft = home / "draft"; draft.write_text(json.dumps(here)); draft.rename(home / "node.json")
if "stubborn" not in behaviours:
    signal.signal(signal.SIGTERM, lambda *_: (child and child.kill(), os._exit(0)))
print("echo-node join --role inference --swarm s --peer /ip4/127.0.0.1/tcp/4001/p2p/12D3KooWfake")
while True:
    time.sleep(0.05)  # short: the signal may be taken by the other thread, which does not wake this one
"""

SUMMARY_KEYS = {
    "reward_first10",
    "reward_last10",
    "steps",
    "rollouts_by_peer",
    "lag_mean",
    "lag_max",
    "max_lag",
    "release_bytes_mean",
    "model_bytes_bf16",
    "trainer_idle_share",
    "refused",
    "policy_hash",
    "orphans",
}


def test_five_nodes_are_started_as_a_user_would_and_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "summary.json"
    home = tmp_path / "home"
    options = DemoOptions(steps=3, seconds=30, seed=7, slow=0.5, json_path=answer, home=home, settings=("run.x=1",))
    assert run_demo(options, command=_fake(tmp_path, "parent")) == 0

    def arguments(name: str) -> str:
        words: list[str] = json.loads((home / name / "arguments.json").read_text())
        return " ".join(words)

    assert {path.name for path in home.iterdir() if path.is_dir()} == {
        "bootstrap", "trainer", "chain-a", "chain-b", "whole",
    }  # fmt: skip
    assert arguments("bootstrap").startswith("bootstrap --swarm demo-")
    assert "join --role trainer --config" in arguments("trainer")
    assert "run.seed=7" in arguments("trainer")
    assert "--steps 3" in arguments("trainer")
    assert "--peer /ip4/127.0.0.1/tcp/4001/p2p/12D3KooWfake" in arguments("trainer")
    assert "--max-layers 2" in arguments("chain-a")
    assert "--max-layers" not in arguments("whole")
    assert "--slowdown 0.5" in arguments("whole")
    assert all("--set run.x=1" in arguments(name) for name in ("bootstrap", "trainer", "chain-b"))
    document = json.loads(answer.read_bytes())
    assert set(document) == SUMMARY_KEYS
    assert document["orphans"] == 0
    assert document["steps"] == 3
    assert document["rollouts_by_peer"] == {"peer-whole": 24}
    assert document["max_lag"] == 4
    assert 1 <= document["refused"]["malformed"] <= 5
    shown = capsys.readouterr()
    assert "policy hash" in shown.out
    assert document["policy_hash"] in shown.out  # whole, so that it can be compared
    assert str(home) in shown.err
    _assert_gone(str(tmp_path))


def test_the_time_limit_ends_the_demo(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run_demo(DemoOptions(seconds=1.5, home=home), command=_fake(tmp_path, "plain")) == 0
    _assert_gone(str(tmp_path))


def test_co_located_is_one_process(tmp_path: Path) -> None:
    home, answer = tmp_path / "home", tmp_path / "summary.json"
    options = DemoOptions(co_located=True, steps=2, seconds=30, home=home, json_path=answer)
    assert run_demo(options, command=_fake(tmp_path, "plain")) == 0
    assert [path.name for path in home.iterdir() if path.is_dir()] == ["co-located"]
    assert json.loads(answer.read_bytes())["policy_hash"].endswith("hash2")


def test_a_trainer_that_dies_fails_the_demo_with_its_last_words(tmp_path: Path) -> None:
    options = DemoOptions(seconds=30, home=tmp_path / "home")
    with pytest.raises(EchoError, match=r"trainer ended .*it broke: the last line"):
        run_demo(options, command=_fake(tmp_path, "trainer"))
    _assert_gone(str(tmp_path))


def test_a_bootstrap_that_dies_at_once_fails_the_demo_with_its_last_words(tmp_path: Path) -> None:
    options = DemoOptions(seconds=30, home=tmp_path / "home")
    with pytest.raises(EchoError, match=r"bootstrap ended .*it broke: the last line"):
        run_demo(options, command=_fake(tmp_path, "bootstrap"))
    _assert_gone(str(tmp_path))


def test_a_node_that_ignores_sigterm_falls_with_its_children(tmp_path: Path) -> None:
    ending = _end_of_fleet(tmp_path, "stubborn,parent")
    assert ending == Ending(drained=(), killed=("node",), orphans=0)


def test_a_child_that_outlives_its_drained_node_is_counted_and_ended(tmp_path: Path) -> None:
    ending = _end_of_fleet(tmp_path, "runaway")
    assert ending == Ending(drained=("node",), killed=(), orphans=1)


def test_an_error_in_the_demo_itself_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fleet(tmp_path, command=_fake(tmp_path, "stubborn,runaway,parent"), drain_s=0.1) as fleet:
            await _up(fleet)
            assert len(fleet.processes()) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trio.run(main)
    _assert_gone(str(tmp_path))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_drains_and_leaves_no_process(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with _demo_process(tmp_path, "parent") as demo:
        demo.send_signal(number)
        assert demo.wait(timeout=20) == status
    _assert_gone(str(tmp_path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the kernel's parent-death signal")
def test_killing_the_demo_kills_its_nodes(tmp_path: Path) -> None:
    with _demo_process(tmp_path, "plain") as demo:
        demo.kill()
        demo.wait(timeout=20)
    _assert_gone(str(tmp_path), within_s=5.0)


def test_the_summary_is_made_from_the_log_of_trained_groups(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    lines = [
        {
            "step": step,
            "version": f"0.{step}",
            "reward_mean": 0.25 if step < 10 else 0.5,
            "groups": [{"worker": "a", "counter": step, "version": "0.1", "lag": step % 5, "reward_mean": 0.1}] * 2,
            "release_bytes": 1000,
            "model_bytes_bf16": 9000,
            "policy_hash": f"h{step}",
            "waited_s": 1.0 if step else 500.0,  # the wait for the first batch is the start-up
            "step_s": 0.95,
        }
        for step in range(20)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 20, "rew'  # a kill cut the last line
    (folder / "steps.jsonl").write_text(content)
    states = [_state("trainer", refused={"late": 2}), _state("x", refused={"late": 1})]
    summary = summarise(read_steps(tmp_path), RunConfig(group_size=8, max_lag=6), states, 0)
    assert summary.trainer_idle_share == pytest.approx(0.5)
    assert msgspec.structs.replace(summary, trainer_idle_share=0.5) == Summary(
        reward_first10=0.25,
        reward_last10=0.5,
        steps=20,
        rollouts_by_peer={"a": 320},
        lag_mean=2.0,
        lag_max=4,
        max_lag=6,
        release_bytes_mean=1000.0,
        model_bytes_bf16=9000,
        trainer_idle_share=0.5,
        refused={"late": 3},
        policy_hash="h19",
        orphans=0,
    )


def test_a_trainer_without_a_port_is_shown_from_its_log(tmp_path: Path) -> None:
    assert run_demo(DemoOptions(co_located=True, steps=5, seconds=30, home=tmp_path), command=_fake(tmp_path, "x")) == 0
    home = tmp_path / "co-located"
    steps, config = read_steps(home), read_config(home)
    assert config is not None
    state = state_from_log("co-located", steps, config)
    assert state.trainer is not None
    assert state.trainer.step == 5
    assert state.trainer.lag_histogram == lag_histogram(steps) == {0: 1, 1: 2, 2: 2}
    assert "learning" in progress_line(_view(state))
    assert state.trainer.policy_hash.endswith("hash5")


def test_a_run_without_a_step_still_has_a_summary(tmp_path: Path) -> None:
    summary = summarise(read_steps(tmp_path), None, [], 0)
    assert summary.reward_last10 is None
    assert set(msgspec.to_builtins(summary)) == SUMMARY_KEYS


def test_the_screen_tells_what_it_waits_for() -> None:
    waiting = InferenceView(activity="waiting")
    working = InferenceView(activity="generating", span="0–4", tokens_per_s=90.0)
    fresh, trained = TrainerView(step=0, version="0.0"), TrainerView(step=3, version="0.3", reward_history=(0.5,))
    phases = [
        (_view(), "starting the first node"),
        (_view(_state("bootstrap")), "starting the trainer"),
        (_view(_state("bootstrap"), _state("trainer")), "publish version 0"),
        (_view(_state("trainer", trainer=fresh)), "first inference peer"),
        (_view(_state("trainer", trainer=fresh), _state("inference", inference=waiting)), "dividing the layers"),
        (_view(_state("trainer", trainer=fresh), _state("inference", inference=working)), "first rollouts"),
        (_view(_state("trainer", trainer=trained)), "learning"),
    ]
    for view, words in phases:
        assert words in phase_text(view)
        assert phase_text(view)[1:] in _text(view)
        assert words in progress_line(view)


def test_the_screen_shows_peers_rewards_lags_releases_and_refusals() -> None:
    trainer = TrainerView(
        step=30,
        version="0.30",
        reward_history=tuple(step / 30 for step in range(30)),
        lag_histogram={0: 3, 1: 40, 4: 1},
        release_bytes=(2_000, 4_000),
        model_bytes_bf16=1_000_000,
        rollouts_by_peer={"peer-inference": 44},
        buffer_groups=5,
    )
    run = RunView(
        run_id="r",
        model="tiny",
        task="t",
        algorithm="grpo",
        protocol="async",
        max_lag=4,
        group_size=8,
        groups_per_step=8,
    )
    work = InferenceView(span="0–2", version="0.29", tokens_per_s=123.0, chain=("peer-inference", "other"), head=True)
    view = _view(
        _state("trainer", trainer=trainer, run=run),
        _state("inference", inference=work, refused={"stale": 7}),
        ended={"bootstrap": (-9, "it broke")},
    )
    text = _text(view)
    for words in (
        "step 30",
        "▁",
        "█",
        "0.30",
        "0.29",
        "0–2",
        "123",
        "stale 7",
        "3 kB",
        "333.3×",
        "signal 9",
        "it broke",
    ):
        assert words in text
    assert death_lines(view) == ["bootstrap ended (signal 9): it broke"]


def test_charts_are_short_and_to_scale() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0], 4) == "▁▃▆█"
    assert len(sparkline([float(value) for value in range(1000)], 40)) == 40
    assert sparkline([1.0, 1.0], 40) == "▁▁"
    assert sparkline([float("nan")]) == ""
    assert moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert [bytes_text(size) for size in (0, 999, 1040, 1_040_000)] == ["0 B", "999 B", "1.04 kB", "1.04 MB"]
    assert [duration_text(seconds) for seconds in (9, 185, 7800)] == ["9 s", "3 min 5 s", "2 h 10 min"]


def _fake(folder: Path, behaviour: str) -> tuple[str, ...]:
    script = folder / "fake_node.py"
    script.write_text(FAKE_NODE)
    return (sys.executable, "-S", "-u", str(script), behaviour)


def _end_of_fleet(folder: Path, behaviour: str) -> Ending:
    async def main() -> Ending:
        async with Fleet(folder, command=_fake(folder, behaviour), drain_s=0.5) as fleet:
            await _up(fleet)
            ending = await fleet.end()
            assert fleet.processes() == []
            return ending

    ending = trio.run(main)
    _assert_gone(str(folder))
    return ending


async def _up(fleet: Fleet) -> None:
    node = fleet.launch("node", ["bootstrap"])
    with trio.fail_after(20):
        while "--peer" not in node.output():  # noqa: ASYNC110  another process says it
            await trio.sleep(0.02)


def _demo_process(folder: Path, behaviour: str) -> "subprocess.Popen[bytes]":
    """A demo of fakes in a process of its own, once all five nodes are up."""
    command = _fake(folder, behaviour)
    program = (
        "import sys; from pathlib import Path; from echo_node.demo import DemoOptions, run_demo;"
        f"sys.exit(run_demo(DemoOptions(seconds=60, home=Path({str(folder / 'home')!r})), command={command!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    demo = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(list(folder.glob("home/*/node.json"))) < 5:
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return demo


def _assert_gone(mark: str, within_s: float = 0.0) -> None:
    """No process is left that a node with its home under `mark` has started."""
    deadline = time.monotonic() + within_s
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _marked(mark: str) -> Sequence[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark in process.environ().get("ECHO_HOME", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _state(
    role: str,
    *,
    trainer: TrainerView | None = None,
    inference: InferenceView | None = None,
    run: RunView | None = None,
    refused: dict[str, int] | None = None,
) -> NodeState:
    document = {"peer": f"peer-{role}", "role": "bootstrap" if role == "x" else role, "swarm": "s", "software": "x"}
    base = msgspec.convert({**document, "pid": 1, "started_at": 0.0, "now": 1.0}, NodeState)
    return msgspec.structs.replace(base, trainer=trainer, inference=inference, run=run, refused=refused or {})


def _view(*states: NodeState, ended: dict[str, tuple[int, str]] | None = None) -> DemoView:
    nodes = [NodeStatus(state.role, state) for state in states]
    nodes += [NodeStatus(name, None, status, line) for name, (status, line) in (ended or {}).items()]
    return DemoView((*(nodes or [NodeStatus("bootstrap")]), NodeStatus("late")), 12.0, 150.0)


def _text(view: DemoView) -> str:
    console = Console(width=140, no_color=True)
    with console.capture() as captured:
        console.print(render(view))
    return captured.get()
