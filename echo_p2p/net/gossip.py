"""Gossip over py-libp2p's GossipSub (v1.1, TCP, Noise, yamux). The only home of libp2p. Knows no message's meaning.

py-libp2p lives in the node's own trio run, where an exception that escapes one of its handlers would end everything:
so each place where a peer's bytes enter is guarded here, and what is refused is counted by reason.
"""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.pb import crypto_pb2
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from echo_p2p.errors import FrameTooLarge, Unreachable
from echo_p2p.identity import Identity
from echo_p2p.net.base import GOSSIP_MAX_BYTES, Message
from echo_p2p.net.dialing import answers, backoff_s, split_address

logger = logging.getLogger(__name__)

KEY_MESSAGES = crypto_pb2
"""The protobuf module of libp2p's keys. hivemind registers the same names: `net.hive` lends it this one."""

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
REDIAL_CHECK_S = 2.0
PUBLISH_WAIT_S = 0.25
"""How long a burst waits for room towards a slow peer, before it goes on without it."""
QUEUE_CROWDED = 24
DIALLED_MAX = 64
RPC_MAX_BYTES = 1024 * 1024

# Meshes of a swarm of tens of peers; the heartbeat is py-libp2p's default divided by 120.
_DEGREE, _DEGREE_LOW, _DEGREE_HIGH, _HEARTBEAT_S = 6, 4, 12, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """Where to listen (port 0: any), and how many messages wait for a slow subscriber before the newest are dropped."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    queue_messages: int = 256


class GossipNode:
    """`Gossip` of one node. Made by `open_gossip`. `dropped` counts what did not reach a subscriber, by reason.

    Dialled addresses are remembered (`DIALLED_MAX`, the oldest goes first) and dialled again when they come back.
    """

    def __init__(self, settings: GossipSettings, host: Any, pubsub: "_GuardedPubsub", dropped: Counter[str]) -> None:
        self.dropped = dropped
        self._settings = settings
        self._host = host
        self._pubsub = pubsub
        self._subscribers: dict[str, set[trio.MemorySendChannel[Message]]] = {}
        self._subscribing = trio.Lock()
        self._dialled: dict[str, str] = {}  # PeerID: transport address
        pubsub.deliver = self._deliver

    @property
    def peer_id(self) -> str:
        return str(self._host.get_id())

    def listen_addresses(self) -> list[str]:
        """Where others can dial us, each with `/p2p/…`."""
        return [str(address) for address in self._host.get_addrs()]

    def peers(self) -> list[str]:
        """PeerIDs that we exchange gossip with."""
        return sorted(str(peer) for peer in self._pubsub.peers)

    def subscribers(self, topic: str) -> list[str]:
        """PeerIDs of our direct peers that are subscribed to `topic`."""
        return sorted(str(peer) for peer in self._pubsub.peer_topics.get(topic, ()))

    async def publish(self, topic: str, data: bytes) -> None:
        """As `Gossip.publish`; we do not hear our own messages."""
        if len(data) > GOSSIP_MAX_BYTES:
            raise FrameTooLarge(f"a gossip message of {len(data)} bytes exceeds {GOSSIP_MAX_BYTES}; publish its hash")
        with trio.move_on_after(PUBLISH_WAIT_S):
            while self._pubsub.is_crowded(topic):  # noqa: ASYNC110 (a vendor's queue tells nobody that it has room)
                await trio.sleep(PUBLISH_WAIT_S / 50)
        await self._pubsub.publish(topic, data)

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[trio.MemoryReceiveChannel[Message]]:
        """As `Gossip.subscribe`; a topic may be subscribed to several times."""
        send, receive = trio.open_memory_channel[Message](self._settings.queue_messages)
        async with self._subscribing:
            channels = self._subscribers.setdefault(topic, set())
            channels.add(send)
            await self._pubsub.subscribe(topic)
        try:
            with receive:
                yield receive
        finally:
            channels.discard(send)
            send.close()
            with trio.move_on_after(CONNECT_TIMEOUT_S, shield=True):
                async with self._subscribing:
                    if not channels:
                        await self._pubsub.unsubscribe(topic)

    def _deliver(self, message: Any) -> None:
        sender = str(ID(message.from_id))
        if sender == self.peer_id:
            return
        for topic in message.topicIDs:
            for channel in self._subscribers.get(topic, ()):
                try:
                    channel.send_nowait(Message(topic, sender, message.data))
                except trio.WouldBlock:
                    self.dropped["queue full"] += 1
                except trio.BrokenResourceError:
                    self.dropped["subscriber gone"] += 1

    async def connect(self, address: str) -> None:
        """As `Gossip.connect`; even if it raises Unreachable, the address is tried again in the background."""
        transport, peer = split_address(address)
        if peer == self.peer_id:
            return
        self._dialled.pop(peer, None)
        self._dialled[peer] = transport
        if len(self._dialled) > DIALLED_MAX:
            del self._dialled[next(iter(self._dialled))]
        await self._dial(peer, transport)

    def forget(self, peer: str) -> None:
        """Dial a peer no more once it is lost."""
        self._dialled.pop(peer, None)

    async def _dial(self, peer: str, transport: str) -> None:
        if peer in self.peers():
            return
        if not await answers(transport):
            raise Unreachable(f"nobody answers at {transport} (gossip of peer {peer})")
        identifier = ID.from_base58(peer)
        # what failed before must not stand in the way: a peer that restarted is back at another address
        self._host.get_peerstore().clear_addrs(identifier)
        self._host.get_network().unblock_peer(identifier)
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                await self._host.connect(PeerInfo(identifier, [Multiaddr(transport)]))
                await self._pubsub.wait_for_peer(identifier, timeout=CONNECT_TIMEOUT_S)
        except (BaseLibp2pError, OSError, ValueError, trio.TooSlowError) as error:
            raise Unreachable(f"gossip of peer {peer} at {transport} can't be joined: {error!r}") from error

    async def keep_connected(self) -> None:
        """Dial again whoever we dialled once and lost, with backoff for each peer; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            redialling: set[str] = set()
            while True:
                await trio.sleep(REDIAL_CHECK_S)
                for peer in set(self._dialled) - set(self.peers()) - redialling:
                    redialling.add(peer)
                    nursery.start_soon(self._redial, peer, redialling)

    async def _redial(self, peer: str, redialling: set[str]) -> None:
        for delay_s in backoff_s():
            transport = self._dialled.get(peer)
            if transport is None:
                break
            try:
                await self._dial(peer, transport)
            except Unreachable as error:
                logger.info("%s; trying again in %.0f s", error, delay_s)
                await trio.sleep(delay_s)
            else:
                logger.info("connected to the gossip of peer %s again", peer)
                break
        redialling.discard(peer)


class _GuardedPubsub(Pubsub):
    """Pubsub in which no peer's bytes can raise past the border."""

    def __init__(self, host: Any, router: Any, dropped: Counter[str]) -> None:
        super().__init__(host, router, strict_signing=True, max_inbound_rpc_size=RPC_MAX_BYTES)
        # Peers drop a (sender, sequence number) they have seen: a restart must not begin below where it left off.
        self.counter = time.time_ns()
        self.deliver: Any = None
        self._dropped = dropped

    async def stream_handler(self, stream: Any) -> None:
        """Task boundary of one peer's incoming messages."""
        try:
            await super().stream_handler(stream)
        except Exception:
            peer = stream.muxed_conn.peer_id
            self._dropped["malformed"] += 1
            logger.warning("gossip of peer %s could not be read; dropping its stream", peer, exc_info=True)
            await stream.reset()
            self._handle_dead_peer(peer)

    def is_crowded(self, topic: str) -> bool:
        """Whether a subscriber's outbound queue (32 messages) is nearly full: more would be dropped silently."""
        queues = (self.peer_queues.get(peer) for peer in self.peer_topics.get(topic, ()))
        return any(queue is not None and len(queue) > QUEUE_CROWDED for queue in queues)

    async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
        """Task boundary of one message: checked before it is verified, delivered or forwarded."""
        if len(msg.data) > GOSSIP_MAX_BYTES or len(msg.topicIDs) != 1:
            self._dropped["malformed"] += 1
            return
        try:
            await super().push_msg(msg_forwarder, msg)
        except Exception:
            self._dropped["malformed"] += 1
            logger.warning("a gossip message from peer %s was dropped", msg_forwarder, exc_info=True)

    def notify_subscriptions(self, publish_message: Any) -> None:
        """Straight to the subscribers' own queues, past the fixed one of the base class."""
        self.deliver(publish_message)


@asynccontextmanager
async def open_gossip(identity: Identity, settings: GossipSettings | None = None) -> AsyncIterator[GossipNode]:
    """Run a gossip node; closes its connections when the context is left."""
    settings = settings or GossipSettings()
    announce = [Multiaddr(address) for address in settings.announce] or None
    host = new_host(
        key_pair=create_new_key_pair(identity.seed),
        muxer_preference="YAMUX",
        announce_addrs=announce,
        # Whom we dial is decided above us: no automatic dialling of whoever was heard of.
        connection_config=ConnectionConfig(min_connections=0, low_watermark=0, auto_connect_interval=1e9),
    )
    router = GossipSub(
        protocols=[PROTOCOL_ID_V11],
        degree=_DEGREE,
        degree_low=_DEGREE_LOW,
        degree_high=_DEGREE_HIGH,
        heartbeat_interval=_HEARTBEAT_S,
        spam_protection_enabled=False,  # it drops beyond 10 messages a second and topic; the border admits by peer
    )
    dropped: Counter[str] = Counter()
    pubsub = _GuardedPubsub(host, router, dropped)
    listen = [Multiaddr(address) for address in settings.listen]
    async with host.run(listen_addrs=listen), background_trio_service(pubsub), background_trio_service(router):
        try:
            await pubsub.wait_until_ready()
            async with trio.open_nursery() as nursery:
                node = GossipNode(settings, host, pubsub, dropped)
                nursery.start_soon(node.keep_connected)
                yield node
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await host.close()  # cancelling alone would leave the sockets open, and our peers none the wiser
