"""The head's end of a ring: orders go out, tokens, prepares and beats come back. Knows no answer and no stage.

In a ring of one there is nobody to talk to: sends vanish, and nothing is waited for.
"""

import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from types import TracebackType
from typing import Self, TypeVar

import trio

from echo_p2p.chain.group import Drawn
from echo_p2p.chain.link import CLOSED, ChainBroken, ChainLimits, Link, broken
from echo_p2p.chain.pace import Pace, Rounds
from echo_p2p.chain.ring import Ring, close_ring, engine_of
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.wire import from_tokens
from echo_p2p.errors import WeightsError
from echo_protocols.hop import CHAIN_ID_BYTES, Beat, Failure, Forward, Frame, Join, Prepare, Switch, Tokens
from echo_protocols.values import PolicyVersion

T = TypeVar("T")

_TIMES_USUAL = 8.0
"""What a round is given before the ring counts as silent."""

_BEATS = -1
"""Where lanes have their number."""


class RingHead:
    """Owns the head's streams while its context is open. The first failure is final, and wakes all who wait."""

    def __init__(self, ring: Ring, server: ChainServer | None, limits: ChainLimits) -> None:
        self.failed = trio.Event()
        self.failure: Failure | None = None
        self.versions: tuple[PolicyVersion, ...] = ()
        self.engine: str | None = None
        self.room = limits.room
        self.ragged = True
        self.vocabulary = ring.vocabulary
        self._ring = ring
        self._server = server
        self._limits = limits
        self._chain = secrets.token_bytes(CHAIN_ID_BYTES)
        self._stack = AsyncExitStack()
        self._link: Link | None = None
        self._nursery: trio.Nursery | None = None
        self._released = trio.Event()
        self._scopes: set[trio.CancelScope] = set()
        self._lanes: dict[int, trio.MemorySendChannel[Drawn]] = {}
        self._preparing: dict[PolicyVersion, trio.MemorySendChannel[Prepare]] = {}
        # A stage that stalls is reported by itself, and has less time for that; this is for peers that fall silent.
        pace = Pace(1.5 * limits.patience_s, limits.hop_timeout_s * len(ring.route), _TIMES_USUAL)
        self._rounds = Rounds[tuple[int, int]](pace)
        self._patience = trio.CancelScope()

    @property
    def last(self) -> str:
        """The peer that tokens come from."""
        return self._ring.route[-1].peer

    @property
    def told_by(self) -> str | None:
        """The neighbour that told of the failure; None if it was found here."""
        return self._link.told_by if self._link else None

    def send(self, frame: Frame) -> None:
        """Queue a frame for the second stop; a full queue is a failure of the ring."""
        if self._link is not None:
            self._note(frame)
            try:
                self._link.send(frame)
            except ChainBroken as error:
                self.fail(error.failure)

    def _note(self, frame: Frame) -> None:
        """What comes around is waited for from now on."""
        now = trio.current_time()
        match frame:
            case Forward(lane=lane, step=step, rows=rows, length=length):
                self._rounds.sent((lane, step), len(rows) // 4 * length, now)
            case Join(lane=lane, step=step, rows=samples):
                self._rounds.sent((lane, step), len(samples), now)
            case Beat(number=number):
                self._rounds.sent((_BEATS, number), 0, now)
            case Switch():
                self._rounds.switched()
        self._patience.deadline = self._rounds.deadline

    def _came(self, lane: int, step: int) -> None:
        self._rounds.came((lane, step), trio.current_time())
        self._patience.deadline = self._rounds.deadline

    def fail(self, failure: Failure) -> None:
        """End the ring; the first reason stays."""
        if self.failure is None:
            self.failure = failure
            self.failed.set()
            for scope in self._scopes:
                scope.cancel()
        if self._link is not None:
            self._link.end(self.failure)

    @contextmanager
    def until_failure(self) -> Iterator[None]:
        """Whatever waits inside ends with ChainBroken as soon as the ring fails."""
        if self.failure is None:
            with trio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    yield
                except ChainBroken as error:
                    self.fail(error.failure)
                    raise
                finally:
                    self._scopes.discard(scope)
            if not scope.cancelled_caught:
                return
        assert self.failure is not None
        raise ChainBroken(self.failure)

    @contextmanager
    def tokens_of(self, lane: int) -> Iterator[trio.MemoryReceiveChannel[Drawn]]:
        """Where the lane's tokens arrive; those that come later are dropped."""
        self._lanes[lane], tokens = trio.open_memory_channel[Drawn](self._limits.queue_frames)
        try:
            yield tokens
        finally:
            del self._lanes[lane]

    @contextmanager
    def preparing(self, version: PolicyVersion) -> Iterator[trio.MemoryReceiveChannel[Prepare]]:
        """Where the prepare of `version` comes back to."""
        self._preparing[version], returned = trio.open_memory_channel[Prepare](4)
        try:
            yield returned
        finally:
            del self._preparing[version]

    async def prepared(self, returned: trio.MemoryReceiveChannel[Prepare]) -> None:
        """Return once all other stops have staged the version. Raises WeightsError if one can't."""
        if self._link is not None and (back := await returned.receive()).fault:
            raise WeightsError(f"version {back.version} was not staged: {back.fault}")

    async def __aenter__(self) -> Self:
        if self._server is None or len(self._ring.route) == 1:
            return self
        try:
            closed = await close_ring(self._stack, self._ring, self._server, self._chain, self._released)
            self.versions, self.engine = closed.opened.versions, engine_of(closed.opened)
            self.room, self.ragged = min(closed.opened.room), all(closed.opened.ragged)
            self._link = Link(self._chain, closed.upstream, closed.downstream, self._limits)
        finally:
            if self._link is None:
                self._released.set()
                await self._stack.aclose()
        self._nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._nursery.start_soon(self._run, self._link)
        self._nursery.start_soon(self._beat)
        self._nursery.start_soon(self._watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The caller's exception stays outside of the nursery, which would wrap it.
        self.fail(Failure(reason=CLOSED, text="the head closed the chain", peer=self._ring.route[0].peer))
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
        try:
            await self._stack.aclose()
        finally:
            self._released.set()

    async def _run(self, link: Link) -> None:
        self.fail(await link.run(self._on_frame))

    async def _beat(self) -> None:
        for number in count(1):
            await trio.sleep(self._limits.beat_s)
            self.send(Beat(number=number))

    async def _watch(self) -> None:
        with self._patience:
            await trio.sleep_forever()
        others = [stop.peer for stop in self._ring.route[1:]]
        text = "nothing came around in the time that usually is more than enough"
        self.fail(Failure(reason="silent", text=text, peer=others[0] if len(others) == 1 else None))

    async def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Tokens():
                self._came(frame.lane, frame.step)
                if (lane := self._lanes.get(frame.lane)) is not None:  # else its caller was cancelled meanwhile
                    self._hand_over(lane, from_tokens(frame))
            case Prepare():
                if (waiting := self._preparing.get(frame.version)) is not None:
                    self._hand_over(waiting, frame)
            case Beat():
                self._came(_BEATS, frame.number)
            case _:
                raise broken("bad-frame", f"a {type(frame).__name__} frame came back to the head", self.last)

    def _hand_over(self, channel: trio.MemorySendChannel[T], item: T) -> None:
        try:
            channel.send_nowait(item)
        except trio.WouldBlock:
            raise broken("bad-frame", "answers came that nobody asked for", self.last) from None
