"""Upload limits of one node: whose transfer goes on now, and how fast. Knows no blob and no stream.

Transfers take turns in few `slots`: some finish early and can be passed on, where all at once would all finish late.
Smaller ones go first, by powers of two of `TURN_BYTES`, and in a class who came first; a turn ends for one that is
smaller, so that a snapshot doesn't hold up patches, and when the other side takes far longer than is usual over a
frame. The rate, if there is one, is of all together.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import trio

TURN_BYTES = 2**20
_BURST_S = 0.25
_WAIT_S = 10.0
_CHECK_S = 0.25
_BLOCKED_S = 0.01  # what takes less went into a buffer, and says nothing of the link
_SLOW_S = 0.5
_SLOW_AT_FIRST_S = 5.0
_SLOWER_THAN_USUAL = 8.0
_FRAMES_KNOWN = 4


class Busy(Exception):
    """As many transfers wait as may."""


@dataclass(slots=True, eq=False)
class _Place:
    peer: str
    left_bytes: int
    turn: trio.Event = field(default_factory=trio.Event)


class Uplink:
    """Shared by everything that a node uploads, a peer in one slot at a time. `bytes_s` 0 is no limit of the rate.

    At most `waiting` transfers wait for a turn, at most half of them of one peer; none waits over 10 s for its first.
    """

    def __init__(self, bytes_s: float = 0.0, *, slots: int = 2, waiting: int = 64) -> None:
        self._bytes_s = bytes_s
        self._slots = slots
        self._waiting_max = waiting
        self._waiting: list[_Place] = []
        self._active: dict[str, _Place] = {}  # by peer
        self._sending: dict[_Place, float] = {}  # since when its frame is on the way
        self._frames_s: deque[float] = deque(maxlen=32)  # how long frames took that had to wait for the link
        self._paid_until = 0.0  # when the bytes that were let go are all paid for

    @asynccontextmanager
    async def transfer(self, peer: str, size_bytes: int) -> AsyncIterator["Transfer"]:
        """A transfer of `size_bytes` to `peer`, whose turn it is. Raises Busy."""
        ahead = sum(place.peer == peer for place in self._waiting)
        if len(self._waiting) >= self._waiting_max or 2 * ahead >= self._waiting_max:
            raise Busy
        with trio.move_on_after(_WAIT_S) as scope:
            place = await self._take(peer, size_bytes)
        if scope.cancelled_caught:
            raise Busy
        transfer = Transfer(self, place)
        try:
            yield transfer
        finally:
            self._give(transfer.place)

    async def _take(self, peer: str, left_bytes: int) -> _Place:
        place = _Place(peer, left_bytes)
        self._waiting.append(place)
        self._admit()
        try:
            while not place.turn.is_set():
                with trio.move_on_after(_CHECK_S):
                    await place.turn.wait()
                self._end_slow_turns()
        except trio.Cancelled:
            if place in self._waiting:
                self._waiting.remove(place)
            self._give(place)
            raise
        return place

    def _give(self, place: _Place) -> None:
        if self._active.get(place.peer) is place:
            del self._active[place.peer]
            self._admit()

    def _admit(self) -> None:
        while len(self._active) < self._slots:
            place = self._next()
            if place is None:
                return
            self._waiting.remove(place)
            self._active[place.peer] = place
            place.turn.set()

    def _next(self) -> _Place | None:
        """Whose turn it is when a slot is free."""
        able = (place for place in self._waiting if place.peer not in self._active)
        return min(able, key=lambda place: _class_of(place.left_bytes), default=None)

    def _end_slow_turns(self) -> None:
        known = len(self._frames_s) >= _FRAMES_KNOWN
        patience_s = max(_SLOW_S, _SLOWER_THAN_USUAL * median(self._frames_s)) if known else _SLOW_AT_FIRST_S
        now = trio.current_time()
        for place in [place for place, since in self._sending.items() if now - since > patience_s]:
            self._give(place)

    async def _pay(self, size_bytes: int) -> None:
        if self._bytes_s > 0:
            now = trio.current_time()
            self._paid_until = max(self._paid_until, now - _BURST_S) + size_bytes / self._bytes_s
            await trio.sleep_until(self._paid_until)

    async def _send(self, place: _Place, part: memoryview, send: Callable[[memoryview], Awaitable[None]]) -> None:
        began_at = self._sending[place] = trio.current_time()
        try:
            await send(part)
        finally:
            del self._sending[place]
        took_s = trio.current_time() - began_at
        if took_s > _BLOCKED_S:
            self._frames_s.append(took_s)


class Transfer:
    """One transfer on the uplink, in as many turns as it takes. Made by `Uplink.transfer`."""

    def __init__(self, uplink: Uplink, place: _Place) -> None:
        self.place = place
        self._uplink = uplink
        self._bytes = 0

    async def carry(self, part: memoryview, send: Callable[[memoryview], Awaitable[None]]) -> None:
        """Send the next part by `send`, when it may go out."""
        uplink, place = self._uplink, self.place
        if self._bytes >= TURN_BYTES:
            self._bytes = 0
            smaller = uplink._next()
            if smaller and _class_of(smaller.left_bytes) < _class_of(place.left_bytes):
                uplink._give(place)
        if uplink._active.get(place.peer) is not place:
            self.place = place = await uplink._take(place.peer, place.left_bytes)
        self._bytes += len(part)
        place.left_bytes -= len(part)
        await uplink._pay(len(part))
        await uplink._send(place, part, send)


def _class_of(left_bytes: int) -> int:
    return (left_bytes // TURN_BYTES).bit_length()
