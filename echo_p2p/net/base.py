"""The three seams of the network: gossip, records, streams. Knows no vendor and no meaning of any byte.

Peers are named by their PeerID in base58 (`12D3Koo…`). Every implementation must be driven from trio.
`net.memory` ships an in-process implementation of all three; `net.hive` (records, streams) and `net.gossip`
(gossip) are the real ones. One contract test runs over all of them.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import trio
from trio import TaskStatus

GOSSIP_MAX_BYTES = 64 * 1024
"""Largest gossip message. Larger bodies travel by hash and are fetched over a stream."""

RECORD_MAX_BYTES = 16 * 1024
"""Largest value of one record."""

FRAME_MAX_BYTES = 64 * 1024 * 1024
"""Largest frame of a stream unless the serving side asks for less."""


@dataclass(frozen=True, slots=True)
class Message:
    """One gossip message: `sender` is the peer that published it (verified by the transport)."""

    topic: str
    sender: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """One value of a key, put by one owner. `expires_at` is in Unix seconds."""

    owner: str
    value: bytes
    expires_at: float


class Gossip(Protocol):
    """One-to-many messages of at most `GOSSIP_MAX_BYTES`, best effort."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Send to all subscribers of `topic`. Raises FrameTooLarge."""

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[trio.MemoryReceiveChannel[Message]]:
        """Receive from `topic` while the context is open; a full (bounded) queue drops the newest and counts it."""

    async def connect(self, address: str) -> None:
        """Dial a peer's gossip address (`/ip4/…/tcp/…/p2p/…`); idempotent. Raises Unreachable."""


class Records(Protocol):
    """Expiring values under `key`, one for each owner; only the owner can write its own (signed by its key)."""

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store our value under `key`. Raises FrameTooLarge, Unreachable."""

    async def get(self, key: str) -> dict[str, Record]:
        """All live values under `key` by owner (PeerID); empty if there are none."""


class Stream(Protocol):
    """An ordered, bidirectional stream of frames with one peer."""

    @property
    def peer(self) -> str:
        """PeerID of the other side, verified by the transport."""

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send one frame, the concatenation of `parts`. Raises StreamClosed, FrameTooLarge."""

    async def receive(self) -> bytes:
        """The next frame. Raises StreamClosed at the end, FrameTooLarge if the peer exceeds the bound (and closes)."""

    async def aclose(self) -> None:
        """Close both directions; idempotent."""


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Runs in a task of its own for each stream. An exception closes that stream, is logged with the peer's id,
and ends nothing else."""


class Streams(Protocol):
    """Streams to named protocols of a peer."""

    def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> AbstractAsyncContextManager[Stream]:
        """Open a stream; closed when the context is left. Raises Unreachable, or NotServed if the peer is there."""

    async def serve(
        self,
        protocol: str,
        handler: StreamHandler,
        *,
        max_frame_bytes: int = FRAME_MAX_BYTES,
        max_streams: int = 64,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve `protocol` until cancelled; started (`task_status`) once it can be dialled.

        At most `max_streams` are served at a time; further ones are refused.
        """
