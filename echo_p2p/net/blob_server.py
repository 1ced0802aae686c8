"""Serves blobs by hash over streams, each when the uplink has a turn for it. Knows nothing of what the bytes mean.

The streams that were silent for longest are closed when there are too many.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import trio
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, NetError
from echo_p2p.net.base import Stream, Streams
from echo_p2p.net.blob_wire import BLOB_FRAME_BYTES, REQUEST_MAX_BYTES, UNDECODABLE, Refusal, Reply, Request
from echo_p2p.net.uplink import Busy, Transfer, Uplink
from echo_protocols import names

log = logging.getLogger(__name__)

MAX_STREAMS = 64
STREAMS_OF_A_PEER = 32
_ROOM_STREAMS = 8  # always free for newcomers, while any is silent
_IDLE_S = 60.0
_SEND_DEADLINE_S = 10.0

Lookup = Callable[[bytes], bytes | None]
"""The blob of a hash, or None."""


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
            await server.answer_all(stream)
            counts["malformed"] += 1
        except Busy:
            counts["too-many"] += 1
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
        max_frame_bytes=REQUEST_MAX_BYTES,
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
        self._streams = Counter[str]()  # by peer
        self._silent: dict[Stream, trio.CancelScope] = {}  # whose next request is awaited, the longest first

    async def answer_all(self, stream: Stream) -> None:
        """Answer requests until one is none. Raises Busy if the peer has too many streams."""
        if self._streams[stream.peer] >= STREAMS_OF_A_PEER:
            raise Busy
        self._streams[stream.peer] += 1
        try:
            if self._streams.total() > MAX_STREAMS - _ROOM_STREAMS and self._silent:
                next(iter(self._silent.values())).cancel()
            while await self._answer(stream):
                pass
        finally:
            self._streams[stream.peer] -= 1
            if not self._streams[stream.peer]:
                del self._streams[stream.peer]

    async def _request(self, stream: Stream) -> bytes:
        with trio.fail_after(_IDLE_S) as scope:
            self._silent[stream] = scope
            try:
                return await stream.receive()
            finally:
                del self._silent[stream]

    async def _answer(self, stream: Stream) -> bool:
        """Answer one request; False if the peer doesn't speak the protocol."""
        frame = await self._request(stream)
        try:
            request = msgspec.msgpack.decode(frame, type=Request)
        except UNDECODABLE:
            await _reply(stream, 0, "malformed")
            return False
        whole = False
        if self._watcher is not None:
            self._watcher.asked(stream.peer, request.hash)
        try:
            whole = await self._take_turn(stream, request)
        except Busy:
            await _reply(stream, 0, "busy")
        finally:
            if self._watcher is not None:
                self._watcher.ended(stream.peer, request.hash, whole=whole)
        return True

    async def _take_turn(self, stream: Stream, request: Request) -> bool:
        """Send the blob when it is its turn; whether it was sent. Whose blob is larger than said waits once more."""
        left_bytes = max(0, request.size_bytes - request.offset)
        for is_known in (False, True):
            async with self._uplink.transfer(stream.peer, left_bytes) as transfer:
                data = await self._find(request.hash)
                left_bytes = max(0, len(data or b"") - request.offset)
                if is_known or transfer.fits(left_bytes):
                    transfer.left_bytes = left_bytes
                    return await self._serve(stream, request, data, transfer)
                del data
        raise AssertionError("a known blob is served")

    async def _serve(self, stream: Stream, request: Request, data: bytes | None, transfer: Transfer) -> bool:
        """Send the blob, or say why not; whether it was sent."""
        if data is None or request.offset > len(data):
            await _reply(stream, len(data or b""), "absent" if data is None else "offset")
            return False
        size_bytes = len(data) - request.offset
        if self._watcher is not None:
            self._watcher.began(stream.peer, request.hash, size_bytes)
        await _reply(stream, len(data))
        view = memoryview(data)
        for start in range(request.offset, len(data), BLOB_FRAME_BYTES):
            await transfer.carry(view[start : start + BLOB_FRAME_BYTES], partial(_send, stream))
        return True

    async def _find(self, hash: bytes) -> bytes | None:
        return await trio.to_thread.run_sync(self._lookup, hash) if self._in_thread else self._lookup(hash)


async def _reply(stream: Stream, size_bytes: int, refusal: Refusal | None = None) -> None:
    await _send(stream, msgspec.msgpack.encode(Reply(size_bytes, refusal)))


async def _send(stream: Stream, data: bytes | memoryview) -> None:
    with trio.fail_after(_SEND_DEADLINE_S):
        await stream.send(data)
