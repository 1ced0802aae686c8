"""From rollout groups to one update: grade, line up the rows, step, write the run's log. Knows no network.

The swarm's trainer and the co-located baseline both learn through here, so that they can only differ in where
their rollouts come from.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from echo_node.prompts import Prompts
from echo_p2p.rl.rewards import rewards
from echo_p2p.rl.trainer import StepReport, Trainer, TrainingRow
from echo_protocols.release import Release
from echo_protocols.rollout import RolloutGroup
from echo_protocols.sync import Lineage
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Graded:
    """A group with the rewards of its samples, which the trainer's own task gave."""

    worker: str
    group: RolloutGroup
    rewards: tuple[float, ...]

    @property
    def reward(self) -> float:
        """Mean over the samples."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def varies(self) -> bool:
        """Whether the samples differ in their rewards: only then they say what was better."""
        return len(set(self.rewards)) > 1


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A group in the run's log."""

    worker: str
    counter: int
    prompt_index: int
    version: str
    lag: int
    reward_mean: float


class StepRecord(Struct, frozen=True, kw_only=True):
    """One line of `steps.jsonl`. `version` is the policy that the step started from; `policy_hash` what it led to.

    `groups` are those that were trained on; `reward_mean` is over all that were looked at for the step, `passed_over`
    groups of equal rewards included.
    """

    step: int
    version: str
    reward_mean: float
    updated: bool
    groups: tuple[TrainedGroup, ...]
    release_bytes: int
    model_bytes_bf16: int
    policy_hash: str
    waited_s: float
    step_s: float
    idle_share: float
    figures: dict[str, float]
    wall_s: float
    at: float
    passed_over: int = 0


def grade(prompts: Prompts, worker: str, group: RolloutGroup) -> Graded:
    """Score every sample of a group; seconds at worst, so call it in a worker thread."""
    texts = [prompts.text(sample.tokens) for sample in group.samples]
    return Graded(worker, group, tuple(_reward(prompts, group.prompt_index, text) for text in texts))


def _reward(prompts: Prompts, index: int, text: str) -> float:
    """A task's own code reads what a peer wrote: whatever that does to it, the answer is worth nothing, no more."""
    try:
        (reward,) = rewards(prompts.task, index, [text])
    except Exception:
        log.exception("task %s can't score an answer of %d characters; it gets 0", prompts.task.name, len(text))
        return 0.0
    return reward if math.isfinite(reward) else 0.0


def training_rows(prompts: Prompts, batch: Sequence[Graded]) -> tuple[TrainingRow, ...]:
    """The batch as rows, groups in the order given."""
    return tuple(
        TrainingRow(
            group=place,
            prompt=prompt,
            response=sample.tokens,
            behaviour_logprobs=sample.logprobs,
            reward=reward,
            truncated=sample.finish == "length",
        )
        for place, graded in enumerate(batch)
        for prompt in [prompts.ids(graded.group.prompt_index)]
        for sample, reward in zip(graded.group.samples, graded.rewards, strict=True)
    )


class RunLog:
    """`steps.jsonl` of a run: one StepRecord a line, flushed at once. Reading skips a line that a crash cut short."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "steps.jsonl"
        self._started = time.monotonic()
        self._cut_short = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")

    @property
    def wall_s(self) -> float:
        """Seconds since this process began to learn."""
        return time.monotonic() - self._started

    def append(self, record: StepRecord) -> None:
        """Write one step."""
        ended = b"\n" if self._cut_short else b""  # else the new line would be lost with the one cut short
        with self._path.open("ab") as file:
            file.write(ended + msgspec.json.encode(record) + b"\n")
        self._cut_short = False

    def read(self) -> list[StepRecord]:
        """All whole lines, oldest first."""
        records: list[StepRecord] = []
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                try:
                    records.append(msgspec.json.decode(line, type=StepRecord))
                except msgspec.DecodeError:
                    continue
        return records


def idle_share(steps: Sequence[StepRecord]) -> float:
    """Share of the time since the first of some steps that the trainer waited for rollouts.

    What the state document says, of the last `RECENT_STEPS`, in figure and in words.
    """
    took_s = steps[-1].at - steps[0].at if steps else 0.0
    return min(1.0, sum(step.waited_s for step in steps[1:]) / took_s) if took_s > 0.0 else 0.0


def update(trainer: Trainer, prompts: Prompts, batch: Sequence[Graded]) -> tuple[StepReport, float]:
    """One step on a batch, and the seconds that it took."""
    started = time.monotonic()
    report = trainer.step(training_rows(prompts, batch))
    return report, time.monotonic() - started


def trained_groups(batch: Sequence[Graded], lineage: Lineage, current: PolicyVersion) -> tuple[TrainedGroup, ...]:
    """What the log says of a batch that was trained on at `current`."""
    return tuple(
        TrainedGroup(
            worker=graded.worker,
            counter=graded.group.counter,
            prompt_index=graded.group.prompt_index,
            version=str(graded.group.oldest),
            lag=_lag(lineage, graded.group.oldest, current),
            reward_mean=graded.reward,
        )
        for graded in batch
    )


def _lag(lineage: Lineage, version: PolicyVersion, current: PolicyVersion) -> int:
    lag = lineage.lag(version, current)
    return lag if isinstance(lag, int) else -1


def record_step(
    log: RunLog,
    *,
    version: PolicyVersion,
    groups: tuple[TrainedGroup, ...],
    sampled_rewards: Sequence[float],
    report: StepReport,
    release: Release,
    waited_s: float,
    step_s: float,
    idle_share: float,
) -> StepRecord:
    """Write a step into the run's log. `sampled_rewards` are of all groups that were looked at for it."""
    record = StepRecord(
        step=release.version.step,
        version=str(version),
        reward_mean=sum(sampled_rewards) / len(sampled_rewards),
        updated=report.updated,
        groups=groups,
        release_bytes=release.patch_bytes,
        model_bytes_bf16=release.model_bytes,
        policy_hash=release.policy_hash.hex(),
        waited_s=waited_s,
        step_s=step_s,
        idle_share=idle_share,
        figures={name: float(value) for name, value in report.figures.items() if math.isfinite(value)},
        wall_s=log.wall_s,
        at=time.time(),
        passed_over=len(sampled_rewards) - len(groups),
    )
    log.append(record)
    return record
