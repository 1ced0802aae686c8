"""Lossless patches and snapshots of bf16 tensors. Knows no part, no version, no file and no peer.

A patch holds, for each changed tensor, the gaps between changed positions and the changes as steps of the ordered
bit pattern (one ULP is one step, zeros and infinities included), split into byte planes and compressed with zstd.
A tensor of which much changed carries a step or a value for every position, whichever is expected to be smaller.
A snapshot is a blob of values only.

Blobs come from the network. Every size is checked against what the receiver already knows (the base, or a bound)
before anything of that size is allocated; whatever is wrong with a blob, the error is CorruptChunk.
"""

# Layout, all little-endian: b"EWC\x01", u32 size of the header, the header (msgpack in a zstd frame), then the byte
# planes of each stream, one zstd frame each, without separators; a plane of zeros takes no bytes at all.

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import zstandard
from msgspec import Meta, Struct
from numpy.typing import NDArray

from echo_p2p.errors import BaseMismatch, CorruptChunk
from echo_p2p.tensors import Bits, TensorUpdate

SNAPSHOT_MAX_BYTES = 2**34
"""Default bound on the tensors of one decoded snapshot."""

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"EWC\x01"
_HEADER_MAX_BYTES = 4 * 2**20
_LEVEL = 1
_GAP_PLANES = 6
_TRY_DENSE_SHARE = 0.1  # below it positions always pay

_SPARSE, _STEPS, _VALUES = 0, 1, 2

Plane = NDArray[np.uint8]
Gaps = NDArray[np.int64]
_U16 = np.dtype("<u2")
_I64 = np.dtype("<i8")


class _Entry(Struct, frozen=True, array_like=True):
    """One tensor of a blob; the words of its form follow those of the entries before it in the form's stream."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=8)]
    form: Annotated[int, Meta(ge=_SPARSE, le=_VALUES)]
    words: Annotated[int, Meta(ge=0, le=2**40)]


_Planes = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=_GAP_PLANES)]


class _Header(Struct, frozen=True, array_like=True):
    """What a blob holds; each stream is given by the compressed sizes of its planes, lowest byte first."""

    entries: Annotated[tuple[_Entry, ...], Meta(max_length=65536)]
    gaps: _Planes
    words: Annotated[tuple[_Planes, _Planes, _Planes], Meta(description="of forms sparse, steps, values")]


@dataclass(frozen=True, slots=True)
class _Coded:
    """One tensor on its way into a blob."""

    entry: _Entry
    words: Bits  # (words,)
    gaps: Gaps | None = None  # (words,) of a sparse tensor


def content_hash(tensors: Mapping[str, Bits]) -> bytes:
    """BLAKE2b-256 over names, shapes and bits, as a tree with one leaf a tensor, in order of the names."""
    root = hashlib.blake2b(b"echo/content/1", digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name]
        leaf = hashlib.blake2b(msgspec.msgpack.encode((name, tensor.shape)), digest_size=32)
        leaf.update(_flat(tensor).astype(_U16, copy=False).view(np.uint8).data)
        root.update(leaf.digest())
    return root.digest()


def encode_patch(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> bytes:
    """A blob from which `decode_patch` with `base` gives what changed. Raises BaseMismatch if the layouts differ."""
    if {name: bits.shape for name, bits in base.items()} != {name: bits.shape for name, bits in new.items()}:
        raise BaseMismatch("base and new tensors differ in names or shapes; publish a snapshot instead")
    changed = (_code_change(name, base[name], new[name]) for name in sorted(new))
    return _pack([coded for coded in changed if coded is not None])


def decode_patch(blob: bytes, base: Mapping[str, Bits]) -> dict[str, TensorUpdate]:
    """The changed tensors with their new bits, at most those of `base`. Raises CorruptChunk.

    It takes memory in proportion to `base`, whatever the blob says.
    """
    header, body = _open(blob)
    for entry in header.entries:
        if entry.name not in base or base[entry.name].shape != entry.shape:
            raise CorruptChunk(f"the patch is of a tensor {entry.name!r} of shape {entry.shape}, which the base lacks")
    gaps, words = _read_streams(header, body)
    updates: dict[str, TensorUpdate] = {}
    used = [0, 0, 0]
    for entry in header.entries:
        at = slice(used[entry.form], used[entry.form] + entry.words)
        used[entry.form] = at.stop
        update = _decode_change(entry, base[entry.name], gaps[at], words[entry.form][at])
        updates[entry.name] = update
    return updates


def encode_snapshot(tensors: Mapping[str, Bits]) -> bytes:
    """A blob from which `decode_snapshot` gives the same tensors."""
    return _pack([_code_values(name, tensors[name]) for name in sorted(tensors)])


def decode_snapshot(blob: bytes, *, max_bytes: int = SNAPSHOT_MAX_BYTES) -> dict[str, Bits]:
    """All tensors of a snapshot, of at most `max_bytes` together. Raises CorruptChunk."""
    header, body = _open(blob)
    if any(entry.form != _VALUES for entry in header.entries):
        raise CorruptChunk("the blob is a patch, not a snapshot")
    size_bytes = 2 * sum(entry.words for entry in header.entries)
    if size_bytes > max_bytes:
        raise CorruptChunk(f"the snapshot would take {size_bytes} bytes, more than the {max_bytes} expected")
    _, (_, _, values) = _read_streams(header, body)
    tensors: dict[str, Bits] = {}
    used = 0
    for entry in header.entries:
        tensors[entry.name] = values[used : used + entry.words].reshape(entry.shape)
        used += entry.words
    return tensors


# -- one tensor ---------------------------------------------------------------------------------------------------


def _flat(bits: Bits) -> Bits:
    return np.ascontiguousarray(bits).reshape(-1)


def _ordered(bits: Bits) -> Bits:
    """Bit patterns such that the next larger float is the next larger integer; NaNs lie at both ends."""
    mask: Bits = (bits >> np.uint16(15)) * np.uint16(0x7FFF) | np.uint16(0x8000)
    return bits ^ mask


def _unordered(ordered: Bits) -> Bits:
    mask: Bits = ((ordered >> np.uint16(15)) ^ np.uint16(1)) * np.uint16(0x7FFF) | np.uint16(0x8000)
    return ordered ^ mask


def _steps(old: Bits, new: Bits) -> Bits:
    """Zigzag of the signed distance in ordered patterns, modulo 2^16: 0, -1, 1, -2 … become 0, 1, 2, 3 …"""
    distance = (_ordered(new) - _ordered(old)).view(np.int16)
    return ((distance << 1) ^ (distance >> 15)).view(np.uint16)


def _stepped(old: Bits, steps: Bits) -> Bits:
    distance = (steps >> 1) ^ (np.uint16(0) - (steps & np.uint16(1)))
    return _unordered(_ordered(old) + distance)


def _code_values(name: str, bits: Bits) -> _Coded:
    return _Coded(_Entry(name, bits.shape, _VALUES, bits.size), _flat(bits))


def _code_change(name: str, base: Bits, new: Bits) -> _Coded | None:
    old, fresh = _flat(base), _flat(new)
    index = np.flatnonzero(old != fresh)
    if not index.size:
        return None
    gaps = np.diff(index, prepend=-1) - 1
    words = _steps(old[index], fresh[index]) - np.uint16(1)  # never 0: these did change
    sparse = _Coded(_Entry(name, new.shape, _SPARSE, index.size), words, gaps)
    if index.size < _TRY_DENSE_SHARE * new.size:
        return sparse
    steps = _Coded(_Entry(name, new.shape, _STEPS, new.size), _steps(old, fresh))
    return min(sparse, steps, _code_values(name, new), key=_expected_bits)


def _decode_change(entry: _Entry, base: Bits, gaps: Gaps, words: Bits) -> TensorUpdate:
    if entry.form == _VALUES:
        return TensorUpdate(index=None, values=words.reshape(entry.shape))
    old = _flat(base)
    if entry.form == _STEPS:
        return TensorUpdate(index=None, values=_stepped(old, words).reshape(entry.shape))
    # Gaps are below 2^48 each; the float sum keeps the integer one from wrapping round.
    if float(gaps.sum(dtype=np.float64)) + entry.words > 2**62:
        raise CorruptChunk(f"positions of tensor {entry.name!r} overflow")
    index = np.cumsum(gaps + 1) - 1
    if index.size and int(index[-1]) >= old.size:
        raise CorruptChunk(f"position {int(index[-1])} is outside tensor {entry.name!r} of {old.size} values")
    return TensorUpdate(index=index, values=_stepped(old[index], words + np.uint16(1)))


def _expected_bits(coded: _Coded) -> float:
    """Order-0 entropy of the planes that this form would take."""
    planes = [*_split(coded.words, 2)]
    if coded.gaps is not None:
        planes += _split(coded.gaps, _width(coded.gaps))
    return sum(_entropy_bits(plane) for plane in planes)


def _entropy_bits(plane: Plane) -> float:
    counts = np.bincount(plane, minlength=256)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / plane.size)).sum())


# -- streams and planes -------------------------------------------------------------------------------------------


def _width(gaps: Gaps) -> int:
    """Bytes that the largest gap needs."""
    return (int(gaps.max(initial=0)).bit_length() + 7) // 8


def _split(words: Bits | Gaps, width: int) -> list[Plane]:
    """The lowest `width` bytes of each word as a plane each, lowest first."""
    little = words.astype(words.dtype.newbyteorder("<"), copy=False)
    columns = little.view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(columns[:, k]) for k in range(width)]


def _pack(coded: Sequence[_Coded]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)

    def compress(planes: Iterable[Plane]) -> list[bytes]:
        return [compressor.compress(plane.data) if plane.any() else b"" for plane in planes]

    gaps = np.concatenate([np.empty(0, np.int64), *(c.gaps for c in coded if c.gaps is not None)])
    streams = [compress(_split(gaps, _width(gaps)))]
    for form in (_SPARSE, _STEPS, _VALUES):
        words = np.concatenate([np.empty(0, np.uint16), *(c.words for c in coded if c.entry.form == form)])
        streams.append(compress(_split(words, 2)))
    sizes = [tuple(len(plane) for plane in stream) for stream in streams]
    header = _Header(tuple(c.entry for c in coded), sizes[0], (sizes[1], sizes[2], sizes[3]))
    head = compressor.compress(msgspec.msgpack.encode(header))
    return b"".join([_PREFIX.pack(_MAGIC, len(head)), head, *(plane for stream in streams for plane in stream)])


def _open(blob: bytes) -> tuple[_Header, memoryview]:
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
        header = msgspec.msgpack.decode(head, type=_Header)
    except msgspec.DecodeError as error:
        raise CorruptChunk(f"the header of the blob is malformed: {error}") from None
    names = [entry.name for entry in header.entries]
    if names != sorted(set(names)):
        raise CorruptChunk("the tensors of the blob are not in order, or one is named twice")
    for entry in header.entries:
        size = math.prod(entry.shape)
        if entry.words > size or (entry.form != _SPARSE and entry.words != size):
            raise CorruptChunk(f"{entry.words} words do not fit tensor {entry.name!r} of {size} values")
    return header, body[head_bytes:]


def _read_streams(header: _Header, body: memoryview) -> tuple[Gaps, list[Bits]]:
    """The gaps, and the words of each form. The caller has bounded the words of all entries."""
    counts = [sum(entry.words for entry in header.entries if entry.form == form) for form in range(3)]
    if sum(header.gaps) + sum(sum(sizes) for sizes in header.words) != len(body):
        raise CorruptChunk(f"the planes do not add up to the {len(body)} bytes of the blob")
    words: list[Bits] = []
    gaps = np.zeros(counts[_SPARSE], _I64)
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
