"""The go-libp2p daemon (p2pd), spoken to from trio over its unix socket. Knows nothing of who started it.

Each request is one connection: a length-prefixed protobuf `Request`, then a `Response`. After STREAM_OPEN the same
connection *is* the stream, and for an incoming stream p2pd connects to us; so frames never cross to another loop.
The schema is `p2pd.proto` of go-libp2p-daemon; the field numbers below are its.
"""

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from trio import TaskStatus

from echo_p2p import protobuf
from echo_p2p.errors import FrameTooLarge, NetError, NotServed, StreamClosed, Unreachable
from echo_p2p.identity import base58_encode, peer_id_bytes
from echo_p2p.net.base import FRAME_MAX_BYTES, Stream, StreamHandler
from echo_p2p.net.frames import FrameStream

logger = logging.getLogger(__name__)

IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER, LIST_PEERS, DISCONNECT, REMOVE_STREAM_HANDLER = 0, 1, 2, 3, 5, 7, 10
_TYPE, _CONNECT, _STREAM_OPEN, _STREAM_HANDLER, _DISCONNECT, _REMOVE_STREAM_HANDLER = 1, 2, 3, 4, 7, 9  # of Request
_ERROR, _STREAM_INFO, _IDENTIFY, _PEERS = 2, 3, 4, 6  # of Response
_UNIX_PROTOCOL = 400  # multiaddr's code

RESPONSE_MAX_BYTES = 1024 * 1024
CONTROL_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0

_NOT_SERVED = "protocols not supported"  # as p2pd puts it

# The serving side answers a new stream with one byte, so that "too busy" is told apart from a broken connection.
_ACCEPTED = b"\0"
_BUSY = b"\1"


class Daemon:
    """A client of the p2pd that listens at `control_path`; `folder` is for our own sockets (short path, mode 0700)."""

    def __init__(self, control_path: str, folder: Path) -> None:
        self.refused: Counter[str] = Counter()  # incoming streams, by reason
        self._control_path = control_path
        self._folder = folder

    async def identify(self) -> tuple[str, list[str]]:
        """Its PeerID and the addresses it can be dialled at (without the `/p2p/…` suffix)."""
        response = protobuf.bytes_field(await self._ask(IDENTIFY), _IDENTIFY)
        return base58_encode(protobuf.bytes_field(response, 1)), _address_texts(protobuf.bytes_fields(response, 2))

    async def connect(self, peer: str, addresses: Sequence[str], timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Have a connection with `peer`. Raises Unreachable."""
        raw = [(2, _address_bytes(address)) for address in addresses]
        request = protobuf.encode((1, peer_id_bytes(peer)), *raw, (3, max(1, round(timeout_s))))
        await self._ask(CONNECT, (_CONNECT, request), timeout_s=timeout_s)

    async def disconnect(self, peer: str) -> None:
        """Drop the connections with `peer`."""
        await self._ask(DISCONNECT, (_DISCONNECT, protobuf.encode((1, peer_id_bytes(peer)))))

    async def peers(self) -> list[str]:
        """PeerIDs it is connected with."""
        infos = protobuf.bytes_fields(await self._ask(LIST_PEERS), _PEERS)
        return sorted({base58_encode(protobuf.bytes_field(info, 1)) for info in infos})

    async def dial(self, peer: str, protocol: str, timeout_s: float) -> trio.SocketStream:
        """A bare byte stream to a peer that p2pd is connected with or can find. Raises Unreachable, NotServed."""
        request = protobuf.encode((1, peer_id_bytes(peer)), (2, protocol.encode()), (3, max(1, round(timeout_s))))
        connection = await self._connection()
        dialled = False
        try:
            with trio.fail_after(timeout_s):
                await _exchange(connection, STREAM_OPEN, (_STREAM_OPEN, request))
            dialled = True
        except trio.TooSlowError as error:
            raise Unreachable(f"peer {peer} did not open {protocol} within {timeout_s:g} s") from error
        except (ValueError, trio.BrokenResourceError) as error:
            if _NOT_SERVED in str(error):
                raise NotServed(f"peer {peer} does not serve {protocol}; it may still be loading") from error
            raise Unreachable(f"peer {peer} can't be reached for {protocol}: {error}") from error
        finally:
            if not dialled:
                await trio.aclose_forcefully(connection)
        return connection

    @asynccontextmanager
    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> AsyncIterator[Stream]:
        """A stream of frames to a peer that serves `protocol`. Raises Unreachable, NotServed."""
        connection = await self.dial(peer, protocol, timeout_s)
        stream = FrameStream(connection, peer)
        try:
            await _await_admission(connection, peer, protocol, timeout_s)
            yield stream
        finally:
            await stream.aclose()

    async def serve(
        self,
        protocol: str,
        handler: StreamHandler,
        *,
        max_frame_bytes: int = FRAME_MAX_BYTES,
        max_streams: int = 64,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve `protocol` until cancelled, as `Streams.serve` says."""
        path = self._folder / secrets.token_hex(6)
        address = (1, _unix_address(path))
        serving = _Serving(protocol, handler, max_frame_bytes, max_streams, self.refused)
        listener = trio.SocketListener(await _listening_socket(path))
        request = protobuf.encode(address, (2, protocol.encode()), (3, 0))
        async with listener:
            await self._ask(STREAM_HANDLER, (_STREAM_HANDLER, request))
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(trio.serve_listeners, serving.accept, [listener])
                    task_status.started()
            finally:
                with trio.CancelScope(shield=True):
                    await self._withdraw(protocol, protobuf.encode(address, (2, protocol.encode())))

    async def _withdraw(self, protocol: str, request: bytes) -> None:
        try:
            await self._ask(REMOVE_STREAM_HANDLER, (_REMOVE_STREAM_HANDLER, request), timeout_s=1.0)
        except NetError as error:
            logger.debug("the daemon went before %s was withdrawn: %s", protocol, error)

    async def _ask(self, kind: int, *body: protobuf.Field, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        connection = await self._connection()
        try:
            with trio.fail_after(timeout_s):
                return await _exchange(connection, kind, *body)
        except trio.TooSlowError as error:
            raise Unreachable(f"the network daemon did not answer within {timeout_s:g} s") from error
        except (ValueError, trio.BrokenResourceError) as error:
            raise Unreachable(f"the network daemon refused: {error}") from error
        finally:
            await trio.aclose_forcefully(connection)

    async def _connection(self) -> trio.SocketStream:
        try:
            with trio.fail_after(CONTROL_TIMEOUT_S):
                return await trio.open_unix_socket(self._control_path)
        except (OSError, trio.TooSlowError) as error:
            raise Unreachable(f"the network daemon at {self._control_path} is gone; restart this node") from error


class _Serving:
    """One served protocol: counts its streams, and keeps a failing handler to its own stream.

    One peer gets at most a quarter of the streams, so that it can't keep all others out by holding them.
    """

    def __init__(
        self, protocol: str, handler: StreamHandler, max_frame_bytes: int, max_streams: int, refused: Counter[str]
    ) -> None:
        self._refused = refused
        self._protocol = protocol
        self._handler = handler
        self._max_frame_bytes = max_frame_bytes
        self._max_streams = max_streams
        self._max_of_a_peer = max(1, max_streams // 4)
        self._active: Counter[str] = Counter()  # by peer

    async def accept(self, connection: trio.SocketStream) -> None:
        """Task boundary of one incoming stream: nothing that goes wrong in it may end the others."""
        peer = "unknown"
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                peer = base58_encode(protobuf.bytes_field(await read_message(connection), 1))
            await self._admit(connection, peer)
        except StreamClosed as error:
            logger.debug("a stream of %s ended: %s", self._protocol, error)
        except FrameTooLarge as error:
            self._refused["oversized"] += 1
            logger.debug("a stream of %s was closed: %s", self._protocol, error)
        except Exception:
            self._refused["stream-failed"] += 1
            logger.exception("a stream of %s with peer %s failed and was closed", self._protocol, peer)

    async def _admit(self, connection: trio.SocketStream, peer: str) -> None:
        if self._active.total() >= self._max_streams or self._active[peer] >= self._max_of_a_peer:
            self._refused["too-many-streams"] += 1
            logger.warning("refused a stream of peer %s to %s: all are in use", peer, self._protocol)
            await _reply(connection, peer, _BUSY)
            return
        self._active[peer] += 1
        stream = FrameStream(connection, peer, self._max_frame_bytes)
        try:
            await _reply(connection, peer, _ACCEPTED)
            await self._handler(stream)
        finally:
            self._active[peer] -= 1
            if not self._active[peer]:
                del self._active[peer]
            await stream.aclose()


async def _reply(connection: trio.SocketStream, peer: str, answer: bytes) -> None:
    try:
        await connection.send_all(answer)
    except trio.BrokenResourceError as error:
        raise StreamClosed(f"peer {peer} left before it was answered") from error


async def _await_admission(connection: trio.SocketStream, peer: str, protocol: str, timeout_s: float) -> None:
    try:
        with trio.fail_after(timeout_s):
            answer = await connection.receive_some(1)
    except (trio.TooSlowError, trio.BrokenResourceError) as error:
        raise Unreachable(f"peer {peer} opened {protocol} but did not answer within {timeout_s:g} s") from error
    if answer == b"":  # a daemon that knew the peer to serve it asks no more, and is cut off
        raise NotServed(f"peer {peer} does not serve {protocol} now; it may be loading")
    if answer != _ACCEPTED:
        why = "is serving as many streams as it will" if answer == _BUSY else "answered strangely"
        raise Unreachable(f"peer {peer} {why} ({protocol}); try again later or another peer")


async def _listening_socket(path: Path) -> trio.socket.SocketType:
    listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listening.bind(str(path))
    listening.listen(64)
    return listening


async def _exchange(connection: trio.SocketStream, kind: int, *body: protobuf.Field) -> bytes:
    """Send one request and read its response. Raises ValueError with p2pd's words if it failed."""
    request = protobuf.encode((_TYPE, kind), *body)
    await connection.send_all(protobuf.encode_varint(len(request)) + request)
    response = await read_message(connection)
    if protobuf.int_field(response, _TYPE) != 0:
        message = protobuf.bytes_field(protobuf.bytes_field(response, _ERROR), 1)
        raise ValueError(message.decode(errors="replace"))
    return response


async def read_message(connection: trio.SocketStream) -> bytes:
    """One length-prefixed message and not a byte more: what follows belongs to the stream."""
    prefix = b""
    while not prefix or prefix[-1] & 0x80:
        prefix += await _read_exactly(connection, 1)
        if len(prefix) > protobuf.VARINT_MAX_BYTES:
            raise ValueError("the length prefix is too long")
    size, _ = protobuf.decode_varint(prefix)
    if size > RESPONSE_MAX_BYTES:
        raise ValueError(f"a control message of {size} bytes exceeds {RESPONSE_MAX_BYTES}")
    return await _read_exactly(connection, size)


async def _read_exactly(connection: trio.SocketStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = await connection.receive_some(size - len(data))
        if not chunk:
            raise ValueError("the daemon closed the connection")
        data += chunk
    return bytes(data)


def _unix_address(path: Path) -> bytes:
    # By hand: py-multiaddr leaves out the first slash, and p2pd would look for a relative path.
    text = str(path).encode()
    return protobuf.encode_varint(_UNIX_PROTOCOL) + protobuf.encode_varint(len(text)) + text


def _address_bytes(address: str) -> bytes:
    try:
        return bytes(Multiaddr(address).to_bytes())
    except (MultiaddrError, ValueError) as error:
        raise Unreachable(f"{address!r} is not an address; it must look like /ip4/1.2.3.4/tcp/4001") from error


def _address_texts(raw: Sequence[bytes]) -> list[str]:
    """Those that we can read: p2pd knows more transports than this version of multiaddr may."""
    texts = []
    for address in raw:
        try:
            texts.append(str(Multiaddr(address)))
        except (MultiaddrError, ValueError):
            logger.debug("skipped an address that can't be read: %s", address.hex())
    return texts
