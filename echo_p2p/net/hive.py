"""Records and streams over hivemind: its DHT node in this process, and the go-libp2p daemon that it runs.

The only home of hivemind. hivemind lives on one asyncio loop in a thread, which only DHT calls cross to; streams go
from trio straight to the daemon (`net.daemon`). Knows nothing of what records and frames mean.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import trio
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, IdentityError, NetError, Unreachable
from echo_p2p.identity import Identity, peer_id_bytes, to_file_bytes
from echo_p2p.net import leash
from echo_p2p.net.base import FRAME_MAX_BYTES, RECORD_MAX_BYTES, Record, Stream, StreamHandler
from echo_p2p.net.daemon import Daemon
from echo_p2p.net.dialing import answers, backoff_s, split_address
from echo_p2p.net.portal import Portal, open_portal
from echo_p2p.net.signed import TTL_MAX_S, OwnedRecords

logger = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 5.0
RECORD_DEADLINE_S = 15.0
ADDRESS_BOOK_MAX = 1024
STORED_KEYS_MAX = 4096

Role = Literal["bootstrap", "trainer", "volunteer"]

# A relay that is meant to carry the traffic of volunteers, not to help them to a first handshake.
_RELAY_FLAGS = (
    "-relayTimeLimit=24h",
    "-relayDataLimit=1099511627776",
    "-relayMaxCircuits=256",
    "-relayMaxReservations=1024",
)
# Without it a volunteer looks for random relays for minutes before it asks the ones it was given.
_VOLUNTEER_FLAGS = ("-relayDiscovery=0",)
# The daemon starts its relay twice, and only one start has the limits above; on one thread that one wins.
_BOOTSTRAP_ENVIRONMENT = ("GOMAXPROCS=1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiveSettings:
    """How a node takes part.

    A bootstrap and a trainer are public full members; a bootstrap also relays, and waits for nobody. A volunteer may
    be behind NAT: it stores nothing for others, speaks TCP only, and is reached through its relays if need be.
    """

    role: Role
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    trusted_relays: tuple[str, ...] = ()  # of a volunteer; its initial peers if empty
    join_check_s: float = 5.0  # how often to look whether the bootstraps are still in touch


class HiveNode:
    """`Records` and `Streams` of one node. Made by `open_hive`.

    The address book keeps the latest addresses of `ADDRESS_BOOK_MAX` peers; the peer learnt longest ago goes first.
    """

    def __init__(self, identity: Identity, settings: HiveSettings, portal: Portal, node: Any, folder: Path) -> None:
        self._identity = identity
        self._settings = settings
        self._portal = portal
        self._node = node
        self._daemon = Daemon(str(node.p2p.daemon_listen_maddr).removeprefix("/unix"), folder)
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._bootstraps: frozenset[str] = frozenset()
        self._joined = trio.Event()
        for address in settings.initial_peers:
            transport, peer = split_address(address)
            self.learn(peer, (*self._addresses.get(peer, ()), transport))

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def daemon_pid(self) -> int:
        """Process id of the go-libp2p daemon."""
        return int(self._node.p2p._child.pid)

    @property
    def bootstraps(self) -> frozenset[str]:
        """PeerIDs of the bootstraps that answered at the last look; empty: cut off, and trying again."""
        return self._bootstraps

    async def wait_joined(self) -> None:
        """Wait until a bootstrap has let us in, once. Put a deadline around it."""
        await self._joined.wait()

    async def visible_addresses(self) -> list[str]:
        """Where others can dial us now, relayed addresses included, each with `/p2p/…`."""
        _, addresses = await self._daemon.identify()
        return [f"{address}/p2p/{self.peer_id}" for address in addresses]

    async def peers_connected(self) -> list[str]:
        """PeerIDs that the daemon has a connection with."""
        return await self._daemon.peers()

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember where a peer can be dialled (with or without `/p2p/…` behind); replaces what was known."""
        self._addresses.pop(peer, None)
        self._addresses[peer] = tuple(address.removesuffix(f"/p2p/{peer}") for address in addresses)
        if len(self._addresses) > ADDRESS_BOOK_MAX:
            del self._addresses[next(iter(self._addresses))]

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """As `Records.put`; a lifetime over `TTL_MAX_S` is cut to that."""
        if len(value) > RECORD_MAX_BYTES:
            raise FrameTooLarge(f"a record of {len(value)} bytes exceeds {RECORD_MAX_BYTES}; publish its hash instead")
        expires_at = time.time() + min(ttl_s, TTL_MAX_S)
        if not await self._within_deadline(self._store, key, value, expires_at):
            raise Unreachable(f"record {key!r} was stored nowhere: nobody answered, or ours there lives longer")

    async def _store(self, key: str, value: bytes, expires_at: float) -> bool:
        volunteer = self._settings.role == "volunteer"
        stored = await self._node.store(key, value, expires_at, subkey=self.peer_id, exclude_self=volunteer)
        return bool(stored)

    async def get(self, key: str) -> dict[str, Record]:
        """As `Records.get`."""
        found = await self._within_deadline(self._find, key)
        now = time.time()
        return {owner: record for owner, record in found.items() if record.expires_at > now}

    async def _find(self, key: str) -> dict[str, Record]:
        found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            owner: Record(owner, entry.value, entry.expiration_time)
            for owner, entry in found.value.items()
            if isinstance(owner, str) and isinstance(entry.value, bytes)
        }

    async def _within_deadline(self, function: Any, *args: Any) -> Any:
        try:
            with trio.fail_after(RECORD_DEADLINE_S):
                return await self._portal.call(function, *args)
        except trio.TooSlowError as error:
            raise Unreachable(f"the record store did not answer within {RECORD_DEADLINE_S:g} s") from error

    @asynccontextmanager
    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> AsyncIterator[Stream]:
        """As `Streams.open`; dials the addresses that were learnt, then lets the daemon look for the peer."""
        deadline = trio.current_time() + timeout_s
        if addresses := self._addresses.get(peer, ()):
            try:
                await self._daemon.connect(peer, addresses, timeout_s=timeout_s / 2)
            except Unreachable as error:
                logger.debug("the known addresses of peer %s do not answer: %s", peer, error)
        remaining_s = max(0.1, deadline - trio.current_time())
        async with self._daemon.open(peer, protocol, timeout_s=remaining_s) as stream:
            yield stream

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
        await self._daemon.serve(
            protocol, handler, max_frame_bytes=max_frame_bytes, max_streams=max_streams, task_status=task_status
        )

    async def keep_joined(self) -> None:
        """Join through any bootstrap that answers, for ever: one that went away is joined again when it is back."""
        delays_s = backoff_s()
        while True:
            self._note(await self._reach_bootstraps())
            if self._bootstraps or not self._settings.initial_peers:
                self._joined.set()
                delays_s = backoff_s()
                await trio.sleep(self._settings.join_check_s)
            else:
                delay_s = next(delays_s)
                where = ", ".join(self._settings.initial_peers)
                logger.warning("no bootstrap reachable at %s, trying again in %.0f s", where, delay_s)
                await trio.sleep(delay_s)

    def _note(self, reached: frozenset[str]) -> None:
        for peer in self._bootstraps - reached:
            logger.warning("lost bootstrap %s; going on with the peers we know", peer)
        for peer in reached - self._bootstraps:
            logger.info("joined through bootstrap %s", peer)
        self._bootstraps = reached

    async def _reach_bootstraps(self) -> frozenset[str]:
        """PeerIDs of the bootstraps that we are in touch with, after joining those that we were not."""
        try:
            connected = set(await self._daemon.peers())
        except Unreachable as error:  # if the daemon is gone, `_watch` says so
            logger.warning("can't look for bootstraps: %s", error)
            return frozenset()
        reached = set()
        for address in self._settings.initial_peers:
            transport, peer = split_address(address)
            known = peer in connected and await self._portal.call(self._knows, peer)
            if known or await self._join(peer, transport):
                reached.add(peer)
        return frozenset(reached)

    async def _join(self, peer: str, transport: str) -> bool:
        if not await answers(transport):
            return False
        try:
            await self._daemon.connect(peer, [transport])
            return bool(await self._within_deadline(self._greet, peer))
        except NetError as error:
            logger.warning("bootstrap %s answers but does not let us in: %s", peer, error)
            return False

    async def _knows(self, peer: str) -> bool:
        return self._node.protocol.routing_table.get(peer_id=_vendor_peer_id(peer)) is not None

    async def _greet(self, peer: str) -> bool:
        """Enter each other's routing table, and learn our neighbours from it."""
        from hivemind.dht.protocol import ValidationError

        try:
            entered = await self._node.protocol.call_ping(_vendor_peer_id(peer), validate=True, strict=True)
        except ValidationError as error:  # our clock is wrong, or we can't be dialled back
            raise NetError(str(error)) from error
        if entered is not None:
            await self._node.find_nearest_nodes([self._node.node_id])
        return entered is not None


@asynccontextmanager
async def open_hive(identity: Identity, settings: HiveSettings) -> AsyncIterator[HiveNode]:
    """Run a node; it joins in the background (`wait_joined`), and its daemon is gone when the context is left.

    Raises NetError if the daemon does not start, and (out of the body) if it dies while it is needed.
    """
    async with _private_folder() as folder, open_portal("hivemind") as portal:
        vendor_node = await _start(identity, settings, portal, folder)
        try:
            async with trio.open_nursery() as nursery:
                node = HiveNode(identity, settings, portal, vendor_node, folder)
                nursery.start_soon(_watch, portal, vendor_node)
                nursery.start_soon(node.keep_joined)
                yield node
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _stop(portal, vendor_node)


@asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    # Unix socket paths are limited to about 100 characters, so this can't be in the node's data folder.
    with tempfile.TemporaryDirectory(prefix="echo-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


async def _start(identity: Identity, settings: HiveSettings, portal: Portal, folder: Path) -> Any:
    key_path = folder / "key"
    key_path.touch(mode=0o600)
    key_path.write_bytes(to_file_bytes(identity))
    try:
        with trio.CancelScope(shield=True), trio.fail_after(START_DEADLINE_S):
            return await portal.call(_start_vendor, identity, settings, key_path)
    except trio.TooSlowError as error:
        raise NetError(f"the network daemon did not start within {START_DEADLINE_S:g} s; is the machine busy?") from error
    finally:
        key_path.unlink()


async def _start_vendor(identity: Identity, settings: HiveSettings, key_path: Path) -> Any:
    # Imported here, on hivemind's own thread: it takes 3 s. libp2p comes first, because both register the protobuf
    # file `crypto.pb` and libp2p's holds all of hivemind's.
    from echo_p2p.net.gossip import KEY_MESSAGES

    sys.modules.setdefault("hivemind.proto.crypto_pb2", KEY_MESSAGES)
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    volunteer = settings.role == "volunteer"
    try:
        p2p = await _leashed_p2p(settings).create(**_daemon_arguments(settings, key_path))
    except P2PDaemonError as error:
        raise NetError(f"the network daemon did not start: {error}; is its port in use?") from error
    if p2p.peer_id.to_base58() != identity.peer_id:
        raise IdentityError(f"the network daemon calls itself {p2p.peer_id} instead of {identity.peer_id}")
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(source=identity.peer_id),
        client_mode=volunteer,
        record_validator=OwnedRecords(identity),
        cache_size=STORED_KEYS_MAX,
    )
    node.protocol.storage.maxsize = STORED_KEYS_MAX
    return node


def _daemon_arguments(settings: HiveSettings, key_path: Path) -> dict[str, Any]:
    volunteer = settings.role == "volunteer"
    loopback = all("/127.0.0.1/" in address or "/::1/" in address for address in settings.listen)
    return {
        "identity_path": str(key_path),
        "check_if_identity_free": False,  # it understands RSA keys only
        "host_maddrs": list(settings.listen),
        "announce_maddrs": list(settings.announce) or None,
        "dht_mode": "client" if volunteer else "server",
        "force_reachability": None if volunteer else "public",
        "auto_nat": True,
        "nat_port_map": volunteer and not loopback,
        "use_relay": True,
        "use_auto_relay": volunteer,
        "trusted_relays": list(settings.trusted_relays or settings.initial_peers) if volunteer else None,
    }


def _leashed_p2p(settings: HiveSettings) -> Any:
    """hivemind's `P2P`, whose daemon gets the flags that hivemind hides and dies with the thread that starts it."""
    from hivemind.p2p import P2P

    flags = {"bootstrap": _RELAY_FLAGS, "trainer": (), "volunteer": _VOLUNTEER_FLAGS}[settings.role]
    environment = _BOOTSTRAP_ENVIRONMENT if settings.role == "bootstrap" else ()

    class LeashedP2P(P2P):
        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            leash_arguments = [sys.executable, "-I", "-S", str(leash.__file__), str(os.getpid()), *environment, "--"]
            return [*leash_arguments, *P2P._make_process_args(*args, **kwargs), *flags]

    return LeashedP2P


async def _watch(portal: Portal, vendor_node: Any) -> None:
    status = await portal.call(vendor_node.p2p._child.wait)
    raise NetError(f"the network daemon ended unexpectedly (status {status}); restart this node")


async def _stop(portal: Portal, vendor_node: Any) -> None:
    child = vendor_node.p2p._child
    with trio.move_on_after(STOP_DEADLINE_S) as scope:
        await portal.call(vendor_node.shutdown)
        await portal.call(vendor_node.p2p.shutdown)
    if scope.cancelled_caught and child.returncode is None:
        logger.warning("the network daemon (process %d) did not end when told to; killing it", child.pid)
        os.kill(child.pid, signal.SIGKILL)


def _vendor_peer_id(peer: str) -> Any:
    from hivemind.p2p import PeerID

    return PeerID(peer_id_bytes(peer))


