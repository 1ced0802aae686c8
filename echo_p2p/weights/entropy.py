"""Streams of whole numbers, coded near their entropy: sets, gaps and magnitudes. Knows no tensor and no blob.

Everything adapts by blocks of 64 numbers, so streams cost least if numbers of one size stand together. Vectorised:
a stream is a few arrays of one kind (shifts, quotients, low bits), not a string of code words.

A reader knows how many numbers to expect. It allocates in proportion to that and to what it is given, and raises
CorruptChunk, whatever is wrong.
"""

from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from echo_p2p.errors import CorruptChunk

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

LEVEL = 1
_BLOCK = 64
_SHIFT_MAX = 44


class Sink(Protocol):
    """Where coded streams go."""

    def number(self, value: int) -> None:
        """Add one number, not negative."""

    def section(self, content: bytes) -> None:
        """Add some bytes."""


class Source(Protocol):
    """Where they come from, in the same order."""

    def number(self, limit: int) -> int:
        """The next number, at most `limit`. Raises CorruptChunk."""

    def section(self) -> memoryview:
        """The next bytes. Raises CorruptChunk."""


def write_set(index: Numbers, size: int, sink: Sink) -> None:
    """Which of `size` flags are set, for flags that mostly are up to some place, and mostly aren't behind it."""
    surplus = np.arange(1, 2 * index.size, 2) - index  # of set over other flags, up to each set one
    turn = 0
    if index.size and surplus.max() > 0:
        last = int(surplus.argmax())
        turn = int(index[last]) + 1
        others = np.ones(turn, np.bool_)
        others[index[: last + 1]] = False
        index = np.concatenate((np.flatnonzero(others), index[last + 1 :]))
    sink.number(turn)
    sink.number(index.size)
    write_gaps(np.diff(index, prepend=-1) - 1, sink)


def read_set(size: int, source: Source) -> Flags:
    """What `write_set` was given: flags (size,)."""
    turn = source.number(size)
    index = read_places(source.number(size), size, source)
    flags = np.zeros(size, np.bool_)
    flags[:turn] = True
    flags[index] ^= True
    return flags


def read_places(count: int, size: int, source: Source) -> Numbers:
    """Ascending places (count,) below `size`, from the gaps between them."""
    gaps = read_gaps(count, source)
    # No gap reaches 2^62 / count, so the sum can't wrap round.
    places = np.cumsum(gaps + 1) - 1
    if places.size and int(places[-1]) >= size:
        raise CorruptChunk(f"place {int(places[-1])} is outside a range of {size}")
    return places


def write_gaps(gaps: Numbers, sink: Sink) -> None:
    """Gaps between places: Rice codes, whose quotients are unary, with the shift that suits each block's mean."""
    rows, means = _blocks(gaps)
    shifts = np.log2(np.maximum(0.9624 * (means + 0.5), 1.0)).astype(np.uint8)  # of geometric numbers; Kiely 2004
    ends = np.cumsum((rows >> shifts[:, None]).reshape(-1)[: gaps.size] + 1)
    unary = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    unary[ends - 1] = 1
    sink.section(np.packbits(unary).tobytes())
    _write_low_bits(rows, shifts, gaps.size, sink)


def read_gaps(count: int, source: Source) -> Numbers:
    """What `write_gaps` was given: numbers (count,), which can be summed up."""
    unary = source.section()
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8)))
    if ends.size != count or (int(ends[-1]) // 8 + 1 if count else 0) != len(unary):
        raise CorruptChunk(f"a stream holds {ends.size} gaps instead of {count}")
    return _with_low_bits(np.diff(ends, prepend=-1) - 1, source)


def write_values(values: Numbers, sink: Sink) -> None:
    """Magnitudes of any distribution: quotients of a few bits are left to zstd's Huffman coder."""
    rows, means = _blocks(values)
    # 2^shift > mean / 4 and no value is over 64 means: quotients fit a byte.
    shifts = np.maximum(np.frexp(np.ceil(means))[1] - 2, 0).astype(np.uint8)
    quotients = (rows >> shifts[:, None]).reshape(-1)[: values.size].astype(np.uint8)
    sink.section(compress(quotients))
    _write_low_bits(rows, shifts, values.size, sink)


def read_values(count: int, source: Source) -> Numbers:
    """What `write_values` was given: numbers (count,)."""
    return _with_low_bits(np.frombuffer(decompress(source.section(), count), np.uint8).astype(np.int64), source)


def write_bits(flags: Flags, sink: Sink) -> None:
    """Flags that are as often set as not."""
    sink.section(np.packbits(flags).tobytes())


def read_bits(count: int, source: Source) -> Flags:
    """What `write_bits` was given: flags (count,)."""
    return _unpack(source.section(), count).view(np.bool_)


def compress(plane: NDArray[np.uint8]) -> bytes:
    """A zstd frame of these bytes; none at all if all of them are zero."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(plane.data) if plane.any() else b""


def decompress(frame: memoryview, size: int) -> bytes:
    """What `compress` was given, of `size` bytes. A frame's declared size is checked before it is allocated."""
    if not len(frame):
        return bytes(size)
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != size:
            raise CorruptChunk(f"a frame of {declared} bytes stands where {size} are called for")
        # read_across_frames and allow_extra_data are refusals: one frame, nothing behind it.
        content = zstandard.ZstdDecompressor().decompress(frame, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptChunk(f"a frame of the blob does not decompress: {error}") from None
    if len(content) != size:
        raise CorruptChunk(f"a frame of the blob holds {len(content)} bytes instead of {size}")
    return content


# -- blocks -------------------------------------------------------------------------------------------------------


def _blocks(numbers: Numbers) -> tuple[Numbers, NDArray[np.float64]]:
    """Rows of a block each (blocks, 64), the last one filled up with zeros, and their means (blocks,)."""
    short = -numbers.size % _BLOCK
    rows = np.concatenate((numbers, np.zeros(short, np.int64))).reshape(-1, _BLOCK)
    lengths = np.full(len(rows), float(_BLOCK))
    lengths[-1:] -= short
    return rows, rows.sum(axis=1) / lengths


def _narrow(shift: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(np.uint16 if shift <= 16 else np.uint64)


def _write_low_bits(rows: Numbers, shifts: NDArray[np.uint8], count: int, sink: Sink) -> None:
    """The lowest bits of each number, as many as its block's shift: plane by plane, as most of a plane is used."""
    sink.section(compress(shifts))
    top, short = int(shifts.max(initial=0)), rows.size - count
    lows = rows.astype(_narrow(top))
    planes = [np.empty(0, np.uint8)]
    for bit in range(top):
        used = shifts > bit
        plane = ((lows if used.all() else lows[used]) >> bit).astype(np.uint8).reshape(-1) & np.uint8(1)
        planes.append(plane[: plane.size - short] if used[-1] else plane)
    sink.section(np.packbits(np.concatenate(planes)).tobytes())


def _with_low_bits(quotients: Numbers, source: Source) -> Numbers:
    count = quotients.size
    blocks, short = -(-count // _BLOCK), -count % _BLOCK
    shifts = np.frombuffer(decompress(source.section(), blocks), np.uint8)
    top = int(shifts.max(initial=0))
    if top > _SHIFT_MAX or int(quotients.max(initial=0)) >= 2**62 // max(count, 1) >> top:
        raise CorruptChunk(f"a number of a stream is too large: its shift is {top}")
    total = _BLOCK * int(shifts.sum(dtype=np.int64)) - short * int(shifts[-1] if count else 0)
    bits = _unpack(source.section(), total)
    lows = np.zeros((blocks, _BLOCK), _narrow(top))
    at = 0
    for bit in range(top):
        used = shifts > bit
        size = _BLOCK * int(np.count_nonzero(used))
        plane = bits[at : at + size]
        if short and used[-1]:
            size -= short
            plane = np.concatenate((bits[at : at + size], np.zeros(short, np.uint8)))
        shifted = plane.reshape(-1, _BLOCK).astype(lows.dtype) << lows.dtype.type(bit)
        at += size
        if used.all():
            lows |= shifted
        else:
            lows[used] |= shifted
    rows = np.concatenate((quotients, np.zeros(short, np.int64))).reshape(-1, _BLOCK)
    rows <<= shifts[:, None]
    rows |= lows.astype(np.int64)
    return rows.reshape(-1)[:count]


def _unpack(section: memoryview, count: int) -> NDArray[np.uint8]:
    if len(section) != (count + 7) // 8:
        raise CorruptChunk(f"{len(section)} bytes do not hold {count} bits")
    return np.unpackbits(np.frombuffer(section, np.uint8), count=count)
