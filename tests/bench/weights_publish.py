"""What publishing costs the trainer: steps with every version published beside the next one, against steps alone.

In turns, in one process, on the same batch. A step beside a release is timed from its start until the next may start:
the update, the copy of the weights, and the wait for the release before, as the trainer does it.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import torch

from echo_p2p.rl.trainer import TrainingRow
from echo_p2p.rl.verl_trainer import VerlTrainer
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.release import Release
from echo_protocols.run import Algorithm
from echo_protocols.values import PolicyVersion

GROUPS, ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 8, 24, 40  # the default batch: 64 rows
VOCABULARY = 30_000
STEPS_IN_TURN = 2


def batch(random: np.random.Generator) -> tuple[TrainingRow, ...]:
    """Rows of one size, of any tokens: what they say costs nothing."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, VOCABULARY, count).tolist())

    prompts = [tokens(PROMPT_TOKENS) for _ in range(GROUPS)]
    return tuple(
        TrainingRow(group, prompts[group], tokens(ANSWER_TOKENS), (-8.0,) * ANSWER_TOKENS, float(random.random()))
        for group in range(GROUPS)
        for _ in range(ANSWERS)
    )


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Releases:
    """Publishes versions one after the other, in a thread of its own."""

    def __init__(self, trainer: VerlTrainer, folder: Path) -> None:
        self._trainer = trainer
        self._store = Store(folder, 4 << 30)
        self._publisher = Publisher(self._store)
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[Release] | None = None
        self._version = 0
        self.patch_bytes: list[int] = []
        self.took_s: list[float] = []

    def release(self) -> None:
        """Copy the weights, wait for the release before, and let this one be made."""
        weights = self._trainer.weights()
        self.wait()
        self._last = self._thread.submit(self._publish, weights)

    def wait(self) -> None:
        """Until nothing is being released."""
        if self._last is not None:
            self.patch_bytes.append(self._last.result().patch_bytes)

    def _publish(self, weights: Any) -> Release:
        start = time.perf_counter()
        release = self._publisher.publish(PolicyVersion(epoch=0, step=self._version), weights)
        self._publisher.sealed(self._store.put(msgspec.msgpack.encode(release)))
        self._version += 1
        self.took_s.append(time.perf_counter() - start)
        return release


def publish_figures(model: Path, folder: Path, turns: int = 3) -> dict[str, Any]:
    """The delay as a share of a step alone, and what a release takes of a step."""
    trainer = VerlTrainer(model, Algorithm(learning_rate=1e-6, correction="none"), seed=1)
    releases, rows = Releases(trainer, folder), batch(np.random.default_rng(0))

    def step_and_release() -> None:
        trainer.step(rows)
        releases.release()

    trainer.step(rows)
    releases.release()  # a snapshot, not timed
    alone_s: list[float] = []
    beside_s: list[float] = []
    for turn in range(turns):
        releases.wait()
        alone_s += [seconds(lambda: trainer.step(rows)) for _ in range(STEPS_IN_TURN)]
        releases.release()
        beside_s += [seconds(step_and_release) for _ in range(STEPS_IN_TURN)]
        click.echo(f"turn {turn}: alone {alone_s[-2:]}, beside a release {beside_s[-2:]}", err=True)
    releases.wait()
    trainer.close()
    alone = statistics.median(alone_s)
    return {
        "publish_delay_share": statistics.median(beside_s) / alone - 1,
        "release_over_step": statistics.median(releases.took_s[1:]) / alone,
        "step_spread": (max(alone_s) - min(alone_s)) / alone,
    }


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--turns", default=3, type=click.IntRange(1))
def main(model: Path, turns: int) -> None:
    """Measure what publishing costs the trainer."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        click.echo(json.dumps(publish_figures(model, Path(root), turns), indent=2))


if __name__ == "__main__":
    main()
