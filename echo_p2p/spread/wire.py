"""What is said on `/echo/holders/1`: wants one way, announcements the other. Knows no blob."""

from typing import Annotated

from msgspec import Meta, Struct

from echo_protocols.values import Hash

HASHES_MAX = 1024
"""Hashes of one list of one frame."""

PREFIX_BYTES = 4

WANTED_MAX = 2048
"""Hashes that one peer may want at a time; the server ignores further ones."""

FRAME_BYTES_MAX = 2 * 34 * HASHES_MAX + 64
KEEPALIVE_S = 30.0
"""After so long without a word, the opener sends an empty Want. Silence of three times that ends a stream."""

SILENCE_MAX_S = 3 * KEEPALIVE_S

_Hashes = Annotated[tuple[Hash, ...], Meta(max_length=HASHES_MAX)]
_Prefix = Annotated[bytes, Meta(min_length=PREFIX_BYTES, max_length=PREFIX_BYTES)]
_Prefixes = Annotated[tuple[_Prefix, ...], Meta(max_length=HASHES_MAX)]


class Want(Struct, frozen=True, array_like=True):
    """`added` to what the opener of the stream wants, and `dropped` from it: since it has them, or no longer cares."""

    added: _Hashes = ()
    dropped: _Hashes = ()


class Have(Struct, frozen=True, array_like=True):
    """Some of what the opener wants can be had here, from now on. An empty one answers an empty Want.

    `later` has the beginnings of the hashes of what is here too, and should be had from others, or from here when it is
    the opener's turn.
    """

    hashes: _Hashes = ()
    later: _Prefixes = ()
