"""What a node and its engine's process say to each other, over one socket. Knows no engine and no loop.

A message is a 4-byte length, MessagePack of the value and of the arrays' types and shapes, then the arrays' own bytes:
weights cross without a copy, and no array is too long for a frame. Both ends are ours and of one version.
"""

import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import trio
from msgspec import Struct
from numpy.typing import NDArray

from echo_p2p.tensors import TensorUpdate
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion

Array = NDArray[Any]

_LENGTH = struct.Struct(">I")


class Token(NamedTuple):
    """One more token of an answer."""

    number: int
    sample: int
    token: int
    logprob: float


class Load(Struct, frozen=True, kw_only=True, tag=True):
    """First of all: hold this model. `memory_share` is of a GPU; on a CPU keys and values take `kv_bytes`."""

    model: str
    device: str
    rows: int
    positions: int
    kv_bytes: int
    memory_share: float


class Ask(Struct, frozen=True, kw_only=True, tag=True):
    """Answer a prompt, under a number that is new: these samples, with the tokens that each one has already."""

    number: int
    group_id: bytes
    run_seed: bytes
    prompt: tuple[int, ...]
    samples: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    begun: tuple[tuple[int, tuple[int, ...]], ...]


class Drop(Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for this one any more; it may have ended."""

    number: int


class Hold(Struct, frozen=True, kw_only=True, tag=True):
    """Take no step until `Go`."""


class Go(Struct, frozen=True, kw_only=True, tag=True):
    """All weights of `version` are in place: go on."""

    version: PolicyVersion


class Read(Struct, frozen=True, kw_only=True, tag=True):
    """Send all tensors."""


class Apply(Struct, frozen=True, kw_only=True, tag=True):
    """Change weights in place; for each update its name, whether there is an index, and then the arrays."""

    updates: tuple[tuple[str, bool], ...]


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and proven. `blocks` of `block` positions hold keys and values."""

    engine: str
    blocks: int
    block: int


class Drawn(Struct, frozen=True, kw_only=True, tag=True):
    """What a step drew, in `busy_s`."""

    version: PolicyVersion
    tokens: tuple[Token, ...]
    busy_s: float


class Done(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Hold, Go, Read (`names`, and their arrays) or Apply; `fault` if nothing was done."""

    fault: str = ""
    names: tuple[str, ...] = ()


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The process ends. `unfit`: this model or machine can't be served so, and trying again would not help."""

    text: str
    unfit: bool = False


ToWorker = Load | Ask | Drop | Hold | Go | Read | Apply
FromWorker = Ready | Drawn | Done | Failed
Message = ToWorker | FromWorker

_DECODER = msgspec.msgpack.Decoder(tuple[Message, tuple[tuple[str, tuple[int, ...]], ...]])


def apply_message(updates: Mapping[str, TensorUpdate]) -> tuple[Apply, list[Array]]:
    """Updates as a message and its arrays."""
    arrays: list[Array] = []
    for update in updates.values():
        arrays += [update.values] if update.index is None else [update.index, update.values]
    return Apply(updates=tuple((name, update.index is not None) for name, update in updates.items())), arrays


def updates_of(message: Apply, arrays: Sequence[Array]) -> dict[str, TensorUpdate]:
    """The other way round."""
    left = iter(arrays)
    return {
        name: TensorUpdate(index=next(left) if sparse else None, values=next(left)) for name, sparse in message.updates
    }


class WorkerPipe:
    """The engine's end, for a thread that may block."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def waiting(self) -> bool:
        """Whether a message has begun to arrive, or the node is gone."""
        return bool(select.select([self._end], [], [], 0.0)[0])

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Raises OSError when the node is gone."""
        for data in _parts(message, arrays):
            self._end.sendall(data)

    def receive(self) -> tuple[Message, list[Array]]:
        """The next message. Raises EOFError when the node is gone."""
        header = bytearray(_LENGTH.unpack(self._exactly(bytearray(_LENGTH.size)))[0])
        message, forms = _DECODER.decode(self._exactly(header))
        arrays = [_empty(*form) for form in forms]
        for array in arrays:
            self._exactly(_bytes_of(array))
        return message, arrays

    def _exactly(self, buffer: bytearray | memoryview) -> bytearray | memoryview:
        view = memoryview(buffer)
        while view:
            count = self._end.recv_into(view)
            if not count:
                raise EOFError("the node is gone")
            view = view[count:]
        return buffer


class NodePipe:
    """The node's end. One task sends at a time, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = trio.socket.from_stdlib_socket(end)
        self._stream = trio.SocketStream(self._end)

    async def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Raises trio.BrokenResourceError or trio.ClosedResourceError when the engine is gone."""
        for data in _parts(message, arrays):
            await self._stream.send_all(data)

    async def receive(self) -> tuple[Message, list[Array]]:
        """The next message. Raises EOFError, or OSError, when the engine is gone."""
        header = bytearray(_LENGTH.unpack(await self._exactly(bytearray(_LENGTH.size)))[0])
        message, forms = _DECODER.decode(await self._exactly(header))
        arrays = [_empty(*form) for form in forms]
        for array in arrays:
            await self._exactly(_bytes_of(array))
        return message, arrays

    async def _exactly(self, buffer: bytearray | memoryview) -> bytearray | memoryview:
        view = memoryview(buffer)
        while view:
            count = await self._end.recv_into(view)
            if not count:
                raise EOFError("the engine's process is gone")
            view = view[count:]
        return buffer

    def close(self) -> None:
        """The other end hears of it."""
        self._end.close()


def _parts(message: Message, arrays: Sequence[Array]) -> list[bytes | memoryview]:
    plain = [np.ascontiguousarray(array) for array in arrays]
    header = msgspec.msgpack.encode((message, tuple((array.dtype.str, array.shape) for array in plain)))
    return [_LENGTH.pack(len(header)) + header, *(_bytes_of(array) for array in plain if array.size)]


def _empty(kind: str, shape: tuple[int, ...]) -> Array:
    return np.empty(shape, np.dtype(kind))


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
