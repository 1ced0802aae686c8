"""The chains that a peer serves: streams from predecessors, and the last stage's stream back to a head.

Knows no plan (the `allow` hook does) and no role. Everything that a stream brings is hostile until checked: it ends
that stream with a typed failure and a count, never more.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import trio
from trio import TaskStatus

from echo_p2p.chain.group import Drawn
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import (
    CLOSED,
    GARBAGE,
    LOADING,
    ChainBroken,
    Link,
    bid_farewell,
    broken,
    not_opened,
    receive_frame,
    send_frame,
)
from echo_p2p.chain.seat import Seat
from echo_p2p.chain.troubles import Troubles
from echo_p2p.chain.turns import Turn
from echo_p2p.chain.wire import from_forward, is_finite, to_forward, to_tokens
from echo_p2p.errors import NetError, WeightsError
from echo_p2p.net.base import Stream, Streams
from echo_protocols import names
from echo_protocols.hop import (
    Beat,
    BeginPrompt,
    EndLane,
    Failure,
    Forward,
    Frame,
    Join,
    Open,
    Prepare,
    Switch,
)
from echo_protocols.values import PolicyVersion

logger = logging.getLogger(__name__)

Allow = Callable[[str, Open], str | None]
"""Given the predecessor and the chain it asks for: why it is refused, or None. Here the plan is checked."""

_PREPARES_MAX = 4
"""Versions of one chain that a stage stages at a time."""

Ended = Callable[[Open, Failure, str | None], None]
"""Hears of each chain that has ended: how it was opened, why it ended, and the neighbour that said so, if one did."""

Return = Callable[[Stream, Open], Awaitable[None]]


def allow_everybody(peer: str, opening: Open) -> str | None:
    """Refuses nobody: for tests, and for swarms on one machine."""
    return None


class ChainServer:
    """Serves a host's stage to one chain at a time; a newer chain that is allowed takes the place of the older."""

    def __init__(
        self, streams: Streams, host: StageHost, allow: Allow = allow_everybody, ended: Ended | None = None
    ) -> None:
        self.host = host
        self.streams = streams
        self._allow = allow
        self._ended = ended
        self._returns: dict[bytes, Return] = {}
        self._serving: Link | None = None
        self._newest = b""
        self._opening = trio.CancelScope()
        self._free = trio.Lock()
        self._troubles = Troubles()

    async def serve(self, *, max_streams: int = 32, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the hop protocol until cancelled."""
        await self.streams.serve(names.HOP, self._on_stream, max_streams=max_streams, task_status=task_status)

    def expect(self, chain: bytes, accept: Return) -> None:
        """Hand the stream that closes the ring of `chain` to its driver."""
        self._returns[chain] = accept

    def forget(self, chain: bytes) -> None:
        """Refuse that stream again."""
        self._returns.pop(chain, None)

    async def _on_stream(self, stream: Stream) -> None:
        chain = bytes(16)
        try:
            chain, frame = await receive_frame(stream, None, self.host.limits.open_timeout_s)
            if not isinstance(frame, Open):
                raise broken("not-open", f"{stream.peer} began with something else than an open", self.host.peer)
            place = frame.place_of(self.host.peer)
            if place is None:
                raise broken("not-in-route", "this peer has no stop in the route", self.host.peer)
            if stream.peer != frame.route[place - 1].peer:
                raise broken("not-predecessor", f"{stream.peer} does not precede this peer", self.host.peer)
            if place == 0:
                await self._close_ring(stream, chain, frame)
            else:
                await self._serve_chain(stream, chain, frame, place)
        except ChainBroken as error:
            if error.failure.reason == LOADING:
                self._troubles.say(error)
            else:
                self.host.count_refusal(error.failure.reason)
                logger.warning("refused a stream of %s: %s", stream.peer, error)
            await bid_farewell(chain, error.failure, stream)

    async def _close_ring(self, stream: Stream, chain: bytes, opening: Open) -> None:
        accept = self._returns.get(chain)
        if accept is None:
            raise broken("unknown-chain", "no driver here waits for this chain", self.host.peer)
        self.forget(chain)
        await accept(stream, opening)

    async def _serve_chain(self, upstream: Stream, chain: bytes, opening: Open, place: int) -> None:
        host = self.host
        if opening.route[place].span != host.stage.span:
            raise broken("wrong-span", f"this peer serves {host.stage.span}", host.peer)
        if opening.lanes > host.limits.lanes:
            raise broken("too-many-lanes", f"this peer holds {host.limits.lanes} lanes", host.peer)
        if host.corrupt:
            raise broken(GARBAGE, "this peer's stage has gone bad, and is to be loaded anew", host.peer)
        if (reason := self._allow(upstream.peer, opening)) is not None:
            raise broken("not-allowed", reason, host.peer)
        self._newest = chain
        if self._serving is not None:
            self._serving.end(Failure(reason="superseded", text="a newer chain was opened", peer=host.peer))
        self._opening.cancel()  # its successor may never answer
        async with self._free, AsyncExitStack() as stack:
            with trio.CancelScope() as self._opening:
                if self._newest == chain:
                    downstream = await self._open_successor(stack, chain, opening, place)
            if self._newest != chain:
                raise broken("superseded", "a newer chain was opened", host.peer)
            self._troubles.over()
            link = self._serving = Link(chain, upstream, downstream, host.limits)
            try:
                failure = await _ServedChain(host, link).run()
            finally:
                self._serving = None
        if self._ended is not None:
            self._ended(opening, failure, link.told_by)
        if failure.reason != CLOSED:
            host.count_refusal(failure.reason)
            logger.warning("the chain from %s ended: %s", upstream.peer, ChainBroken(failure))

    async def _open_successor(self, stack: AsyncExitStack, chain: bytes, opening: Open, place: int) -> Stream:
        host = self.host
        successor = opening.after(place).peer
        timeout_s = host.limits.open_timeout_s
        try:
            stream = await stack.enter_async_context(self.streams.open(successor, names.HOP, timeout_s=timeout_s))
        except NetError as error:
            raise not_opened(successor, error) from error
        await send_frame(stream, chain, signed_in(opening, host), timeout_s)
        return stream


def signed_in(opening: Open, host: StageHost) -> Open:
    """The open frame with what this stage says of itself added."""
    return Open(
        route=opening.route,
        run_id=opening.run_id,
        plan=opening.plan,
        lanes=opening.lanes,
        versions=(*opening.versions, host.version),
        engines=(*opening.engines, host.stage.engine),
        room=(*opening.room, host.limits.room),
        ragged=(*opening.ragged, host.stage.ragged),
    )


class _ServedChain:
    """One chain at one stage after its first. Its lanes live as long as its link."""

    def __init__(self, host: StageHost, link: Link) -> None:
        self._host = host
        self._link = link
        self._seat = Seat(host, link.predecessor)
        self._background: trio.Nursery | None = None
        self._steps: trio.Nursery | None = None
        self._newest: Turn | None = None
        self._prepared: set[PolicyVersion] = set()

    async def run(self) -> Failure:
        try:
            async with trio.open_nursery() as self._background, trio.open_nursery() as self._steps:
                failure = await self._link.run(self._on_frame)
                self._steps.cancel_scope.cancel()
                self._background.cancel_scope.cancel()
        finally:
            self._seat.leave()
            with trio.CancelScope(shield=True):
                await self._host.free()
        return failure

    async def _on_frame(self, frame: Frame) -> None:
        host, link = self._host, self._link
        if isinstance(frame, Forward | Join):
            assert self._steps is not None
            self._newest = await host.turns.begin()
            self._steps.start_soon(self._step, self._newest, frame)
            return
        if self._newest is not None:
            await self._newest.ended.wait()
        match frame:
            case BeginPrompt():
                self._seat.begin(frame)
                self._pass_on(frame)
            case EndLane():
                self._seat.end(frame.lane)
                self._pass_on(frame)
            case Switch():
                if frame.version not in self._prepared:
                    text = f"{link.predecessor} switches to version {frame.version}, which it had nobody stage"
                    raise broken("bad-frame", text, link.predecessor)
                self._prepared = {version for version in self._prepared if version > frame.version}
                async with host.turns.alone() as turn:
                    await host.switch(turn, frame.version)
                    self._pass_on(frame)
            case Prepare():
                self._start_prepare(frame)
            case Beat():
                link.send(frame)
            case _:
                raise broken("bad-frame", f"a {type(frame).__name__} frame does not belong here", link.predecessor)

    def _pass_on(self, frame: Frame) -> None:
        # The head needs no echo of its own orders; prepares and beats do return to it.
        if not self._host.stage.span.last:
            self._link.send(frame)

    async def _step(self, turn: Turn, frame: Forward | Join) -> None:
        with turn:
            try:
                if isinstance(frame, Forward):
                    await self._forward(turn, frame)
                else:
                    drawn = await self._seat.join(turn, frame)
                    self._link.send(frame if drawn is None else to_tokens(frame.lane, drawn))
            except ChainBroken as error:
                self._link.end(error.failure)

    async def _forward(self, turn: Turn, frame: Forward) -> None:
        host, sender = self._host, self._link.predecessor
        rows, positions, hidden = from_forward(frame)
        if host.width not in (None, frame.width):
            raise broken("bad-frame", f"{sender} sent states of {frame.width} values, not {host.width}", sender)
        if not is_finite(hidden):
            raise broken(GARBAGE, f"{sender} sent states that are not finite", sender)
        if frame.version != host.version:
            text = f"a frame of version {frame.version} came to a stage at {host.version}"
            raise broken("version", text, host.peer)
        result = await self._seat.forward(turn, frame.lane, frame.step, rows, positions, hidden)
        host.width = frame.width
        if isinstance(result, Drawn):
            self._link.send(to_tokens(frame.lane, result))
        else:
            self._link.send(
                to_forward(frame.lane, frame.step, host.version, rows=rows, positions=positions, hidden=result)
            )

    def _start_prepare(self, frame: Prepare) -> None:
        assert self._background is not None
        if len(self._background.child_tasks) >= _PREPARES_MAX:
            raise broken("too-many-prepares", f"{_PREPARES_MAX} versions are being staged", self._host.peer)
        self._background.start_soon(self._prepare, frame)

    async def _prepare(self, frame: Prepare) -> None:
        fault = frame.fault
        if not fault:
            try:
                await self._host.prepare(frame.version, frame.timeout_s)
                self._prepared.add(frame.version)
            except WeightsError as error:
                fault = f"{self._host.peer}: {error}"[:500]
        try:
            self._link.send(Prepare(version=frame.version, timeout_s=frame.timeout_s, fault=fault))
        except ChainBroken as error:
            self._link.end(error.failure)
