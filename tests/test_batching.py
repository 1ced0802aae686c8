"""Rows of many groups in few lanes: whoever is finished makes room at once, and nobody's tokens change by it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import trio
import trio.testing
from numpy.typing import NDArray

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.growth import PROMPT_PART
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.ring import Ring, lanes_for
from echo_p2p.errors import ChainError
from echo_protocols.hop import MAX_ROWS
from echo_protocols.peer import Stop
from echo_protocols.rollout import Sample
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

WHOLE = Span(start=0, end=6, layers=6)
PEER = "A" * 44
V0 = PolicyVersion(epoch=0, step=0)
LIMITS = ChainLimits(lanes=32, rows=16, positions=2048)


class Watched(MemoryStage):
    """A stage that notes what it is asked to compute: (lane, rows, length) of each call, and joins."""

    def __init__(self) -> None:
        super().__init__(WHOLE)
        self.calls: list[tuple[int, int, int]] = []
        self.joins: list[tuple[int, int]] = []

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        self.calls.append((lane, len(rows), inputs.shape[1]))
        return super().forward(lane, rows, positions, inputs)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        self.joins.append((lane, len(rows)))
        super().join(lane, rows, source)

    @property
    def decoded(self) -> list[int]:
        """Rows of each step of a lane."""
        lanes = {lane for lane, _ in self.joins}
        return [rows for lane, rows, _ in self.calls if lane in lanes]


def request(
    number: int, *, samples: int = 4, length: int = 12, prompt: int = 5, stop: frozenset[int] = frozenset({3})
) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple(1 + (number + i) % 7 for i in range(prompt)),
        samples=samples,
        sampling=Sampling(max_new_tokens=length),
        stop_tokens=stop,
    )


@asynccontextmanager
async def chain(
    stage: MemoryStage, *, rows: int = 8, lanes: int = 1, exclusive: bool = False, limits: ChainLimits = LIMITS
) -> AsyncIterator[ChainDriver]:
    ring = Ring((Stop(peer=PEER, span=WHOLE),), bytes(32), lanes=lanes, rows=rows, exclusive=exclusive)
    host = StageHost(PEER, stage, MemoryWeights({}), V0, limits=limits)
    async with open_chain(ring, host, canary=False) as driver:
        yield driver


async def all_of(driver: ChainDriver, requests: list[GroupRequest]) -> list[tuple[Sample, ...]]:
    answers: list[tuple[Sample, ...]] = [()] * len(requests)

    async def one(place: int) -> None:
        answers[place] = await driver.generate(requests[place])

    async with trio.open_nursery() as nursery:
        for place in range(len(requests)):
            nursery.start_soon(one, place)
            await trio.lowlevel.checkpoint()  # they are asked for in this order
    return answers


MIXED = [request(number, samples=1 + number % 5, length=(4, 40, 9, 25)[number % 4]) for number in range(12)]


async def one_by_one() -> list[tuple[Sample, ...]]:
    async with chain(MemoryStage(WHOLE), exclusive=True) as driver:
        return [await driver.generate(each) for each in MIXED]


@pytest.mark.parametrize(("rows", "lanes"), [(1, 1), (3, 2), (8, 1), (16, 3)])
def test_what_a_row_shares_its_lane_with_changes_no_token(rows: int, lanes: int) -> None:
    async def main() -> None:
        alone = await one_by_one()
        async with chain(MemoryStage(WHOLE), rows=rows, lanes=lanes) as driver:
            assert await all_of(driver, MIXED) == alone
            assert driver.statistics.lanes == 0

    trio.run(main)


def test_a_finished_row_is_replaced_in_the_next_step() -> None:
    async def main() -> None:
        stage, lengths = Watched(), (3, 30, 17, 5)
        async with chain(stage, rows=4) as driver:
            await all_of(driver, [request(n, samples=1, length=lengths[n % 4], stop=frozenset()) for n in range(16)])
        steps = stage.decoded
        assert sum(steps) == 4 * sum(length - 1 for length in lengths)  # the first token comes with the joining
        assert len(steps) < 1.4 * sum(steps) / 4  # the last ones are alone at the end
        assert len(steps) < 0.6 * 4 * (max(lengths) - 1)  # as if each four waited for their longest

    trio.run(main)


def test_rows_that_all_end_at_once_make_room_for_as_many_as_a_stage_holds() -> None:
    """Nobody is left whose next step would say that the others have gone."""

    async def main() -> None:
        limits = replace(LIMITS, rows=4)
        async with chain(MemoryStage(WHOLE), rows=4, limits=limits) as driver:
            answers = await all_of(driver, [request(n, length=6, stop=frozenset()) for n in range(5)])
        assert [len(answer.tokens) for group in answers for answer in group] == [6] * 20

    trio.run(main)


def test_an_answer_may_outlive_as_many_others_as_there_are_row_numbers() -> None:
    async def main() -> None:
        long, short = request(0, samples=1, length=1400, stop=frozenset()), request(1, samples=1, length=1)
        async with chain(MemoryStage(WHOLE), rows=5, limits=replace(LIMITS, room=2**30)) as driver:
            answers = await all_of(driver, [long, *[replace(short, samples=4)] * (MAX_ROWS // 4 + 8)])
        assert len(answers[0][0].tokens) == 1400

    trio.run(main)


def test_a_prompt_is_read_once_for_all_its_answers_and_in_parts() -> None:
    async def main() -> None:
        stage = Watched()
        async with chain(stage) as driver:
            await driver.generate(request(0, samples=6, prompt=2 * PROMPT_PART + 3))
        parts = [(rows, length) for lane, rows, length in stage.calls if length > 1]
        assert parts == [(1, PROMPT_PART), (1, PROMPT_PART), (1, 3)]
        assert stage.joins[0][1] == 6
        assert not stage.lanes

    trio.run(main)


def test_rows_go_on_growing_between_the_parts_of_a_long_prompt() -> None:
    async def main() -> None:
        stage = Watched()
        async with chain(stage, rows=4) as driver:
            await all_of(driver, [request(1, length=30, stop=frozenset()), request(2, prompt=4 * PROMPT_PART)])
        begun = next(place for place, (_, _, length) in enumerate(stage.calls) if length == 1)
        parts = [place for place, (_, _, length) in enumerate(stage.calls) if length == PROMPT_PART and place > begun]
        assert len(parts) > 1
        assert all(later - earlier > 1 for earlier, later in pairwise(parts))

    trio.run(main)


def test_an_exclusive_ring_computes_one_group_at_a_time_in_a_lane() -> None:
    async def main() -> None:
        stage = Watched()
        async with chain(stage, rows=8, exclusive=True) as driver:
            await all_of(driver, [request(number, samples=3) for number in range(5)])
        assert [rows for _, rows in stage.joins] == [3] * 5
        assert len({lane for lane, _ in stage.joins}) == 5
        assert max(stage.decoded) == 3

    trio.run(main)


def test_stages_whose_rows_can_not_be_mixed_get_one_group_at_a_time() -> None:
    async def main() -> None:
        stage = Watched()
        stage.ragged = False
        async with chain(stage, rows=8) as driver:
            await all_of(driver, [request(number, samples=3) for number in range(3)])
        assert [rows for _, rows in stage.joins] == [3] * 3

    trio.run(main)


def test_groups_wait_for_room_instead_of_overfilling_a_stage() -> None:
    async def main() -> None:
        limits = ChainLimits(lanes=32, rows=16, positions=64, room=2 * (5 + 4 * 17))
        most, stage = 0, Watched()
        async with chain(stage, rows=16, lanes=2, limits=limits) as driver:
            with pytest.raises(ChainError, match="room"):
                await driver.generate(request(0, samples=9))
            groups = [request(number) for number in range(9)]
            async with trio.open_nursery() as nursery:
                for group in groups:
                    nursery.start_soon(driver.generate, group)
                while driver.statistics.groups < 9:
                    most = max(most, max((rows for _, rows, _ in stage.calls), default=0))
                    await trio.lowlevel.checkpoint()
        assert most <= 8

    trio.run(main)


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_whenever_a_group_is_cancelled_the_others_and_the_stage_are_as_without_it(after: int) -> None:
    async def main() -> None:
        alone, stage = await one_by_one(), Watched()
        async with chain(stage, rows=3, lanes=2) as driver:
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()

                async def cancelled() -> None:
                    with scope:
                        await driver.generate(request(99, samples=5, length=60, prompt=PROMPT_PART + 9))

                nursery.start_soon(cancelled)
                answers: list[tuple[Sample, ...]] = []

                async def others() -> None:
                    answers.extend(await all_of(driver, MIXED))

                nursery.start_soon(others)
                while len(stage.calls) + len(stage.joins) < after:
                    await trio.lowlevel.checkpoint()
                scope.cancel()
            assert answers == alone
            assert driver.statistics.lanes == 0
            assert driver._growth._queue._left == driver._growth._queue.room
        assert not stage.lanes

    trio.run(main)


def test_a_stage_alone_has_all_rows_in_one_lane():
    alone = partial(lanes_for, 1, rows_max=256)
    assert alone(lanes=2, rows=8, exclusive=False) == (1, 16)
    assert alone(lanes=2, rows=200, exclusive=False) == (1, 256)
    assert alone(lanes=2, rows=300, exclusive=False) == (1, 300)
    assert alone(lanes=2, rows=8, exclusive=True) == (2, 8)


def test_stages_in_a_row_have_a_lane_each_to_be_busy_with():
    assert lanes_for(3, lanes=2, rows=8, rows_max=256, exclusive=False) == (3, 8)
    assert lanes_for(2, lanes=4, rows=8, rows_max=256, exclusive=False) == (4, 8)
