"""An engine that holds the whole model, behind its process' socket: the same answers as a chain, or one typed error."""

import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from echo_p2p.chain.answerer import Answerer, GroupBounds
from echo_p2p.chain.driver import open_chain
from echo_p2p.chain.group import AnswerSoFar, GroupRequest, SoFar
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import GroupBroken
from echo_p2p.chain.memory_core import MemoryCore, start_thread
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.sampler import draw
from echo_p2p.chain.shape import span_bytes
from echo_p2p.chain.stage import TensorUpdate
from echo_p2p.chain.vllm_engine import Releases, Room, VllmEngine, load_for
from echo_p2p.chain.vllm_loop import Core
from echo_p2p.chain.vllm_process import open_process
from echo_p2p.chain.vllm_wire import Apply, Done, Load, NodePipe, Ready, WorkerPipe, apply_message, updates_of
from echo_p2p.chain.workload import cache_bytes
from echo_p2p.errors import ChainError, ModelError, WeightsError
from echo_p2p.models import resolve_model
from echo_p2p.weights.codec import content_hash
from echo_protocols.peer import Stop
from echo_protocols.rollout import Sample, Segment
from echo_protocols.run import Sampling
from echo_protocols.uniform import uniforms
from echo_protocols.values import PolicyVersion, Span

WHOLE = Span(start=0, end=4, layers=4)
V0, V1, V2 = (PolicyVersion(epoch=0, step=step) for step in range(3))
LOAD = Load(model="none", device="cpu", rows=8, positions=64, kv_bytes=0, memory_share=0.5)
BOUNDS = GroupBounds(samples=8, positions=64)


def stage(seed: int = 1) -> MemoryStage:
    return MemoryStage(WHOLE, seed=seed)


def weights() -> MemoryWeights:
    sparse = {
        name: TensorUpdate(np.array([0, bits.size - 1]), bits.reshape(-1)[[0, -1]] ^ np.uint16(1 << 7))
        for name, bits in stage(2).tensors().items()
    }
    dense = {name: TensorUpdate(None, bits) for name, bits in stage(2).tensors().items()}
    return MemoryWeights({V0: {}, V1: dense, V2: sparse})


def request(number: int = 0, *, samples: int = 4, length: int = 12, top_k: int = 0) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple(1 + (number + i) % 7 for i in range(3 + number % 4)),
        samples=samples,
        sampling=Sampling(max_new_tokens=length, top_k=top_k),
        stop_tokens=frozenset({6, 25}),
    )


@asynccontextmanager
async def engine(
    core: Callable[[Load], Core] = lambda _: MemoryCore(stage()), releases: Releases | None = None
) -> AsyncIterator[VllmEngine]:
    with trio.fail_after(60):
        async with open_process(LOAD, start_thread(core)) as process:
            answerer = VllmEngine(process, releases or weights(), BOUNDS)  # type: ignore[arg-type]
            await answerer.begin(V0)
            yield answerer


async def by_chain(requests: list[GroupRequest]) -> list[tuple[Sample, ...]]:
    ring = Ring((Stop(peer="A" * 44, span=WHOLE),), bytes(32), lanes=2, rows=8)
    async with open_chain(ring, StageHost("A" * 44, stage(), weights(), V0)) as driver:
        return [await driver.generate(each) for each in requests]


async def all_of(answerer: Answerer, requests: list[GroupRequest]) -> list[tuple[Sample, ...]]:
    answers: dict[int, tuple[Sample, ...]] = {}

    async def ask(number: int) -> None:
        answers[number] = await answerer.generate(requests[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(requests)):
            nursery.start_soon(ask, number)
    return [answers[number] for number in range(len(requests))]


def test_it_answers_as_a_chain_does_whatever_is_asked_together() -> None:
    async def main() -> None:
        requests = [request(number, samples=1 + number % 4, top_k=5 * (number % 2)) for number in range(6)]
        async with engine() as answerer:
            answers = await all_of(answerer, requests)
            assert answerer.statistics.groups == 6
            assert answerer.statistics.tokens == sum(len(sample.tokens) for group in answers for sample in group)
        expected = await by_chain(requests)
        assert answers == expected
        assert {sample.finish for group in answers for sample in group} == {"stop", "length"}

    trio.run(main)


def test_a_listener_hears_every_token_and_the_version_that_drew_it() -> None:
    async def main() -> None:
        heard: list[list[int]] = [[] for _ in range(4)]

        def hear(sample: int, token: int, version: PolicyVersion) -> None:
            assert version == V0
            heard[sample].append(token)

        async with engine() as answerer:
            samples = await answerer.generate(request(), hear)
        assert [tuple(tokens) for tokens in heard] == [sample.tokens for sample in samples]

    trio.run(main)


class Gated(MemoryStage):
    """Stops within `forward` number `at` until the gate is opened."""

    def __init__(self, at: int) -> None:
        super().__init__(WHOLE)
        self._left = at
        self.gate = threading.Event()
        self.reached = threading.Event()

    def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.gate.wait(60)
        return super().forward(lane, rows, positions, inputs)


def endless(samples: int = 1, length: int = 20) -> GroupRequest:
    return replace(request(samples=samples, length=length), stop_tokens=frozenset())


def test_a_switch_in_mid_answer_begins_a_segment_whose_tokens_replay_on_the_kv_that_stays() -> None:
    async def main() -> None:
        gated = Gated(at=5)
        async with engine(lambda _: MemoryCore(gated)) as answerer, trio.open_nursery() as nursery:
            grown: list[tuple[Sample, ...]] = []

            async def ask() -> None:
                grown.append(await answerer.generate(endless()))

            async def switch() -> None:
                await answerer.switch(V1, 10.0)
                assert (answerer.version, answerer.statistics.switches) == (V1, 1)

            nursery.start_soon(ask)
            await trio.to_thread.run_sync(gated.reached.wait, 60)
            nursery.start_soon(switch)
            await trio.testing.wait_all_tasks_blocked()
            assert answerer.version == V0
            gated.gate.set()
        ((sample,),) = grown
        assert [(segment.start, segment.version) for segment in sample.segments] == [(0, V0), (5, V1)]
        assert sample.tokens == replayed(endless(), switch_after=5)
        changed = stage()
        weights().switch(V1, changed)
        assert content_hash(gated.tensors()) == content_hash(changed.tensors())

    trio.run(main)


def replayed(asked: GroupRequest, switch_after: int) -> tuple[int, ...]:
    """The tokens of sample 0, whose model changes once so many have been drawn."""
    model, tokens, inputs, position = stage(), list[int](), list(asked.prompt), 0
    for at in range(asked.sampling.max_new_tokens):
        if at == switch_after:
            weights().switch(V1, model)
        row, here = np.zeros(1, np.int32), np.array([position], np.int32)
        logits = model.forward(0, row, here, np.array([inputs], np.int32))
        position += len(inputs)
        chance = np.array(uniforms(asked.run_seed, asked.group_id, [0], at))
        tokens.append(int(draw(logits, chance, asked.sampling)[0][0]))
        inputs = tokens[-1:]
    return tuple(tokens)


def test_sparse_and_dense_updates_lead_to_the_hash_that_was_promised() -> None:
    async def main() -> None:
        core, promised = MemoryCore(stage()), stage()
        async with engine(lambda _: core) as answerer:
            for version in (V1, V2):
                await answerer.switch(version, 10.0)
                weights().switch(version, promised)
                assert content_hash(core.weights.tensors()) == content_hash(promised.tensors())

    trio.run(main)


def test_a_version_that_can_not_be_had_leaves_it_as_it_is() -> None:
    async def main() -> None:
        async with engine() as answerer:
            with pytest.raises(WeightsError, match="is not in the table"):
                await answerer.switch(PolicyVersion(epoch=0, step=9), 10.0)
            await answerer.switch(V1, 10.0)
            with pytest.raises(WeightsError, match="only grow"):
                await answerer.switch(V0, 10.0)
            assert [segment.version for segment in (await answerer.generate(request()))[0].segments] == [V1]

    trio.run(main)


class Impossible(MemoryWeights):
    """A release whose updates fit no engine."""

    def switch(self, version, stage):  # type: ignore[no-untyped-def]
        if version == V1:
            raise WeightsError("the update does not fit")


def test_an_engine_between_two_versions_is_failed_and_says_why() -> None:
    async def main() -> None:
        async with engine(releases=Impossible({V0: {}, V1: {}})) as answerer:
            with pytest.raises(ChainError, match="does not fit"):
                await answerer.switch(V1, 10.0)
            assert answerer.failed.is_set()
            with pytest.raises(ChainError, match="does not fit"):
                await answerer.generate(request())

    trio.run(main)


def test_a_group_that_nobody_waits_for_makes_room_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        gated = Gated(at=3)
        core = MemoryCore(gated, blocks=4)  # room for one group
        async with engine(lambda _: core) as answerer:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answerer.generate, endless(samples=2, length=28))
                await trio.to_thread.run_sync(gated.reached.wait, 60)
                nursery.cancel_scope.cancel()
            gated.gate.set()
            assert len(await answerer.generate(endless(samples=2, length=28))) == 2
            assert answerer.statistics.groups == 1
            assert not core.busy
            assert not gated.lanes

    trio.run(main)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(samples=9), "9 samples"),
        (request(length=64), "positions"),
        (replace(request(), prompt=()), "at least one token"),
        (endless(samples=8, length=60), "32 blocks"),
    ],
)
def test_a_group_that_it_can_never_hold_is_refused_at_once(asked: GroupRequest, words: str) -> None:
    async def main() -> None:
        async with engine(lambda _: MemoryCore(stage(), blocks=8)) as answerer:
            with pytest.raises(ChainError, match=words):
                await answerer.generate(asked)
            assert not answerer.failed.is_set()

    trio.run(main)


class Broken(MemoryStage):
    """Fails when it computes."""

    def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
        raise RuntimeError("the device fell off")


def test_an_engine_that_fails_fails_whole_and_all_who_wait_hear_why() -> None:
    async def main() -> None:
        faults: list[ChainError] = []

        async def ask(answerer: VllmEngine, number: int) -> None:
            with pytest.raises(ChainError, match="fell off") as caught:
                await answerer.generate(request(number))
            faults.append(caught.value)

        async with engine(lambda _: MemoryCore(Broken(WHOLE), blocks=16)) as answerer:
            async with trio.open_nursery() as nursery:
                for number in range(8):  # some of them wait for room
                    nursery.start_soon(ask, answerer, number)
            assert answerer.failed.is_set()
            assert "fell off" in str(answerer.fault)
            assert len(faults) == 8

    trio.run(main)


def test_a_group_goes_on_in_another_engine_or_a_chain_with_what_one_that_failed_had_drawn() -> None:
    class Dying(MemoryStage):
        left = 9

        def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
            Dying.left -= 1
            if not Dying.left:
                raise RuntimeError("the device fell off")
            return super().forward(lane, rows, positions, inputs)

    async def main() -> None:
        asked = replace(request(1, samples=3), stop_tokens=frozenset())
        async with engine(lambda _: MemoryCore(Dying(WHOLE))) as answerer:
            with pytest.raises(GroupBroken, match="fell off") as caught:
                await answerer.generate(asked)
        so_far = caught.value.so_far
        assert so_far.token_count == 6  # of two steps that were finished
        (whole,) = await by_chain([asked])
        async with engine() as answerer:
            assert await answerer.generate(asked, None, so_far) == whole
            assert answerer.statistics.tokens == 3 * 12 - 6
            finished = SoFar(tuple(AnswerSoFar(each.tokens, each.logprobs, each.segments) for each in whole))
            assert await answerer.generate(asked, None, finished) == whole
            with pytest.raises(ChainError, match="3 answers so far"):
                await answerer.generate(request(1, samples=2), None, so_far)
        newer = replace(so_far, answers=(replace(so_far.answers[0], segments=(Segment(start=0, version=V1),)),) * 3)
        async with engine() as answerer:
            with pytest.raises(ChainError, match="newer version"):
                await answerer.generate(asked, None, newer)

    trio.run(main)


def test_a_process_that_is_gone_is_noticed_at_once_and_a_closed_one_is_failed() -> None:
    async def main() -> None:
        ends: list[socket.socket] = []

        def start(end: socket.socket) -> Callable[[], None]:
            ends.append(end.dup())

            def run() -> None:
                pipe = WorkerPipe(ends[0])
                pipe.receive()
                pipe.send(Ready(engine="short-lived", blocks=64, block=16))
                pipe.receive()
                pipe.send(Done())
                pipe.receive()
                ends[0].shutdown(socket.SHUT_RDWR)

            thread = threading.Thread(target=run)
            thread.start()
            return thread.join

        with trio.fail_after(60):
            async with open_process(LOAD, start) as process:
                answerer = VllmEngine(process, weights(), BOUNDS)  # type: ignore[arg-type]
                await process.go(V0)
                with pytest.raises(ChainError, match="its process has ended"):
                    await answerer.generate(request())
        ends[0].close()
        async with engine() as answerer:
            pass
        assert answerer.failed.is_set()
        with pytest.raises(ChainError, match="closed"):
            await answerer.generate(request())

    trio.run(main)


@pytest.mark.parametrize("error", [ModelError("not this model"), RuntimeError("no memory")])
def test_an_engine_that_does_not_load_says_whether_another_try_would_help(error: Exception) -> None:
    def load(_: Load) -> Core:
        raise error

    async def main() -> None:
        with pytest.raises(ModelError if isinstance(error, ModelError) else ChainError, match=str(error)):
            async with engine(load):
                raise AssertionError("it is not to be had")

    trio.run(main)


def test_one_that_dies_while_it_loads_is_not_tried_again() -> None:
    def start(end: socket.socket) -> Callable[[], None]:
        own = end.dup()
        own.shutdown(socket.SHUT_RDWR)
        return own.close

    async def main() -> None:
        with pytest.raises(ModelError, match="or choose --engine torch"):
            async with open_process(LOAD, start):
                raise AssertionError("it is not to be had")

    trio.run(main)


def test_what_a_process_is_asked_for_is_what_the_memory_holds() -> None:
    tiny = resolve_model("tiny")
    span = Span(start=0, end=4, layers=4)
    ask = partial(load_for, tiny, span, device="cpu", rows=16, memory_share=0.5)
    ample = ask(positions=200, memory_bytes=1 << 30)
    assert (ample.rows, ample.positions) == (16, 512)  # the model's longest
    assert ample.kv_bytes == cache_bytes(tiny, span, 17 * 512, 4)
    least = span_bytes(tiny, span) + cache_bytes(tiny, span, 256, 4)
    assert ask(positions=200, memory_bytes=least).positions == 256
    with pytest.raises(ModelError, match=r"inference\.memory_share"):
        ask(positions=200, memory_bytes=least - cache_bytes(tiny, span, 128, 4))
    assert load_for(tiny, span, device="cuda", rows=16, positions=200, memory_bytes=0, memory_share=0.9).kv_bytes == 0


def test_one_that_is_cancelled_ends_its_process_before_it_leaves() -> None:
    async def main() -> None:
        stopped = threading.Event()

        def start(end: socket.socket) -> Callable[[], None]:
            join = start_thread(lambda _: MemoryCore(stage()))(end)

            def stop() -> None:
                join()
                stopped.set()

            return stop

        with trio.CancelScope() as scope:
            async with open_process(LOAD, start):
                scope.cancel()
                await trio.sleep_forever()
        assert stopped.is_set()

    trio.run(main)


def test_the_caller_s_own_exception_is_not_wrapped() -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            async with engine():
                raise KeyError("mine")

    trio.run(main)


def test_room_is_given_in_the_order_in_which_it_is_asked_for() -> None:
    async def main() -> None:
        room, order = Room(4), list[int]()

        async def take(blocks: int) -> None:
            await room.take(blocks)
            order.append(blocks)

        async with trio.open_nursery() as nursery:
            await room.take(3)
            for blocks in (4, 1, 2):
                nursery.start_soon(take, blocks)
                await trio.testing.wait_all_tasks_blocked()
            assert order == []  # 1 would fit, and 4 was first
            room.free(3)
            await trio.testing.wait_all_tasks_blocked()
            assert order == [4]
            room.free(4)
        assert order == [4, 1, 2]

    trio.run(main)


def test_messages_and_arrays_of_any_shape_cross_whole() -> None:
    updates = {
        "a": TensorUpdate(None, np.arange(12, dtype=np.uint16).reshape(3, 4)),
        "b": TensorUpdate(np.array([5, 7], np.int64), np.array([1, 2], np.uint16)),
        "c": TensorUpdate(np.array([], np.int64), np.array([], np.uint16)),
        "d": TensorUpdate(None, np.arange(1 << 21, dtype=np.uint16)[::2]),
    }

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            node, worker = NodePipe(ours), WorkerPipe(theirs)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.send, *apply_message(updates))
                message, arrays = await trio.to_thread.run_sync(worker.receive)
            assert isinstance(message, Apply)
            received = updates_of(message, arrays)
            assert list(received) == list(updates)
            for name, update in updates.items():
                assert (received[name].index is None) == (update.index is None)
                assert np.array_equal(received[name].values, update.values)
                if update.index is not None:
                    assert np.array_equal(received[name].index, update.index)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, worker.send, message, arrays)
                assert (await node.receive())[0] == message
            node.close()
            assert worker.waiting()
            with pytest.raises(EOFError):
                worker.receive()

    trio.run(main)
