"""A ring that fails loses no work: another goes on with what its groups have, and draws what one ring would have."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import AnswerSoFar, GroupRequest, SoFar
from echo_p2p.chain.growth import PROMPT_PART
from echo_p2p.chain.link import ChainBroken, ChainLimits, GroupBroken
from echo_p2p.chain.memory_ring import memory_ring
from echo_p2p.chain.memory_stage import MemoryStage
from echo_p2p.chain.sampler import draw
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Stage
from echo_p2p.errors import ChainError
from echo_protocols.rollout import Sample, Segment
from echo_protocols.run import Sampling
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion, Span

LAYERS = 4
V0, V1 = (PolicyVersion(epoch=0, step=step) for step in (0, 1))
LIMITS = ChainLimits(lanes=16, rows=16, positions=2048, hop_timeout_s=20.0, beat_s=5.0)
SPLITS = ((4,), (1, 4), (1, 3, 4), (2, 4))


class Mortal(MemoryStage):
    """A stage that dies in the middle of its call number `dies_at`, counted over `forward` and `join`."""

    def __init__(self, span: Span, dies_at: int = 0) -> None:
        super().__init__(span)
        self._left = dies_at
        self.read = 0  # tokens that came in calls of several

    def _live(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("the stage dies")

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        self._live()
        self.read += inputs.shape[1] * (inputs.shape[1] > 1)
        return super().forward(lane, rows, positions, inputs)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        self._live()
        super().join(lane, rows, source)


def stages(split: Sequence[int], dying: int = 0, dies_at: int = 0) -> list[MemoryStage]:
    spans = [Span(start=a, end=b, layers=LAYERS) for a, b in pairwise((0, *split))]
    return [Mortal(span, dies_at if place == dying else 0) for place, span in enumerate(spans)]


def request(
    number: int, *, samples: int = 4, length: int = 14, prompt: int = 5, stop: frozenset[int] = frozenset({3})
) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple(1 + (number + i) % 7 for i in range(prompt)),
        samples=samples,
        sampling=Sampling(max_new_tokens=length),
        stop_tokens=stop,
    )


REQUESTS = [request(number, samples=1 + number % 5, length=(4, 30, 9, 20)[number % 4]) for number in range(7)]


@asynccontextmanager
async def chain(
    model: Sequence[Stage],
    *,
    version: PolicyVersion = V0,
    lanes: int = 2,
    rows: int = 6,
    exclusive: bool = False,
    limits: ChainLimits = LIMITS,
    canary: bool = False,
) -> AsyncIterator[ChainDriver]:
    async with memory_ring(model, version=version, limits=limits) as ring:
        opened = ring.ring(lanes=lanes, rows=rows, exclusive=exclusive)
        async with open_chain(opened, ring.hosts[0], ring.servers[0], canary=canary) as driver:
            yield driver


class Work:
    """Groups on their way, from ring to ring; `heard` counts the tokens that were told as new."""

    def __init__(self, requests: Sequence[GroupRequest]) -> None:
        self.requests = requests
        self.so_far: list[SoFar | None] = [None] * len(requests)
        self.done: dict[int, tuple[Sample, ...]] = {}
        self.heard: Counter[tuple[int, int]] = Counter()
        self.failures: set[tuple[str, str | None]] = set()

    async def go_on(self, driver: ChainDriver) -> None:
        """Ask a ring for all that is not done."""
        async with trio.open_nursery() as nursery:
            for place in range(len(self.requests)):
                if place not in self.done:
                    nursery.start_soon(self._one, driver, place)

    async def _one(self, driver: ChainDriver, place: int) -> None:
        def hear(sample: int, token: int, version: PolicyVersion) -> None:
            self.heard[place, sample] += 1

        try:
            self.done[place] = await driver.generate(self.requests[place], hear, self.so_far[place])
        except GroupBroken as error:
            self.so_far[place] = error.so_far
            self.failures.add((error.failure.reason, error.failure.peer))

    @property
    def answers(self) -> list[tuple[Sample, ...]]:
        return [self.done[place] for place in range(len(self.requests))]

    @property
    def tokens_so_far(self) -> int:
        return sum(so_far.token_count for so_far in self.so_far if so_far)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await main()

    trio.run(bounded)


async def undisturbed(requests: Sequence[GroupRequest] = REQUESTS) -> list[tuple[Sample, ...]]:
    work = Work(requests)
    async with chain(stages((LAYERS,))) as driver:
        await work.go_on(driver)
    return work.answers


def room_is_free(driver: ChainDriver) -> bool:
    queue = driver._growth._queue
    return queue._left == queue.room and driver.statistics.lanes == 0


@pytest.mark.parametrize("dies_at", [1, 2, 3, 9, 20, 33])
@pytest.mark.parametrize(("split", "dying"), [(0, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
def test_another_ring_goes_on_where_one_failed(split: int, dying: int, dies_at: int) -> None:
    async def main() -> None:
        work = Work(REQUESTS)
        async with chain(stages(SPLITS[split], dying, dies_at)) as driver:
            await work.go_on(driver)
        assert {reason for reason, _ in work.failures} == {"engine"}
        assert {peer for _, peer in work.failures} == {"ABC"[dying] * 44}
        assert work.tokens_so_far or dies_at < 20
        async with chain(stages(SPLITS[3])) as driver:
            await work.go_on(driver)
            assert room_is_free(driver)
        assert work.answers == await undisturbed()
        assert all(work.heard[place, i] == len(s.tokens) for place in work.done for i, s in enumerate(work.done[place]))

    run(main)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(SPLITS), st.integers(0, 2), st.integers(1, 60)), max_size=5),
    st.integers(1, 8),
    st.integers(1, 3),
    st.booleans(),
)
def test_whatever_rings_a_group_has_been_through_its_answers_are_the_same(
    deaths: list[tuple[Sequence[int], int, int]], rows: int, lanes: int, canary: bool
) -> None:
    async def main() -> None:
        work = Work(REQUESTS)
        for split, dying, dies_at in [*deaths, ((LAYERS,), 0, 0)]:
            model = stages(split, dying % len(split), dies_at)
            async with chain(model, rows=rows, lanes=lanes, canary=canary) as driver:
                await work.go_on(driver)
                assert driver.failed.is_set() or room_is_free(driver)
        assert work.answers == await undisturbed()
        drawn = sum(len(sample.tokens) for group in work.answers for sample in group)
        assert sum(work.heard.values()) == drawn or canary  # which may have some drawn again

    run(main)


async def partly(asked: GroupRequest, tokens: int) -> SoFar:
    """What a ring of one has of a group when about so many tokens of it are drawn."""
    heard = 0

    def hear(sample: int, token: int, version: PolicyVersion) -> None:
        nonlocal heard
        heard += 1

    caught: list[GroupBroken] = []

    async def one(driver: ChainDriver) -> None:
        with pytest.raises(GroupBroken) as error:
            await driver.generate(asked, hear)
        caught.append(error.value)

    async with (
        memory_ring(stages((2, LAYERS)), version=V0, limits=LIMITS) as ring,
        open_chain(ring.ring(lanes=1), ring.hosts[0], ring.servers[0], canary=False) as driver,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(one, driver)
        while heard < tokens:
            await trio.lowlevel.checkpoint()
        ring.network.split([ring.route[1].peer])
    assert not caught[0].so_far.fault(asked)
    return caught[0].so_far


def test_finished_answers_stay_and_those_not_begun_share_one_prompt() -> None:
    async def main() -> None:
        asked = request(1, samples=6, length=20, prompt=40)
        whole = (await undisturbed([asked]))[0]
        answers = tuple(AnswerSoFar(sample.tokens, sample.logprobs, sample.segments) for sample in whole)
        so_far = SoFar((answers[0], answers[1].cut(5), answers[2].cut(2), *[AnswerSoFar()] * 3))
        alone = Mortal(Span(start=0, end=LAYERS, layers=LAYERS))
        async with chain([alone]) as driver:
            assert await driver.generate(asked, None, so_far) == whole
        assert alone.read == (40 + 5) + (40 + 2) + 40

    run(main)


def test_a_group_whose_answers_are_all_finished_needs_no_ring() -> None:
    async def main() -> None:
        whole = (await undisturbed())[1]
        so_far = SoFar(tuple(AnswerSoFar(sample.tokens, sample.logprobs, sample.segments) for sample in whole))
        alone = Mortal(Span(start=0, end=LAYERS, layers=LAYERS))
        async with chain([alone]) as driver:
            assert await driver.generate(REQUESTS[1], None, so_far) == whole
        assert alone.read == 0

    run(main)


def test_what_a_group_was_given_is_not_lost_when_the_next_ring_fails_at_once() -> None:
    async def main() -> None:
        so_far = await partly(REQUESTS[1], 20)
        assert so_far.token_count >= 20
        async with chain(stages(SPLITS[1], 1, 1)) as driver:
            for _ in range(2):  # when the ring fails, and on a ring that has failed
                with pytest.raises(GroupBroken) as caught:
                    await driver.generate(REQUESTS[1], None, so_far)
                assert caught.value.so_far == so_far

    run(main)


def test_long_answers_are_read_in_parts_like_prompts() -> None:
    async def main() -> None:
        asked = request(2, samples=2, length=3 * PROMPT_PART, prompt=9, stop=frozenset())
        so_far = await partly(asked, 4 * PROMPT_PART)
        alone = Mortal(Span(start=0, end=LAYERS, layers=LAYERS))
        async with chain([alone]) as driver:
            assert await driver.generate(asked, None, so_far) == (await undisturbed([asked]))[0]
        assert alone.read == so_far.token_count + 2 * 9

    run(main)


def test_a_new_version_begins_a_segment_and_reads_the_tokens_of_the_older() -> None:
    """An oracle draws the rest by hand from the new weights alone."""

    async def main() -> None:
        asked = request(3, samples=3, length=20, stop=frozenset())
        so_far = await partly(asked, 18)
        newer = MemoryStage(Span(start=0, end=LAYERS, layers=LAYERS), seed=2)
        async with chain([newer], version=V1) as driver:
            group = await driver.generate(asked, None, so_far)
        for number, (sample, begun) in enumerate(zip(group, so_far.answers, strict=True)):
            done = len(begun.tokens)
            assert sample.segments == (Segment(start=0, version=V0), Segment(start=done, version=V1))
            assert sample.tokens == rest_by_hand(asked, number, begun.tokens)

    run(main)


def rest_by_hand(asked: GroupRequest, sample: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    stage, row = MemoryStage(Span(start=0, end=LAYERS, layers=LAYERS), seed=2), np.zeros(1, np.int32)
    position, inputs = 0, asked.prompt + tokens
    while len(tokens) < asked.sampling.max_new_tokens:
        logits = stage.forward(0, row, np.array([position], np.int32), np.array([inputs], np.int32))
        u = uniform(asked.run_seed, asked.group_id, sample, len(tokens))
        drawn, _ = draw(logits, np.array([u]), asked.sampling)
        position, inputs = position + len(inputs), (int(drawn[0]),)
        tokens = (*tokens, int(drawn[0]))
    return tokens


def test_a_group_goes_on_only_at_versions_that_a_group_may_have() -> None:
    async def main() -> None:
        asked = REQUESTS[1]
        newer = SoFar(tuple(AnswerSoFar((1,), (-1.0,), (Segment(start=0, version=V1),)) for _ in range(asked.samples)))
        older = SoFar(tuple(AnswerSoFar((1,), (-1.0,), (Segment(start=0, version=V0),)) for _ in range(asked.samples)))
        async with chain(stages((LAYERS,)), version=V0) as driver:
            with pytest.raises(ChainError, match="newer version than 0"):
                await driver.generate(asked, None, newer)
        async with chain(stages((LAYERS,)), version=V1, exclusive=True) as driver:
            with pytest.raises(ChainError, match="another version than 0"):
                await driver.generate(asked, None, older)
            assert not driver.failed.is_set()
            assert len(await driver.generate(asked, None, newer)) == asked.samples

    run(main)


def test_an_exclusive_ring_gives_each_answer_that_goes_on_a_lane_of_its_own() -> None:
    async def main() -> None:
        asked = request(1, samples=4, length=20, stop=frozenset())
        so_far = await partly(asked, 30)
        async with chain(stages(SPLITS[2]), exclusive=True) as driver:
            assert await driver.generate(asked, None, so_far) == (await undisturbed([asked]))[0]
            assert room_is_free(driver)

    run(main)


ONE = AnswerSoFar((1,), (-1.0,), (Segment(start=0, version=V0),))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((ONE,), "not those of 2 samples"),
        ((ONE, AnswerSoFar((1,), (), ONE.segments)), "1 tokens with 0"),
        ((ONE, AnswerSoFar((1,) * 15, (-1.0,) * 15, ONE.segments)), "15 tokens"),
        ((ONE, AnswerSoFar((3, 1), (-1.0,) * 2, ONE.segments)), "follow a stop token"),
        ((ONE, AnswerSoFar((1,), (-1.0,))), "segments"),
        ((ONE, AnswerSoFar((), (), ONE.segments)), "segments"),
        ((ONE, AnswerSoFar((1,), (-1.0,), (Segment(start=1, version=V0),))), "segments"),
        (
            (ONE, AnswerSoFar((1, 1), (-1.0,) * 2, (*ONE.segments, Segment(start=1, version=V0)))),
            "do not grow",
        ),
    ],
)
def test_what_cannot_be_of_the_request_is_refused(answers: tuple[AnswerSoFar, ...], message: str) -> None:
    async def main() -> None:
        async with chain(stages((LAYERS,))) as driver:
            with pytest.raises(ChainError, match=message) as caught:
                await driver.generate(request(0, samples=2), None, SoFar(answers))
            assert not isinstance(caught.value, ChainBroken)

    run(main)


@pytest.mark.parametrize("after", range(0, 24, 2))
def test_a_group_that_goes_on_and_is_cancelled_gives_its_room_back(after: int) -> None:
    async def main() -> None:
        so_far = await partly(request(9, samples=5, length=60, stop=frozenset()), 100)
        stage = Mortal(Span(start=0, end=LAYERS, layers=LAYERS))
        async with chain([stage], rows=3) as driver:
            async with trio.open_nursery() as nursery:
                asked = request(9, samples=5, length=60, stop=frozenset())
                nursery.start_soon(driver.generate, asked, None, so_far)
                while driver.host.statistics.steps < after:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            work = Work(REQUESTS)
            await work.go_on(driver)
            assert work.answers == await undisturbed()
            assert room_is_free(driver)
        assert not stage.lanes

    run(main)


def test_torch_stages_go_on_as_they_would_have() -> None:
    """The tiny model in fp32: the same tokens, log-probabilities within what reading instead of stepping may change."""
    torch_stage = pytest.importorskip("echo_p2p.chain.torch_stage")
    tiny = Path(torch_stage.__file__).parent.parent / "models" / "tiny"
    layers = model_shape(tiny).layers
    asked = [request(number, samples=3, length=24, prompt=30) for number in range(4)]

    def model(*cuts: int) -> list[Stage]:
        return [torch_stage.load_stage(tiny, Span(start=a, end=b, layers=layers)) for a, b in pairwise((0, *cuts))]

    async def main() -> None:
        whole, work = Work(asked), Work(asked)
        async with chain(model(layers)) as driver:
            await whole.go_on(driver)
        async with (
            memory_ring(model(1, layers), version=V0, limits=LIMITS) as ring,
            open_chain(ring.ring(lanes=2, rows=6), ring.hosts[0], ring.servers[0], canary=False) as driver,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(work.go_on, driver)
            while driver.statistics.tokens < 100:
                await trio.lowlevel.checkpoint()
            ring.network.split([ring.route[1].peer])
        assert work.tokens_so_far >= 100
        async with chain(model(1, layers)) as driver:
            await work.go_on(driver)
        for ours, theirs in zip(work.answers, whole.answers, strict=True):
            assert [sample.tokens for sample in ours] == [sample.tokens for sample in theirs]
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
                assert one.segments == other.segments

    run(main)
