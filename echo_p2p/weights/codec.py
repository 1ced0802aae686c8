"""Lossless patches and snapshots of tensors of 16 or 32 bits. Knows no part, no version, no file and no peer.

A patch lists nothing that its base tells: tensors stand in order of their names, positions and steps are coded by the
base's magnitudes (`changes`). A tensor of which much changed carries a step or a value for every position as byte
planes, whichever is expected to be smaller. A snapshot is a blob of names, shapes and values.

Blobs come from the network. Every size is checked against what the receiver already knows (the base, or a bound)
before anything of that size is allocated; whatever is wrong with a blob, the error is CorruptChunk.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta, Struct

from echo_p2p.errors import BaseMismatch, CorruptChunk
from echo_p2p.tensors import Bits, TensorUpdate, changed_values
from echo_p2p.weights.changes import Change, read_changes, write_changes
from echo_p2p.weights.container import PATCH, SNAPSHOT, BlobReader, BlobWriter
from echo_p2p.weights.dense import expected_bits, little_endian, read_words, stepped, steps_between, write_words
from echo_p2p.weights.entropy import compress, decompress

SNAPSHOT_MAX_BYTES = 2**34
"""Default bound on the tensors of one decoded snapshot."""

_SAME, _SPARSE, _STEPS, _VALUES = range(4)  # forms of a tensor in a patch
_WIDTHS = (2, 4)
_TRY_DENSE_SHARE = 0.1  # below it positions always pay
_NAMES_MAX_BYTES = 16 * 2**20


class _Entry(Struct, frozen=True, array_like=True):
    """One tensor of a snapshot."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=8)]
    width: Literal[2, 4]


_Entries = Annotated[tuple[_Entry, ...], Meta(max_length=65536)]


def content_hash(tensors: Mapping[str, Bits]) -> bytes:
    """BLAKE3 over names, shapes and bits, as a tree with one leaf a tensor, in order of the names.

    Taken of all weights at each version, on both sides: BLAKE2b would take twice as long as all else together.
    """
    root = blake3(b"echo/content/1")
    for name in sorted(tensors):
        tensor = tensors[name]
        said = (name, tensor.shape) if tensor.itemsize == 2 else (name, tensor.shape, tensor.itemsize)
        leaf = blake3(msgspec.msgpack.encode(said))
        leaf.update(little_endian(_flat(tensor)).view(np.uint8).data)
        root.update(leaf.digest())
    return root.digest()


def encode_patch(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> bytes:
    """A blob from which `decode_patch` with `base` gives what changed. Raises BaseMismatch if the layouts differ."""
    return encode_changes(base, find_changes(base, new))


def find_changes(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> list[Change]:
    """The change of each tensor, in order of the names. Raises BaseMismatch if the layouts differ.

    They share memory with `base` only: `new` may change again.
    """
    if _layout(base) != _layout(new):
        raise BaseMismatch("base and new tensors differ in names, shapes or sizes; publish a snapshot instead")
    pairs = ((_flat(base[name]), _flat(new[name])) for name in sorted(new))
    return [Change(old, *changed_values(old, fresh)) for old, fresh in pairs]


def encode_changes(base: Mapping[str, Bits], changes: Sequence[Change]) -> bytes:
    """`encode_patch`, given what `find_changes` found."""
    forms = [_form(change) for change in changes]
    writer = BlobWriter(PATCH)
    writer.section(_fingerprint(base))
    writer.section(compress(np.array(forms, np.uint8)))
    for width in _WIDTHS:
        by_form: list[list[Change]] = [[], [], [], []]
        for form, change in zip(forms, changes, strict=True):
            if change.old.itemsize == width:
                by_form[form].append(change)
        if by_form[_SPARSE]:
            write_changes(by_form[_SPARSE], writer)
        write_words([steps_between(change.old, change.new) for change in by_form[_STEPS]], writer)
        write_words([change.new for change in by_form[_VALUES]], writer)
    return writer.blob()


def decode_patch(blob: bytes, base: Mapping[str, Bits]) -> dict[str, TensorUpdate]:
    """The changed tensors with their new bits, at most those of `base`. Raises CorruptChunk.

    It takes memory in proportion to `base`, whatever the blob says.
    """
    reader = BlobReader(blob, PATCH)
    if reader.section() != _fingerprint(base):
        raise CorruptChunk("the patch is of tensors of other names or shapes than the base's")
    forms = dict(zip(sorted(base), decompress(reader.section(), len(base)), strict=True))
    if max(forms.values(), default=_SAME) > _VALUES:
        raise CorruptChunk("a tensor of the patch has an unknown form")
    updates: dict[str, TensorUpdate] = {}
    for width in _WIDTHS:
        sparse, steps, values = (
            {n: _flat(base[n]) for n, chosen in forms.items() if chosen == form and base[n].itemsize == width}
            for form in (_SPARSE, _STEPS, _VALUES)
        )
        if sparse:
            for name, (index, bits) in zip(sparse, read_changes(list(sparse.values()), reader), strict=True):
                updates[name] = TensorUpdate(index=index, values=bits)
        for name, words in read_words({name: old.shape for name, old in steps.items()}, width, reader).items():
            updates[name] = TensorUpdate(index=None, values=stepped(steps[name], words).reshape(base[name].shape))
        for name, bits in read_words({name: base[name].shape for name in values}, width, reader).items():
            updates[name] = TensorUpdate(index=None, values=bits)
    reader.end()
    return updates


def encode_snapshot(tensors: Mapping[str, Bits]) -> bytes:
    """A blob from which `decode_snapshot` gives the same tensors."""
    writer = BlobWriter(SNAPSHOT)
    entries = [_Entry(name, tensors[name].shape, _width(tensors[name])) for name in sorted(tensors)]
    names = np.frombuffer(msgspec.msgpack.encode(entries), np.uint8)
    writer.number(names.size)
    writer.section(compress(names))
    for width in _WIDTHS:
        write_words([_flat(tensors[e.name]) for e in entries if e.width == width], writer)
    return writer.blob()


def decode_snapshot(blob: bytes, *, max_bytes: int = SNAPSHOT_MAX_BYTES) -> dict[str, Bits]:
    """All tensors of a snapshot, of at most `max_bytes` together. Raises CorruptChunk."""
    reader = BlobReader(blob, SNAPSHOT)
    size = reader.number(_NAMES_MAX_BYTES)
    try:
        entries = msgspec.msgpack.decode(decompress(reader.section(), size), type=_Entries)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptChunk(f"the list of tensors is malformed: {error}") from None
    names = [entry.name for entry in entries]
    if names != sorted(set(names)):
        raise CorruptChunk("the tensors of the blob are not in order, or one is named twice")
    size_bytes = sum(entry.width * math.prod(entry.shape) for entry in entries)
    if size_bytes > max_bytes:
        raise CorruptChunk(f"the snapshot would take {size_bytes} bytes, more than the {max_bytes} expected")
    tensors: dict[str, Bits] = {}
    for width in _WIDTHS:
        tensors |= read_words({e.name: e.shape for e in entries if e.width == width}, width, reader)
    reader.end()
    return {name: tensors[name] for name in names}


# -- layouts ------------------------------------------------------------------------------------------------------


def _width(bits: Bits) -> Literal[2, 4]:
    return 2 if bits.itemsize == 2 else 4


def _layout(tensors: Mapping[str, Bits]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(name, tensors[name].shape, tensors[name].itemsize) for name in sorted(tensors)]


def _fingerprint(tensors: Mapping[str, Bits]) -> bytes:
    """Guards against the wrong base: the content hash of the chunk proves the right one."""
    return hashlib.blake2b(msgspec.msgpack.encode(_layout(tensors)), digest_size=8).digest()


def _flat(bits: Bits) -> Bits:
    return np.ascontiguousarray(bits).reshape(-1)


def _form(change: Change) -> int:
    changed, size = change.index.size, change.old.size
    if not changed:
        return _SAME
    if changed < _TRY_DENSE_SHARE * size:
        return _SPARSE
    share = changed / size
    positions = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) if changed < size else 0.0
    expected = {
        _SPARSE: positions + expected_bits(steps_between(change.before, change.after)),
        _STEPS: expected_bits(steps_between(change.old, change.new)),
        _VALUES: expected_bits(change.new),
    }
    return min(expected, key=lambda form: expected[form])
