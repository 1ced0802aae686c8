"""Changed values of some tensors, coded by what the base already tells. Knows no name, no blob and no dense form.

An optimiser moves every value by about the learning rate, and the next value of the format is the further away the
larger a value is: so small values change often and by many steps, large ones seldom and by one. Positions of values
below a bound are therefore coded in order of the base's magnitude (256 classes: the exponent), the rest by gaps, and
steps in the same order. Both sides derive the order from the base. Steps are exact: signs and integer distances of
bit patterns, so NaNs, infinities, denormals and zeros of both signs are nothing special.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import CorruptChunk
from echo_p2p.kernels import Numbers, positions_in, values_below
from echo_p2p.tensors import Bits
from echo_p2p.weights import entropy
from echo_p2p.weights.entropy import Sink, Source

_CLASSES = 256
_SMALL_SHARE = 0.02  # listing the small values takes time in proportion
_SAMPLE = 509  # one value in so many tells how many are small; prime to the lengths of rows


@dataclass(frozen=True, slots=True)
class Change:
    """What changed in one tensor: its old bits, flat, and both values at the places where they differ."""

    old: Bits  # (values,)
    index: Numbers  # (changed,), ascending
    before: Bits  # (changed,)
    after: Bits  # (changed,)

    @property
    def new(self) -> Bits:
        """The new bits, all of them (values,)."""
        new = self.old.copy()
        new[self.index] = self.after
        return new


def write_changes(changes: Sequence[Change], sink: Sink) -> None:
    """Code the changes of tensors of one item size."""
    starts = _starts([change.old for change in changes])
    index = np.concatenate([change.index + start for change, start in zip(changes, starts.tolist(), strict=True)])
    before = np.concatenate([change.before for change in changes])
    after = np.concatenate([change.after for change in changes])
    classes = _classes(before)
    bound = _small_below(changes, classes)
    small = _Small([change.old for change in changes], bound)
    below, above = np.flatnonzero(classes < bound), np.flatnonzero(classes >= bound)
    below = below.take(np.argsort(classes.take(below), kind="stable"))
    sink.number(bound)
    entropy.write_set(positions_in(small.places.take(small.order), index.take(below)), small.places.size, sink)
    sink.number(above.size)
    entropy.write_places(index.take(above), sink)
    coded = np.concatenate((below, above))
    _write_steps(before.take(coded), after.take(coded), sink)


def read_changes(olds: Sequence[Bits], source: Source) -> list[tuple[Numbers, Bits]]:
    """Positions and new values of each tensor, from its old bits, flat."""
    small = _Small(olds, source.number(_CLASSES - 1))
    total, starts = sum(old.size for old in olds), _starts(olds)
    chosen = small.order.take(np.flatnonzero(entropy.read_set(small.old.size, source)))
    places = entropy.read_places(source.number(total), total, source)
    large = [old.take(part) for old, part in zip(olds, _split(places, starts), strict=True)]
    values = _read_steps(np.concatenate([small.old.take(chosen), *large]), source)
    places, values = _sorted(np.concatenate((small.places.take(chosen), places)), values)
    if (places[1:] == places[:-1]).any():
        raise CorruptChunk("a value of the patch changes twice")
    indexes = _split(places, starts)
    cuts = np.cumsum([index.size for index in indexes[:-1]], dtype=np.int64)
    return list(zip(indexes, np.split(values, cuts), strict=True))


def _starts(olds: Sequence[Bits]) -> Numbers:
    """Where each tensor starts among all values of all tensors."""
    return np.cumsum([0, *(old.size for old in olds)], dtype=np.int64)[:-1]


def _split(places: Numbers, starts: Numbers) -> list[Numbers]:
    """Ascending places among all values of all tensors, as those inside each tensor."""
    parts = np.split(places, np.searchsorted(places, starts[1:]))
    return [part - start for part, start in zip(parts, starts.tolist(), strict=True)]


def _sorted(places: Numbers, values: Bits) -> tuple[Numbers, Bits]:
    if values.itemsize == 2:  # a sort of both in one number takes half the time of an argsort
        keys = np.sort(places << 16 | values)
        return keys >> 16, keys.astype(np.uint16)
    order = np.argsort(places)
    return places[order], values[order]


# -- small values -------------------------------------------------------------------------------------------------


class _Small:
    """The values below a class in some tensors, and the order in which they are coded."""

    def __init__(self, olds: Sequence[Bits], bound: int) -> None:
        found = [_below(old, bound, start) for old, start in zip(olds, _starts(olds).tolist(), strict=True)]
        self.places = np.concatenate([places for places, _ in found])  # among all values of all tensors
        self.old = np.concatenate([bits for _, bits in found])
        self.order = np.argsort(_classes(self.old), kind="stable")


def _classes(bits: Bits) -> NDArray[np.uint8]:
    """The highest eight bits of each magnitude."""
    return ((bits << 1) >> (8 * bits.itemsize - 8)).astype(np.uint8)


def _below(old: Bits, bound: int, first: int) -> tuple[Numbers, Bits]:
    """Where the values below a class are, if the tensor starts at `first`, and these values."""
    places, bits = values_below(old, bound << (8 * old.itemsize - 9))
    places += first
    return places, bits


def _small_below(changes: Sequence[Change], classes: NDArray[np.uint8]) -> int:
    """The bound that is expected to save most, of those that leave few values below."""
    changed = np.bincount(classes, minlength=_CLASSES).astype(np.float64)
    values = np.zeros(_CLASSES)
    for change in changes:
        sample = _classes(change.old[::_SAMPLE])
        values += np.bincount(sample, minlength=_CLASSES) * (change.old.size / sample.size)
    values = np.maximum(values, changed)
    below = np.concatenate(([0.0], np.cumsum(values)))
    small = np.concatenate(([0.0], np.cumsum(_set_bits(changed, values))))
    large = _set_bits(changed.sum() - np.concatenate(([0.0], np.cumsum(changed))), below[-1] - below)
    bits = np.where(below <= _SMALL_SHARE * below[-1], small + large, np.inf)
    return int(bits[:_CLASSES].argmin())


def _set_bits(chosen: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropy of which of `size` values are the chosen ones."""
    share = np.clip(chosen / np.maximum(size, 1), 1e-9, 1 - 1e-9)
    return -size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


# -- steps --------------------------------------------------------------------------------------------------------


def _write_steps(old: Bits, new: Bits, sink: Sink) -> None:
    """New values (changed,), which differ from the old ones, by sign and distance of magnitudes."""
    crossed = (old ^ new) > _sign(old) - 1
    over = np.flatnonzero(crossed)
    entropy.write_set(over, crossed.size, sink)
    far = _magnitudes(new.take(over))
    usual = int(np.median(far)) if far.size else 0
    sink.number(usual)
    entropy.write_numbers(_zigzag(far - usual), sink)
    distance = _magnitudes(new) - _magnitudes(old)
    if over.size:
        distance = distance[~crossed]
    entropy.write_bits(distance > 0, sink)
    several = np.flatnonzero(np.abs(distance) != 1)
    entropy.write_set(several, distance.size, sink)
    entropy.write_numbers(np.abs(distance.take(several)) - 2, sink)


def _read_steps(old: Bits, source: Source) -> Bits:
    largest = _sign(old) - 1
    crossed = entropy.read_set(old.size, source)
    over = np.flatnonzero(crossed)
    usual = source.number(largest)
    far = _unzigzag(entropy.read_numbers(over.size, 4 * over.size * largest, source)) + usual
    up = entropy.read_bits(old.size - over.size, source)
    several = np.flatnonzero(entropy.read_set(up.size, source))
    steps = 2 + entropy.read_numbers(several.size, several.size * largest, source)
    if int(steps.max(initial=0)) > largest:
        raise CorruptChunk("a step of the patch is longer than the format")
    magnitude = _magnitudes(old)
    distance = 2 * up.astype(magnitude.dtype) - 1
    distance[several] *= steps.astype(magnitude.dtype)
    if over.size:
        magnitude[~crossed] += distance
        magnitude[over] = np.clip(far, -1, largest + 1)
    else:
        magnitude += distance
    if magnitude.size and (int(magnitude.min()) < 0 or int(magnitude.max()) > largest):
        raise CorruptChunk("a step of the patch leads out of the format")
    new = magnitude.astype(old.dtype) | (old & old.dtype.type(_sign(old)))
    new[over] ^= old.dtype.type(_sign(old))
    return new


def _sign(bits: Bits) -> int:
    """The bit of the sign."""
    return 1 << (8 * bits.itemsize - 1)


def _magnitudes(bits: Bits) -> NDArray[np.signedinteger[Any]]:
    """In integers that are wide enough for the distance of two."""
    return (bits & (_sign(bits) - 1)).astype(np.int32 if bits.itemsize == 2 else np.int64)


def _zigzag(numbers: NDArray[np.signedinteger[Any]]) -> Numbers:
    wide = numbers.astype(np.int64)
    return (wide << 1) ^ (wide >> 63)


def _unzigzag(numbers: Numbers) -> Numbers:
    return (numbers >> 1) ^ -(numbers & 1)
