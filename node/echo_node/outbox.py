"""The groups of one head that its trainer may not have yet, and whether to begin more. Pure: `now` is passed in.

Nothing acknowledges a group, so what the trainer says anyway stands for it: a new version, or its role record, renewed
each 20 s. What was published before such a sign has arrived, unless the trainer was away meanwhile or is a new process:
then it is sent again.
"""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Final

from echo_p2p.rl.algorithms import step_size
from echo_protocols.run import RunManifest
from echo_protocols.values import PolicyVersion

SILENT_S: Final = 45.0
"""Without a sign, two renewals and a bit, after which a trainer counts as silent; who says that it leaves, at once."""

LISTENS_AFTER_S: Final = 15.0
"""How long after its first record a new process may be taken to hear what is published, if it releases nothing."""

HELD_MAX_BYTES: Final = 64 << 20

_INCARNATIONS_MAX = 64  # that are remembered: anybody's records are many, a trainer's are few

Signs = Mapping[tuple[str, float], float]
"""The live trainers: when each process signed its newest record, by peer and start; all times are its own."""


def usable_groups(manifest: RunManifest) -> int:
    """As many groups of one version as a run could train on: those of each step until they are beyond the lag bound."""
    return step_size(manifest.algorithm, manifest.groups_per_step).bound * (manifest.max_lag + 1)


class Outbox:
    """Holds at most `count_max` groups and `HELD_MAX_BYTES`; beyond them, those under way when that is reached.

    While the trainer is silent nothing is dropped, and no group begun for which there is no room: all are made by the
    newest versions known, which don't move, so an old one is as good as a new one, and dropping any wastes what it
    cost. While signs come, the oldest make room: they are the likeliest to have arrived.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._held: deque[bytes] = deque()
        self._held_bytes = self._under_way = 0
        self._version: PolicyVersion | None = None
        self._heard: dict[tuple[str, float], tuple[float, float]] = {}  # when each process signed, first and last
        self._told: frozenset[tuple[str, float]] | None = None  # the processes that what is held was published to
        self._there = False
        self._sign_at = -inf

    @property
    def held(self) -> int:
        """How many groups there are."""
        return len(self._held)

    def silent(self, now: float) -> bool:
        """Whether there is no trainer that is heard of."""
        return not self._there or now - self._sign_at > SILENT_S

    def may_begin(self, now: float) -> bool:
        """Whether to begin another group."""
        has_room = len(self._held) + self._under_way < self._count_max and self._held_bytes < HELD_MAX_BYTES
        return has_room or not self.silent(now)

    def begin(self) -> None:
        """A group is under way, until it is `ended`."""
        self._under_way += 1

    def ended(self) -> None:
        """A group is not under way any more."""
        self._under_way -= 1

    def put(self, sealed: bytes, now: float) -> None:
        """A group was published."""
        self._held.append(sealed)
        self._held_bytes += len(sealed)
        while not self.silent(now) and (len(self._held) > self._count_max or self._held_bytes > HELD_MAX_BYTES):
            self._held_bytes -= len(self._held.popleft())

    def note(self, signs: Signs, version: PolicyVersion | None, now: float) -> tuple[bool, tuple[bytes, ...]]:
        """Take in who is there, and the newest version known: whether that was a sign, and what to publish again.

        A process that is new has to be there for a while, or to release a version: it speaks before it listens.
        """
        there, first = frozenset(signs), self._told is None
        told = there if self._told is None else self._told
        restarted = self._version is not None and version is not None and version.epoch != self._version.epoch
        spoke = any(self._speaks(each, signs[each], told) for each in there)
        is_sign = first or spoke or version != self._version
        self._version, self._there = version, bool(there)
        for each in there:
            since, _ = self._heard.pop(each, (signs[each], 0.0))
            self._heard[each] = since, signs[each]
        for each in list(self._heard)[:-_INCARNATIONS_MAX]:
            del self._heard[each]
        self._told = there if is_sign or not there else told
        if not is_sign:
            return False, ()
        self._sign_at = now
        if restarted or told.isdisjoint(there):
            return True, tuple(self._held)
        self._held.clear()
        self._held_bytes = 0
        return True, ()

    def _speaks(self, process: tuple[str, float], signed_at: float, told: frozenset[tuple[str, float]]) -> bool:
        since, last = self._heard.get(process, (signed_at, signed_at))
        return signed_at > last and (process in told or signed_at - since >= LISTENS_AFTER_S)
