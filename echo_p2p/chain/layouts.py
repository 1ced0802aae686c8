"""Where published tensors lie in an engine's own: renamed, fused, stacked or transposed. Knows no engine and no codec.

A layout is data that an engine declares: for each published tensor a `Place`, which is a strided view of a live one.
Published are the names and shapes of a Hugging Face module, experts apart, as trainers export them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import WeightsError
from echo_p2p.tensors import TensorUpdate

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Value [i, j, …] of a published tensor lies at `offset + i·strides[0] + j·strides[1] + …` of a flat live one."""

    live: str
    shape: Shape  # of the published tensor
    offset: int
    strides: Shape  # in values

    @staticmethod
    def whole(live: str, shape: Shape) -> "Place":
        """All of a live tensor, as it is."""
        return Place(live, shape, 0, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))))

    def rows(self, first: int, count: int) -> "Place":
        """Some rows of it: a tensor that the engine keeps fused with others along the first axis."""
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * self.strides[0])

    def item(self, i: int) -> "Place":
        """Its i-th item: a tensor that the engine keeps in a stack."""
        return Place(self.live, self.shape[1:], self.offset + i * self.strides[0], self.strides[1:])

    def transposed(self) -> "Place":
        """It with the last two axes swapped."""
        *outer, a, b = range(len(self.shape))
        order = (*outer, b, a)
        return replace(self, shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order))

    def positions(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Flat live positions of flat published ones, in the order given."""
        runs = self.runs()
        if len(runs) > 1:
            rest, places = index, np.full(index.shape, self.offset, np.int64)
            for size, stride in reversed(runs[1:]):
                rest, here = np.divmod(rest, size)
                places += here * stride
            return places + rest * runs[0][1]
        stride = runs[0][1] if runs else 1
        places = index if stride == 1 else index * stride
        return places + self.offset if self.offset else places

    def runs(self) -> list[tuple[int, int]]:
        """(size, stride) of the axes, those merged that are contiguous in each other; outermost first."""
        merged: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        return merged


Layout = Mapping[str, Place]
"""The place of each published tensor."""

UnsignedBits = np.dtype[np.unsignedinteger[Any]]


def same_layout(live: Mapping[str, Shape]) -> dict[str, Place]:
    """Every live tensor is published as it is."""
    return {name: Place.whole(name, shape) for name, shape in live.items()}


def experts_apart(live: Mapping[str, Shape], model_type: str) -> dict[str, Place]:
    """A transformers module's tensors as trainers publish them: packed experts one by one, all others as they are.

    transformers 5 packs experts while it loads a checkpoint; verl's export undoes that, except for gpt_oss, whose
    checkpoints are packed too.
    """
    layout: dict[str, Place] = {}
    for name, shape in live.items():
        module, _, kind = name.rpartition(".")
        whole = Place.whole(name, shape)
        if not module.endswith(".mlp.experts") or len(shape) != 3 or model_type == "gpt_oss":
            layout[name] = whole
        elif kind == "gate_up_proj":  # (experts, 2 * intermediate, hidden)
            half = shape[1] // 2
            for i in range(shape[0]):
                layout[f"{module}.{i}.gate_proj.weight"] = whole.item(i).rows(0, half)
                layout[f"{module}.{i}.up_proj.weight"] = whole.item(i).rows(half, half)
        elif kind == "down_proj":  # (experts, hidden, intermediate)
            layout |= {f"{module}.{i}.down_proj.weight": whole.item(i) for i in range(shape[0])}
        else:
            layout[name] = whole
    return layout


def check_layout(layout: Layout, live: Mapping[str, Shape]) -> None:
    """Raises WeightsError unless each live value is published exactly once."""
    places: dict[str, list[Place]] = {name: [] for name in live}
    for name, place in layout.items():
        if place.live not in places:
            raise WeightsError(f"the layout puts {name!r} into {place.live!r}, which the engine has not: correct it")
        reach = place.offset + sum((n - 1) * stride for n, stride in zip(place.shape, place.strides, strict=True))
        if 0 in place.shape or min(place.offset, *place.strides, 0) < 0 or reach >= prod(live[place.live]):
            raise WeightsError(f"the layout puts {name!r} outside of {place.live!r}: correct its shape or place")
        places[place.live].append(place)
    for name, parts in places.items():
        values = prod(live[name])
        if sum(prod(part.shape) for part in parts) != values or not _disjoint(parts, values):
            raise WeightsError(f"the layout does not name each value of {name!r} exactly once: correct it")


def _disjoint(parts: list[Place], values: int) -> bool:
    """Whether no two of these, which have as many values as the live tensor, share one."""
    if all(not part.runs() or [stride for _, stride in part.runs()] == [1] for part in parts):
        edges = sorted((part.offset, part.offset + prod(part.shape)) for part in parts)
        return all(end <= start for (_, end), (start, _) in pairwise(edges))
    named = np.zeros(values, np.bool_)
    for part in parts:
        view_of(named, part)[...] = True
    return bool(named.all())


def check_update(layout: Layout, name: str, update: TensorUpdate, bits: UnsignedBits) -> None:
    """Raises WeightsError unless the update fits the published tensor of that name, and its values are such bits."""
    if name not in layout:
        raise WeightsError(f"tensor {name!r} is not of this span: fetch the parts of this span only")
    index, values, shape = update.index, update.values, layout[name].shape
    if index is None:
        fits = values.shape == shape
    elif index.ndim == 1 and values.shape == index.shape and index.dtype == np.int64:
        fits = not index.size or bool(index.min() >= 0 and index.max() < prod(shape))
    else:
        fits = False
    if not fits or values.dtype != bits:
        raise WeightsError(f"the update of {name!r} does not fit its shape {shape} in {bits}: fetch it again")


def view_of(flat: NDArray[np.generic], place: Place) -> NDArray[np.generic]:
    """The published tensor as a view of the flat live one."""
    strides = [stride * flat.itemsize for stride in place.strides]
    return np.lib.stride_tricks.as_strided(flat[place.offset :], place.shape, strides)
