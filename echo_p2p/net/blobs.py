"""Blobs by hash from any peer that holds them, over streams. Knows nothing of what the bytes mean.

A request names a hash and an offset; the reply says how large the blob is, or why it isn't sent, and is followed by
the bytes in frames of one size, so that other streams get their turn and a transfer cut short goes on elsewhere.
A stream carries any number of requests, one after the other.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal, Protocol

import msgspec
import trio
from msgspec import Meta, Struct
from trio import TaskStatus

from echo_p2p.errors import CorruptChunk, EchoError, FrameTooLarge, NetError, RemoteError, Unreachable
from echo_p2p.net.base import Stream, Streams
from echo_p2p.net.uplink import Busy, Transfer, Uplink
from echo_protocols import names
from echo_protocols.values import Count, Hash

log = logging.getLogger(__name__)

BLOB_FRAME_BYTES = 2**16
"""Bytes of each frame of a transfer but the last. Also the least that has to arrive within each deadline."""

MAX_STREAMS = 64
INLINE_MAX_BYTES = 2**18
"""Blobs up to this size are hashed where they are: in less time than a thread takes to be asked."""

_REQUEST_MAX_BYTES = 1024
_IDLE_S = 60.0
_SEND_DEADLINE_S = 10.0

_UNDECODABLE = (msgspec.DecodeError, RecursionError)

Refusal = Literal["absent", "malformed", "offset", "busy"]

_NOT_NOW = ("absent", "busy")

Lookup = Callable[[bytes], bytes | None]
"""The blob of a hash, or None."""


class _Request(Struct, frozen=True, array_like=True):
    """`size_bytes` is what the blob is expected to have, 0 if that isn't known: small ones need not wait for large."""

    hash: Hash
    offset: Count
    size_bytes: Count = 0


class _Reply(Struct, frozen=True, array_like=True):
    """`size_bytes` of the whole blob; frames with what follows the offset come next, unless there is a refusal."""

    size_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    refusal: Refusal | None = None


def blob_hash(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE2b-256: the name of a blob."""
    return hashlib.blake2b(data, digest_size=32).digest()


class Watcher(Protocol):
    """Is told of blobs on their way out."""

    def asked(self, peer: str, hash: bytes) -> None:
        """A blob is asked for, and will be sent when it is its turn."""

    def began(self, peer: str, hash: bytes, size_bytes: int) -> None:
        """`size_bytes` are about to be sent."""

    def ended(self, peer: str, hash: bytes, *, whole: bool) -> None:
        """It was sent to the last byte, or something came between."""


async def serve_blobs(
    streams: Streams,
    lookup: Lookup,
    *,
    refused: Counter[str] | None = None,
    uplink: Uplink | None = None,
    watcher: Watcher | None = None,
    in_thread: bool = True,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve what `lookup` finds, until cancelled; `refused` counts what is no request.

    `lookup` is called in a worker thread, unless it is said not to block (`in_thread` false).
    """
    server = _Server(lookup, uplink or Uplink(), watcher, in_thread)
    counts = Counter[str]() if refused is None else refused

    async def handle(stream: Stream) -> None:
        try:
            while await server.answer(stream):
                pass
            counts["malformed"] += 1
        except FrameTooLarge as error:
            counts["oversized"] += 1
            log.debug("blobs for %s ended: %s", stream.peer, error)
        except trio.TooSlowError:
            counts["too-slow"] += 1
        except NetError as error:
            log.debug("blobs for %s ended: %s", stream.peer, error)

    await streams.serve(
        names.BLOB,
        handle,
        max_frame_bytes=_REQUEST_MAX_BYTES,
        max_streams=MAX_STREAMS,
        task_status=task_status,
    )


class _Server:
    """Answers requests. A blob is read once it is its turn, so that few are in memory at a time."""

    def __init__(self, lookup: Lookup, uplink: Uplink, watcher: Watcher | None, in_thread: bool) -> None:
        self._lookup = lookup
        self._uplink = uplink
        self._watcher = watcher
        self._in_thread = in_thread

    async def answer(self, stream: Stream) -> bool:
        """Answer one request; False if the peer doesn't speak the protocol."""
        with trio.fail_after(_IDLE_S):
            frame = await stream.receive()
        try:
            request = msgspec.msgpack.decode(frame, type=_Request)
        except _UNDECODABLE:
            await _reply(stream, 0, "malformed")
            return False
        whole = False
        if self._watcher is not None:
            self._watcher.asked(stream.peer, request.hash)
        try:
            async with self._uplink.transfer(stream.peer, max(0, request.size_bytes - request.offset)) as transfer:
                whole = await self._serve(stream, request, transfer)
        except Busy:
            await _reply(stream, 0, "busy")
        finally:
            if self._watcher is not None:
                self._watcher.ended(stream.peer, request.hash, whole=whole)
        return True

    async def _serve(self, stream: Stream, request: _Request, transfer: Transfer) -> bool:
        """Send the blob, or say why not; whether it was sent."""
        data = await self._find(request.hash)
        if data is None or request.offset > len(data):
            await _reply(stream, len(data or b""), "absent" if data is None else "offset")
            return False
        size_bytes = len(data) - request.offset
        if self._watcher is not None:
            self._watcher.began(stream.peer, request.hash, size_bytes)
        transfer.place.left_bytes = size_bytes
        await _reply(stream, len(data))
        view = memoryview(data)
        for start in range(request.offset, len(data), BLOB_FRAME_BYTES):
            await transfer.carry(view[start : start + BLOB_FRAME_BYTES], partial(_send, stream))
        return True

    async def _find(self, hash: bytes) -> bytes | None:
        return await trio.to_thread.run_sync(self._lookup, hash) if self._in_thread else self._lookup(hash)


async def _reply(stream: Stream, size_bytes: int, refusal: Refusal | None = None) -> None:
    await _send(stream, msgspec.msgpack.encode(_Reply(size_bytes, refusal)))


async def _send(stream: Stream, data: bytes | memoryview) -> None:
    with trio.fail_after(_SEND_DEADLINE_S):
        await stream.send(data)


async def fetch_blob(streams: Streams, peer: str, hash: bytes, size_bytes: int, *, timeout_s: float = 20.0) -> bytes:
    """The blob of that hash, of at most `size_bytes`, from one peer.

    `timeout_s` bounds each wait: for the connection, the reply, each frame. Raises CorruptChunk, Unreachable,
    StreamClosed, and RemoteError with the reason ("absent").
    """
    received = bytearray()
    await receive_blob(streams, peer, hash, size_bytes, received, timeout_s=timeout_s)
    return await checked_blob(received, hash, peer)


async def fetch_from_any(
    streams: Streams, peers: Sequence[str], hash: bytes, size_bytes: int, *, timeout_s: float = 20.0
) -> bytes:
    """The blob from the first of `peers` that gives it; a transfer cut short goes on with the next one.

    Raises RemoteError ("absent") if every peer answers that it lacks the blob, else Unreachable if none gives it.
    """
    received = bytearray()
    failures: list[EchoError] = []
    for peer in peers:
        for _ in range(2):  # once more from the start if the bytes of an earlier peer may be what is wrong
            resumed = bool(received)
            try:
                await receive_blob(streams, peer, hash, size_bytes, received, timeout_s=timeout_s)
                return await checked_blob(received, hash, peer)
            except (NetError, RemoteError, CorruptChunk) as error:
                failures.append(error)
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
    streams: Streams, peer: str, hash: bytes, size_bytes: int, received: bytearray, *, timeout_s: float = 20.0
) -> None:
    """Add to `received` what the peer has beyond it. Whatever fails, what has arrived stays. Raises as `fetch_blob`."""
    async with streams.open(peer, names.BLOB, timeout_s=timeout_s) as stream:
        await stream.send(msgspec.msgpack.encode(_Request(hash, len(received), size_bytes)))
        try:
            reply = msgspec.msgpack.decode(await _next(stream, timeout_s), type=_Reply)
        except _UNDECODABLE:
            raise CorruptChunk(f"{peer} sent a malformed reply for blob {hash.hex()[:12]}") from None
        if reply.refusal is not None:
            raise RemoteError(reply.refusal, f"{peer} refused blob {hash.hex()[:12]}: {reply.refusal}")
        if not len(received) <= reply.size_bytes <= size_bytes:
            raise CorruptChunk(
                f"{peer} offers {reply.size_bytes} bytes for blob {hash.hex()[:12]}, of at most {size_bytes}"
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
