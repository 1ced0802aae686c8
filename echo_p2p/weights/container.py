"""The container of weight blobs: a header of numbers, and sections of bytes. Knows no meaning of either.

Nothing is allocated here but the header, which is bounded. Whatever is wrong, the error is CorruptChunk.
"""

# Layout, all little-endian: b"EWC\x03", u32 size of the header, the header (msgpack), the sections without separators.

import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from echo_p2p.errors import CorruptChunk

SNAPSHOT, PATCH = 0, 1

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"EWC\x03"
_LENGTH_MAX = 256
_HEADER_MAX_BYTES = 2 * 9 * _LENGTH_MAX + 16


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kind: Annotated[int, Meta(ge=SNAPSHOT, le=PATCH)]
    numbers: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=_LENGTH_MAX)]
    sections: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=_LENGTH_MAX)]


class BlobWriter:
    """Collects numbers and sections of one blob."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._numbers: list[int] = []
        self._sections: list[bytes] = []

    def number(self, value: int) -> None:
        """Add one number, below 2^40."""
        self._numbers.append(value)

    def section(self, content: bytes) -> None:
        """Add some bytes."""
        self._sections.append(content)

    def blob(self) -> bytes:
        """The whole."""
        sizes = tuple(len(section) for section in self._sections)
        head = msgspec.msgpack.encode(_Header(self._kind, tuple(self._numbers), sizes))
        return b"".join([_PREFIX.pack(_MAGIC, len(head)), head, *self._sections])


class BlobReader:
    """Hands out a blob's numbers and sections in the order in which they were written."""

    def __init__(self, blob: bytes, kind: int) -> None:
        header, self._body = _open(blob)
        if header.kind != kind:
            raise CorruptChunk(
                "the blob is a snapshot, not a patch" if kind == PATCH else "the blob is a patch, not a snapshot"
            )
        self._numbers = iter(header.numbers)
        self._sections = iter(header.sections)

    def number(self, limit: int) -> int:
        """The next number, at most `limit`."""
        value = next(self._numbers, None)
        if value is None or value > limit:
            raise CorruptChunk(f"the blob says {value} where at most {limit} makes sense")
        return value

    def section(self) -> memoryview:
        """The next bytes."""
        size = next(self._sections, None)
        if size is None:
            raise CorruptChunk("the blob ends before its last section")
        content, self._body = self._body[:size], self._body[size:]
        return content

    def end(self) -> None:
        """Raises CorruptChunk if something is left."""
        if next(self._numbers, None) is not None or next(self._sections, None) is not None:
            raise CorruptChunk("the blob goes on after its last section")


def _open(blob: bytes) -> tuple[_Header, memoryview]:
    view = memoryview(blob)
    if len(view) < _PREFIX.size:
        raise CorruptChunk(f"a blob of {len(view)} bytes is too short")
    magic, head_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptChunk(f"the blob starts with {magic!r}, not {_MAGIC!r}: another format or version")
    body = view[_PREFIX.size :]
    if head_bytes > min(len(body), _HEADER_MAX_BYTES):
        raise CorruptChunk(f"a header of {head_bytes} bytes does not fit the blob, or makes no sense")
    try:
        header = msgspec.msgpack.decode(body[:head_bytes], type=_Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptChunk(f"the header of the blob is malformed: {error}") from None
    if sum(header.sections) != len(body) - head_bytes:
        raise CorruptChunk(f"the sections do not add up to the {len(body) - head_bytes} bytes behind the header")
    return header, body[head_bytes:]
