"""Changes of many versions become one, without the models in between."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_p2p.errors import WeightsError
from echo_p2p.tensors import Bits
from echo_p2p.weights.codec import decode_patch, encode_changes, find_changes
from echo_p2p.weights.rewind import Windows

Tensors = dict[str, Bits]


def changed(tensors: Tensors, random: np.random.Generator, share: float) -> Tensors:
    """A few values are others, of few: so that many come back to what they were."""
    return {
        name: np.where(random.random(bits.shape) < share, random.integers(0, 3, bits.shape, bits.dtype), bits)
        for name, bits in tensors.items()
    }


@given(st.integers(0, 2**32), st.sampled_from((0.001, 0.05, 0.6)), st.sampled_from(((2, 4, 8), (3, 6), (1 + 1,))))
def test_a_window_leads_back_to_where_it_began_and_its_patch_on_from_there(
    seed: int, share: float, lengths: tuple[int, ...]
) -> None:
    random = np.random.default_rng(seed)
    tensors: Tensors = {
        "a": random.integers(0, 2**16, (7, 11), np.uint16),
        "b": random.integers(0, 2**32, 40, np.uint32),
    }
    windows, history = Windows[int](lengths), [tensors]
    windows.reached(0)
    for version in range(1, 2 * lengths[-1] + 2):
        new = changed(history[-1], random, share)
        windows.changed(dict(zip("ab", find_changes(history[-1], new), strict=True)))
        history.append(new)
        ended = []
        for window in windows.ending(1, new):
            assert window.start == version - window.length
            assert window.size_bytes == window.length
            older, changes = window.rewind.changes(new)
            assert all(np.array_equal(older[name], bits) for name, bits in history[window.start].items())
            updates = decode_patch(encode_changes(older, changes), older)
            assert {name for name in "ab" if not np.array_equal(older[name], new[name])} == set(updates)
            ended.append(window.length)
        assert ended == [length for length in lengths if version % length == 0]
        windows.reached(version)


def test_windows_divide_one_another() -> None:
    for lengths in ((4, 6), (1,), (4, 4), (8, 4)):
        with pytest.raises(WeightsError, match="multiple"):
            Windows(lengths)
    assert list(Windows[int](()).ending(1, {})) == []
