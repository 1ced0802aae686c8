"""Lossless patches and snapshots of bf16 tensors. Knows no part, no version, no file and no peer.

A patch holds, for each changed tensor, the gaps between changed positions and the changes as steps of the ordered
bit pattern (one ULP is one step, zeros and infinities included), split into byte planes and compressed with zstd.
A tensor of which much changed carries a step or a value for every position, whichever is expected to be smaller.
A snapshot is a blob of values only.

Blobs come from the network. Every size is checked against what the receiver already knows (the base, or a bound)
before anything of that size is allocated; whatever is wrong with a blob, the error is CorruptChunk.
"""

import hashlib
from collections.abc import Mapping

import msgspec
import numpy as np

from echo_p2p.errors import BaseMismatch, CorruptChunk
from echo_p2p.tensors import Bits, TensorUpdate, layout
from echo_p2p.weights.container import (
    SPARSE,
    STEPS,
    VALUES,
    Coded,
    Entry,
    Gaps,
    Plane,
    gap_width,
    open_blob,
    pack,
    read_streams,
    split_planes,
)

SNAPSHOT_MAX_BYTES = 2**34
"""Default bound on the tensors of one decoded snapshot."""

_TRY_DENSE_SHARE = 0.1  # below it positions always pay


def content_hash(tensors: Mapping[str, Bits]) -> bytes:
    """BLAKE2b-256 over names, shapes and bits, as a tree with one leaf a tensor, in order of the names."""
    root = hashlib.blake2b(b"echo/content/1", digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name]
        leaf = hashlib.blake2b(msgspec.msgpack.encode((name, tensor.shape)), digest_size=32)
        leaf.update(_flat(tensor).astype("<u2", copy=False).view(np.uint8).data)
        root.update(leaf.digest())
    return root.digest()


def encode_patch(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> bytes:
    """A blob from which `decode_patch` with `base` gives what changed. Raises BaseMismatch if the layouts differ."""
    if layout(base) != layout(new):
        raise BaseMismatch("base and new tensors differ in names or shapes; publish a snapshot instead")
    changed = (_code_change(name, base[name], new[name]) for name in sorted(new))
    return pack([coded for coded in changed if coded is not None])


def decode_patch(blob: bytes, base: Mapping[str, Bits]) -> dict[str, TensorUpdate]:
    """The changed tensors with their new bits, at most those of `base`. Raises CorruptChunk.

    It takes memory in proportion to `base`, whatever the blob says.
    """
    header, body = open_blob(blob)
    for entry in header.entries:
        if entry.name not in base or base[entry.name].shape != entry.shape:
            raise CorruptChunk(f"the patch is of a tensor {entry.name!r} of shape {entry.shape}, which the base lacks")
    gaps, words = read_streams(header, body)
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
    return pack([_code_values(name, tensors[name]) for name in sorted(tensors)])


def decode_snapshot(blob: bytes, *, max_bytes: int = SNAPSHOT_MAX_BYTES) -> dict[str, Bits]:
    """All tensors of a snapshot, of at most `max_bytes` together. Raises CorruptChunk."""
    header, body = open_blob(blob)
    if any(entry.form != VALUES for entry in header.entries):
        raise CorruptChunk("the blob is a patch, not a snapshot")
    size_bytes = 2 * sum(entry.words for entry in header.entries)
    if size_bytes > max_bytes:
        raise CorruptChunk(f"the snapshot would take {size_bytes} bytes, more than the {max_bytes} expected")
    _, (_, _, values) = read_streams(header, body)
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


def _code_values(name: str, bits: Bits) -> Coded:
    return Coded(Entry(name, bits.shape, VALUES, bits.size), _flat(bits))


def _code_change(name: str, base: Bits, new: Bits) -> Coded | None:
    old, fresh = _flat(base), _flat(new)
    index = np.flatnonzero(old != fresh)
    if not index.size:
        return None
    gaps = np.diff(index, prepend=-1) - 1
    words = _steps(old[index], fresh[index]) - np.uint16(1)  # never 0: these did change
    sparse = Coded(Entry(name, new.shape, SPARSE, index.size), words, gaps)
    if index.size < _TRY_DENSE_SHARE * new.size:
        return sparse
    steps = Coded(Entry(name, new.shape, STEPS, new.size), _steps(old, fresh))
    return min(sparse, steps, _code_values(name, new), key=_expected_bits)


def _decode_change(entry: Entry, base: Bits, gaps: Gaps, words: Bits) -> TensorUpdate:
    if entry.form == VALUES:
        return TensorUpdate(index=None, values=words.reshape(entry.shape))
    old = _flat(base)
    if entry.form == STEPS:
        return TensorUpdate(index=None, values=_stepped(old, words).reshape(entry.shape))
    # Gaps are below 2^48 each; the float sum keeps the integer one from wrapping round.
    if float(gaps.sum(dtype=np.float64)) + entry.words > 2**62:
        raise CorruptChunk(f"positions of tensor {entry.name!r} overflow")
    index = np.cumsum(gaps + 1) - 1
    if index.size and int(index[-1]) >= old.size:
        raise CorruptChunk(f"position {int(index[-1])} is outside tensor {entry.name!r} of {old.size} values")
    return TensorUpdate(index=index, values=_stepped(old[index], words + np.uint16(1)))


def _expected_bits(coded: Coded) -> float:
    """Order-0 entropy of the planes that this form would take."""
    planes = [*split_planes(coded.words, 2)]
    if coded.gaps is not None:
        planes += split_planes(coded.gaps, gap_width(coded.gaps))
    return sum(_entropy_bits(plane) for plane in planes)


def _entropy_bits(plane: Plane) -> float:
    counts = np.bincount(plane, minlength=256)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / plane.size)).sum())
