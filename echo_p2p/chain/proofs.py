"""Which tokens of a ring are proven: those drawn before a canary began that agreed. Groups are delivered once they are.

Knows when a canary is due and what depends on it, not how it is read.
"""

from collections import deque
from collections.abc import Sequence

import trio

from echo_p2p.chain.canary import Canary
from echo_p2p.chain.link import GARBAGE, broken
from echo_p2p.chain.queue import Group
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.verdict import Judge
from echo_protocols.hop import Failure

_SHARE = 0.02
"""Of the ring's time that canaries may take while that makes nobody wait for long."""

_WAIT_S = 2.0
"""Most between two beginnings while a finished group waits for one."""

_APART_S = 5.0
"""Most between two beginnings while groups only grow: what another ring has to repeat of them."""

_AT_LEAST = 25.0
"""Times its own duration between two beginnings, however long that is: in slow rings groups take minutes anyway."""

_KEPT = 8
"""Newest durations that are looked at: the least of them is that of a canary that did not queue."""


def next_canary_at(began_at: float, takes_s: float, *, waited_for: bool, idle: bool) -> float:
    """When the next canary may begin, after one that `began_at`, of canaries that take `takes_s` of a stage.

    `waited_for` by groups that are finished, which are all that there is if the ring is `idle` otherwise.
    """
    if waited_for and idle:
        return began_at
    wished_s = min(takes_s / _SHARE, _WAIT_S if waited_for else _APART_S)
    return began_at + max(wished_s, _AT_LEAST * takes_s)


class Proofs:
    """The groups of one ring that are not delivered yet. Without a canary, whatever is drawn is proven."""

    def __init__(self, ring: Ring, canary: Canary | None, judge: Judge | None) -> None:
        self._route = ring.route
        self._canary = canary
        self._judge = judge
        self._groups: set[Group] = set()
        self._asked: list[trio.Event] = []
        self._due = False
        self._began_at = float("-inf")
        self._took_s = deque[float](maxlen=_KEPT)
        self._changed = trio.Event()

    @property
    def room(self) -> int:
        """Positions that a canary takes."""
        return self._canary.room if self._canary else 0

    def add(self, group: Group) -> None:
        """A group that begins to grow here."""
        self._groups.add(group)
        self._wake()

    def discard(self, group: Group) -> None:
        """Nobody waits for it any more."""
        self._groups.discard(group)
        self._wake()

    def finished(self, group: Group) -> None:
        """All its answers are; it is done as soon as they are proven."""
        if self._canary is None:
            group.done.set()
        self._wake()

    def kept(self, group: Group, failure: Failure) -> Sequence[int]:
        """Tokens of each answer that can be believed after a failure: of garbage, none that this ring has drawn."""
        if failure.reason == GARBAGE:
            return group.given
        return group.proven if self._canary else group.answers.lengths

    async def prove(self) -> None:
        """Return when a canary that begins from now on has agreed; at once if there is nothing to be proven."""
        if self._judge is not None and self._judge.baseline is not None and self._groups:
            proven = trio.Event()
            self._asked.append(proven)
            self._wake()
            await proven.wait()

    def begin(self) -> None:
        """All stages are at one version, and maybe not for long: the next canary is its first, and due at once."""
        self._due = True
        self._wake()

    async def run(self) -> None:
        """Read canaries when they are due. Raises ChainBroken, also when one disagrees."""
        if self._canary is None or self._judge is None:
            return
        while True:
            wait_s = self._next_at() - trio.current_time()
            if wait_s <= 0:
                await self._read(self._canary, self._judge)
            else:
                with trio.move_on_after(wait_s):
                    await self._changed.wait()

    def _next_at(self) -> float:
        if self._due or self._asked:
            return self._began_at
        if not self._groups:
            return float("inf")
        finished = [group.answers.finished for group in self._groups]
        return next_canary_at(
            self._began_at, min(self._took_s, default=0.0), waited_for=any(finished), idle=all(finished)
        )

    async def _read(self, canary: Canary, judge: Judge) -> None:
        self._began_at, self._due = trio.current_time(), False
        asked, self._asked = self._asked, []
        lengths = {group: group.answers.lengths for group in self._groups}
        finished = [group for group in self._groups if group.answers.finished]
        seen = await canary.read()
        if seen is None:  # the ring has switched meanwhile: another one at once, for the new version
            self._due, self._asked = True, asked + self._asked
            return
        self._took_s.append((trio.current_time() - self._began_at) / len(self._route))
        if (fault := judge.fault(seen)) is not None:
            # The head's own stage knows its canaries: if it is not at fault itself, only one is left in a ring of two.
            raise broken(GARBAGE, fault, self._route[-1].peer if len(self._route) <= 2 else None)
        for group, proven in lengths.items():
            group.proven = proven
        self._groups.difference_update(finished)
        for event in asked + [group.done for group in finished]:
            event.set()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
