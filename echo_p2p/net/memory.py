"""All three seams inside one process: for tests, simulations and the co-located run. Knows no vendor, opens no socket.

Delay, loss, partitions and upload rates can be set at any time; under trio's `MockClock` (with
`now=trio.current_time`) time is virtual. Differences from the real stacks: everybody gossips with everybody, and
records live in the network itself.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, NotServed, StreamClosed, Unreachable
from echo_p2p.net.base import (
    FRAME_MAX_BYTES,
    GOSSIP_MAX_BYTES,
    RECORD_MAX_BYTES,
    Message,
    Record,
    Stream,
    StreamHandler,
)
from echo_p2p.net.memory_stream import MemoryStream, stream_pair

logger = logging.getLogger(__name__)

_ADDRESS_PREFIX = "/memory/p2p/"


@dataclass(slots=True)
class _Served:
    handler: StreamHandler
    max_frame_bytes: int
    max_streams: int
    nursery: trio.Nursery
    active: int = 0


@dataclass(slots=True)
class MemoryNetwork:
    """The medium between `MemoryNode`s: set its fields to make it slow, lossy or split."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of gossip deliveries that vanish; streams and records are reliable
    seed: int = 0
    queue_messages: int = 256
    now: Callable[[], float] = time.time
    uplink_bytes_s: dict[str, float] = field(default_factory=dict)
    """By peer: what leaves it over streams goes out at this rate, packet by packet, its streams in turn; a sender waits
    until its frame has left. Peers that aren't named, records and gossip know no such limit."""
    sent_bytes: Counter[str] = field(default_factory=Counter)  # by peer, over streams
    _nodes: dict[str, "MemoryNode"] = field(default_factory=dict)
    _records: dict[str, dict[str, Record]] = field(default_factory=dict)
    _sides: dict[str, int] = field(default_factory=dict)
    open_streams: set[MemoryStream] = field(default_factory=set)
    _random: random.Random = field(init=False)
    _uplink_free_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def node(self, peer_id: str) -> "MemoryNode":
        """The node of that name, made at its first use."""
        return self._nodes.setdefault(peer_id, MemoryNode(self, peer_id))

    def split(self, *sides: Sequence[str]) -> None:
        """Let peers of different sides no longer reach each other; peers that are not named form one more side.

        Open streams between sides break.
        """
        self._sides = {peer: index for index, side in enumerate(sides, start=1) for peer in side}
        for stream in [stream for stream in self.open_streams if stream.is_cut()]:
            stream.close()

    def heal(self) -> None:
        """Undo `split`."""
        self._sides = {}

    def leaves_at(self, peer: str, size_bytes: int) -> float:
        """When a packet that `peer` sends now has left it; the next one goes out behind it."""
        now = trio.current_time()
        self.sent_bytes[peer] += size_bytes
        if peer not in self.uplink_bytes_s:
            return now
        at = max(now, self._uplink_free_at.get(peer, 0.0)) + size_bytes / self.uplink_bytes_s[peer]
        self._uplink_free_at[peer] = at
        return at

    def connects(self, one: str, other: str) -> bool:
        """Whether two peers can reach each other."""
        return self._sides.get(one, 0) == self._sides.get(other, 0)


class MemoryNode:
    """`Gossip`, `Records` and `Streams` of one peer. Made by `MemoryNetwork.node`."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self.peer_id = peer_id
        self.dropped: Counter[str] = Counter()
        self._network = network
        self._subscribers: dict[str, list[trio.MemorySendChannel[Message]]] = {}
        self._served: dict[str, _Served] = {}

    def listen_addresses(self) -> list[str]:
        """The address for `connect`."""
        return [_ADDRESS_PREFIX + self.peer_id]

    async def connect(self, address: str) -> None:
        """As `Gossip.connect`."""
        await trio.lowlevel.checkpoint()
        peer = address.removeprefix(_ADDRESS_PREFIX)
        if peer not in self._network._nodes or not self._network.connects(self.peer_id, peer):
            raise Unreachable(f"nobody answers at {address}")

    async def publish(self, topic: str, data: bytes) -> None:
        """As `Gossip.publish`; we do not hear our own messages."""
        await trio.lowlevel.checkpoint()
        if len(data) > GOSSIP_MAX_BYTES:
            raise FrameTooLarge(f"a gossip message of {len(data)} bytes exceeds {GOSSIP_MAX_BYTES}; publish its hash")
        network = self._network
        for node in network._nodes.values():
            heard = node is not self and network.connects(self.peer_id, node.peer_id)
            if heard and network._random.random() >= network.loss:
                message = Message(topic, self.peer_id, data)
                if network.delay_s > 0:
                    trio.lowlevel.spawn_system_task(_hear_late, network.delay_s, node, message)
                else:
                    node._hear(message)

    def _hear(self, message: Message) -> None:
        for channel in self._subscribers.get(message.topic, ()):
            try:
                channel.send_nowait(message)
            except trio.WouldBlock:
                self.dropped["queue full"] += 1
            except trio.BrokenResourceError:
                self.dropped["subscriber gone"] += 1

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[trio.MemoryReceiveChannel[Message]]:
        """As `Gossip.subscribe`."""
        send, receive = trio.open_memory_channel[Message](self._network.queue_messages)
        channels = self._subscribers.setdefault(topic, [])
        channels.append(send)
        try:
            with receive:
                yield receive
        finally:
            channels.remove(send)
            send.close()

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """As `Records.put`; like the DHT, it keeps a record of ours that lives longer and says so."""
        await trio.sleep(self._network.delay_s)
        if len(value) > RECORD_MAX_BYTES:
            raise FrameTooLarge(f"a record of {len(value)} bytes exceeds {RECORD_MAX_BYTES}; publish its hash instead")
        record = Record(self.peer_id, value, self._network.now() + ttl_s)
        records = self._network._records.setdefault(key, {})
        if self.peer_id in records and records[self.peer_id].expires_at > record.expires_at:
            raise Unreachable(f"record {key!r} was stored nowhere: ours there lives longer")
        records[self.peer_id] = record

    async def get(self, key: str) -> dict[str, Record]:
        """As `Records.get`; expired records are dropped as they are found."""
        await trio.sleep(self._network.delay_s)
        records, now = self._network._records.get(key, {}), self._network.now()
        for owner in [owner for owner, record in records.items() if record.expires_at <= now]:
            del records[owner]
        return {owner: record for owner, record in records.items() if self._network.connects(self.peer_id, owner)}

    @asynccontextmanager
    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> AsyncIterator[Stream]:
        """As `Streams.open`."""
        await trio.sleep(min(self._network.delay_s, timeout_s))
        node = self._network._nodes.get(peer)
        served = node._served.get(protocol) if node else None
        if node is None or self._network.delay_s > timeout_s or not self._network.connects(self.peer_id, peer):
            raise Unreachable(f"peer {peer} can't be reached for {protocol} within {timeout_s:g} s")
        if served is None:
            raise NotServed(f"peer {peer} does not serve {protocol}; it may still be loading")
        if served.active >= served.max_streams:
            raise Unreachable(f"peer {peer} is serving as many streams as it will ({protocol}); try another peer")
        ours, theirs = stream_pair(self._network, self.peer_id, peer, served.max_frame_bytes)
        served.active += 1
        served.nursery.start_soon(_handle, served, protocol, theirs)
        try:
            yield ours
        finally:
            await ours.aclose()

    async def serve(
        self,
        protocol: str,
        handler: StreamHandler,
        *,
        max_frame_bytes: int = FRAME_MAX_BYTES,
        max_streams: int = 64,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """As `Streams.serve`."""
        async with trio.open_nursery() as nursery:
            self._served[protocol] = _Served(handler, max_frame_bytes, max_streams, nursery)
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                del self._served[protocol]


async def _handle(served: _Served, protocol: str, stream: MemoryStream) -> None:
    """Task boundary of one incoming stream."""
    try:
        await served.handler(stream)
    except StreamClosed as error:
        logger.debug("a stream of %s ended: %s", protocol, error)
    except Exception:
        logger.exception("a stream of %s with peer %s failed and was closed", protocol, stream.peer)
    finally:
        served.active -= 1
        await stream.aclose()


async def _hear_late(delay_s: float, node: MemoryNode, message: Message) -> None:
    await trio.sleep(delay_s)
    node._hear(message)
