"""Tensors as bit patterns and in-place changes of them. Knows no engine, no codec and no network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_p2p.kernels import differing
from echo_protocols.release import part_of

Bits = NDArray[np.unsignedinteger[Any]]
"""Values as their bit patterns, uint16 for bf16 and fp16, uint32 for fp32: what patches and hashes are made of."""

Layout = dict[str, tuple[tuple[int, ...], int]]

SPARSE_SHARE = 0.25
"""Above this share of changed values an update carries the whole tensor: an int64 index costs four values."""


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


def layout(tensors: Mapping[str, Bits]) -> Layout:
    """Shape and bytes a value of each tensor."""
    return {name: (bits.shape, bits.itemsize) for name, bits in tensors.items()}


def changed_values(old: Bits, new: Bits) -> tuple[NDArray[np.int64], Bits, Bits]:
    """Where two flat arrays of one type and size differ, ascending, and both values there.

    Takes at most twice the time of telling whether they differ, without the interpreter's lock.
    """
    return differing(np.ascontiguousarray(old), np.ascontiguousarray(new))


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
