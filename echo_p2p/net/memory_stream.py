"""A stream between two nodes of the in-memory network, with its delay. Made by `net.memory`."""

from typing import Protocol

import trio

from echo_p2p.errors import FrameTooLarge, StreamClosed
from echo_p2p.net.base import FRAME_MAX_BYTES

FRAMES_IN_FLIGHT_MAX = 64
"""Frames of one direction of a stream that wait for the receiver before the sender does."""


PACKET_BYTES = 4096
"""What a sender with a limited upload rate sends before others of its streams get their turn."""


class Medium(Protocol):
    """What a stream asks of the network that it runs over."""

    delay_s: float
    open_streams: set["MemoryStream"]

    uplink_bytes_s: dict[str, float]

    def connects(self, one: str, other: str) -> bool:
        """Whether two peers can reach each other."""

    def leaves_at(self, peer: str, size_bytes: int) -> float:
        """When a packet that `peer` sends now has left it."""


class MemoryStream:
    """One end of a stream."""

    def __init__(
        self,
        network: Medium,
        ends: tuple[str, str],
        outgoing: "trio.MemorySendChannel[tuple[float, bytes]]",
        incoming: "trio.MemoryReceiveChannel[tuple[float, bytes]]",
        max_frame_bytes: int,
    ) -> None:
        self._network = network
        self._own, self._peer = ends
        self._outgoing = outgoing
        self._incoming = incoming
        self._max_frame_bytes = max_frame_bytes
        self._sending = trio.Lock()
        self._next: tuple[float, bytes] | None = None  # taken, but not yet due
        network.open_streams.add(self)

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, *parts: bytes | memoryview) -> None:
        frame = b"".join(parts)
        if len(frame) > FRAME_MAX_BYTES:
            raise FrameTooLarge(f"a frame of {len(frame)} bytes exceeds {FRAME_MAX_BYTES}; send it in pieces")
        try:
            async with self._sending:
                left_at = await self._leave(len(frame))
                await self._outgoing.send((left_at + self._network.delay_s, frame))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamClosed(f"peer {self._peer} closed the stream while we were sending") from error

    async def _leave(self, size_bytes: int) -> float:
        """Return when a frame has left this node: at once, or packet by packet in turn with those of other streams."""
        network = self._network
        if self._own not in network.uplink_bytes_s:
            return network.leaves_at(self._own, size_bytes)
        left_at = trio.current_time()
        for start in range(0, size_bytes, PACKET_BYTES):
            left_at = network.leaves_at(self._own, min(PACKET_BYTES, size_bytes - start))
            await trio.sleep_until(left_at)
        return left_at

    async def receive(self) -> bytes:
        try:
            self._next = self._next or await self._incoming.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise StreamClosed(f"peer {self._peer} ended the stream") from error
        due, frame = self._next
        await trio.sleep_until(due)
        self._next = None
        if len(frame) > self._max_frame_bytes:
            self.close()
            raise FrameTooLarge(f"peer {self._peer} sent {len(frame)} bytes; the bound is {self._max_frame_bytes}")
        return frame

    def is_cut(self) -> bool:
        """Whether a partition lies between the two ends."""
        return not self._network.connects(self._own, self._peer)

    def close(self) -> None:
        """Close both directions now; frames already sent still arrive."""
        self._network.open_streams.discard(self)
        self._outgoing.close()
        self._incoming.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.cancel_shielded_checkpoint()


def stream_pair(
    network: Medium, opener: str, server: str, server_max_frame_bytes: int
) -> tuple[MemoryStream, MemoryStream]:
    """The opener's and the server's end of a new stream."""
    there_send, there_receive = trio.open_memory_channel[tuple[float, bytes]](FRAMES_IN_FLIGHT_MAX)
    back_send, back_receive = trio.open_memory_channel[tuple[float, bytes]](FRAMES_IN_FLIGHT_MAX)
    return (
        MemoryStream(network, (opener, server), there_send, back_receive, FRAME_MAX_BYTES),
        MemoryStream(network, (server, opener), back_send, there_receive, server_max_frame_bytes),
    )
