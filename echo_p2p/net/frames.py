"""Frames on a byte stream: four bytes of length (big-endian), then the body. Knows no peer-to-peer stack."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import trio

from echo_p2p.errors import FrameTooLarge, StreamClosed
from echo_p2p.net.base import FRAME_MAX_BYTES

HEADER_BYTES = 4
_READ_BYTES = 64 * 1024
_JOIN_BYTES = 128 * 1024
"""Frames up to this size are copied into one write; larger ones are written part by part."""

_DISCARD_READS_MAX = 64


class FrameStream:
    """A `Stream` over a connected socket, which it owns.

    Receiving may be cancelled and resumed; a send that is cancelled in the middle closes the stream, because the
    other side could no longer tell where the next frame begins. The buffer never exceeds one frame plus 64 KiB.
    """

    def __init__(self, connection: trio.SocketStream, peer: str, max_frame_bytes: int = FRAME_MAX_BYTES) -> None:
        self._connection = connection
        self._socket = connection.socket
        self._peer = peer
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()  # read, not yet part of a frame in progress
        self._body: bytearray | None = None  # a frame in progress, of its final size
        self._filled = 0  # bytes of `_body` that have arrived
        self._send_lock = trio.Lock()
        self._closed = False

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, *parts: bytes | memoryview) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        if size > FRAME_MAX_BYTES:
            raise FrameTooLarge(f"a frame of {size} bytes exceeds the bound of {FRAME_MAX_BYTES}; send it in pieces")
        header = size.to_bytes(HEADER_BYTES, "big")
        async with self._send_lock:
            await self._write([b"".join([header, *views])] if size <= _JOIN_BYTES else [header, *views])

    async def _write(self, chunks: Sequence[bytes | memoryview]) -> None:
        whole = False
        try:
            for chunk in chunks:
                await self._connection.send_all(chunk)
            whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamClosed(f"peer {self._peer} closed the stream while we were sending") from error
        finally:
            if not whole:
                self._close()

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while (frame := self._take()) is None:
            await self._fill()
        return frame

    def _take(self) -> bytes | None:
        """The next frame if all of it is here; prepares `_body` as soon as a header is."""
        if self._body is not None:
            if self._filled < len(self._body):
                return None
            frame, self._body = bytes(self._body), None
            return frame
        if len(self._buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if size > self._max_frame_bytes:
            self._close()
            raise FrameTooLarge(
                f"peer {self._peer} announced a frame of {size} bytes; the bound is {self._max_frame_bytes}"
            )
        available = len(self._buffer) - HEADER_BYTES
        if available >= size:
            frame = bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size])
            del self._buffer[: HEADER_BYTES + size]
            return frame
        self._body, self._filled = bytearray(size), available
        self._body[:available] = self._buffer[HEADER_BYTES:]
        self._buffer.clear()
        return None

    async def _fill(self) -> None:
        try:
            if self._body is None:
                data = await self._socket.recv(_READ_BYTES)
                self._buffer += data
                received = len(data)
            else:
                received = await self._socket.recv_into(memoryview(self._body)[self._filled :])
                self._filled += received
        except (OSError, trio.ClosedResourceError) as error:
            self._close()
            raise StreamClosed(f"the stream with peer {self._peer} broke: {error}") from error
        if received == 0:
            partial = self._body is not None or bool(self._buffer)
            raise StreamClosed(f"peer {self._peer} ended the stream" + (" inside a frame" if partial else ""))

    async def aclose(self) -> None:
        self._close()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        close_socket(self._socket)


def close_socket(connection: trio.socket.SocketType) -> None:
    """Close so that what was sent still arrives: closing over unread input would reset the other side."""
    with suppress(OSError):  # not connected, or the other side has gone: nothing is left to deliver
        connection.shutdown(socket.SHUT_WR)
        for _ in range(_DISCARD_READS_MAX):
            if not os.read(connection.fileno(), _READ_BYTES):
                break
    connection.close()
