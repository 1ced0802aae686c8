"""Tensors as bit patterns and in-place changes of them. Knows no engine, no codec and no network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_protocols.release import part_of

Bits = NDArray[np.unsignedinteger[Any]]
"""Values as their bit patterns, uint16 for bf16 and fp16, uint32 for fp32: what patches and hashes are made of."""

SPARSE_SHARE = 0.25
"""Above this share of changed values an update carries the whole tensor: an int64 index costs four values."""

_TILE = 2**16  # words of 64 bits that are compared at a time: so that what is in between stays in the cache


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """New values of one tensor at some flat positions; `index` None means all of them, `values` then has its shape."""

    index: NDArray[np.int64] | None  # (changed,), ascending, each position once
    values: Bits  # (changed,) or the tensor's shape


def by_part(tensors: Mapping[str, Bits]) -> dict[str, dict[str, Bits]]:
    """The tensors of each part."""
    parts: dict[str, dict[str, Bits]] = {}
    for name, bits in tensors.items():
        parts.setdefault(part_of(name), {})[name] = bits
    return parts


def layout(tensors: Mapping[str, Bits]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: bits.shape for name, bits in tensors.items()}


def set_places(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where flags are set, ascending: `np.flatnonzero`, but faster if few are."""
    even = flags[: flags.size & ~7].view(np.uint64)
    words = np.flatnonzero(even.astype(np.bool_))
    if 2 * words.size > even.size:
        return np.flatnonzero(flags)
    lanes = np.flatnonzero(even[words].view(np.bool_))
    places = words.take(lanes >> 3)
    places <<= 3
    places |= lanes & 7
    if flags.size & 7:
        places = np.concatenate((places, np.flatnonzero(flags[flags.size & ~7 :]) + (flags.size & ~7)))
    return places


def changed_values(old: Bits, new: Bits) -> tuple[NDArray[np.int64], Bits, Bits]:
    """Where two flat arrays of one type and size differ, ascending, and both values there.

    Takes about twice the time of telling whether they differ: they are compared by words of 64 bits.
    """
    shift = 3 - old.itemsize // 2  # a word holds 4 values of 16 bits, or 2 of 32
    even = old.size >> shift << shift
    before, after = (np.ascontiguousarray(bits[:even]).view(np.uint64) for bits in (old, new))
    flags = np.empty(min(_TILE, before.size), np.bool_)
    index, left, right = [], [], []
    for start in range(0, before.size, _TILE):
        tiles = before[start : start + _TILE], after[start : start + _TILE]
        words = set_places(np.not_equal(*tiles, out=flags[: tiles[0].size]))
        earlier, later = (tile.take(words).view(old.dtype) for tile in tiles)
        differ = np.flatnonzero(earlier != later)
        places = words.take(differ >> shift)
        places += start
        places <<= shift
        places |= differ & ((1 << shift) - 1)
        index.append(places)
        left.append(earlier.take(differ))
        right.append(later.take(differ))
    rest = np.flatnonzero(old[even:] != new[even:]) + even
    return np.concatenate((*index, rest)), np.concatenate((*left, old[rest])), np.concatenate((*right, new[rest]))


def difference(old: Bits, new: Bits) -> TensorUpdate | None:
    """The update that turns `old` into `new` (of one shape); None if they are equal bit for bit."""
    index, _, values = changed_values(old.reshape(-1), new.reshape(-1))
    if not index.size:
        return None
    if index.size > SPARSE_SHARE * new.size:
        return TensorUpdate(index=None, values=new.copy())
    return TensorUpdate(index=index, values=values)


def updated(old: Bits, update: TensorUpdate) -> Bits:
    """A new array: `old` with the update applied."""
    if update.index is None:
        return update.values.copy()
    new = np.array(old, order="C")
    new.reshape(-1)[update.index] = update.values
    return new


def merged(first: TensorUpdate, then: TensorUpdate) -> TensorUpdate:
    """One update with the effect of `first`, then `then`."""
    if then.index is None:
        return then
    if first.index is None:
        return TensorUpdate(index=None, values=updated(first.values, then))
    index, latest = np.unique(np.concatenate((then.index, first.index)), return_index=True)
    return TensorUpdate(index=index, values=np.concatenate((then.values, first.values))[latest])


def merged_all(first: Mapping[str, TensorUpdate], then: Mapping[str, TensorUpdate]) -> dict[str, TensorUpdate]:
    """`merged` for each tensor that either names."""
    both = {name: merged(first[name], update) if name in first else update for name, update in then.items()}
    return {**first, **both}
