"""Upload limits of one node: whose transfer goes on now, and how fast. Knows no blob and no stream.

Transfers take turns in few `slots`: some finish early and can be passed on, where all at once would all finish late.
Smaller ones go first, by powers of two of 256 KiB, and in a class who came first; a turn ends for one that is smaller
after a mebibyte or half a second, and when the other side takes far longer than is usual over a frame. Where larger
ones have all slots, one of less than 256 KiB gets one more. The rate, if there is one, is of all together.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import trio

TURN_BYTES = 2**20
TURN_S = 0.5
_CLASS_BYTES = 2**18
_BURST_S = 0.25
_WAIT_S = 10.0
_CHECK_S = 0.25
_BLOCKED_S = 0.01  # what takes less went into a buffer, and says nothing of the link
_SLOW_S = 0.5
_SLOW_AT_FIRST_S = 5.0
_SLOWER_THAN_USUAL = 8.0
_FRAMES_KNOWN = 4

Send = Callable[[memoryview], Awaitable[None]]


class Busy(Exception):
    """As many transfers wait as may."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer on the uplink, in as many turns as it takes. Made by `Uplink.transfer`."""

    uplink: "Uplink"
    peer: str
    left_bytes: int
    turn: trio.Event = field(default_factory=trio.Event)
    turn_began_at: float = 0.0
    turn_bytes: int = 0

    @property
    def size_class(self) -> int:
        """Which transfers go before this one: those of a lower class."""
        return (self.left_bytes // _CLASS_BYTES).bit_length()

    def fits(self, size_bytes: int) -> bool:
        """Whether it would have come as early had it been known to have so many bytes left."""
        return (size_bytes // _CLASS_BYTES).bit_length() <= self.size_class

    async def carry(self, part: memoryview, send: Send) -> None:
        """Send the next part by `send`, when it may go out."""
        await self.uplink.carry(self, part, send)


class Uplink:
    """Shared by everything that a node uploads, a peer in one slot at a time. `bytes_s` 0 is no limit of the rate.

    At most `waiting` transfers wait for a turn, at most half of them of one peer; none waits over 10 s for its first.
    """

    def __init__(self, bytes_s: float = 0.0, *, slots: int = 2, waiting: int = 64) -> None:
        self._bytes_s = bytes_s
        self._slots = slots
        self._waiting_max = waiting
        self._waiting: list[Transfer] = []
        self._active: dict[str, Transfer] = {}  # by peer
        self._sending: dict[Transfer, float] = {}  # since when its frame is on the way
        self._frames_s: deque[float] = deque(maxlen=32)  # how long frames took that had to wait for the link
        self._paid_until = 0.0  # when the bytes that were let go are all paid for

    @asynccontextmanager
    async def transfer(self, peer: str, size_bytes: int) -> AsyncIterator[Transfer]:
        """A transfer of `size_bytes` to `peer`, whose turn it is. Raises Busy."""
        ahead = sum(each.peer == peer for each in self._waiting)
        if len(self._waiting) >= self._waiting_max or 2 * ahead >= self._waiting_max:
            raise Busy
        transfer = Transfer(self, peer, size_bytes)
        with trio.move_on_after(_WAIT_S) as scope:
            await self._take(transfer)
        if scope.cancelled_caught:
            raise Busy
        try:
            yield transfer
        finally:
            self._give(transfer)

    async def carry(self, transfer: Transfer, part: memoryview, send: Send) -> None:
        """Send the next part of a transfer, when it may go out."""
        now = trio.current_time()
        if transfer.turn_bytes >= TURN_BYTES or now - transfer.turn_began_at >= TURN_S:
            transfer.turn_bytes, transfer.turn_began_at = 0, now
            following = self._next()
            if following and following.size_class < transfer.size_class:
                self._give(transfer)
        if self._active.get(transfer.peer) is not transfer:
            await self._take(transfer)
        transfer.turn_bytes += len(part)
        transfer.left_bytes -= len(part)
        await self._pay(len(part))
        await self._send(transfer, part, send)

    async def _take(self, transfer: Transfer) -> None:
        """Wait for a turn."""
        transfer.turn = trio.Event()
        self._waiting.append(transfer)
        self._admit()
        try:
            while not transfer.turn.is_set():
                with trio.move_on_after(_CHECK_S):
                    await transfer.turn.wait()
                self._end_slow_turns()
        except trio.Cancelled:
            if transfer in self._waiting:
                self._waiting.remove(transfer)
            self._give(transfer)
            raise

    def _give(self, transfer: Transfer) -> None:
        if self._active.get(transfer.peer) is transfer:
            del self._active[transfer.peer]
            self._admit()

    def _admit(self) -> None:
        while (transfer := self._next()) is not None and self._has_room(transfer):
            self._waiting.remove(transfer)
            self._active[transfer.peer] = transfer
            transfer.turn_bytes, transfer.turn_began_at = 0, trio.current_time()
            transfer.turn.set()

    def _has_room(self, transfer: Transfer) -> bool:
        kept = transfer.size_class == 0 and all(each.size_class > 0 for each in self._active.values())
        return len(self._active) < self._slots + kept

    def _next(self) -> Transfer | None:
        """Whose turn it is when a slot is free."""
        able = (each for each in self._waiting if each.peer not in self._active)
        return min(able, key=lambda each: each.size_class, default=None)

    def _end_slow_turns(self) -> None:
        known = len(self._frames_s) >= _FRAMES_KNOWN
        patience_s = max(_SLOW_S, _SLOWER_THAN_USUAL * median(self._frames_s)) if known else _SLOW_AT_FIRST_S
        now = trio.current_time()
        for each in [each for each, since in self._sending.items() if now - since > patience_s]:
            self._give(each)

    async def _pay(self, size_bytes: int) -> None:
        if self._bytes_s > 0:
            now = trio.current_time()
            self._paid_until = max(self._paid_until, now - _BURST_S) + size_bytes / self._bytes_s
            await trio.sleep_until(self._paid_until)

    async def _send(self, transfer: Transfer, part: memoryview, send: Send) -> None:
        began_at = self._sending[transfer] = trio.current_time()
        try:
            await send(part)
        finally:
            del self._sending[transfer]
        took_s = trio.current_time() - began_at
        if took_s > _BLOCKED_S:
            self._frames_s.append(took_s)
