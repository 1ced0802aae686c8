"""The container of weight blobs: a header that lists tensors, and streams of words cut into compressed byte planes.

Knows no meaning of a word. Nothing of a size that the blob declares is allocated here but what the header's entries
call for, which the caller bounds between `open_blob` and `read_streams`. Whatever is wrong, the error is CorruptChunk.
"""

# Layout, all little-endian: b"EWC\x01", u32 size of the header, the header (msgpack in a zstd frame), then the byte
# planes of each stream, one zstd frame each, without separators; a plane of zeros takes no bytes at all.

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import zstandard
from msgspec import Meta, Struct
from numpy.typing import NDArray

from echo_p2p.errors import CorruptChunk
from echo_p2p.tensors import Bits

SPARSE, STEPS, VALUES = 0, 1, 2
"""Forms of a tensor: steps at some positions, a step for every position, a value for every position."""

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"EWC\x01"
_HEADER_MAX_BYTES = 4 * 2**20
_LEVEL = 1
_GAP_PLANES = 6
_U16 = np.dtype("<u2")
_I64 = np.dtype("<i8")

Plane = NDArray[np.uint8]
Gaps = NDArray[np.int64]


class Entry(Struct, frozen=True, array_like=True):
    """One tensor of a blob; the words of its form follow those of the entries before it in the form's stream."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=8)]
    form: Annotated[int, Meta(ge=SPARSE, le=VALUES)]
    words: Annotated[int, Meta(ge=0, le=2**40)]


_Planes = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=_GAP_PLANES)]


class Header(Struct, frozen=True, array_like=True):
    """What a blob holds; each stream is given by the compressed sizes of its planes, lowest byte first."""

    entries: Annotated[tuple[Entry, ...], Meta(max_length=65536)]
    gaps: _Planes
    words: Annotated[tuple[_Planes, _Planes, _Planes], Meta(description="of forms sparse, steps, values")]


@dataclass(frozen=True, slots=True)
class Coded:
    """One tensor on its way into a blob."""

    entry: Entry
    words: Bits  # (words,)
    gaps: Gaps | None = None  # (words,) of a sparse tensor


def gap_width(gaps: Gaps) -> int:
    """Bytes that the largest gap needs."""
    return (int(gaps.max(initial=0)).bit_length() + 7) // 8


def split_planes(words: Bits | Gaps, width: int) -> list[Plane]:
    """The lowest `width` bytes of each word as a plane each, lowest first."""
    little = words.astype(words.dtype.newbyteorder("<"), copy=False)
    columns = little.view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(columns[:, k]) for k in range(width)]


def pack(coded: Sequence[Coded]) -> bytes:
    """A blob of these tensors, which are in order of their names."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)

    def compress(planes: Iterable[Plane]) -> list[bytes]:
        return [compressor.compress(plane.data) if plane.any() else b"" for plane in planes]

    gaps = np.concatenate([np.empty(0, np.int64), *(c.gaps for c in coded if c.gaps is not None)])
    streams = [compress(split_planes(gaps, gap_width(gaps)))]
    for form in (SPARSE, STEPS, VALUES):
        words = np.concatenate([np.empty(0, np.uint16), *(c.words for c in coded if c.entry.form == form)])
        streams.append(compress(split_planes(words, 2)))
    sizes = [tuple(len(plane) for plane in stream) for stream in streams]
    header = Header(tuple(c.entry for c in coded), sizes[0], (sizes[1], sizes[2], sizes[3]))
    head = compressor.compress(msgspec.msgpack.encode(header))
    return b"".join([_PREFIX.pack(_MAGIC, len(head)), head, *(plane for stream in streams for plane in stream)])


def open_blob(blob: bytes) -> tuple[Header, memoryview]:
    """The header, of which every entry is sound by itself, and the planes."""
    view = memoryview(blob)
    if len(view) < _PREFIX.size:
        raise CorruptChunk(f"a blob of {len(view)} bytes is too short")
    magic, head_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptChunk(f"the blob starts with {magic!r}, not {_MAGIC!r}: another format or version")
    body = view[_PREFIX.size :]
    if head_bytes > len(body):
        raise CorruptChunk(f"a header of {head_bytes} bytes does not fit the blob")
    head = _decompress(body[:head_bytes], lambda size: size <= _HEADER_MAX_BYTES)
    try:
        header = msgspec.msgpack.decode(head, type=Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptChunk(f"the header of the blob is malformed: {error}") from None
    names = [entry.name for entry in header.entries]
    if names != sorted(set(names)):
        raise CorruptChunk("the tensors of the blob are not in order, or one is named twice")
    for entry in header.entries:
        size = math.prod(entry.shape)
        if entry.words > size or (entry.form != SPARSE and entry.words != size):
            raise CorruptChunk(f"{entry.words} words do not fit tensor {entry.name!r} of {size} values")
    return header, body[head_bytes:]


def read_streams(header: Header, body: memoryview) -> tuple[Gaps, list[Bits]]:
    """The gaps, and the words of each form. The caller has bounded the words of all entries."""
    counts = [sum(entry.words for entry in header.entries if entry.form == form) for form in range(3)]
    if sum(header.gaps) + sum(sum(sizes) for sizes in header.words) != len(body):
        raise CorruptChunk(f"the planes do not add up to the {len(body)} bytes of the blob")
    words: list[Bits] = []
    gaps = np.zeros(counts[SPARSE], _I64)
    body = _join(gaps.view(np.uint8).reshape(-1, 8), header.gaps, body)
    for count, sizes in zip(counts, header.words, strict=True):
        if len(sizes) > 2:
            raise CorruptChunk("a stream of 16-bit words has more than two planes")
        stream = np.zeros(count, _U16)
        body = _join(stream.view(np.uint8).reshape(-1, 2), sizes, body)
        words.append(stream.astype(np.uint16, copy=False))
    return gaps.astype(np.int64, copy=False), words


def _join(columns: NDArray[np.uint8], sizes: Sequence[int], body: memoryview) -> memoryview:
    """Fill the first columns (words, bytes of a word) with the planes at the start of `body`; returns what follows."""
    for column, size in enumerate(sizes):
        if size:
            plane = _decompress(body[:size], lambda count: count == len(columns))
            columns[:, column] = np.frombuffer(plane, np.uint8)
            body = body[size:]
    return body


def _decompress(frame: memoryview, accepts: Callable[[int], bool]) -> bytes:
    """One zstd frame, whose declared content size is checked before any of it is allocated."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if not accepts(size):
            raise CorruptChunk(f"a frame of {size} bytes is not what the blob's header calls for")
        # read_across_frames and allow_extra_data are refusals: one frame, nothing behind it.
        content = zstandard.ZstdDecompressor().decompress(frame, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptChunk(f"a frame of the blob does not decompress: {error}") from None
    if len(content) != size:
        raise CorruptChunk(f"a frame of the blob holds {len(content)} bytes instead of {size}")
    return content
