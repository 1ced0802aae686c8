"""Loops over all values of a model, and over all bits of a patch, as machine code. Knows no tensor's name and no blob.

numba compiles a loop when it is first called (half a second, then kept on disk); loops run without the interpreter's
lock. Compiled code checks no index. So each loop stays inside its arrays whatever these hold, even if that changes
meanwhile, provided their sizes are as it says; the functions above the loops see to the sizes.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import CorruptChunk

Numbers = NDArray[np.int64]
Patterns = NDArray[np.unsignedinteger[Any]]
Words = NDArray[np.uint64]

_NUMBER_BITS = 48
NUMBER_MAX = 2**_NUMBER_BITS - 1

_TILE = 2**20  # values that are looked at in one call: the buffers are as long
_CHUNK = 2**11  # words of 64 bits that are looked at together: they stay in the cache
_UNARY = 24  # quotients from here on are written out instead
_ZEROS = np.array([8, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))])  # below a byte's lowest one
_SHIFT_MAX = 32  # unary, shifted bits and what is left of a byte fit 64 bits
_WINDOW = 64  # numbers that the shift is derived from
_log = logging.getLogger(__name__)


def differing(old: Patterns, new: Patterns) -> tuple[Numbers, Patterns, Patterns]:
    """Where two flat arrays of one type and size differ, ascending, and both values there."""
    if old.ndim != 1 or old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype} {old.shape} can't be compared with {new.dtype} {new.shape}")
    scan, room = _compiled(_scan_differing), min(_TILE, old.size)
    hits, places = np.empty(_CHUNK, np.int64), np.empty(room, np.int64)
    before, after = np.empty(room, old.dtype), np.empty(room, old.dtype)
    found = []
    for start in range(0, max(old.size, 1), _TILE):
        earlier, later = old[start : start + _TILE], new[start : start + _TILE]
        count = scan(earlier, later, _words(earlier), _words(later), start, hits, places, before, after)
        found.append((places[:count].copy(), before[:count].copy(), after[:count].copy()))
    if len(found) == 1:
        return found[0]
    index, left, right = zip(*found, strict=True)
    return np.concatenate(index), np.concatenate(left), np.concatenate(right)


def values_below(bits: Patterns, limit: int) -> tuple[Numbers, Patterns]:
    """Where magnitudes of a flat array are below a limit, ascending, and the values there."""
    sign = 1 << (8 * bits.itemsize - 1)
    lanes = sum(1 << (8 * bits.itemsize * lane) for lane in range(8 // bits.itemsize))
    # With this added, the highest bit of a lane is clear if its magnitude is below the limit; lanes can't overflow.
    offset, signs = np.uint64(lanes * (sign - limit)), np.uint64(lanes * sign)
    scan, room = _compiled(_scan_below), min(_TILE, bits.size)
    hits, places, values = np.empty(_CHUNK, np.int64), np.empty(room, np.int64), np.empty(room, bits.dtype)
    found = []
    for start in range(0, max(bits.size, 1), _TILE):
        tile = bits[start : start + _TILE]
        count = scan(tile, _words(tile), offset, signs, limit, start, hits, places, values)
        found.append((places[:count].copy(), values[:count].copy()))
    if len(found) == 1:
        return found[0]
    index, below = zip(*found, strict=True)
    return np.concatenate(index), np.concatenate(below)


def positions_in(values: Numbers, chosen: Numbers) -> Numbers:
    """Where the chosen values are, all of which are among the values and in the same order."""
    positions = np.empty(chosen.size, np.int64)
    return positions[: _compiled(_positions)(values, chosen, positions)]


def rice_coded(numbers: Numbers) -> bytes:
    """Numbers from 0 to NUMBER_MAX as Rice codes, whose shift follows the numbers before."""
    stream = np.empty(9 * numbers.size + 1, np.uint8)  # 72 bits at most
    return stream[: _compiled(_write_rice)(numbers.astype(np.int64, copy=False), stream)].tobytes()


def rice_decoded(stream: memoryview, count: int, limit: int) -> Numbers:
    """What `rice_coded` was given: numbers (count,), whose sum is at most `limit`. Raises CorruptChunk."""
    if count > 8 * len(stream):
        raise CorruptChunk(f"{len(stream)} bytes do not hold {count} numbers")
    numbers = np.empty(count, np.int64)
    taken = _compiled(_read_rice)(np.array(stream, np.uint8), min(limit, 2**62), numbers)
    if taken != len(stream):
        raise CorruptChunk(f"a stream of {len(stream)} bytes does not hold {count} numbers of at most {limit} together")
    return numbers


def _words(values: Patterns) -> Words:
    """The values by 64 bits, without a rest."""
    lanes = 8 // values.itemsize
    return values[: values.size // lanes * lanes].view(np.uint64)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    try:
        compiled: Callable[..., Any] = numba.njit(function, nogil=True, cache=True)
    except RuntimeError as error:  # neither the package's folder nor the user's can be written to
        _log.info("compiled code is not kept: %s", error)
        compiled = numba.njit(function, nogil=True)
    return compiled


# -- loops --------------------------------------------------------------------------------------------------------


def _scan_differing(
    old: Patterns,
    new: Patterns,
    old_words: Words,
    new_words: Words,
    first: int,
    hits: Numbers,
    places: Numbers,
    before: Patterns,
    after: Patterns,
) -> int:
    """Fills the last three, which are as long as `old` and `new`; returns how far. `hits` has room for a chunk."""
    found, lanes = 0, 8 // old.itemsize
    for chunk in range(0, old_words.size, _CHUNK):
        hit, done = 0, found
        for word in range(chunk, min(chunk + _CHUNK, old_words.size)):
            hits[hit] = word  # the next one overwrites it unless it counts: faster than a branch
            hit += old_words[word] != new_words[word]
        for word in hits[:hit]:
            for place in range(word * lanes, word * lanes + lanes):
                places[found] = place
                found += old[place] != new[place]
        for at in range(done, found):
            place = places[at]
            places[at], before[at], after[at] = first + place, old[place], new[place]
    for place in range(old_words.size * lanes, old.size):
        if old[place] != new[place]:
            places[found], before[found], after[found] = first + place, old[place], new[place]
            found += 1
    return found


def _scan_below(
    bits: Patterns,
    words: Words,
    offset: np.uint64,
    signs: np.uint64,
    limit: int,
    first: int,
    hits: Numbers,
    places: Numbers,
    values: Patterns,
) -> int:
    """Fills the last two, which are as long as `bits`; returns how far. `hits` has room for a chunk."""
    found, lanes, magnitude = 0, 8 // bits.itemsize, (1 << (8 * bits.itemsize - 1)) - 1
    for chunk in range(0, words.size, _CHUNK):
        hit, done = 0, found
        for word in range(chunk, min(chunk + _CHUNK, words.size)):
            hits[hit] = word
            hit += ((words[word] & ~signs) + offset) & signs != signs
        for word in hits[:hit]:
            for place in range(word * lanes, word * lanes + lanes):
                places[found] = place
                found += (bits[place] & magnitude) < limit
        for at in range(done, found):
            place = places[at]
            places[at], values[at] = first + place, bits[place]
    for place in range(words.size * lanes, bits.size):
        if (bits[place] & magnitude) < limit:
            places[found], values[found] = first + place, bits[place]
            found += 1
    return found


def _positions(values: Numbers, chosen: Numbers, positions: Numbers) -> int:
    """Fills the last one, which is as long as `chosen`; returns how far."""
    found = 0
    for at in range(values.size):
        if found < chosen.size and values[at] == chosen[found]:
            positions[found] = at
            found += 1
    return found


def _write_rice(numbers: Numbers, stream: NDArray[np.uint8]) -> int:
    """Fills the stream, of 9 bytes a number and one more; returns how far. Lowest bits come first."""
    held, bits, at = np.uint64(0), 0, 0  # what is not written yet, less than a byte between two numbers
    total, count, shift = 0, 1, 0
    for number in numbers:
        quotient = number >> shift
        if quotient < _UNARY:
            held |= np.uint64(1) << np.uint64(bits + quotient)
            bits += quotient + 1
            held |= np.uint64(number - (quotient << shift)) << np.uint64(bits)
            bits += shift
        else:
            for _ in range(_UNARY // 8):
                stream[at] = held
                at, held = at + 1, held >> np.uint64(8)
            held |= np.uint64(number) << np.uint64(bits)
            bits += _NUMBER_BITS
        while bits >= 8:
            stream[at] = held & np.uint64(255)
            at, bits, held = at + 1, bits - 8, held >> np.uint64(8)
        total, count = total + number, count + 1
        if count == _WINDOW:
            total, count = total >> 1, count >> 1
        while shift < _SHIFT_MAX and (count << (shift + 1)) <= total:
            shift += 1
        while shift and (count << shift) > total:
            shift -= 1
    stream[at] = held
    return at + (bits > 0)


def _read_rice(stream: NDArray[np.uint8], limit: int, numbers: Numbers) -> int:
    """Fills the numbers; returns how much of the stream they take, or -1 if it is too short or they are too large."""
    held, bits, at = np.uint64(0), 0, 0
    total, count, shift, left = 0, 1, 0, limit
    for index in range(numbers.size):
        while bits <= 56 and at < stream.size:
            held |= np.uint64(stream[at]) << np.uint64(bits)
            at, bits = at + 1, bits + 8
        quotient = 0
        while quotient < _UNARY and not held & np.uint64(255):
            quotient, held = quotient + 8, held >> np.uint64(8)
        if quotient < _UNARY:
            zeros = _ZEROS[held & np.uint64(255)]
            quotient, held = quotient + zeros, held >> np.uint64(zeros + 1)
            bits -= quotient + 1 + shift
            low = held & ((np.uint64(1) << np.uint64(shift)) - np.uint64(1))
            numbers[index] = (quotient << shift) + np.int64(low)
            held >>= np.uint64(shift)
        else:
            bits -= _UNARY
            while 0 <= bits <= 56 and at < stream.size:
                held |= np.uint64(stream[at]) << np.uint64(bits)
                at, bits = at + 1, bits + 8
            bits -= _NUMBER_BITS
            numbers[index] = held & np.uint64(NUMBER_MAX)
            held >>= np.uint64(_NUMBER_BITS)
        number = numbers[index]
        left -= number
        if bits < 0 or left < 0:
            return -1
        total, count = total + number, count + 1
        if count == _WINDOW:
            total, count = total >> 1, count >> 1
        while shift < _SHIFT_MAX and (count << (shift + 1)) <= total:
            shift += 1
        while shift and (count << shift) > total:
            shift -= 1
    return at - bits // 8
