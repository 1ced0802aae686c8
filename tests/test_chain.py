"""Chains of one, two and three peers over the in-memory network: the same tokens, or one typed error."""

import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import msgspec
import numpy as np
import pytest
import trio
import trio.lowlevel
import trio.testing

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import Answers, GroupRequest
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainBroken, ChainLimits, broken
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.queue import Group, Queue, readings_of
from echo_p2p.chain.ring import Ring, opening_fault
from echo_p2p.chain.server import Allow, ChainServer, allow_everybody
from echo_p2p.chain.stage import Stage, TensorUpdate, Weights
from echo_p2p.chain.troubles import Troubles, how_said
from echo_p2p.errors import ChainError, WeightsError
from echo_p2p.net.base import Stream, StreamHandler
from echo_p2p.net.memory import MemoryNetwork, MemoryNode
from echo_protocols import names
from echo_protocols.hop import (
    BeginPrompt,
    EndLane,
    Failure,
    Forward,
    Frame,
    Join,
    Open,
    Prepare,
    Switch,
    Tokens,
    decode,
    encode,
)
from echo_protocols.peer import Plan, Stop
from echo_protocols.rollout import Sample, Segment
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

LAYERS = 6
PEERS = tuple(letter * 44 for letter in "ABC")
OUTSIDER = "Z" * 44
V0, V1, V2, V9 = (PolicyVersion(epoch=0, step=step) for step in (0, 1, 2, 9))
SPLITS = {1: (6,), 2: (2, 6), 3: (2, 3, 6)}
LIMITS = ChainLimits(lanes=8, rows=16, positions=256, hop_timeout_s=10.0, open_timeout_s=10.0, beat_s=5.0)
IMPATIENT = replace(LIMITS, hop_timeout_s=0.5)


def releases() -> Mapping[PolicyVersion, Mapping[str, TensorUpdate]]:
    whole = MemoryStage(Span(start=0, end=LAYERS, layers=LAYERS))
    other = MemoryStage(Span(start=0, end=LAYERS, layers=LAYERS), seed=2)
    change = {name: TensorUpdate(index=None, values=bits) for name, bits in other.tensors().items()}
    back = {name: TensorUpdate(index=None, values=bits) for name, bits in whole.tensors().items()}
    return {V1: change, V2: back}


def request(
    number: int = 0, *, samples: int = 4, length: int = 12, stop: frozenset[int] = frozenset({3})
) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple(1 + (number + i) % 7 for i in range(3 + number % 4)),
        samples=samples,
        sampling=Sampling(max_new_tokens=length),
        stop_tokens=stop,
    )


class Faulty(MemoryStage):
    """A stage whose `forward` number `at` runs `action` first."""

    def __init__(self, span: Span, at: int, action: Callable[[], None]) -> None:
        super().__init__(span)
        self._left = at
        self._action = action

    def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left == 0:
            self._action()
        return super().forward(lane, rows, positions, inputs)


@dataclass
class Swarm:
    network: MemoryNetwork
    route: tuple[Stop, ...]
    hosts: list[StageHost] = field(default_factory=list)
    servers: list[ChainServer] = field(default_factory=list)
    scopes: list[trio.CancelScope] = field(default_factory=list)

    def open(self, lanes: int = 0, *, canary: bool = True) -> ChainDriver:
        ring = Ring(route=self.route, run_id=bytes(32), lanes=lanes, vocabulary=32)
        return open_chain(ring, self.hosts[0], self.servers[0], canary=canary)

    def stage(self, place: int) -> MemoryStage:
        stage = self.hosts[place].stage
        assert isinstance(stage, MemoryStage)
        return stage


@asynccontextmanager
async def swarm(
    stops: int,
    *,
    stages: Mapping[int, MemoryStage] | None = None,
    versions: Mapping[int, PolicyVersion] | None = None,
    weights: Mapping[int, Weights] | None = None,
    limits: ChainLimits = LIMITS,
    allow: Allow = allow_everybody,
) -> AsyncIterator[Swarm]:
    """Peers that serve their spans, each in a scope of its own."""
    starts = (0, *SPLITS[stops][:-1])
    spans = [Span(start=a, end=b, layers=LAYERS) for a, b in zip(starts, SPLITS[stops], strict=True)]
    found = Swarm(MemoryNetwork(), tuple(Stop(peer=p, span=s) for p, s in zip(PEERS, spans, strict=False)))
    async with trio.open_nursery() as nursery:
        for place, stop in enumerate(found.route):
            stage = (stages or {}).get(place) or MemoryStage(stop.span)
            version = (versions or {}).get(place, V0)
            source = (weights or {}).get(place) or MemoryWeights(releases())
            host = StageHost(stop.peer, stage, source, version, limits=limits)
            server = ChainServer(found.network.node(stop.peer), host, allow)
            found.hosts.append(host)
            found.servers.append(server)
            found.scopes.append(await nursery.start(serve_in_scope, server))
        yield found
        nursery.cancel_scope.cancel()


async def serve_in_scope(
    server: ChainServer, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            task_status.started(scope)


async def answers(driver: ChainDriver, *requests: GroupRequest) -> list[tuple[Sample, ...]]:
    """All groups at once, in the order of the requests."""
    results: list[tuple[Sample, ...]] = [()] * len(requests)

    async def one(place: int) -> None:
        results[place] = await driver.generate(requests[place])

    async with trio.open_nursery() as nursery:
        for place in range(len(requests)):
            nursery.start_soon(one, place)
    return results


def whole_answers(count: int = 6) -> list[tuple[Sample, ...]]:
    """What a chain of one makes of the first requests, one after the other."""

    async def main() -> list[tuple[Sample, ...]]:
        async with swarm(1) as peers, peers.open() as driver:
            return [await driver.generate(request(number)) for number in range(count)]

    return trio.run(main)


@pytest.mark.parametrize("stops", [1, 2, 3])
def test_a_chain_draws_what_the_whole_model_draws(stops: int) -> None:
    async def main() -> None:
        async with swarm(stops) as peers, peers.open() as driver:
            assert [await driver.generate(request(number)) for number in range(6)] == whole
            assert driver.statistics.groups == 6
            assert driver.statistics.tokens == sum(len(sample.tokens) for group in whole for sample in group)
        assert not any(peers.stage(place).lanes for place in range(stops))

    whole = whole_answers()
    assert {sample.finish for group in whole for sample in group} == {"stop", "length"}
    trio.run(main)


@pytest.mark.parametrize("stops", [1, 2, 3])
def test_interleaved_lanes_draw_what_sequential_ones_draw(stops: int) -> None:
    async def main() -> None:
        async with swarm(stops) as peers, peers.open(lanes=3) as driver:
            assert await answers(driver, *map(request, range(6))) == whole

    whole = whole_answers()
    trio.run(main)


def test_a_stop_token_is_part_of_its_answer() -> None:
    async def main() -> None:
        async with swarm(2) as peers, peers.open() as driver:
            group = await driver.generate(request(length=40, samples=8))
        for sample in group:
            assert (sample.tokens[-1] == 3) == (sample.finish == "stop")
            assert 3 not in sample.tokens[:-1]
            assert len(sample.tokens) == len(sample.logprobs) <= 40
            assert all(logprob <= 0.0 for logprob in sample.logprobs)

    trio.run(main)


@pytest.mark.parametrize("samples", [1, 4])
def test_lanes_and_prompts_in_flight_are_bounded(samples: int) -> None:
    async def main() -> None:
        most = 0
        async with swarm(2) as peers, peers.open(lanes=2) as driver, trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(driver.generate, request(number, samples=samples))
            while driver.statistics.groups < 24:
                most = max(most, *(host.statistics.lanes for host in peers.hosts))
                await trio.lowlevel.checkpoint()
        assert 2 < most <= 2 + 4 + 2  # lanes, prompts that are held until all their answers joined one, and a canary

    trio.run(main)


def test_a_prompt_counts_as_held_until_all_its_answers_are_in_a_lane() -> None:
    """Not only until they have been given to a lane: that still has to take a step for them."""
    queue, numbers = Queue(room=1000, ahead=2), count(1)
    for number in range(3):
        group = Group(request(number, samples=1), Answers(request(number, samples=1)))
        group.readings = readings_of(group, numbers)
        queue.add(group)
    for _ in range(2):
        reading = queue.to_read()
        assert reading is not None
        queue.read(reading)
    assert len(queue.to_begin(16, whole=False)) == 2
    assert queue.to_read() is None
    queue.ended()
    assert queue.to_read() is not None
    assert queue.to_read() is None


def switching_answers(stops: int) -> list[tuple[Sample, ...]]:
    """Two groups with a switch to V1 when the first has done five steps."""

    async def main() -> list[tuple[Sample, ...]]:
        async with swarm(stops) as peers, peers.open(lanes=1, canary=False) as driver:
            results: list[tuple[Sample, ...]] = []

            async def generate() -> None:
                results.append(await driver.generate(request(0, stop=frozenset(), length=40)))
                results.append(await driver.generate(request(1, stop=frozenset(), length=10)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate)
                while driver.statistics.steps < 5:
                    await trio.lowlevel.checkpoint()
                await driver.switch(V1, timeout_s=5)
            assert {host.version for host in peers.hosts} == {driver.version} == {V1}
            return results

    return trio.run(main)


@pytest.mark.parametrize("stops", [1, 2, 3])
def test_a_switch_in_mid_generation_marks_one_boundary_for_all_stages(stops: int) -> None:
    first, second = switching_answers(stops)
    boundary = first[0].segments[1].start
    assert 0 < boundary < 40
    for sample in first:
        assert [(segment.start, segment.version) for segment in sample.segments] == [(0, V0), (boundary, V1)]
    for sample in second:
        assert [(segment.start, segment.version) for segment in sample.segments] == [(0, V1)]
    assert replay(boundary) == first


def replay(boundary: int) -> tuple[Sample, ...]:
    """The same group from one stage whose weights change exactly before token `boundary`."""

    class Changing(MemoryStage):
        steps = 0

        def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
            if self.steps == boundary:
                self.apply(releases()[V1])
            self.steps += 1
            return super().forward(lane, rows, positions, inputs)

    async def main() -> tuple[Sample, ...]:
        stages = {0: Changing(Span(start=0, end=6, layers=6))}
        async with swarm(1, stages=stages) as peers, peers.open(canary=False) as driver:
            return await driver.generate(request(0, stop=frozenset(), length=40))

    segments = (Segment(start=0, version=V0), Segment(start=boundary, version=V1))
    return tuple(msgspec.structs.replace(sample, segments=segments) for sample in trio.run(main))


def test_a_version_that_a_stage_cannot_stage_leaves_the_chain_as_it_was() -> None:
    async def main() -> None:
        async with swarm(3, weights={1: MemoryWeights({V2: releases()[V2]})}) as peers, peers.open() as driver:
            with pytest.raises(WeightsError, match=PEERS[1]):
                await driver.switch(V1, timeout_s=5)
            assert {host.version for host in peers.hosts} == {V0}
            assert [await driver.generate(request(number)) for number in range(2)] == whole
            await driver.switch(V2, timeout_s=5)
            await driver.generate(request())
            assert {host.version for host in peers.hosts} == {V2}

    whole = whole_answers(2)
    trio.run(main)


def test_a_version_never_goes_back() -> None:
    async def main() -> None:
        async with swarm(2) as peers, peers.open() as driver:
            await driver.switch(V1, timeout_s=5)
            await driver.switch(V1, timeout_s=5)
            with pytest.raises(WeightsError, match="only grow"):
                await driver.switch(V0, timeout_s=5)
            assert driver.version == V1

    trio.run(main)


def test_stages_that_disagree_on_the_version_compute_nothing_together() -> None:
    async def main() -> None:
        async with swarm(3, versions={1: V1}) as peers, peers.open() as driver:
            assert driver.versions == (V0, V1, V0)
            with pytest.raises(ChainError, match="version"):
                await driver.generate(request())
            assert peers.hosts[2].statistics.steps == 0

    trio.run(main)


def test_a_switch_brings_stages_together_that_were_apart() -> None:
    async def main() -> None:
        async with swarm(3, versions={0: V1, 2: V0}) as peers, peers.open() as driver:
            await driver.switch(V2, timeout_s=5)
            group = await driver.generate(request())
            assert {segment.version for sample in group for segment in sample.segments} == {V2}

    trio.run(main)


def wait_for(event: threading.Event) -> None:
    event.wait(30)


def raise_error() -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(("stops", "place"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("fault", ["raises", "stalls"])
def test_a_stage_that_fails_ends_the_chain_with_its_reason(stops: int, place: int, fault: str) -> None:
    released = threading.Event()

    async def main() -> None:
        action: Callable[[], None] = raise_error if fault == "raises" else partial(wait_for, released)
        span = Span(start=(0, *SPLITS[stops])[place], end=SPLITS[stops][place], layers=LAYERS)
        limits = IMPATIENT if fault == "stalls" else LIMITS
        stages = {place: Faulty(span, 7, action)}
        async with swarm(stops, stages=stages, limits=limits) as peers, peers.open(lanes=2) as driver:
            reasons = await failures(driver, request(0), request(1), request(2))
            assert reasons == [("engine" if fault == "raises" else "stalled", PEERS[place])] * 3
            assert driver.failed.is_set()
            with pytest.raises(ChainError):
                await driver.generate(request(3))
            with pytest.raises(ChainError):
                await driver.switch(V1, timeout_s=1)
            released.set()

    try:
        with_deadline(main)
    finally:
        released.set()


async def failures(driver: ChainDriver, *requests: GroupRequest) -> list[tuple[str, str | None]]:
    """Reason and peer of the ChainError that each of the groups ends in."""
    reasons: list[tuple[str, str | None]] = []

    async def one(asked: GroupRequest) -> None:
        with pytest.raises(ChainBroken) as caught:
            await driver.generate(asked)
        reasons.append((caught.value.failure.reason, caught.value.failure.peer))

    async with trio.open_nursery() as nursery:
        for asked in requests:
            nursery.start_soon(one, asked)
    return reasons


def with_deadline(main: Callable[[], object], seconds: float = 30.0) -> None:
    async def bounded() -> None:
        with trio.fail_after(seconds):
            await main()  # type: ignore[misc]

    trio.run(bounded)


@pytest.mark.parametrize(("stops", "place"), [(2, 1), (3, 1), (3, 2)])
def test_a_peer_that_disappears_ends_the_chain_and_frees_its_lanes(stops: int, place: int) -> None:
    async def main() -> None:
        async with swarm(stops) as peers, peers.open(lanes=2) as driver:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(failures, driver, request(0, length=200, stop=frozenset()))
                while driver.statistics.steps < 3:
                    await trio.lowlevel.checkpoint()
                peers.network.split([PEERS[place]])
                await driver.failed.wait()
            while any(peers.stage(other).lanes for other in range(1, stops)):
                await trio.lowlevel.checkpoint()

    with_deadline(main)


def false_last_stage(peers: Swarm, answer: Frame | None = None) -> StreamHandler:
    """Closes the ring as a last stage does, computes nothing, and says nothing or `answer` to the first step."""

    async def handle(stream: Stream) -> None:
        chain, opening = decode(await stream.receive())
        assert isinstance(opening, Open)
        whole = msgspec.structs.replace(
            opening, versions=(V0, V0), engines=("a", "b"), room=(99999, 99999), ragged=(True, True)
        )
        async with peers.network.node(PEERS[1]).open(PEERS[0], names.HOP) as last:
            await last.send(*encode(chain, whole))
            while answer is not None:
                if isinstance(decode(await stream.receive())[1], Forward):
                    await last.send(*encode(chain, answer))
            await trio.sleep_forever()

    return handle


def test_a_silent_peer_is_noticed_while_no_group_is_in_flight() -> None:
    async def main() -> None:
        async with swarm(2, limits=IMPATIENT) as peers:
            peers.scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                await nursery.start(peers.network.node(PEERS[1]).serve, names.HOP, false_last_stage(peers))
                async with peers.open() as driver:
                    started = trio.current_time()
                    await driver.failed.wait()
                    assert trio.current_time() - started < 10
                    assert isinstance(driver.fault, ChainBroken)
                    assert driver.fault.failure.reason == "silent"
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_a_silent_peer_ends_a_group_within_the_deadline() -> None:
    async def main() -> None:
        async with swarm(2, limits=IMPATIENT) as peers:
            peers.scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                await nursery.start(peers.network.node(PEERS[1]).serve, names.HOP, false_last_stage(peers))
                async with peers.open() as driver:
                    assert await failures(driver, request()) == [("silent", PEERS[1])]
                nursery.cancel_scope.cancel()

    with_deadline(main)


def test_a_chain_is_whole_again_after_it_is_opened_anew() -> None:
    async def main() -> None:
        async with swarm(3) as peers:
            async with peers.open() as driver:
                peers.network.split([PEERS[1]])
                await driver.failed.wait()
            with pytest.raises(ChainError, match="unreachable"):
                async with peers.open():
                    raise AssertionError("a ring can't close over a partition")
            peers.network.heal()
            async with peers.open() as driver:
                assert [await driver.generate(request(number)) for number in range(2)] == whole

    whole = whole_answers(2)
    with_deadline(main)


@pytest.mark.parametrize("late", [1, 2])
def test_a_stop_that_still_loads_is_waited_for_in_one_calm_line(late: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    troubles = Troubles()

    async def main() -> None:
        async with swarm(3) as peers:
            peers.scopes[late].cancel()
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                with pytest.raises(ChainBroken) as raised:
                    async with peers.open():
                        raise AssertionError("a ring can't close over a stop that serves nothing")
                assert (raised.value.failure.reason, raised.value.failure.peer) == ("loading", PEERS[late])
                troubles.say(raised.value)
            assert not any(host.refused for host in peers.hosts)

    with_deadline(main)
    lines = [record for record in caplog.records if record.levelname in ("INFO", "WARNING", "ERROR")]
    assert {(record.levelname, record.getMessage()) for record in lines} == {
        ("INFO", f"waiting for {PEERS[late]} to load its layers")
    }
    assert len(lines) == late  # one of each stop that waits


def test_a_trouble_is_said_once_until_a_chain_is_open_and_that_of_a_changed_plan_calmly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    troubles = Troubles()
    for _ in range(2):
        troubles.say(broken("lost", "text", PEERS[1]))
        troubles.say(broken("lost", "text", PEERS[1]))
        troubles.over()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    levels = {reason: how_said(broken(reason, "text", PEERS[1]))[0] for reason in ("lost", "not-allowed", "loading")}
    assert levels == {"lost": logging.WARNING, "not-allowed": logging.INFO, "loading": logging.INFO}
    assert how_said(ChainError("too few lanes")) == (logging.WARNING, "the chain can't be opened: too few lanes")


def test_a_newer_chain_takes_the_place_of_an_older() -> None:
    async def main() -> None:
        async with swarm(2) as peers, peers.open() as older, peers.open() as newer:
            await older.failed.wait()
            assert "superseded" in str(older.fault)
            assert [await newer.generate(request(number)) for number in range(2)] == whole

    whole = whole_answers(2)
    with_deadline(main)


class Swallowed:
    """The streams of a node to which one peer has fallen silent without a word: opening one to it never ends."""

    def __init__(self, node: MemoryNode, silent: str) -> None:
        self._node = node
        self._silent = silent
        self.dialled = trio.Event()
        self.serve = node.serve

    @asynccontextmanager
    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> AsyncIterator[Stream]:
        if peer == self._silent:
            self.dialled.set()
            await trio.sleep_forever()
        async with self._node.open(peer, protocol, timeout_s=timeout_s) as stream:
            yield stream


def test_a_newer_chain_does_not_wait_for_an_older_that_looks_for_a_silent_peer() -> None:
    async def main() -> None:
        async with swarm(3) as peers, trio.open_nursery() as nursery:
            streams = Swallowed(peers.network.node(PEERS[1]), OUTSIDER)
            peers.scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
            await nursery.start(serve_in_scope, ChainServer(streams, peers.hosts[1]))
            route = (*peers.route[:2], msgspec.structs.replace(peers.route[2], peer=OUTSIDER))

            async def open_older() -> None:
                with pytest.raises(ChainError, match="superseded"):
                    async with open_chain(Ring(route, bytes(32)), peers.hosts[0], peers.servers[0]):
                        raise AssertionError("a ring can't close over a silent peer")

            nursery.start_soon(open_older)
            await streams.dialled.wait()
            async with peers.open() as newer:
                assert [await newer.generate(request(number)) for number in range(2)] == whole
            nursery.cancel_scope.cancel()

    whole = whole_answers(2)
    with_deadline(main)


def test_a_cancelled_group_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with swarm(3) as peers:
            async with peers.open(lanes=3) as driver:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(driver.generate, request(9, length=200, stop=frozenset()))
                    while driver.statistics.steps < 3:
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                assert await answers(driver, *map(request, range(3))) == whole
                assert driver.statistics.lanes == 0
            while any(peers.stage(place).lanes for place in range(3)):  # within the deadline, every stop frees them
                await trio.lowlevel.checkpoint()

    whole = whole_answers(3)
    with_deadline(main)


class GatedJoin(MemoryStage):
    """A stage whose next join waits until it is let through."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.reached, self.let = threading.Event(), threading.Event()

    def join(self, lane, rows, source):  # type: ignore[no-untyped-def]
        self.reached.set()
        self.let.wait(20)
        super().join(lane, rows, source)


@pytest.mark.parametrize("samples", [6, 4])
@pytest.mark.parametrize("stops", [1, 2])
def test_a_group_that_is_cancelled_while_its_answers_join_leaves_the_chain_whole(stops: int, samples: int) -> None:
    """With `samples` over the rows of a lane, some of its answers still wait for others to end."""

    whole = whole_answers(2)

    async def main() -> None:
        head = GatedJoin(Span(start=0, end=SPLITS[stops][0], layers=LAYERS))
        async with swarm(stops, stages={0: head}) as peers:
            ring = Ring(route=peers.route, run_id=bytes(32), lanes=1, rows=4)
            async with open_chain(ring, peers.hosts[0], peers.servers[0]) as driver:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(driver.generate, request(7, samples=samples))
                    assert await trio.to_thread.run_sync(head.reached.wait, 20.0)
                    nursery.cancel_scope.cancel()
                head.let.set()
                assert [await driver.generate(request(number)) for number in range(2)] == whole
            while any(peers.stage(place).lanes for place in range(stops)):
                await trio.lowlevel.checkpoint()

    with_deadline(main)


def test_a_lane_that_is_discarded_before_its_step_runs_is_freed_after_it() -> None:
    async def main() -> None:
        async with swarm(1) as peers:
            host = peers.hosts[0]
            lane = host.begin()
            host.discard(lane)  # as when a caller is cancelled while the step's thread starts
            with await host.turns.begin() as turn:
                one = np.zeros(1, np.int32)
                await host.forward(turn, lane, one, one, np.ones((1, 3), np.int32), lambda outputs: None)
            await host.free()
            assert not peers.stage(0).lanes

    with_deadline(main)


def test_a_stage_may_refuse_a_chain_and_says_why() -> None:
    async def main() -> None:
        async with swarm(3, allow=lambda peer, opening: "plan 0 is over") as peers:
            with pytest.raises(ChainError, match="plan 0 is over"):
                async with peers.open():
                    raise AssertionError("refused chains do not open")
            assert peers.hosts[1].statistics.refused == {"not-allowed": 1}
            with pytest.raises(ChainError, match="8 lanes"):
                peers.open(lanes=9)

    with_deadline(main)


CHAIN = bytes(range(16))


def opening(peers: Swarm) -> Open:
    return Open(route=peers.route, run_id=bytes(32), plan=0, lanes=2)


def hostile_frames(peers: Swarm, chain: bytes = CHAIN) -> dict[str, tuple[str, list[bytes]]]:
    """What a predecessor may send to the second of three stops, by what is wrong: the reason, and the frames."""

    def frame(
        lane: int = 1, rows: Sequence[int] = (0,), positions: Sequence[int] | None = None, **changes: object
    ) -> bytes:
        """Of the prompt, or of a lane; one token of each row."""
        step = Forward(
            lane=lane,
            step=0,
            version=V0,
            length=1,
            width=16,
            rows=np.array(rows, "<i4").tobytes(),
            positions=np.array(positions or [0] * len(rows), "<i4").tobytes(),
            payload=np.ones((len(rows), 1, 16), "<f4").tobytes(),
        )
        return b"".join(encode(chain, msgspec.structs.replace(step, **changes)))

    def begin(samples: int = 2, positions: int = 4, drawn: int = 0) -> bytes:
        order = msgspec.structs.replace(begin_order(samples, positions), drawn=drawn)
        return b"".join(encode(chain, order))

    def join(
        rows: tuple[int, ...] = (0, 1),
        samples: tuple[int, ...] = (0, 1),
        *,
        lane: int = 2,
        prompt: int = 1,
        step: int = 0,
    ) -> bytes:
        return b"".join(encode(chain, Join(lane=lane, prompt=prompt, step=step, rows=rows, samples=samples)))

    longer = np.ones((1, 2, 16), "<f4").tobytes()
    read = [begin(), frame()]
    lane = [*read, join()]
    full = [begin(samples=16), frame(), join(tuple(range(16)), tuple(range(16)))]
    again = b"".join(encode(chain, msgspec.structs.replace(begin_order(), lane=3)))
    first = b"".join(encode(chain, opening(peers)))
    other = bytes(16)
    wrong_span = msgspec.structs.replace(peers.route[1], span=Span(start=2, end=4, layers=6))
    last = msgspec.structs.replace(peers.route[2], span=Span(start=4, end=6, layers=6))
    spans = msgspec.structs.replace(opening(peers), route=(peers.route[0], wrong_span, last))
    return {
        "garbage": ("bad-frame", [b"not a frame"]),
        "empty": ("bad-frame", [b""]),
        "no open": ("not-open", [begin()]),
        "other span": ("wrong-span", [b"".join(encode(chain, spans))]),
        "garbage later": ("bad-frame", [first, b"eh" + bytes(30)]),
        "second open": ("bad-frame", [first, first]),
        "other chain": ("wrong-chain", [first, b"".join(encode(other, begin_order()))]),
        "unknown lane": ("bad-lane", [first, frame()]),
        "prompt twice": ("bad-lane", [first, begin(), begin()]),
        "end of nothing": ("bad-lane", [first, b"".join(encode(chain, EndLane(lane=7)))]),
        "samples": ("lane-too-large", [first, begin(samples=17)]),
        "positions": ("lane-too-large", [first, begin(positions=257)]),
        "other row of a prompt": ("bad-rows", [first, begin(), frame(rows=[1])]),
        "two rows of a prompt": ("bad-rows", [first, begin(), frame(rows=[0, 1])]),
        "position of a prompt": ("bad-rows", [first, begin(), frame(positions=[1])]),
        "step of a prompt": ("bad-rows", [first, begin(), frame(step=1)]),
        "too long a prompt": ("bad-rows", [first, begin(positions=1), frame(length=2, payload=longer)]),
        "a prompt goes on after answers began": ("bad-rows", [first, *lane, frame(step=1, positions=[1])]),
        "join without a prompt": ("bad-lane", [first, join()]),
        "join before anything was read": ("bad-rows", [first, begin(), join()]),
        "more was drawn than read": ("bad-rows", [first, begin(drawn=1), frame(), join()]),
        "join at another step": ("bad-rows", [first, *read, join(step=1)]),
        "join a prompt": ("bad-lane", [first, *read, join(lane=1)]),
        "same row joins": ("bad-rows", [first, *read, join(rows=(1, 1))]),
        "same sample joins": ("bad-rows", [first, *read, join(samples=(1, 1))]),
        "no such sample": ("bad-rows", [first, *read, join(samples=(1, 2))]),
        "rows without samples": ("bad-rows", [first, *read, join(samples=(1,))]),
        "row of a lane joins": ("bad-rows", [first, *lane, again, frame(lane=3), join((1,), (0,), prompt=3, step=1)]),
        "sample joins again": ("bad-rows", [first, *lane, join((2,), (1,), step=1)]),
        "lane is full": ("bad-rows", [first, *full, again, frame(lane=3), join((16,), (0,), prompt=3, step=1)]),
        "other rows": ("bad-rows", [first, *lane, frame(lane=2, rows=[0, 2], positions=[1, 1], step=1)]),
        "same row": ("bad-rows", [first, *lane, frame(lane=2, rows=[1, 1], positions=[1, 1], step=1)]),
        "negative row": ("bad-rows", [first, *lane, frame(lane=2, rows=[-1, 1], positions=[1, 1], step=1)]),
        "position": ("bad-rows", [first, *lane, frame(lane=2, rows=[0, 1], positions=[1, 2], step=1)]),
        "step": ("bad-rows", [first, *lane, frame(lane=2, rows=[0, 1], positions=[1, 1], step=2)]),
        "two tokens": ("bad-rows", [first, *lane, frame(lane=2, positions=[1], step=1, length=2, payload=longer)]),
        "a row that left": (
            "bad-rows",
            [first, *lane, frame(lane=2, positions=[1], step=1), frame(lane=2, rows=[1], positions=[1], step=2)],
        ),
        "over its positions": (
            "bad-rows",
            [first, *lane, *(frame(lane=2, positions=[at], step=at) for at in range(1, 5))],
        ),
        "version": ("version", [first, begin(), frame(version=V9)]),
        "a switch that nobody has prepared": ("bad-frame", [first, b"".join(encode(chain, Switch(version=V1)))]),
        "width": ("bad-frame", [first, begin(), frame(width=8, payload=bytes(32))]),
        "no number": ("garbage", [first, begin(), frame(payload=np.full(16, np.nan, "<f4").tobytes())]),
        "too large a number": ("garbage", [first, begin(), frame(payload=np.full(16, np.inf, "<f4").tobytes())]),
    }


BLAMES_THE_PREDECESSOR = {"bad-frame", "wrong-chain", "bad-lane", "bad-rows", "garbage"}


async def wait_for_end(stream: Stream, opened: Open) -> None:
    """What a head does that has opened a chain and never looks at it again."""
    while True:
        await stream.receive()


def begin_order(samples: int = 2, positions: int = 4) -> BeginPrompt:
    return BeginPrompt(lane=1, group_id=b"g", run_seed=b"s", sampling=Sampling(), samples=samples, positions=positions)


def test_hostile_input_ends_its_stream_with_a_counted_reason_and_nothing_else() -> None:
    async def main() -> None:
        async with swarm(3) as peers:
            predecessor = peers.network.node(PEERS[0])
            for number, name in enumerate(hostile_frames(peers)):
                chain = bytes([number]) * 16  # of its own: stops of the one before may still open their streams
                reason, frames = hostile_frames(peers, chain)[name]
                peers.servers[0].expect(chain, wait_for_end)
                before = peers.hosts[1].statistics.refused.get(reason, 0)
                async with predecessor.open(PEERS[1], names.HOP) as stream:
                    for data in frames:
                        await stream.send(data)
                    _, frame = decode(await stream.receive())
                    assert isinstance(frame, Failure), name
                    assert frame.reason == reason, name
                    assert (frame.peer == PEERS[0]) == (reason in BLAMES_THE_PREDECESSOR), name
                while peers.hosts[1].statistics.refused.get(reason, 0) == before:
                    await trio.lowlevel.checkpoint()
            assert not peers.stage(1).lanes
            async with peers.open() as driver:
                assert await driver.generate(request(0)) == whole[0]

    whole = whole_answers(1)
    with_deadline(main)


def test_a_head_can_not_fill_the_memory_of_a_stage() -> None:
    """One long row makes all rows of its lane as long where a stage keeps them."""

    async def main() -> None:
        most = 100
        async with swarm(3, limits=replace(LIMITS, held=most)) as peers:
            chain = bytes(range(16))
            prompt = msgspec.structs.replace(begin_order(), samples=16, positions=60)
            long = Forward(
                lane=1, step=0, version=V0, length=20, width=16, rows=bytes(4), positions=bytes(4),
                payload=np.ones((1, 20, 16), "<f4").tobytes(),
            )  # fmt: skip
            short = msgspec.structs.replace(long, lane=3, length=1, payload=np.ones(16, "<f4").tobytes())
            begun = [opening(peers), prompt, long, msgspec.structs.replace(prompt, lane=3), short]
            several = tuple(range(1, 8))
            for joins in (
                [Join(lane=2, prompt=1, step=0, rows=several, samples=several)],
                [
                    Join(lane=2, prompt=1, step=0, rows=(0,), samples=(0,)),
                    Join(lane=2, prompt=3, step=1, rows=several, samples=several),
                ],
            ):
                peers.servers[0].expect(chain, wait_for_end)
                async with peers.network.node(PEERS[0]).open(PEERS[1], names.HOP) as stream:
                    for frame in (*begun, *joins):
                        await stream.send(*encode(chain, frame))
                    _, failure = decode(await stream.receive())
                assert isinstance(failure, Failure)
                assert (failure.reason, failure.peer) == ("no-room", PEERS[0])
            async with peers.open() as driver:
                assert await driver.generate(request(0)) == whole[0]

    whole = whole_answers(1)
    with_deadline(main)


def test_only_the_predecessor_may_feed_a_stage() -> None:
    async def main() -> None:
        async with swarm(3) as peers:
            for peer, place, reason in [
                (OUTSIDER, 1, "not-predecessor"),
                (PEERS[1], 0, "not-predecessor"),
                (PEERS[2], 0, "unknown-chain"),
            ]:
                async with peers.network.node(peer).open(PEERS[place], names.HOP) as stream:
                    await stream.send(*encode(CHAIN, opening(peers)))
                    _, frame = decode(await stream.receive())
                    assert isinstance(frame, Failure)
                    assert frame.reason == reason
                assert peers.hosts[place].statistics.refused[reason] == 1

    with_deadline(main)


def test_a_fault_of_the_caller_leaves_the_chain_unwrapped() -> None:
    async def main() -> None:
        async with swarm(2) as peers:
            driver = peers.open()
            with pytest.raises(KeyError, match="mine"):
                await use_and_fail(driver)
            assert driver.failed.is_set()

    async def use_and_fail(driver: ChainDriver) -> None:
        async with driver:
            await driver.generate(request())
            raise KeyError("mine")

    with_deadline(main)


def test_an_idle_chain_stays_whole() -> None:
    async def main() -> None:
        limits = ChainLimits(beat_s=10.0, idle_timeout_s=25.0)
        # No canary: this clock leaps while threads compute.
        async with swarm(3, limits=limits) as peers, peers.open(canary=False) as driver:
            await trio.sleep(1000)
            assert not driver.failed.is_set()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("place", [1, 2])
def test_a_peer_that_shuts_down_says_so(place: int) -> None:
    async def main() -> None:
        async with swarm(3) as peers, peers.open() as driver:
            peers.scopes[place].cancel()
            await driver.failed.wait()
            assert isinstance(driver.fault, ChainBroken)
            assert driver.fault.failure.reason == "left"

    with_deadline(main)


class SlowWeights(MemoryWeights):
    """Stages a version when `staged` is set."""

    staged: trio.Event

    async def prepare(self, version: PolicyVersion) -> None:
        await self.staged.wait()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_groups_go_on_while_a_version_is_staged(place: int) -> None:
    async def main() -> None:
        weights = SlowWeights(releases())
        weights.staged = trio.Event()
        async with swarm(3, weights={place: weights}) as peers, peers.open() as driver:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(driver.switch, V1, 5)
                assert [await driver.generate(request(number)) for number in range(3)] == whole
                assert driver.version == V0
                weights.staged.set()
            assert driver.version == V1
            weights.staged = trio.Event()
            with pytest.raises(WeightsError, match="staged"):
                await driver.switch(V2, timeout_s=0.05)
            assert driver.version == V1
            assert len(await driver.generate(request())) == 4

    whole = whole_answers(3)
    with_deadline(main)


def test_only_a_few_versions_are_staged_at_a_time() -> None:
    async def main() -> None:
        weights = SlowWeights(releases())
        weights.staged = trio.Event()
        async with swarm(2, weights={1: weights}) as peers:
            peers.servers[0].expect(CHAIN, wait_for_end)
            async with peers.network.node(PEERS[0]).open(PEERS[1], names.HOP) as stream:
                await stream.send(*encode(CHAIN, opening(peers)))
                for step in range(1, 9):
                    prepare = Prepare(version=PolicyVersion(epoch=0, step=step), timeout_s=100.0)
                    await stream.send(*encode(CHAIN, prepare))
                _, frame = decode(await stream.receive())
                assert isinstance(frame, Failure)
                assert frame.reason == "too-many-prepares"

    with_deadline(main)


class BrokenWeights(MemoryWeights):
    """Stages everything and can apply nothing."""

    def switch(self, version: PolicyVersion, stage: Stage) -> None:
        raise WeightsError("the patch was made against other weights")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_that_cannot_apply_a_staged_version_ends_the_chain(place: int) -> None:
    async def main() -> None:
        broken = BrokenWeights(releases())
        async with swarm(3, weights={place: broken}) as peers, peers.open() as driver:
            if place == 0:
                with pytest.raises(ChainError, match="other weights"):
                    await driver.switch(V1, timeout_s=5)
            else:
                await driver.switch(V1, timeout_s=5)
            await driver.failed.wait()
            with pytest.raises(ChainError, match="other weights"):
                await driver.generate(request())

    with_deadline(main)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 1}, "bad-tokens"),
        ({"version": V9}, "bad-tokens"),
        ({"tokens": np.array([1, -1], "<i4").tobytes()}, "bad-tokens"),
        ({"tokens": np.array([1, 32], "<i4").tobytes()}, "bad-tokens"),
        ({"rows": np.array([1, 0], "<i4").tobytes()}, "bad-tokens"),
        ({"logprobs": np.array([0.5, -1.0], "<f4").tobytes()}, "bad-tokens"),
        ({"logprobs": np.array([np.nan, -1.0], "<f4").tobytes()}, "bad-tokens"),
        ({"lane": 7}, "silent"),
    ],
)
def test_tokens_that_cannot_be_are_refused_by_the_head(changes: dict[str, object], reason: str) -> None:
    tokens = Tokens(
        lane=1,
        step=0,
        version=V0,
        rows=np.arange(2, dtype="<i4").tobytes(),
        tokens=np.ones(2, "<i4").tobytes(),
        logprobs=np.full(2, -1.0, "<f4").tobytes(),
    )

    async def main() -> None:
        async with swarm(2, limits=IMPATIENT) as peers:
            peers.scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                handler = false_last_stage(peers, msgspec.structs.replace(tokens, **changes))
                await nursery.start(peers.network.node(PEERS[1]).serve, names.HOP, handler)
                async with peers.open(canary=False) as driver:
                    assert await failures(driver, request(samples=2)) == [(reason, PEERS[1])]
                nursery.cancel_scope.cancel()

    with_deadline(main)


def test_a_plan_decides_which_chains_are_served() -> None:
    async def main() -> None:
        async with swarm(3) as peers:
            asked = opening(peers)
            plan = Plan(number=4, layers=LAYERS, chains=(peers.route,))
            assert opening_fault(asked, plan, asked.run_id) is None
            assert "another run" in str(opening_fault(asked, plan, b"x" * 32))
            assert "not in plan 5" in str(opening_fault(asked, Plan(number=5, layers=LAYERS), asked.run_id))

    trio.run(main)
