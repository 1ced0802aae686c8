"""Blobs by hash from any peer that holds them, over streams. Knows nothing of what the bytes mean.

A request names a hash and an offset; the reply says how large the blob is, or why it isn't sent, and is followed by
the bytes in frames of one size, so that other streams get their turn and a transfer cut short goes on elsewhere.
A stream carries any number of requests, one after the other.
"""

import hashlib
import logging
from collections.abc import Sequence

import msgspec
import trio

from echo_p2p.errors import CorruptChunk, EchoError, NetError, RemoteError, Unreachable
from echo_p2p.net.absentees import Absentees
from echo_p2p.net.base import Stream, Streams
from echo_p2p.net.blob_server import Lookup, Watcher, serve_blobs
from echo_p2p.net.blob_wire import BLOB_FRAME_BYTES, UNDECODABLE, Reply, Request
from echo_protocols import names

__all__ = [
    "BLOB_FRAME_BYTES",
    "INLINE_MAX_BYTES",
    "Lookup",
    "Watcher",
    "blob_hash",
    "checked_blob",
    "fetch_blob",
    "fetch_from_any",
    "receive_blob",
    "serve_blobs",
]

log = logging.getLogger(__name__)

INLINE_MAX_BYTES = 2**18
"""Blobs up to this size are hashed where they are: in less time than a thread takes to be asked."""

_NOT_NOW = ("absent", "busy")


def blob_hash(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE2b-256: the name of a blob."""
    return hashlib.blake2b(data, digest_size=32).digest()


async def fetch_blob(
    streams: Streams, peer: str, hash: bytes, size_bytes: int, *, exact: bool = False, timeout_s: float = 20.0
) -> bytes:
    """The blob of that hash, of at most `size_bytes`, from one peer; of so many, if they are said to be `exact`.

    `timeout_s` bounds each wait: for the connection, the reply, each frame. Raises CorruptChunk, Unreachable,
    StreamClosed, and RemoteError with the reason ("absent").
    """
    received = bytearray()
    await receive_blob(streams, peer, hash, size_bytes, received, exact=exact, timeout_s=timeout_s)
    return await checked_blob(received, hash, peer)


async def fetch_from_any(
    streams: Streams,
    peers: Sequence[str],
    hash: bytes,
    size_bytes: int,
    *,
    exact: bool = False,
    timeout_s: float = 20.0,
    absentees: Absentees | None = None,
) -> bytes:
    """The blob from the first of `peers` that gives it; a transfer cut short goes on with the next one.

    Those of `absentees` are left out, and those added that can't be reached: share it among fetches of many blobs.

    Raises RemoteError ("absent") if every peer answers that it lacks the blob, else Unreachable if none gives it.
    """
    absentees = absentees or Absentees()
    received = bytearray()
    failures: list[EchoError] = []
    for peer in peers:
        if absentees.avoided(peer, trio.current_time()):
            failures.append(Unreachable(f"peer {peer} did not answer a moment ago"))
            continue
        for _ in range(2):  # once more from the start if the bytes of an earlier peer may be what is wrong
            resumed = bool(received)
            try:
                await receive_blob(streams, peer, hash, size_bytes, received, exact=exact, timeout_s=timeout_s)
                absentees.answered(peer)
                return await checked_blob(received, hash, peer)
            except (NetError, RemoteError, CorruptChunk) as error:
                failures.append(error)
                if isinstance(error, Unreachable):
                    absentees.failed(peer, trio.current_time())
                if isinstance(error, NetError) or (isinstance(error, RemoteError) and error.reason in _NOT_NOW):
                    break  # what has arrived is good as far as anybody knows
                received.clear()
                if not resumed:
                    break
        log.info("blob %s: %s", hash.hex()[:12], failures[-1])
    if failures and all(isinstance(failure, RemoteError) and failure.reason == "absent" for failure in failures):
        raise RemoteError("absent", f"none of {len(peers)} peers has blob {hash.hex()[:12]}")
    last = failures[-1] if failures else "no peer is known to hold it"
    raise Unreachable(f"blob {hash.hex()[:12]} could not be fetched from {len(peers)} peers; last: {last}")


async def checked_blob(received: bytearray, hash: bytes, peer: str) -> bytes:
    """The blob that has been received, last from `peer`. Raises CorruptChunk if it isn't what was asked for."""
    data = bytes(received)
    small = len(data) <= INLINE_MAX_BYTES
    if (blob_hash(data) if small else await trio.to_thread.run_sync(blob_hash, data)) != hash:
        raise CorruptChunk(f"what {peer} sent does not hash to {hash.hex()[:12]}; ask another peer")
    return data


async def receive_blob(
    streams: Streams,
    peer: str,
    hash: bytes,
    size_bytes: int,
    received: bytearray,
    *,
    exact: bool = False,
    timeout_s: float = 20.0,
) -> None:
    """Add to `received` what the peer has beyond it. Whatever fails, what has arrived stays. Raises as `fetch_blob`.

    What CorruptChunk says is of this peer alone.
    """
    async with streams.open(peer, names.BLOB, timeout_s=timeout_s) as stream:
        await stream.send(msgspec.msgpack.encode(Request(hash, len(received), size_bytes if exact else 0)))
        try:
            reply = msgspec.msgpack.decode(await _next(stream, timeout_s), type=Reply)
        except UNDECODABLE:
            raise CorruptChunk(f"{peer} sent a malformed reply for blob {hash.hex()[:12]}") from None
        if reply.refusal is not None:
            raise RemoteError(reply.refusal, f"{peer} refused blob {hash.hex()[:12]}: {reply.refusal}")
        if not (size_bytes if exact else len(received)) <= reply.size_bytes <= size_bytes:
            bound = "" if exact else "at most "
            raise CorruptChunk(
                f"{peer} offers {reply.size_bytes} bytes for blob {hash.hex()[:12]}, of {bound}{size_bytes}"
            )
        while len(received) < reply.size_bytes:
            frame = await _next(stream, timeout_s)
            if len(frame) != min(BLOB_FRAME_BYTES, reply.size_bytes - len(received)):
                raise CorruptChunk(f"{peer} sent a frame of {len(frame)} bytes in blob {hash.hex()[:12]}")
            received += frame


async def _next(stream: Stream, timeout_s: float) -> bytes:
    with trio.move_on_after(timeout_s):
        return await stream.receive()
    raise Unreachable(f"{stream.peer} sent nothing for {timeout_s:g} s")
