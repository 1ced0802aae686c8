"""Releases: what a trainer says when a new policy version is out. Knows no codec, no store and no torch.

A model's tensors are grouped into **parts**: `embed`, `layer.0` … `layer.N-1`, `head` (final norm and output
matrix). A chunk carries one part, so a peer fetches only the parts of its span.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from echo_protocols.values import Count, Hash, Name, PolicyVersion, Span

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Chunk(Struct, frozen=True, kw_only=True, array_like=True):
    """One part's patch or snapshot: the blob `hash` turns tensors of content `base` into tensors of content `result`.

    A snapshot has no base: `base` is None.
    """

    part: Name
    hash: Hash
    size_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    base: Hash | None
    result: Hash


Chunks = Annotated[tuple[Chunk, ...], Meta(max_length=4096)]


class Skip(Struct, frozen=True, kw_only=True, array_like=True):
    """A patch over several versions: from `base`, whose sealed release hashes to `base_release`."""

    base: PolicyVersion
    base_release: Hash
    chunks: Annotated[tuple[Chunk, ...], Meta(min_length=1, max_length=4096)]


class Release(Struct, frozen=True, kw_only=True):
    """One policy version, and how to get there.

    `patch` leads from `parent` to `version`, each of `skips` from a version before that; `snapshot` holds the version
    whole. There is a patch or a snapshot. `parent_release`, `base_release` of a skip and `snapshot_release` (of the
    newest release before this one that has a snapshot) are hashes of sealed releases, so that a peer that was away can
    find its way.
    The first release of a new epoch names in `continues` the version whose weights and step it goes on from.
    `figures` sum up the step, for people; they may be NaN.
    """

    version: PolicyVersion
    parent: PolicyVersion | None
    parent_release: Hash | None
    snapshot_release: Hash | None
    continues: PolicyVersion | None = None
    policy_hash: Hash
    patch: Chunks = ()
    skips: Annotated[tuple[Skip, ...], Meta(max_length=8)] = ()
    snapshot: Chunks = ()
    model_bytes: Count
    figures: Annotated[dict[Name, float], Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        if not self.patch and not self.snapshot:
            raise ValueError("a release has a patch or a snapshot")
        if self.patch and self.parent is None:
            raise ValueError("a patch needs a parent")
        if self.parent is not None and self.parent >= self.version:
            raise ValueError("a patch leads from an older version")
        skipped = [chunk for skip in self.skips for chunk in skip.chunks]
        if any(chunk.base is None for chunk in (*self.patch, *skipped)):
            raise ValueError("chunks of a patch have a base")
        if any(chunk.base is not None for chunk in self.snapshot):
            raise ValueError("chunks of a snapshot have no base")
        if self.skips and (self.parent is None or any(skip.base >= self.parent for skip in self.skips)):
            raise ValueError("a skip leads from a version before the parent")
        continued = self.continues
        if continued and (continued.epoch >= self.version.epoch or continued.step != self.version.step):
            raise ValueError(f"epoch {self.version.epoch} can't continue from {continued} at step {self.version.step}")

    @property
    def patch_bytes(self) -> int:
        """Bytes of all patch chunks."""
        return sum(chunk.size_bytes for chunk in self.patch)


def part_of(tensor: str) -> str:
    """The part that a tensor (by its Hugging Face name) belongs to."""
    layer = _LAYER.search(tensor)
    if layer:
        return f"layer.{int(layer[1])}"
    return "embed" if "embed_tokens" in tensor else "head"


def parts_of(span: Span, *, tied: bool) -> tuple[str, ...]:
    """The parts that a span needs, in model order. With tied embeddings the last stage needs `embed` too."""
    parts = [f"layer.{i}" for i in range(span.start, span.end)]
    if span.first or (span.last and tied):
        parts.insert(0, "embed")
    if span.last:
        parts.append("head")
    return tuple(parts)


def policy_hash(results: Mapping[str, bytes]) -> bytes:
    """Root hash of a policy from the content hash of each part."""
    root = hashlib.blake2b(b"echo/policy/1", digest_size=32)
    for part in sorted(results):
        root.update(hashlib.blake2b(part.encode(), digest_size=32).digest() + results[part])
    return root.digest()


def total_bytes(chunks: Iterable[Chunk]) -> int:
    """Bytes of some chunks."""
    return sum(chunk.size_bytes for chunk in chunks)
