"""Streams of whole numbers, coded near their entropy: sets, numbers and flags. Knows no tensor and no blob.

Codes adapt to the numbers before, so streams cost least if numbers of one size stand together. A reader knows how many
to expect. It allocates in proportion to that and to what it is given, and raises CorruptChunk, whatever is wrong.
"""

from typing import Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from echo_p2p.errors import CorruptChunk
from echo_p2p.kernels import Numbers, rice_coded, rice_decoded

Flags = NDArray[np.bool_]

LEVEL = 1


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
    write_places(index, sink)


def read_set(size: int, source: Source) -> Flags:
    """What `write_set` was given: flags (size,)."""
    turn = source.number(size)
    index = read_places(source.number(size), size, source)
    flags = np.zeros(size, np.bool_)
    flags[:turn] = True
    flags[index] ^= True
    return flags


def write_places(index: Numbers, sink: Sink) -> None:
    """Ascending places, as the gaps between them."""
    write_numbers(np.diff(index, prepend=-1) - 1, sink)


def read_places(count: int, size: int, source: Source) -> Numbers:
    """What `write_places` was given: places (count,) below `size`."""
    if count > size:
        raise CorruptChunk(f"{count} different places can't be inside a range of {size}")
    gaps = read_numbers(count, size - count, source)
    gaps += 1
    places = np.cumsum(gaps)
    places -= 1
    return places


def write_numbers(numbers: Numbers, sink: Sink) -> None:
    """Numbers that are mostly about as large as those before, up to NUMBER_MAX."""
    sink.section(rice_coded(numbers))


def read_numbers(count: int, limit: int, source: Source) -> Numbers:
    """What `write_numbers` was given: numbers (count,), whose sum is at most `limit`."""
    return rice_decoded(source.section(), count, limit)


def write_bits(flags: Flags, sink: Sink) -> None:
    """Flags that are as often set as not."""
    sink.section(np.packbits(flags).tobytes())


def read_bits(count: int, source: Source) -> Flags:
    """What `write_bits` was given: flags (count,)."""
    section = source.section()
    if len(section) != (count + 7) // 8:
        raise CorruptChunk(f"{len(section)} bytes do not hold {count} bits")
    return np.unpackbits(np.frombuffer(section, np.uint8), count=count).view(np.bool_)


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
