"""Chains over real streams, all peers in this process, each with a network daemon of its own; stages that sleep.

What scheduling costs is shown by stages that take a known time, over links that add a known delay.
"""

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from statistics import median

import numpy as np
import trio
from numpy.typing import NDArray
from trio import TaskStatus

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.sampler import draw
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.stage import Stage
from echo_p2p.errors import StreamClosed
from echo_p2p.identity import generate
from echo_p2p.net.base import FRAME_MAX_BYTES, Stream, StreamHandler, Streams
from echo_p2p.net.hive import HiveNode, HiveSettings, open_hive
from echo_protocols.peer import Stop
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

ROWS = 8
V0 = PolicyVersion(epoch=0, step=0)

STEP_S = 0.04
HOPS_S = (0.0, 0.025, 0.08)
STOPS = (2, 3, 4)
WINDOWS = 5


def request(number: int, prompt: Sequence[int], *, tokens: int, samples: int = 1) -> GroupRequest:
    """Answers of a length that nothing cuts short."""
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"bench",
        prompt=tuple(prompt),
        samples=samples,
        sampling=Sampling(max_new_tokens=tokens),
        stop_tokens=frozenset(),
    )


def spans(stops: int, layers: int) -> list[Span]:
    """Equal parts of a model."""
    edges = [layers * i // stops for i in range(stops + 1)]
    return [Span(start=start, end=end, layers=layers) for start, end in pairwise(edges)]


@asynccontextmanager
async def open_peers(count: int) -> AsyncIterator[list[HiveNode]]:
    """Peers on this machine that know each other."""
    async with AsyncExitStack() as stack:
        settings = HiveSettings(role="trainer")
        nodes = [await stack.enter_async_context(open_hive(generate(), settings)) for _ in range(count)]
        for node in nodes:
            addresses = await node.visible_addresses()
            for other in nodes:
                if other is not node:
                    other.learn(node.peer_id, addresses)
        yield nodes


@asynccontextmanager
async def open_ring(
    stages: Sequence[Stage], peers: Sequence[str], streams: Sequence[Streams], *, lanes: int, rows: int = ROWS
) -> AsyncIterator[ChainDriver]:
    """A chain of these stages; no streams for a chain of one."""
    route = tuple(Stop(peer=peer, span=stage.span) for peer, stage in zip(peers, stages, strict=True))
    hosts = [StageHost(peer, stage, MemoryWeights({}), V0) for peer, stage in zip(peers, stages, strict=True)]
    async with trio.open_nursery() as nursery:
        servers = [ChainServer(each, host) for each, host in zip(streams, hosts, strict=False)]
        for server in servers:
            await nursery.start(server.serve)
        ring = Ring(route, bytes(32), lanes=lanes, rows=rows)
        async with open_chain(ring, hosts[0], servers[0] if servers else None) as driver:
            yield driver
        nursery.cancel_scope.cancel()


class LateStreams:
    """Streams whose frames arrive `delay_s` after they were sent, in the direction in which the stream was opened."""

    def __init__(self, streams: Streams, delay_s: float) -> None:
        self._streams = streams
        self._delay_s = delay_s

    @asynccontextmanager
    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> AsyncIterator[Stream]:
        """As `Streams.open`."""
        async with self._streams.open(peer, protocol, timeout_s=timeout_s) as stream, trio.open_nursery() as nursery:
            late = LateStream(stream, self._delay_s)
            nursery.start_soon(late.run)
            try:
                yield late
            finally:
                late.end()

    async def serve(
        self,
        protocol: str,
        handler: StreamHandler,
        *,
        max_frame_bytes: int = FRAME_MAX_BYTES,
        max_streams: int = 64,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """As `Streams.serve`."""
        await self._streams.serve(
            protocol, handler, max_frame_bytes=max_frame_bytes, max_streams=max_streams, task_status=task_status
        )


class LateStream:
    """One stream of them; `run` sends what is due until `end`."""

    def __init__(self, stream: Stream, delay_s: float) -> None:
        self._stream = stream
        self._delay_s = delay_s
        self._due, self._dues = trio.open_memory_channel[tuple[float, bytes]](1024)

    @property
    def peer(self) -> str:
        return self._stream.peer

    async def send(self, *parts: bytes | memoryview) -> None:
        await self._due.send((trio.current_time() + self._delay_s, b"".join(parts)))

    async def receive(self) -> bytes:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def run(self) -> None:
        async for due, frame in self._dues:
            await trio.sleep_until(due)
            with suppress(StreamClosed):  # who sends hears of it when it receives
                await self._stream.send(frame)

    def end(self) -> None:
        self._due.close()


class SleepingStage(MemoryStage):
    """A stage that takes `step_s` for each call; `took_s` are the times that it took in truth."""

    def __init__(self, span: Span, step_s: float) -> None:
        super().__init__(span)
        self._step_s = step_s
        self.took_s: list[float] = []

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """As `Stage.forward`."""
        begun = time.perf_counter()
        outputs = super().forward(lane, rows, positions, inputs)
        time.sleep(max(0.0, begun + self._step_s - time.perf_counter()))
        self.took_s.append(time.perf_counter() - begun)
        return outputs


async def efficiency(nodes: Sequence[HiveNode], hop_s: float, steps: int) -> dict[str, float]:
    """Tokens/s of a chain over those of its slowest stage alone; and by the times that stages took meanwhile.

    Each group fills a lane and goes on until the end; every step of a lane is one call of each stage. The median of
    some windows of `steps`.
    """
    stages = [SleepingStage(span, STEP_S) for span in spans(len(nodes), 12)]
    alone_s = max([await trio.to_thread.run_sync(time_alone, stage) for stage in stages])
    streams = [LateStreams(node, hop_s) if hop_s else node for node in nodes]
    lanes = math.ceil(len(nodes) * (STEP_S + hop_s) / STEP_S) + 1
    found, taken = [], []
    peers = [node.peer_id for node in nodes]
    async with open_ring(stages, peers, streams, lanes=lanes) as driver, trio.open_nursery() as nursery:
        for number in range(lanes):
            nursery.start_soon(driver.generate, request(number, (1, 2, 3), samples=ROWS, tokens=4096))
        await _steps(driver, 5 * lanes)
        for _ in range(WINDOWS):
            begun, before = time.perf_counter(), driver.statistics.tokens
            for stage in stages:
                stage.took_s.clear()
            await _steps(driver, steps)
            step_s = (time.perf_counter() - begun) / (driver.statistics.tokens - before) * ROWS
            found.append(alone_s / step_s)
            taken.append(max(sum(stage.took_s) / len(stage.took_s) for stage in stages) / step_s)
        nursery.cancel_scope.cancel()
    return {"found": median(found), "taken": median(taken)}


def time_alone(stage: SleepingStage) -> float:
    """Seconds that a step takes at least; at the last stage tokens are drawn, too."""
    row, took_s = np.arange(ROWS, dtype=np.int32), []
    for position in range(20):
        begun = time.perf_counter()
        hidden = np.zeros((ROWS, 1, 16), np.float32)
        outputs = stage.forward(0, row, np.full(ROWS, position, np.int32), row[:, None] if stage.span.first else hidden)
        if stage.span.last:
            draw(outputs, np.full(ROWS, 0.5), Sampling())
        took_s.append(time.perf_counter() - begun)
    stage.close(0)
    return min(took_s)


async def _steps(driver: ChainDriver, steps: int) -> None:
    """Return right after a step, about this many later."""
    due = driver.statistics.steps + steps
    await trio.sleep(max(0, steps - 2) * STEP_S)
    while driver.statistics.steps < due:  # noqa: ASYNC110 (figures have no event)
        await trio.sleep(0.0005)


async def scheduling_figures(nodes: Sequence[HiveNode], steps: int) -> dict[str, float]:
    """The least of all chains, and each of them."""
    figures: dict[str, float] = {}
    for stops in STOPS:
        for hop_s in HOPS_S:
            name = f"{stops}_stages_{round(hop_s * 1000)}_ms"
            found = await efficiency(nodes[:stops], hop_s, steps)
            figures[f"scheduling_efficiency_{name}"] = found["found"]
            figures[f"scheduling_efficiency_{name}_taken"] = found["taken"]
    least = min(value for name, value in figures.items() if not name.endswith("taken"))
    return {"scheduling_efficiency_min": least} | figures
