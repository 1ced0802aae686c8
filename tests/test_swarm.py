"""Whole swarms of real processes over the real stacks on loopback: what no part can show alone."""

import functools
import os
import re
import secrets
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import trio
from rich.console import Console

from echo_node.demo import DemoOptions, Played, join_address, play
from echo_node.fleet import Fleet, NodeProcess
from echo_node.learning import RunLog, StepRecord

pytestmark = pytest.mark.slow

PATIENCE_S = 150.0


def demo(root: Path, **options: object) -> Played:
    quiet = Console(file=StringIO())
    return trio.run(functools.partial(play, DemoOptions(**options), root, progress=quiet))  # type: ignore[arg-type]


def steps_of(home: Path) -> list[StepRecord]:
    return [record for run in (home / "runs").glob("*") for record in RunLog(run).read()]


def test_sequential_is_the_co_located_run_bit_for_bit(tmp_path: Path) -> None:
    shared = {"protocol": "sequential", "steps": 5, "seed": 3}
    baseline = demo(tmp_path / "co-located", co_located=True, **shared)
    whole = demo(tmp_path / "whole", peers="whole", **shared)
    chain = demo(tmp_path / "chain", peers="chain", **shared)

    assert baseline.summary.steps == whole.summary.steps == chain.summary.steps == 5
    assert whole.summary.policy_hash == baseline.summary.policy_hash
    assert chain.summary.policy_hash == baseline.summary.policy_hash
    assert whole.summary.lag_max == chain.summary.lag_max == 0
    assert baseline.summary.orphans == whole.summary.orphans == chain.summary.orphans == 0


def test_dynamic_sampling_looks_at_the_same_groups_in_a_swarm_as_co_located(tmp_path: Path) -> None:
    shared = {"protocol": "sequential", "steps": 4, "seed": 3, "settings": ("run.algorithm.name=dapo",)}
    baseline = demo(tmp_path / "co-located", co_located=True, **shared)
    whole = demo(tmp_path / "whole", peers="whole", **shared)
    assert baseline.summary.steps == whole.summary.steps == 4
    assert whole.summary.policy_hash == baseline.summary.policy_hash
    here, there = (steps_of(tmp_path / folder) for folder in ("co-located/co-located", "whole/trainer"))
    assert [record.passed_over for record in here] == [record.passed_over for record in there]
    assert sum(record.passed_over for record in here) > 0
    assert {len(record.groups) for record in here} == {8}


def test_no_rollout_beyond_the_bound_is_trained_on_with_a_slow_peer(tmp_path: Path) -> None:
    played = demo(tmp_path, protocol="async", steps=24, seed=2, slow=0.03, settings=("run.max_lag=2",))

    lags = [group.lag for record in steps_of(tmp_path / "trainer") for group in record.groups]
    assert len(lags) == 24 * 8
    assert min(lags) >= 0
    assert max(lags) <= 2
    assert len(played.summary.rollouts_by_peer) == 2  # the slow peer took part
    assert played.summary.orphans == 0


def test_the_run_goes_on_when_a_peer_the_bootstrap_or_the_trainer_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fleet(tmp_path) as fleet:
            swarm = await Swarm.start(fleet)
            await swarm.reach_step(3)

            swarm.kill(swarm.chain_b)  # in mid-generation: its lanes are always full
            before = swarm.step
            await swarm.reach_step(before + 4)
            assert "the chain ended" in swarm.chain_a.output()

            port = swarm.address.split("/")[4]
            swarm.kill(swarm.bootstrap)
            before = swarm.step
            await swarm.reach_step(before + 4)
            bootstrap = fleet.launch("bootstrap", ["bootstrap", "--port", port, *swarm.flags])
            await eventually(lambda: said(swarm.trainer, f"joined through bootstrap {swarm.bootstrap_peer}", times=2))
            assert await join_address(bootstrap) == swarm.address

            await eventually(lambda: exists(tmp_path / "trainer", "progress.json"))
            swarm.kill(swarm.trainer)
            lost = swarm.step
            swarm.trainer = swarm.launch_trainer()
            await swarm.reach_step(lost + 4)
            check_resumed(swarm, lost)
        assert fleet.processes() == []

    trio.run(main)


def test_the_plan_gives_the_faster_of_two_peers_more_layers(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fleet(tmp_path) as fleet:
            swarm = Swarm(fleet)
            swarm.bootstrap = fleet.launch("bootstrap", ["bootstrap", *swarm.flags])
            swarm.address = await join_address(swarm.bootstrap)
            join = ["join", "--role", "inference", "--peer", swarm.address, *swarm.flags, "--max-layers", "3"]
            slow = fleet.launch("slow", [*join, "--slowdown", "0.3"])
            fast = fleet.launch("fast", join)
            swarm.trainer = swarm.launch_trainer()
            await eventually(lambda: spans_held(slow)[-1:] in (["0:1/4"], ["3:4/4"]))
            await eventually(lambda: spans_held(fast)[-1:] in (["1:4/4"], ["0:3/4"]))
            await swarm.reach_step(1)
        assert fleet.processes() == []

    trio.run(main)


def spans_held(node: NodeProcess) -> list[str]:
    """What a peer has held, in order."""
    return re.findall(r"holding span (\S+) at version", node.output())


def check_resumed(swarm: "Swarm", lost: int) -> None:
    """A new epoch, which continues from the checkpoint; every rollout within the bound, none of a lost branch."""
    records = steps_of(swarm.trainer.home)
    first = next(record for record in records if record.version.startswith("1."))
    assert 0 < int(first.version.split(".")[1]) <= lost
    assert f"resumed as version {first.version}" in swarm.trainer.output()
    for record in records:
        for group in record.groups:
            assert 0 <= group.lag <= 4
    trained = [(group.worker, group.counter) for record in surviving(records) for group in record.groups]
    assert len(trained) == len(set(trained))


def surviving(records: list[StepRecord]) -> list[StepRecord]:
    """The steps that the newest policy is made of: a later epoch's step replaces the lost one of that number."""
    return list({record.step: record for record in records}.values())


class Swarm:
    """Four processes: bootstrap, trainer, a chain of two and a whole-model peer; killed and started at will."""

    bootstrap: NodeProcess
    trainer: NodeProcess
    chain_a: NodeProcess
    chain_b: NodeProcess
    address: str

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.flags = ["--swarm", f"test-{secrets.token_hex(4)}", "--host", "127.0.0.1"]

    @classmethod
    async def start(cls, fleet: Fleet) -> "Swarm":
        swarm = cls(fleet)
        swarm.bootstrap = fleet.launch("bootstrap", ["bootstrap", *swarm.flags])
        swarm.address = await join_address(swarm.bootstrap)
        swarm.bootstrap_peer = swarm.address.rsplit("/", 1)[1]
        swarm.trainer = swarm.launch_trainer()
        join = ["join", "--role", "inference", "--peer", swarm.address, *swarm.flags]
        swarm.chain_a = fleet.launch("chain-a", [*join, "--max-layers", "2"])
        swarm.chain_b = fleet.launch("chain-b", [*join, "--max-layers", "2"])
        fleet.launch("whole", join)
        await eventually(lambda: said(swarm.chain_a, "chain of 2 is open") or said(swarm.chain_b, "chain of 2 is open"))
        if not said(swarm.chain_a, "chain of 2 is open"):
            swarm.chain_a, swarm.chain_b = swarm.chain_b, swarm.chain_a  # chain_a is the head
        return swarm

    bootstrap_peer: str

    def launch_trainer(self) -> NodeProcess:
        settings = ["--set", "trainer.checkpoint_every=2", "--set", "run.algorithm.learning_rate=1e-4"]
        arguments = ["join", "--role", "trainer", "--peer", self.address, *self.flags, *settings]
        return self.fleet.launch("trainer", arguments)

    def kill(self, node: NodeProcess) -> None:
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()

    @property
    def step(self) -> int:
        records = steps_of(self.trainer.home)
        return records[-1].step if records else 0

    async def reach_step(self, step: int) -> None:
        await eventually(lambda: self.step >= step)


def said(node: NodeProcess, words: str, *, times: int = 1) -> bool:
    return node.output().count(words) >= times


def exists(home: Path, name: str) -> bool:
    return any((home / "runs").glob(f"*/{name}"))


async def eventually(condition: Callable[[], bool]) -> None:
    """Other processes have no event to wait for: look now and then, and give up loudly."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.2)
