"""One part's tensors brought from one content to another by chunks, and checked. Knows no peer, file or version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_p2p.errors import BaseMismatch, WeightsError
from echo_p2p.tensors import Bits, TensorUpdate, difference, layout, updated
from echo_p2p.weights.codec import content_hash, decode_patch, decode_snapshot
from echo_protocols.release import Chunk


@dataclass(frozen=True, slots=True)
class Brought:
    """A part at its new content, and how it differs from the old one."""

    tensors: Mapping[str, Bits]
    updates: Mapping[str, TensorUpdate]


def advance(old: Mapping[str, Bits], chunks: Sequence[Chunk], blobs: Sequence[bytes], result: bytes) -> Brought:
    """Apply the chunks' blobs, in order, to copies of one part's tensors.

    The first chunk is a snapshot or a patch of `old`; without chunks, `old` is what is wanted. Memory is bounded by
    the size of `old`. Raises BaseMismatch if the content isn't `result` in the end, CorruptChunk for a malformed blob.
    """
    if not chunks:
        return Brought(old, {})
    tensors: Mapping[str, Bits] = old
    updates: Mapping[str, TensorUpdate] = {}
    for chunk, blob in zip(chunks, blobs, strict=True):
        if chunk.base is None:
            tensors = decode_snapshot(blob, max_bytes=sum(bits.nbytes for bits in old.values()))
            if layout(tensors) != layout(old):
                raise BaseMismatch(f"the snapshot of {chunk.part} has other tensors than the stage")
        else:
            updates = decode_patch(blob, tensors)
            tensors = {**tensors, **{name: updated(tensors[name], update) for name, update in updates.items()}}
    if content_hash(tensors) != result:
        raise BaseMismatch(f"{len(chunks)} chunks of {chunks[0].part} do not lead to the content that is promised")
    if len(chunks) > 1 or chunks[0].base is None:
        compared = {name: difference(old[name], bits) for name, bits in tensors.items()}
        updates = {name: update for name, update in compared.items() if update is not None}
    return Brought(tensors, updates)


def culprit(old: Mapping[str, Bits], chunks: Sequence[Chunk], blobs: Sequence[bytes]) -> Chunk:
    """The first of some chunks that `advance` failed with whose blob doesn't lead to the content that it promises."""
    tensors = old
    for chunk, blob in zip(chunks, blobs, strict=True):
        try:
            tensors = advance(tensors, [chunk], [blob], chunk.result).tensors
        except WeightsError:
            return chunk
    return chunks[-1]
