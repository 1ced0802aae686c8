"""The two synchronisation protocols as pure state machines. No socket, no clock (`now` is passed in), no torch.

Sequential (pull): the trainer asks for the groups of one step at its own version; `SequentialStep` hands slots to
workers, takes them back when a worker is late or gone, and yields the groups in slot order whatever order they came in.

Asynchronous (push-pull): workers generate while their lag allows it (`may_generate`); the trainer admits what the
`Lineage` of epochs says is fresh enough, and asks again when it trains.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from echo_protocols.rollout import RolloutGroup, Slot
from echo_protocols.values import Hash, PolicyVersion


class PullRequest(Struct, frozen=True, kw_only=True):
    """The trainer's call: answer the prompts of these slots with exactly this version."""

    version: PolicyVersion
    slots: Annotated[tuple[Slot, ...], Meta(min_length=1, max_length=1024)]

    def __post_init__(self) -> None:
        if len(set(self.slots)) != len(self.slots) or len({slot.step for slot in self.slots}) != 1:
            raise ValueError("a pull names different slots of one step")


class PullReply(Struct, frozen=True, kw_only=True):
    """One frame of the worker's answer: a sealed rollout group, or why there are no more."""

    group: Annotated[bytes, Meta(max_length=17 << 20)] = b""
    failure: Annotated[str, Meta(max_length=1024)] = ""


class LatestRelease(Struct, frozen=True, kw_only=True):
    """Which version is out, and the blob that holds its sealed release."""

    version: PolicyVersion
    release: Hash
    size_bytes: Annotated[int, Meta(ge=1, le=2 << 20)]


class Lineage:
    """Which versions lead to the trainer's policy.

    A new epoch names the version that it continues from. Rollouts of older epochs count only up to there: what came
    after belongs to a branch that was abandoned.
    """

    def __init__(self, continues: Mapping[int, PolicyVersion] | None = None) -> None:
        """As after `open_epoch` of each. Raises ValueError like it."""
        self._continues: dict[int, PolicyVersion] = {}
        for epoch, version in (continues or {}).items():
            self.open_epoch(epoch, version)

    def open_epoch(self, epoch: int, continues: PolicyVersion) -> None:
        """Record that `epoch` goes on from `continues`.

        Raises ValueError if that is not of an older epoch, or `epoch` is known to go on from another version.
        """
        if continues.epoch >= epoch or self._continues.get(epoch, continues) != continues:
            raise ValueError(f"epoch {epoch} can't continue from {continues}")
        self._continues[epoch] = continues

    @property
    def epochs(self) -> Mapping[int, PolicyVersion]:
        """For each epoch after the first, the version that it continues from."""
        return self._continues

    def lag(self, rollout: PolicyVersion, current: PolicyVersion) -> int | str:
        """Steps between a rollout's version and the trainer's, or why there is no such number."""
        if rollout.epoch > current.epoch:
            return "unknown-epoch"
        last_step = current.step
        epoch = current.epoch
        while epoch > rollout.epoch:
            fork = self._continues.get(epoch)
            if fork is None:
                return "unknown-epoch"
            epoch, last_step = fork.epoch, min(last_step, fork.step)
        if epoch < rollout.epoch:  # the walk has passed over it
            return "abandoned-branch" if rollout.epoch in self._continues else "unknown-epoch"
        if rollout.step > last_step:
            return "future-version" if rollout.epoch == current.epoch else "abandoned-branch"
        return current.step - rollout.step


def lag_fault(group: RolloutGroup, lineage: Lineage, current: PolicyVersion, bound: int) -> str | None:
    """Why a group can't be trained on at `current` under a lag bound, as a reason to count; None when it can.

    Every segment must lie on the lineage; the lag counts from the oldest.
    """
    for sample in group.samples:
        for segment in sample.segments:
            lag = lineage.lag(segment.version, current)
            if isinstance(lag, str):
                return lag
            if lag > bound:
                return "stale"
    return None


def may_generate(own: PolicyVersion | None, latest: PolicyVersion | None, max_lag: int) -> bool:
    """The producer's rule: go on while the newest known version is at most `max_lag` steps ahead, in one epoch."""
    if own is None or latest is None:
        return False
    return own >= latest or (own.epoch == latest.epoch and latest.step - own.step <= max_lag)


def release_fault(version: PolicyVersion, known: PolicyVersion | None) -> str | None:
    """Why an announced version is not news, as a reason to count; None when it is. Versions only grow."""
    if known is None or version > known:
        return None
    return "known-version" if version == known else "regressed-version"


@dataclass(slots=True)
class _Assignment:
    worker: str
    deadline: float


@dataclass(slots=True)
class SequentialStep:
    """One step of the sequential protocol, on the trainer's side.

    Slots are handed out lowest first. A slot that is late may be handed out again; the first acceptable answer wins,
    later ones are duplicates. A worker answers only what it was once handed; late answers, and those of a worker that
    was thought gone, are as good as any.
    """

    step: int
    version: PolicyVersion
    slots: int
    deadline_s: float
    _assigned: dict[int, _Assignment] = field(default_factory=dict)
    _answers: dict[int, tuple[str, RolloutGroup]] = field(default_factory=dict)
    _handed: set[tuple[str, int]] = field(default_factory=set)
    reassigned: int = 0

    def take(self, worker: str, count: int, now: float) -> tuple[Slot, ...]:
        """Up to `count` slots for `worker`: free ones, and those whose worker is late."""
        taken: list[Slot] = []
        for slot in range(self.slots):
            if len(taken) >= count:
                break
            held = self._assigned.get(slot)
            if slot in self._answers or (held is not None and held.deadline > now):
                continue
            self.reassigned += held is not None
            self._assigned[slot] = _Assignment(worker, now + self.deadline_s)
            self._handed.add((worker, slot))
            taken.append(Slot(step=self.step, slot=slot))
        return tuple(taken)

    def give_back(self, worker: str) -> int:
        """Free the slots of a worker that is gone; how many there were."""
        lost = [slot for slot, held in self._assigned.items() if held.worker == worker and slot not in self._answers]
        for slot in lost:
            del self._assigned[slot]
        self.reassigned += len(lost)
        return len(lost)

    def accept(self, worker: str, group: RolloutGroup) -> str | None:
        """Take a worker's answer; None, or the reason for refusing it."""
        if group.slot is None or group.slot.step != self.step or group.slot.slot >= self.slots:
            return "unknown-slot"
        if (worker, group.slot.slot) not in self._handed:
            return "not-asked"
        if group.slot.slot in self._answers:
            return "duplicate"
        if group.oldest != self.version or group.newest != self.version:
            return "wrong-version"
        self._answers[group.slot.slot] = (worker, group)
        return None

    def next_deadline(self) -> float | None:
        """When the first unanswered assignment becomes late; None when nothing is out."""
        late = [held.deadline for slot, held in self._assigned.items() if slot not in self._answers]
        return min(late, default=None)

    @property
    def missing(self) -> int:
        """Slots without an answer."""
        return self.slots - len(self._answers)

    def ordered(self) -> Iterable[tuple[str, RolloutGroup]]:
        """Worker and group of each slot, in slot order. Raises ValueError while some are missing."""
        if self.missing:
            raise ValueError(f"{self.missing} of {self.slots} slots have no answer yet")
        return [self._answers[slot] for slot in range(self.slots)]
