"""An mlx lane's cache shows each row its own keys and values, in buffers that follow the longest living row."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip(
    "mlx_lm", reason="mlx-lm is not installed: pip install 'echo-p2p[mlx]' on a Mac, mlx-lm[cpu] on Linux"
)

import mlx.core as mx

from echo_p2p.chain.mlx_cache import STEP, LaneCache, is_ragged

Floats = NDArray[np.float32]


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


def append(cache: LaneCache, lengths: Sequence[int], tokens: Floats) -> list[Floats]:
    """Feed tokens (rows, count), one whole number each, to rows of these lengths; what attention sees of each row."""
    rows, count = tokens.shape
    cache.stand_at(np.array(lengths, np.int32))
    seen = []
    for number, layer in enumerate(cache.layers):
        keys = mx.array(tokens.reshape(rows, 1, count, 1)) + number
        mask = layer.make_mask(count)
        shown, values = (np.array(array) for array in layer.update_and_fetch(keys, -keys))
        assert np.array_equal(values, -shown)
        slots = np.array(mask)[:, 0, -1] if isinstance(mask, mx.array) else np.ones((rows, shown.shape[2]), bool)
        seen.append([shown[row, 0, slots[row], 0] - number for row in range(rows)])
        assert not shown[:, 0, :, 0][~slots].any()
    assert all(np.array_equal(one, other) for one, other in zip(*seen, strict=True))
    mx.eval(cache.arrays())
    return seen[0]


def read(prompt: Floats) -> LaneCache:
    """The cache of a lane whose one row has read a prompt (count,)."""
    cache = LaneCache(2)
    append(cache, [0], prompt[None])
    cache.stand_at(np.array([len(prompt)], np.int32))
    return cache


def join(cache: LaneCache, held: Sequence[Floats], prompt: Floats, rows: int) -> list[Floats]:
    """The rows' tokens, once `rows` rows have joined with the prompt's."""
    joined = [*held, *[prompt] * rows]
    cache.stand_at(np.array([len(row) for row in joined], np.int32))
    cache.join(read(prompt), held=len(held), rows=rows)
    mx.eval(cache.arrays())
    return joined


def close_up(staying: Sequence[int]) -> list[int]:
    """As `Lanes` has it: who stays and has a place among the first keeps it, the last ones fill the gaps."""
    moving = [place for place in staying if place >= len(staying)]
    return [place if place in staying else moving.pop() for place in range(len(staying))]


@pytest.mark.parametrize("seed", range(4))
def test_each_row_sees_its_own_whoever_comes_and_goes(seed: int) -> None:
    draws, cache, rows = np.random.default_rng(seed), LaneCache(2), list[Floats]()
    for _ in range(150):
        while len(rows) < 4:
            prompt = draws.integers(1, 1000, draws.integers(1, 90)).astype(np.float32)
            rows = join(cache, rows, prompt, int(draws.integers(1, 4)))
        newest = draws.integers(1, 1000, (len(rows), 1)).astype(np.float32)
        seen = append(cache, [len(row) for row in rows], newest)
        rows = [np.append(row, token) for row, token in zip(rows, newest, strict=True)]
        assert all(np.array_equal(one, row) for one, row in zip(seen, rows, strict=True))
        staying = [place for place in range(len(rows)) if draws.random() < 0.95] or [0]
        kept = close_up(staying)
        cache.select(kept)
        rows = [rows[place] for place in kept]


def test_buffers_follow_the_longest_living_row_for_hours() -> None:
    cache, rows, most = LaneCache(2), list[Floats](), 0
    zero = np.zeros(1, np.float32)
    for clock in range(1000):
        if clock % 10 == 0:  # one a while, each for 40 steps
            rows = join(cache, rows, np.full(5, clock, np.float32), 1)
        append(cache, [len(row) for row in rows], np.zeros((len(rows), 1), np.float32))
        rows = [np.append(row, zero) for row in rows]
        staying = [place for place, row in enumerate(rows) if len(row) < 45]
        if len(staying) < len(rows):
            kept = close_up(staying)
            cache.select(kept)
            rows = [rows[place] for place in kept]
        most = max(most, sum(array.size for array in cache.arrays()) // 4)  # rows times slots
    assert most <= 2 * 4 * (45 + STEP + 1)


def test_what_a_long_row_and_a_crowd_took_is_given_back() -> None:
    cache = LaneCache(2)
    rows = join(cache, [], np.ones(900, np.float32), 1)
    join(cache, rows, np.ones(4, np.float32), 9)
    assert cache.arrays()[0].size >= 10 * 900
    cache.select([9])
    for length in range(4, 4 + STEP + 2):
        append(cache, [length], np.ones((1, 1), np.float32))
    assert cache.arrays()[0].size <= 4 + 2 * STEP + 2


def test_a_step_and_a_join_write_in_place() -> None:
    cache = LaneCache(2)
    rows = join(cache, [], np.ones(2000, np.float32), 32)
    size = sum(array.nbytes for array in cache.arrays())

    def beyond_what_is_held() -> int:
        return int(mx.get_peak_memory() - mx.get_active_memory())

    for kept in ([*range(31)], [30, *range(1, 30)]):
        mx.reset_peak_memory()
        cache.select(kept)
        mx.eval(cache.arrays())
        assert beyond_what_is_held() < size / 4
    rows = rows[:30]
    mx.reset_peak_memory()
    cache.stand_at(np.full(31, 2000, np.int32))
    cache.join(read(rows[0]), held=30, rows=1)
    mx.eval(cache.arrays())
    assert beyond_what_is_held() < size / 4
    mx.reset_peak_memory()
    token = mx.ones((31, 1, 1, 1))
    for layer in cache.layers:
        layer.update_and_fetch(token, token)
    mx.eval(cache.arrays())
    assert beyond_what_is_held() < size / 4


@pytest.mark.parametrize(
    ("config", "ragged"),
    [
        ({}, True),
        ({"rope_scaling": None}, True),
        ({"rope_scaling": {"rope_type": "llama3"}}, True),
        ({"rope_scaling": {"rope_type": "dynamic"}}, False),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, False),
        ({"rope_scaling": {"rope_type": "longrope"}}, False),
    ],
)
def test_models_that_rotate_by_the_longest_row_are_not_ragged(config: dict[str, object], ragged: bool) -> None:
    assert is_ragged(config) is ragged
