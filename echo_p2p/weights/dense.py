"""Tensors of which a word for every position is coded, as byte planes. Knows no name and no blob.

A word is a value, or the step to it in the order of floats: one unit in the last place is one step, zeros and
infinities included. Steps are exact, modulo the number of bit patterns.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_p2p.tensors import Bits
from echo_p2p.weights.entropy import Sink, Source, compress, decompress


def write_words(words: Sequence[Bits], sink: Sink) -> None:
    """Words of some tensors, of one size, as compressed byte planes, lowest first; nothing if there is no tensor."""
    if words:
        for plane in _planes(np.concatenate(words)):
            sink.section(compress(plane))


def read_words(shapes: Mapping[str, tuple[int, ...]], width: int, source: Source) -> dict[str, Bits]:
    """What `write_words` was given, words of `width` bytes. The caller has bounded the shapes."""
    if not shapes:
        return {}
    sizes = [math.prod(shape) for shape in shapes.values()]
    words = np.empty(sum(sizes), f"<u{width}")
    columns = words.view(np.uint8).reshape(-1, width)
    for column in range(width):
        columns[:, column] = np.frombuffer(decompress(source.section(), len(words)), np.uint8)
    parts = np.split(words.astype(f"u{width}", copy=False), np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def steps_between(old: Bits, new: Bits) -> Bits:
    """Zigzag of the signed distance in ordered patterns, modulo 2^bits: 0, -1, 1, -2 … become 0, 1, 2, 3 …"""
    distance = _ordered(new) - _ordered(old)
    negative = distance >> _word(old, 8 * old.itemsize - 1)
    zigzag: Bits = (distance << _word(old, 1)) ^ (_word(old, 0) - negative)
    return zigzag


def stepped(old: Bits, steps: Bits) -> Bits:
    """`old` with the steps taken."""
    one = _word(old, 1)
    return _unordered(_ordered(old) + ((steps >> one) ^ (_word(old, 0) - (steps & one))))


def expected_bits(words: Bits) -> float:
    """Order-0 entropy of the byte planes."""
    bits = 0.0
    for plane in _planes(words):
        counts = np.bincount(plane, minlength=256)
        counts = counts[counts > 0]
        bits -= float((counts * np.log2(counts / plane.size)).sum())
    return bits


def little_endian(words: Bits) -> Bits:
    """The words as they go into hashes and blobs."""
    return words.astype(words.dtype.newbyteorder("<"), copy=False)


def _planes(words: Bits) -> list[NDArray[np.uint8]]:
    columns = little_endian(words).view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(columns[:, k]) for k in range(words.itemsize)]


def _ordered(bits: Bits) -> Bits:
    """Bit patterns such that the next larger float is the next larger integer; NaNs lie at both ends."""
    return bits ^ _mask(bits, bits >> _word(bits, 8 * bits.itemsize - 1))


def _unordered(ordered: Bits) -> Bits:
    return ordered ^ _mask(ordered, ordered >> _word(ordered, 8 * ordered.itemsize - 1) ^ _word(ordered, 1))


def _mask(like: Bits, negative: Bits) -> Bits:
    """All bits for negative floats, the sign alone for others."""
    sign = 1 << (8 * like.itemsize - 1)
    mask: Bits = negative * _word(like, sign - 1) | _word(like, sign)
    return mask


def _word(like: Bits, value: int) -> np.unsignedinteger[Any]:
    word: np.unsignedinteger[Any] = like.dtype.type(value)
    return word
