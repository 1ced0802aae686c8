"""What a hop of a chain costs over the bare stream that carries the same bytes: making and reading its frames; and a
whole link, with its queues and deadlines. Both ends are in this process, each with a network daemon of its own.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import numpy as np
import trio
from chain_rings import ROWS, V0

from echo_p2p.chain.group import Drawn
from echo_p2p.chain.link import ChainLimits, Link
from echo_p2p.chain.wire import from_forward, from_tokens, is_finite, to_forward, to_tokens
from echo_p2p.net.base import Stream
from echo_p2p.net.hive import HiveNode
from echo_protocols.hop import Forward, Frame, Tokens, decode, encode

HIDDEN = 576
CHAIN = bytes(16)


async def hop_figures(one: HiveNode, other: HiveNode, *, trips: int) -> dict[str, float]:
    """A step's frame there and its tokens back, through two links; against their bytes over streams of the same kind.

    The medians of round trips that take turns.
    """
    hidden = np.random.default_rng(0).standard_normal((ROWS, 1, HIDDEN)).astype(np.float32)
    rows, positions = np.arange(ROWS, dtype=np.int32), np.full(ROWS, 100, np.int32)
    drawn = Drawn(step=1, version=V0, rows=rows, tokens=rows, logprobs=np.full(ROWS, -1.0, np.float32))
    there = b"".join(encode(CHAIN, to_forward(1, 1, V0, rows=rows, positions=positions, hidden=hidden)))
    back = b"".join(encode(CHAIN, to_tokens(1, drawn)))
    bare_s, hop_s, link_s = [], [], []
    async with (
        open_bare(one, other, back) as bare,
        open_frames(one, other, drawn) as frames,
        open_links(one, other, drawn) as (link, arrived),
    ):
        for _ in range(trips):
            begun = time.perf_counter()
            await bare[0].send(there)
            assert len(await bare[1].receive()) == len(back)
            bare_s.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            frame = to_forward(1, 1, V0, rows=rows, positions=positions, hidden=hidden)
            await frames[0].send(*encode(CHAIN, frame))
            assert _drawn_of(decode(await frames[1].receive())[1]).step == 1
            hop_s.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            link.send(to_forward(1, 1, V0, rows=rows, positions=positions, hidden=hidden))
            assert (await arrived.receive()).step == 1
            link_s.append(time.perf_counter() - begun)
    return {
        "hop_over_stream": median(hop_s) / median(bare_s),
        "link_over_stream": median(link_s) / median(bare_s),
        "stream_round_trip_s": median(bare_s),
        "hop_bytes": float(len(there)),
    }


def _drawn_of(frame: Frame) -> Drawn:
    assert isinstance(frame, Tokens)
    return from_tokens(frame)


def _compute(frame: Frame, drawn: Drawn) -> Tokens:
    assert isinstance(frame, Forward)
    assert is_finite(from_forward(frame)[2])
    return to_tokens(frame.lane, drawn)


@asynccontextmanager
async def open_bare(one: HiveNode, other: HiveNode, back: bytes) -> AsyncIterator[tuple[Stream, Stream]]:
    """A stream out, and one into, `one`; whatever goes out is answered with `back`."""
    async with (
        open_streams(one, other, "/echo-bench/bare/1") as (out, there, answer, into),
        trio.open_nursery() as tasks,
    ):

        async def reply() -> None:
            while True:
                await there.receive()
                await answer.send(back)

        tasks.start_soon(reply)
        yield out, into
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_frames(one: HiveNode, other: HiveNode, drawn: Drawn) -> AsyncIterator[tuple[Stream, Stream]]:
    """Likewise; frames that go out are read, and answered with `drawn`."""
    protocol = "/echo-bench/frames/1"
    async with open_streams(one, other, protocol) as (out, there, answer, into), trio.open_nursery() as tasks:

        async def reply() -> None:
            while True:
                _, frame = decode(await there.receive())
                await answer.send(*encode(CHAIN, _compute(frame, drawn)))

        tasks.start_soon(reply)
        yield out, into
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_links(
    one: HiveNode, other: HiveNode, drawn: Drawn
) -> AsyncIterator[tuple[Link, trio.MemoryReceiveChannel[Drawn]]]:
    """The link of a ring of two at its head, and what comes around; each frame is answered with `drawn`."""
    async with (
        open_streams(one, other, "/echo-bench/link/1") as (out, there, answer, into),
        trio.open_nursery() as tasks,
    ):
        head, last = Link(CHAIN, into, out, ChainLimits()), Link(CHAIN, there, answer, ChainLimits())
        came, arrived = trio.open_memory_channel[Drawn](1)

        async def compute(frame: Frame) -> None:
            last.send(_compute(frame, drawn))

        async def take(frame: Frame) -> None:
            came.send_nowait(_drawn_of(frame))

        tasks.start_soon(last.run, compute)
        tasks.start_soon(head.run, take)
        yield head, arrived
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_streams(one: HiveNode, other: HiveNode, protocol: str) -> AsyncIterator[tuple[Stream, ...]]:
    """From one peer to the other and back, with both ends: out of one, into other, out of other, into one."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        arrived, arrivals = trio.open_memory_channel[Stream](1)

        async def accept(stream: Stream) -> None:
            await arrived.send(stream)
            await trio.sleep_forever()

        ends: list[Stream] = []
        for opener, server in ((one, other), (other, one)):
            await nursery.start(server.serve, protocol, accept)
            ends.append(await stack.enter_async_context(opener.open(server.peer_id, protocol)))
            ends.append(await arrivals.receive())
        yield tuple(ends)
