"""What is said on `/echo/blob/1`: requests one way, replies and bytes the other. Knows no blob."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from echo_protocols.values import Count, Hash

BLOB_FRAME_BYTES = 2**16
"""Bytes of each frame of a transfer but the last. Also the least that has to arrive within each deadline."""

REQUEST_MAX_BYTES = 1024
UNDECODABLE = (msgspec.DecodeError, RecursionError)

Refusal = Literal["absent", "malformed", "offset", "busy"]


class Request(Struct, frozen=True, array_like=True):
    """`size_bytes` is what the blob has, 0 if that isn't known: small ones need not wait for large."""

    hash: Hash
    offset: Count
    size_bytes: Count = 0


class Reply(Struct, frozen=True, array_like=True):
    """`size_bytes` of the whole blob; frames with what follows the offset come next, unless there is a refusal."""

    size_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    refusal: Refusal | None = None
