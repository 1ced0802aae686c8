"""The steps of a trainer while releases are made beside them: whenever it ends, log and checkpoint agree."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from numpy.typing import NDArray

from echo_node.course import Course
from echo_node.learner import Learner
from echo_node.learning import Graded, RunLog
from echo_p2p.config import TrainerConfig
from echo_p2p.errors import TrainerError, WeightsError
from echo_p2p.rl.trainer import StepReport
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.release import Release
from echo_protocols.rollout import RolloutGroup, Sample, Segment


class Gate:
    """Where a thread waits until it is let through; open until it is `shut`."""

    def __init__(self) -> None:
        self._arrivals = threading.Semaphore(0)
        self._passes = threading.Semaphore(1_000_000)

    def shut(self) -> None:
        self._passes = threading.Semaphore(0)

    def let(self, count: int) -> None:
        self._passes.release(count)

    def pass_through(self) -> None:
        self._arrivals.release()
        assert self._passes.acquire(timeout=20.0)

    async def arrival(self) -> None:
        assert await trio.to_thread.run_sync(lambda: self._arrivals.acquire(timeout=20.0))


class Engine:
    def __init__(self) -> None:
        self.count, self.gate = 0, Gate()

    def step(self, rows: object) -> StepReport:
        self.gate.pass_through()
        self.count += 1
        return StepReport(updated=True, figures={})

    def weights(self) -> Mapping[str, NDArray[np.uint16]]:
        return {"model.embed_tokens.weight": np.array([self.count], np.uint16)}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, folder: Path) -> None:
        self.count = int(folder.name.split(".")[1])


class GatedPublisher(Publisher):
    fails_at = -1

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = Gate()

    def publish(self, version: Any, *args: Any, **more: Any) -> Release:
        self.gate.pass_through()
        if version.step == self.fails_at:
            raise WeightsError("the disk is full")
        return super().publish(version, *args, **more)


class Gather:
    """A group of the newest version, at once."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def run(self) -> None:
        await trio.sleep_forever()

    async def next_batch(self) -> list[Graded]:
        await trio.lowlevel.checkpoint()
        segments = (Segment(start=0, version=self._learner.version),)
        samples = tuple(Sample(tokens=(1,), logprobs=(-1.0,), finish="stop", segments=segments) for _ in range(2))
        group = RolloutGroup(counter=0, prompt_index=1, samples=samples, sampling_hash=bytes(32), engine="test")
        return [Graded("w", group, (0.0, 1.0))]


class Run:
    """A trainer without a network, in a folder."""

    def __init__(self, folder: Path, steps: int | None = None, checkpoint_every: int = 100) -> None:
        self.folder, self.engine, self.released = folder, Engine(), list[str]()
        self.store = Store(folder / "blobs", 2**20)
        self.publisher = GatedPublisher(self.store)
        config = TrainerConfig(steps=steps, checkpoint_every=checkpoint_every)
        self.learner = Learner(
            folder,
            engine=self.engine,  # type: ignore[arg-type]
            publisher=self.publisher,
            prompts=SimpleNamespace(ids=lambda index: (1, 2)),  # type: ignore[arg-type]
            config=config,
        )
        board = SimpleNamespace(config=SimpleNamespace(trainer=config), presence=SimpleNamespace(figures=None))
        run = SimpleNamespace(manifest=SimpleNamespace(max_lag=2, group_size=2, groups_per_step=1))
        self.course = Course(board, run, self.learner, self)  # type: ignore[arg-type]
        buffer = SimpleNamespace(commit=lambda step: None)
        self.course._buffer = buffer  # type: ignore[assignment]
        self.course.gather = Gather(self.learner)  # type: ignore[assignment]

    async def announce(self, release: Release) -> None:
        """In place of a herald."""
        with trio.CancelScope(shield=True):
            self.publisher.sealed(await trio.to_thread.run_sync(self.store.put, msgspec.msgpack.encode(release)))
        self.released.append(str(release.version))

    async def train(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                try:
                    await self.course.run(nursery)
                finally:
                    with trio.CancelScope(shield=True):
                        await self.course.checkpoint()
                nursery.cancel_scope.cancel()

    def logged(self) -> list[int]:
        return [record.step for record in RunLog(self.folder).read()]

    def resumes_at(self) -> int:
        return Run(self.folder).learner.version.step


def test_a_step_of_the_sequential_protocol_begins_when_its_version_is_out(tmp_path: Path) -> None:
    run, asked = Run(tmp_path, steps=3), list[tuple[str, str]]()
    run.course._buffer = None
    batch = run.course.gather.next_batch

    async def next_batch() -> list[Graded]:
        asked.append((str(run.learner.version), run.released[-1]))
        return await batch()

    run.course.gather.next_batch = next_batch  # type: ignore[method-assign]
    trio.run(run.train, trio.CancelScope())
    assert asked == [(f"0.{step}", f"0.{step}") for step in range(3)]


def test_every_step_is_released_and_logged_before_the_run_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=5, checkpoint_every=2)
    trio.run(run.train, trio.CancelScope())
    assert run.logged() == [1, 2, 3, 4, 5]
    assert run.released == [f"0.{step}" for step in range(6)]
    assert run.resumes_at() == 5


def test_the_next_step_begins_while_a_release_is_made_but_no_second_release_does(tmp_path: Path) -> None:
    async def main() -> None:
        run, scope = Run(tmp_path), trio.CancelScope()
        steps, releases = run.engine.gate, run.publisher.gate
        steps.shut()
        releases.shut()
        releases.let(1)  # of version 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.train, scope)
            await releases.arrival()
            await steps.arrival()
            steps.let(1)
            await releases.arrival()  # of step 1
            await steps.arrival()  # step 2, beside it
            steps.let(1)
            while run.engine.count < 2:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert run.released == ["0.0"]
            scope.cancel()
            releases.let(9)
        assert run.logged() == [1, 2]
        assert run.resumes_at() == 2

    trio.run(main)


@pytest.mark.parametrize("where", ["step", "release"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_whenever_it_is_stopped_what_it_learned_is_logged_and_kept(tmp_path: Path, where: str, number: int) -> None:
    async def main() -> None:
        run, scope = Run(tmp_path, checkpoint_every=2), trio.CancelScope()
        gate = run.engine.gate if where == "step" else run.publisher.gate
        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.train, scope)
            for _ in range(number):
                await gate.arrival()
                gate.let(1)
            scope.cancel()
            gate.let(9)
        assert run.logged() == list(range(1, run.engine.count + 1))
        assert run.resumes_at() == run.engine.count

    trio.run(main)


@pytest.mark.parametrize("checkpoint_every", [1, 100])
def test_a_release_that_fails_ends_the_run_with_the_step_before_it_kept(tmp_path: Path, checkpoint_every: int) -> None:
    run = Run(tmp_path, checkpoint_every=checkpoint_every)
    run.publisher.fails_at = 3
    with pytest.raises(ExceptionGroup) as raised:
        trio.run(run.train, trio.CancelScope())
    assert _innermost(raised.value) <= {"the disk is full", "step 4 can't be released: 2 is the last that was"}
    assert run.logged() == [1, 2]
    assert run.resumes_at() == (2 if checkpoint_every == 1 else 0)


def test_advice_asks_for_no_peer_while_the_trainer_hardly_waits(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=30)
    trio.run(run.train, trio.CancelScope())
    manifest = SimpleNamespace(max_lag=2, group_size=2, groups_per_step=1)
    run.course._run = SimpleNamespace(manifest=manifest)  # type: ignore[assignment]
    assert run.course._advice() == "trainer busy: there are rollouts enough"
    run.course._past = [
        msgspec.structs.replace(record, at=10.0 * number, waited_s=0.4 * number)
        for number, record in enumerate(run.course._past)
    ]
    shown = run.course.view()
    assert shown.idle_share == pytest.approx(0.4 * sum(range(11, 30)) / 190.0)  # of the last 20 steps, one is the begin
    assert shown.advice.startswith(f"trainer idle {100 * shown.idle_share:.0f} %: ")  # the same figure
    assert "trainer idle" not in shown.advice.removeprefix("trainer idle")


def test_steps_are_published_in_their_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trio.run(run.announce, run.learner.first_release())
    batch: Callable[[], Any] = lambda: trio.run(run.course.gather.next_batch)  # noqa: E731
    run.learner.learn(batch(), 0.0)
    second = run.learner.learn(batch(), 0.0)
    with pytest.raises(TrainerError, match="step 2 can't be released"):
        run.learner.publish(second)


def _innermost(error: BaseException) -> set[str]:
    if isinstance(error, BaseExceptionGroup):
        return set().union(*map(_innermost, error.exceptions))
    return {str(error)}
