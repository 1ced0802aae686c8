"""Turns at one stage: its thread goes from one to the next by itself, and what came out leaves in the order of turns.

Knows no stage and no frame. While one turn computes, the next is in a thread already and waits for it there: the event
loop, which has frames to write and read, is not waited for between two steps.
"""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import trio

from echo_p2p.errors import ChainError

T = TypeVar("T")

UNDER_WAY = 2
"""Turns that have begun: one computes, one is next."""


class Turn:
    """One of them; used as a context, which ends it. `ended` once what it computed has been sent on."""

    def __init__(self, turns: "Turns", before: "Turn | None") -> None:
        self.ended = trio.Event()
        self._turns = turns
        self._before = before
        self._computed = threading.Event()
        self._state = threading.Lock()
        self._ran = self._begun = self._left = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, in a thread, after what began before; once that has ended."""
        before, self._ran = self._before, True

        def in_order() -> T:
            try:
                if before is not None:
                    before.wait()
                with self._state:
                    if self._left:
                        raise ChainError("nobody waits for this step any more")
                    self._begun = True
                return work()
            finally:
                self._computed.set()

        try:
            result = await trio.to_thread.run_sync(in_order, abandon_on_cancel=True, limiter=self._turns.threads)
        except trio.Cancelled:
            with self._state:
                self._left = True
                if not self._begun:  # its thread may never have started, and will compute nothing if it has
                    self._computed.set()
            raise
        if before is not None:
            await before.ended.wait()
        return result

    def wait(self) -> None:
        """Return, in a thread, when nothing of this turn and of those before computes."""
        if (before := self._before) is not None:
            before.wait()
            self._before = None
        self._computed.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ran:
            self._computed.set()
        self.ended.set()
        self._turns.release()


class Turns:
    """Turns are had in the order in which they are asked for."""

    def __init__(self) -> None:
        # A turn that is cancelled leaves its thread behind; such threads count until they are done.
        self.threads = trio.CapacityLimiter(UNDER_WAY)
        self._entry = trio.Lock()
        self._room = trio.Semaphore(UNDER_WAY)
        self._newest: Turn | None = None

    async def begin(self) -> Turn:
        """The next turn; to be used as a context at once."""
        async with self._entry:
            await self._room.acquire()
            return self._new()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Turn]:
        """A turn that begins when all others have ended; no other begins before it has."""
        async with self._entry, self._room:
            await self._room.acquire()
            with self._new() as turn:
                yield turn

    def release(self) -> None:
        """A turn has ended."""
        self._room.release()

    def _new(self) -> Turn:
        self._newest = Turn(self, self._newest)
        return self._newest
