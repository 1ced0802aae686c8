"""Lanes keep count of rows that join, stand anywhere and leave; a stage then computes each row as if it were alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from echo_p2p.chain.lanes import MAX_ROWS, Lane, Lanes
from echo_p2p.chain.memory_stage import MemoryStage
from echo_p2p.errors import ChainError
from echo_protocols.values import Span

Names = list[tuple[int, int]]
"""A cache that only remembers: of each of its rows the number, and when it came."""


def integers(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def enter(
    lanes: Lanes[Names], number: int, rows: Sequence[int], positions: int | Sequence[int], length: int = 1
) -> Lane[Names]:
    """Enter a lane and do what the stage has to, as the numbers of the cache's rows show."""
    names = integers(*rows)
    entered = lanes.enter(number, names, np.full(len(names), positions, np.int32), length)
    lane = entered.lane
    if entered.kept is not None:
        assert all(place in (i, max(place, len(entered.kept))) for i, place in enumerate(entered.kept))
        lane.cache[:] = [lane.cache[place] for place in entered.kept]
    if not lane.cache:
        lane.cache[:] = [(name, 0) for name in rows]
    assert [name for name, _ in lane.cache] == lane.rows.tolist()
    assert lane.rows.tolist() == [rows[i] for i in entered.order] if entered.order is not None else list(rows)
    lane.lengths += length
    return lane


def join(lanes: Lanes[Names], number: int, rows: Sequence[int], source: int, when: int = 0) -> None:
    lane, shared = lanes.join(number, integers(*rows), source)
    assert shared.rows.tolist() == [0]
    lane.cache += [(name, when) for name in rows]


def some(*, longest: int = 100, kv_positions: int | None = None, ragged: bool = True) -> Lanes[Names]:
    """Lanes of which lane 1 has read five tokens of one row and lane 2 has read three."""
    lanes: Lanes[Names] = Lanes(list, most=4, longest=longest, kv_positions=kv_positions, ragged=ragged)
    enter(lanes, 1, [0], 0, length=5)
    enter(lanes, 2, [0], 0, length=3)
    return lanes


def test_the_last_rows_take_the_places_of_those_that_leave() -> None:
    lanes = some()
    join(lanes, 7, [10, 11, 12, 13, 14], source=1)
    lane = enter(lanes, 7, [13, 14, 11], 5)
    assert lane.rows.tolist() == [14, 11, 13]
    assert lane.lengths.tolist() == [6, 6, 6]


def test_the_same_calls_put_the_same_rows_at_the_same_places() -> None:
    seen = []
    for _ in range(2):
        lanes = some()
        join(lanes, 7, [3, 1], source=1)
        join(lanes, 7, [9], source=2)
        enter(lanes, 7, [9, 3], [3, 5])
        join(lanes, 7, [1], source=2)
        seen.append(enter(lanes, 7, [1, 3, 9], [3, 6, 4]).rows.tolist())
    assert seen == [[3, 9, 1]] * 2


def test_a_number_is_free_again_once_its_row_has_left() -> None:
    lanes = some()
    join(lanes, 7, [0, 1], source=1)
    with pytest.raises(ChainError, match="it lacks"):
        join(lanes, 7, [1], source=2)
    enter(lanes, 7, [0], 5)
    join(lanes, 7, [1], source=2)
    assert enter(lanes, 7, [0, 1], [6, 3]).lengths.tolist() == [7, 4]


def test_rows_that_stand_apart_take_one_token_at_a_time() -> None:
    lanes = some()
    join(lanes, 7, [0], source=1)
    join(lanes, 7, [1], source=2)
    with pytest.raises(ChainError, match=r"\[5, 3\], and 2 tokens of each are sent"):
        enter(lanes, 7, [0, 1], [5, 3], length=2)
    enter(lanes, 7, [0, 1], [5, 3])
    assert enter(lanes, 7, [1], 4, length=2).lengths.tolist() == [6]  # alone, it stands apart from nobody


@pytest.mark.parametrize(
    ("rows", "source", "message"),
    [
        ([], 1, "it lacks"),
        ([5, 5], 1, "it lacks"),
        ([-1], 1, "it lacks"),
        ([MAX_ROWS], 1, "it lacks"),
        ([0], 1, "it lacks"),
        ([5], 7, "one row that has begun"),
        ([5], 9, "one row that has begun"),
        ([5], 3, "one row that has begun"),
        (range(1, MAX_ROWS), 1, None),
    ],
)
def test_joins_that_do_not_fit_are_refused_and_change_nothing(
    rows: Sequence[int], source: int, message: str | None
) -> None:
    lanes = some()
    enter(lanes, 3, [0, 1], 0, length=5)
    join(lanes, 7, [0], source=2)
    if message is None:
        join(lanes, 7, rows, source)
        return
    with pytest.raises(ChainError, match=message):
        join(lanes, 7, rows, source)
    assert lanes.kv_positions == 5 + 3 + 10 + 3
    assert enter(lanes, 7, [0], 3).rows.tolist() == [0]


def test_a_lane_whose_rows_must_stand_together_takes_none_that_stand_elsewhere() -> None:
    lanes = some(ragged=False)
    join(lanes, 7, [0, 1], source=1)
    join(lanes, 7, [2], source=1)
    with pytest.raises(ChainError, match="needs all at one: join a new lane"):
        join(lanes, 7, [3], source=2)
    join(lanes, 8, [3], source=2)


def test_what_would_pass_the_kv_bound_is_refused_until_rows_have_left() -> None:
    lanes = some(kv_positions=18)
    join(lanes, 7, [0, 1], source=2)
    assert lanes.kv_positions == 5 + 3 + 2 * 3
    with pytest.raises(ChainError, match="28 KV positions of at most 18: wait until rows have left"):
        join(lanes, 7, [2, 3], source=1)  # four rows of up to five
    enter(lanes, 7, [0, 1], 3)
    enter(lanes, 7, [0, 1], 4)
    with pytest.raises(ChainError, match="20 KV positions"):
        enter(lanes, 7, [0, 1], 5)
    enter(lanes, 7, [1], 5)
    assert lanes.kv_positions == 5 + 3 + 6


def test_no_more_lanes_are_kept_and_none_grows_longer_than_is_allowed() -> None:
    lanes = some(longest=6)
    enter(lanes, 1, [0], 5)
    with pytest.raises(ChainError, match="pass 6 positions"):
        enter(lanes, 1, [0], 6)
    join(lanes, 3, [0], source=1)
    enter(lanes, 4, [0], 0)
    assert lanes.numbers == {1, 2, 3, 4}
    with pytest.raises(ChainError, match="one more than the 4"):
        enter(lanes, 5, [0], 0)
    with pytest.raises(ChainError, match="one more than the 4"):
        join(lanes, 5, [0], source=1)


def test_a_lane_whose_computation_failed_is_closed() -> None:
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("out of memory")

    lanes, token = some(), np.zeros((1, 1), np.float32)
    with pytest.raises(ChainError, match=r"lane 1 failed here \(out of memory\): replay it elsewhere"):
        lanes.compute(1, integers(0), integers(5), token, fails)
    assert lanes.numbers == {2}
    with pytest.raises(ChainError, match="stand at"):
        lanes.compute(2, integers(0), integers(5), token, fails)
    with pytest.raises(ChainError, match="out of memory"):
        lanes.share(7, integers(4), 2, fails)
    assert lanes.numbers == {2}
    assert lanes.kv_positions == 3


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_schedule_of_joining_and_leaving_keeps_rows_and_cache_together(data: st.DataObject) -> None:
    lanes, held = some(), dict[int, tuple[int, int]]()  # of each row: its length, and when it came
    for clock in range(1, 12):
        free = sorted(set(range(10)) - set(held))
        if names := data.draw(st.lists(st.sampled_from(free or [-1]), max_size=3 * bool(free), unique=True)):
            source = data.draw(st.sampled_from([1, 2]))
            join(lanes, 7, names, source, clock)
            held |= {name: (5 if source == 1 else 3, clock) for name in names}
        if not held:
            continue
        staying = data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, unique=True))
        lane = enter(lanes, 7, staying, [held[name][0] for name in staying])
        held = {name: (held[name][0] + 1, held[name][1]) for name in staying}
        assert dict(zip(lane.rows.tolist(), lane.lengths.tolist(), strict=True)) == {n: held[n][0] for n in staying}
        assert dict(lane.cache) == {name: held[name][1] for name in staying}


def forward(
    stages: Sequence[MemoryStage], lane: int, rows: Sequence[int], positions: Sequence[int], tokens: ArrayLike
) -> NDArray[np.float32]:
    carried: NDArray[np.int32] | NDArray[np.float32] = np.array(tokens, np.int32)
    for stage in stages:
        carried = stage.forward(lane, integers(*rows), integers(*positions), carried)
    return carried.astype(np.float32)


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4)])
def test_a_memory_stage_gives_each_row_its_bits_whoever_shares_its_lane(cuts: Sequence[int]) -> None:
    stages = [MemoryStage(Span(start=a, end=b, layers=4)) for a, b in pairwise(cuts)]
    draws, held, alone, taken = np.random.default_rng(0), dict[int, int](), 100, dict[int, int]()
    for _ in range(40):
        if len(held) < 4:
            prompt = draws.integers(0, 32, draws.integers(1, 6)).tolist()
            names = [name for name in range(9) if name not in taken][: draws.integers(1, 4)]
            forward(stages, 1, [0], [0], [prompt])
            for stage in stages:
                stage.join(0, integers(*names), 1)
                stage.close(1)
            for name in names:
                held[name], alone = alone, alone + 1
                forward(stages, held[name], [0], [0], [prompt[:1]])
                if len(prompt) > 1:  # in two chunks
                    forward(stages, held[name], [0], [1], [prompt[1:]])
                taken[name] = len(prompt)
        names = draws.permutation(list(held)).tolist()
        tokens = draws.integers(0, 32, (len(names), 1))
        together = forward(stages, 0, names, [taken[name] for name in names], tokens)
        for i, name in enumerate(names):
            assert np.array_equal(together[i], forward(stages, held[name], [0], [taken[name]], tokens[i : i + 1])[0])
            taken[name] += 1
        taken = {name: taken[name] for name in names}
        held = {name: held[name] for name in names if draws.random() < 0.8} or held


def test_a_memory_stage_refuses_more_than_it_may_keep() -> None:
    stage = MemoryStage(Span(start=0, end=2, layers=2), kv_positions=10)
    stage.forward(0, integers(0, 1), integers(0, 0), np.ones((2, 5), np.int32))
    with pytest.raises(ChainError, match="12 KV positions of at most 10"):
        stage.forward(0, integers(0, 1), integers(5, 5), np.ones((2, 1), np.int32))
    stage.forward(0, integers(1), integers(5), np.ones((1, 1), np.int32))
