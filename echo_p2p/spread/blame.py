"""Who sent what is wrong of a blob that came in pieces from several peers. Pure; knows no stream.

When such a blob is wrong nobody knows who it was, until the right one is there to compare the pieces with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from echo_p2p.net.blobs import INLINE_MAX_BYTES, blob_hash

SUSPECTS_MAX = 64
"""Pieces that are remembered of one blob."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which bytes of a blob a peer sent."""

    sender: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A part of a blob that was wrong somewhere, and the hash of that part."""

    part: Part
    hash: bytes


async def suspects_of(received: bytearray, parts: Sequence[Part]) -> list[Suspect]:
    """Remember a wrong blob by the hashes of its parts."""
    parts = parts[:SUSPECTS_MAX]
    return [Suspect(*each) for each in zip(parts, await _hashes(bytes(received), parts), strict=True)]


async def guilty(blob: bytes, suspects: Sequence[Suspect]) -> set[str]:
    """Whose part differs from the right blob."""
    hashes = await _hashes(blob, [each.part for each in suspects])
    return {each.part.sender for each, hash in zip(suspects, hashes, strict=True) if hash != each.hash}


async def _hashes(blob: bytes, parts: Sequence[Part]) -> list[bytes]:
    def hash_all() -> list[bytes]:
        return [blob_hash(memoryview(blob)[part.start : part.end]) for part in parts]

    small = sum(part.end - part.start for part in parts) <= INLINE_MAX_BYTES
    return hash_all() if small else await trio.to_thread.run_sync(hash_all)
