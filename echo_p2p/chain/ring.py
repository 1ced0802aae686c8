"""Closing a ring: the open frame goes out to the second stop and comes back from the last. Knows no lane."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import trio

from echo_p2p.chain.link import ChainBroken, broken, not_opened, receive_frame, send_frame
from echo_p2p.chain.server import ChainServer, signed_in
from echo_p2p.errors import NetError
from echo_p2p.net.base import Stream
from echo_protocols import names
from echo_protocols.hop import Failure, Open
from echo_protocols.peer import Plan, Stop


@dataclass(frozen=True, slots=True)
class Ring:
    """What a chain is opened with: its stops in order, the run and plan that it belongs to, and its lanes.

    `lanes` is M ≥ (Σ stage + Σ hop) / max stage; 0 takes one more than there are stops. A lane computes up to `rows`
    answers together, of any groups: one that is finished makes room for the next. In an `exclusive` ring a lane takes
    one group at a time, whole, so that what is computed together doesn't depend on when it was asked for. Tokens
    outside the `vocabulary` are refused; 0 if it is not known.
    """

    route: tuple[Stop, ...]
    run_id: bytes
    plan: int = 0
    lanes: int = 0
    rows: int = 16
    exclusive: bool = False
    vocabulary: int = 0

    @property
    def lane_count(self) -> int:
        """Groups in flight."""
        return self.lanes or len(self.route) + 1


def lanes_for(stops: int, *, lanes: int, rows: int, rows_max: int, exclusive: bool) -> tuple[int, int]:
    """How many lanes a ring has, and how many rows each; of `rows` rows, and at least a lane for each stop.

    A stage alone computes the rows of all lanes together, as far as a lane holds them: nobody works meanwhile, and
    16 rows take it hardly longer than 8. Not in an `exclusive` ring, whose lanes take a group each.
    """
    lanes = max(lanes, stops)
    if stops > 1 or exclusive:
        return lanes, rows
    return 1, max(rows, min(lanes * rows, rows_max))


@dataclass(frozen=True, slots=True)
class ClosedRing:
    """The head's two streams, and the open frame with what every stage said of itself."""

    upstream: Stream
    downstream: Stream
    opened: Open


async def close_ring(
    stack: AsyncExitStack, ring: Ring, server: ChainServer, chain: bytes, released: trio.Event
) -> ClosedRing:
    """Open the ring; its streams live in `stack` and until `released`. Raises ChainBroken when a stage refuses."""
    arrived, arrivals = trio.open_memory_channel[tuple[Stream, Open]](1)

    async def accept(stream: Stream, opening: Open) -> None:
        arrived.send_nowait((stream, opening))
        await released.wait()  # the stream lives as long as this handler

    opening = Open(route=ring.route, run_id=ring.run_id, plan=ring.plan, lanes=ring.lane_count)
    timeout_s = server.host.limits.open_timeout_s
    successor = ring.route[1].peer
    server.expect(chain, accept)
    try:
        try:
            opened = server.streams.open(successor, names.HOP, timeout_s=timeout_s)
            downstream = await stack.enter_async_context(opened)
        except NetError as error:
            raise not_opened(successor, error) from error
        await send_frame(downstream, chain, signed_in(opening, server.host), timeout_s)
        # Each stage gives its successor `timeout_s`; one more is for the way back.
        closed = await _first_of(downstream, arrivals, chain, timeout_s * (len(ring.route) + 1))
    finally:
        server.forget(chain)
    back = closed.opened
    signed = (back.versions, back.engines, back.room, back.ragged)
    if back.route != ring.route or any(len(said) != len(back.route) for said in signed):
        raise broken("bad-frame", "the ring came back with another route", closed.upstream.peer)
    return closed


async def _first_of(
    downstream: Stream, arrivals: trio.MemoryReceiveChannel[tuple[Stream, Open]], chain: bytes, timeout_s: float
) -> ClosedRing:
    """The stream that closes the ring, unless a stage refuses first. Raises ChainBroken."""
    refusal = Failure(reason="unreachable", text=f"the ring did not close in {timeout_s:g} s")
    arrival: tuple[Stream, Open] | None = None

    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            nonlocal refusal
            try:
                _, frame = await receive_frame(downstream, chain, timeout_s)
                if isinstance(frame, Failure):
                    refusal = frame
            except ChainBroken as error:
                refusal = error.failure
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        arrival = await arrivals.receive()
        nursery.cancel_scope.cancel()
    if arrival is None:
        raise ChainBroken(refusal)
    return ClosedRing(upstream=arrival[0], downstream=downstream, opened=arrival[1])


def opening_fault(opening: Open, plan: Plan, run_id: bytes) -> str | None:
    """Why a chain is not one of the plan's, for a server's `allow`; None when it is."""
    if opening.run_id != run_id:
        return "the chain is of another run"
    if opening.route not in plan.chains:
        return f"the chain of plan {opening.plan} is not in plan {plan.number}"
    return None


def engine_of(opened: Open) -> str:
    """What computes, stage by stage, in at most 256 characters."""
    stages = (f"{engine}[{stop.span}]" for engine, stop in zip(opened.engines, opened.route, strict=True))
    return "+".join(stages)[:256]
