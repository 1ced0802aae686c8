"""A peer's two streams in a ring: frames come from the predecessor, frames go to the successor. Knows no stage.

The first fault on either side ends the link, and is told to both neighbours, so that every peer of a broken ring
learns the reason whichever stream it travels by. Failures also travel against the ring, from the successor.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from echo_p2p.chain.group import SoFar
from echo_p2p.errors import ChainError, NetError, NotServed
from echo_p2p.net.base import Stream
from echo_protocols.hop import BadFrame, Failure, Frame, decode, encode

logger = logging.getLogger(__name__)

CLOSED = "closed"
"""Reason of a chain that its head ended on purpose."""

GARBAGE = "garbage"
"""Reason of a chain with a stage that computes what can't be right."""

LOADING = "loading"
"""Reason of a chain that can't be opened yet: a stop is there, and has not loaded its span."""

_FAREWELL_S = 1.0


class ChainBroken(ChainError):
    """A chain ended; `failure` is what the peers of the ring are told."""

    def __init__(self, failure: Failure) -> None:
        place = f" at peer {failure.peer}" if failure.peer else ""
        words = f"the chain ended{place} ({failure.reason}): {failure.text or 'no further word'}"
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in words))
        self.failure = failure


class GroupBroken(ChainBroken):
    """A chain ended with a group under way; `so_far` is what another ring can go on with."""

    def __init__(self, failure: Failure, so_far: SoFar) -> None:
        super().__init__(failure)
        self.so_far = so_far


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Bounds of what a peer holds for a chain, and how long it waits for its neighbours.

    `rows` of a lane, `positions` of a row. `room` is of all positions of all rows together, as a head counts before
    it asks; `held` is what a stage lets itself be brought to, lanes counted as they are kept: rows times the longest.
    A stage has `hop_timeout_s` for a step, a ring that for each stop; once the usual times are known, some times these,
    and at least `patience_s`.
    """

    lanes: int = 64
    rows: int = 256
    positions: int = 8192
    room: int = 2**20
    held: int = 2**40
    open_timeout_s: float = 15.0
    hop_timeout_s: float = 30.0
    patience_s: float = 2.5
    beat_s: float = 10.0
    idle_timeout_s: float = 60.0

    @property
    def queue_frames(self) -> int:
        """Bound of the queues of a link: begin, forward and end of each lane, and a few for control."""
        return 3 * self.lanes + 16


async def receive_frame(stream: Stream, chain: bytes | None, timeout_s: float) -> tuple[bytes, Frame]:
    """The next frame of a stream, of chain `chain` if that is given. Raises ChainBroken."""
    with trio.move_on_after(timeout_s):
        return await _receive(stream, chain)
    raise _silent(stream, timeout_s)


async def _receive(stream: Stream, chain: bytes | None) -> tuple[bytes, Frame]:
    try:
        found, frame = decode(await stream.receive())
    except NetError as error:
        raise broken("lost", f"the stream with {stream.peer} ended: {error}", stream.peer) from error
    except BadFrame as error:
        raise broken("bad-frame", f"{stream.peer} sent bytes that are no frame: {error}", stream.peer) from error
    if chain is not None and found != chain:
        raise broken("wrong-chain", f"{stream.peer} sent a frame of another chain", stream.peer)
    return found, frame


async def send_frame(stream: Stream, chain: bytes, frame: Frame, timeout_s: float) -> None:
    """Send one frame. Raises ChainBroken."""
    with trio.move_on_after(timeout_s):
        return await _send(stream, chain, frame)
    raise _stalled(stream, timeout_s)


async def _send(stream: Stream, chain: bytes, frame: Frame) -> None:
    try:
        await stream.send(*encode(chain, frame))
    except NetError as error:
        raise broken("lost", f"the stream with {stream.peer} ended: {error}", stream.peer) from error


def _silent(stream: Stream, timeout_s: float) -> ChainBroken:
    return broken("silent", f"no frame from {stream.peer} in {timeout_s:g} s", stream.peer)


def _stalled(stream: Stream, timeout_s: float) -> ChainBroken:
    return broken("stalled", f"{stream.peer} took no frame for {timeout_s:g} s", stream.peer)


async def bid_farewell(chain: bytes, failure: Failure, *streams: Stream) -> None:
    """Tell neighbours why the chain ended, as far as they can still be reached; cancellation does not stop it."""
    with trio.CancelScope(shield=True):
        for stream in streams:
            try:
                await send_frame(stream, chain, failure, _FAREWELL_S)
            except ChainBroken as error:
                logger.debug("could not tell %s that the chain ended: %s", stream.peer, error)


def broken(reason: str, text: str, peer: str | None = None) -> ChainBroken:
    """A fault as an error to raise."""
    return ChainBroken(Failure(reason=reason, text=text[:500], peer=peer))


def not_opened(successor: str, error: NetError) -> ChainBroken:
    """Why a chain does not come to its next stop."""
    if isinstance(error, NotServed):
        return broken(LOADING, f"{successor} has not loaded its span yet", successor)
    return broken("unreachable", f"could not open a stream to {successor}: {error}", successor)


class Link:
    """The streams of one chain at one peer. `run` serves them until the chain ends."""

    def __init__(self, chain: bytes, upstream: Stream, downstream: Stream, limits: ChainLimits) -> None:
        self.chain = chain
        self.predecessor = upstream.peer
        self.told_by: str | None = None
        """Whose failure frame ended the link; None for a fault that was found here."""
        self._upstream = upstream
        self._downstream = downstream
        self._limits = limits
        self._outbox, self._outgoing = trio.open_memory_channel[Frame](limits.queue_frames)
        self._inbox, self._incoming = trio.open_memory_channel[Frame](limits.queue_frames)
        self._failure: Failure | None = None
        self._scope = trio.CancelScope()

    def send(self, frame: Frame) -> None:
        """Queue a frame for the successor. Raises ChainBroken when the queue is full."""
        try:
            self._outbox.send_nowait(frame)
        except trio.WouldBlock:
            raise broken("stalled", f"{self._downstream.peer} does not keep up", self._downstream.peer) from None

    def end(self, failure: Failure) -> None:
        """End the chain; the first reason stays."""
        self._failure = self._failure or failure
        self._scope.cancel()

    async def run(self, handle: Callable[[Frame], Awaitable[None]]) -> Failure:
        """Give every frame of the predecessor to `handle`, in order; return why the chain ended."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for task in (self._read, self._write, self._watch):
                        nursery.start_soon(self._guard, task)
                    nursery.start_soon(self._guard, self._handle, handle)
        finally:
            self._failure = self._failure or Failure(reason="left", text="a peer of the chain shut down")
            await bid_farewell(self.chain, self._failure, self._upstream, self._downstream)
        return self._failure

    async def _guard(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await task(*args)
        except ChainBroken as error:
            self.end(error.failure)

    async def _read(self) -> None:
        # One scope whose deadline moves: making one for each frame is a third of what a hop costs over its stream.
        timeout_s = self._limits.idle_timeout_s
        with trio.CancelScope() as scope:
            while True:
                scope.deadline = trio.current_time() + timeout_s
                _, frame = await _receive(self._upstream, self.chain)
                scope.deadline = math.inf
                if isinstance(frame, Failure):
                    raise self._told(frame, self._upstream)
                try:
                    self._inbox.send_nowait(frame)
                except trio.WouldBlock:
                    await self._inbox.send(frame)
        raise _silent(self._upstream, timeout_s)

    async def _handle(self, handle: Callable[[Frame], Awaitable[None]]) -> None:
        async for frame in self._incoming:
            await handle(frame)

    async def _write(self) -> None:
        timeout_s = self._limits.hop_timeout_s
        try:
            with trio.CancelScope() as scope:
                async for frame in self._outgoing:
                    scope.deadline = trio.current_time() + timeout_s
                    await _send(self._downstream, self.chain, frame)
                    scope.deadline = math.inf
            if scope.cancelled_caught:
                raise _stalled(self._downstream, timeout_s)
        except ChainBroken:
            # A successor that closed the stream may have said why: `_watch` reads that, and ends the link first.
            await trio.sleep(_FAREWELL_S)
            raise

    async def _watch(self) -> None:
        # The successor sends nothing against the ring but the reason of its end. Silence there is normal.
        _, frame = await receive_frame(self._downstream, self.chain, float("inf"))
        if not isinstance(frame, Failure):
            raise broken("bad-frame", "a frame came against the ring", self._downstream.peer)
        raise self._told(frame, self._downstream)

    def _told(self, failure: Failure, stream: Stream) -> ChainBroken:
        if self._failure is None:
            self.told_by = stream.peer
        return ChainBroken(failure)
