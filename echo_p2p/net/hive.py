"""Records and streams over hivemind: its DHT node in this process, and the go-libp2p daemon that it runs.

The only home of hivemind. hivemind lives on one asyncio loop in a thread, which only DHT calls cross to; streams go
from trio straight to the daemon (`net.daemon`). Knows nothing of what records and frames mean.
"""

import importlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from echo_p2p.errors import IdentityError, NetError
from echo_p2p.identity import Identity, peer_id_bytes, to_file_bytes
from echo_p2p.net import leash
from echo_p2p.net.base import Record
from echo_p2p.net.daemon import Daemon
from echo_p2p.net.hive_node import HiveNode
from echo_p2p.net.hive_settings import (
    HiveSettings,
    Role,
    daemon_arguments,
    daemon_environment,
    daemon_flags,
    is_local,
    relays_of,
)
from echo_p2p.net.joining import wait_for_any
from echo_p2p.net.portal import Portal, open_portal
from echo_p2p.net.relay import relay_limit_bytes
from echo_p2p.net.scratch import scratch_folder, sweep
from echo_p2p.net.signed import OwnedRecords

__all__ = ["HiveNode", "HiveSettings", "Role", "open_hive"]

logger = logging.getLogger(__name__)

IMPORT_DEADLINE_S = 120.0
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 5.0
RELAY_ATTEMPTS = 10
RELAY_LIMIT_MIN_BYTES = 1 << 30
STORED_KEYS_MAX = 4096

PROBE = HiveSettings(role="trainer")
_PROBING = {"no_listen": True, "dht_mode": "client", "host_maddrs": None}


class _Table:
    """hivemind's DHT node as a `RecordTable`."""

    def __init__(self, node: Any, peer_id: str, keeps_records: bool) -> None:
        self.node = node
        self._peer_id = peer_id
        self._keeps_records = keeps_records

    async def store(self, key: str, value: bytes, expires_at: float) -> bool:
        elsewhere = not self._keeps_records
        return bool(await self.node.store(key, value, expires_at, subkey=self._peer_id, exclude_self=elsewhere))

    async def find(self, key: str) -> dict[str, Record]:
        found = await self.node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            owner: Record(owner, entry.value, entry.expiration_time)
            for owner, entry in found.value.items()
            if isinstance(owner, str) and isinstance(entry.value, bytes)
        }

    async def knows(self, peer: str) -> bool:
        return self.node.protocol.routing_table.get(peer_id=_vendor_peer_id(peer)) is not None

    async def greet(self, peer: str) -> bool:
        from hivemind.dht.protocol import ValidationError

        try:
            entered = await self.node.protocol.call_ping(_vendor_peer_id(peer), validate=True, strict=True)
        except ValidationError as error:  # our clock is wrong, or we can't be dialled back
            raise NetError(str(error)) from error
        if entered is not None:
            await self.node.find_nearest_nodes([self.node.node_id])
        return entered is not None

    async def seen_at(self, peer: str) -> list[str]:
        infos = await self.node.p2p.list_peers()
        return [str(address) for info in infos if str(info.peer_id) == peer for address in info.addrs]


@asynccontextmanager
async def open_hive(identity: Identity, settings: HiveSettings) -> AsyncIterator[HiveNode]:
    """Run a node; it joins in the background (`wait_joined`), and its daemon is gone when the context is left.

    A volunteer that may need a relay first waits for a bootstrap to answer: a relay that does not answer a daemon when
    it starts is not asked again for a long time.
    Raises NetError if the daemon does not start, and (out of the body) if it dies while it is needed.
    """
    if settings.role == "volunteer" and settings.initial_peers and not is_local(settings):
        await wait_for_any(settings.initial_peers)
    async with _private_folder() as folder, open_portal("hivemind") as portal:
        vendor_node = await _start(identity, settings, portal, folder)
        table = _Table(vendor_node, identity.peer_id, keeps_records=settings.role != "volunteer")
        try:
            async with trio.open_nursery() as nursery:
                node = HiveNode(
                    identity.peer_id,
                    vendor_node.p2p._child.pid,
                    _daemon_of(vendor_node.p2p, folder),
                    table,
                    portal,
                    relays=relays_of(settings),
                    seen_at=table.seen_at,
                    join=settings.initial_peers,
                    join_check_s=settings.join_check_s,
                )
                nursery.start_soon(_watch, portal, vendor_node)
                nursery.start_soon(node.keep_joined)
                nursery.start_soon(node.keep_slots)
                yield node
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _stop(portal, vendor_node)


@asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    # Unix socket paths are limited to about 100 characters, so this can't be in the node's data folder.
    await trio.to_thread.run_sync(sweep)
    with scratch_folder() as scratch:
        yield scratch.path


async def _start(identity: Identity, settings: HiveSettings, portal: Portal, folder: Path) -> Any:
    """hivemind's DHT node, with its daemon; shielded, because an abandoned start would leave a daemon behind."""
    key_path = folder / "key"
    key_path.touch(mode=0o600)
    key_path.write_bytes(to_file_bytes(identity))
    try:
        with trio.CancelScope(shield=True), trio.fail_after(IMPORT_DEADLINE_S):
            await portal.call(_import_vendor)
        with trio.CancelScope(shield=True), trio.fail_after(START_DEADLINE_S):
            p2p = await _start_daemon(settings, portal, folder, key_path)
            return await portal.call(_start_table, identity, settings, p2p)
    except trio.TooSlowError as error:
        raise NetError(
            f"the network daemon did not start within {START_DEADLINE_S:g} s; is the machine busy?"
        ) from error
    finally:
        key_path.unlink()


async def _start_daemon(settings: HiveSettings, portal: Portal, folder: Path, key_path: Path) -> Any:
    # The daemon starts its relay twice, once with our limits and once with the default of 128 KiB; which one wins is a
    # race that we can't decide, so a bootstrap asks its relay, and rolls the dice again.
    arguments = daemon_arguments(settings, key_path)
    for attempt in range(1, RELAY_ATTEMPTS + 1):
        p2p = await portal.call(_start_p2p, settings, arguments, folder)
        if settings.role != "bootstrap" or is_local(settings) or await _relay_carries(portal, p2p, folder):
            return p2p
        logger.info("the relay started with default limits (attempt %d of %d)", attempt, RELAY_ATTEMPTS)
        if attempt < RELAY_ATTEMPTS:
            await portal.call(p2p.shutdown)
    logger.warning("the relay carries only 128 KiB a connection; volunteers behind NAT can't work through it: restart")
    return p2p


async def _relay_carries(portal: Portal, p2p: Any, folder: Path) -> bool:
    """Whether the relay of a daemon has our limits, asked from a second daemon that lives for this question."""
    probe = await portal.call(_start_p2p, PROBE, _PROBING, folder)
    try:
        _, addresses = await _daemon_of(p2p, folder).identify()
        asking = _daemon_of(probe, folder)
        await asking.connect(p2p.peer_id.to_base58(), addresses)
        limit = await relay_limit_bytes(asking, p2p.peer_id.to_base58())
        return limit is None or limit >= RELAY_LIMIT_MIN_BYTES
    except NetError as error:
        logger.warning("the relay could not be tested: %s", error)
        return True
    finally:
        await portal.call(probe.shutdown)


def _daemon_of(p2p: Any, folder: Path) -> Daemon:
    return Daemon(str(p2p.daemon_listen_maddr).removeprefix("/unix"), folder)


async def _import_vendor() -> None:
    # On hivemind's own thread: it takes 3 s, and many times that on a busy machine. libp2p comes first, because both
    # register the protobuf file `crypto.pb` and libp2p's holds all of hivemind's.
    from echo_p2p.net.gossip import KEY_MESSAGES

    sys.modules.setdefault("hivemind.proto.crypto_pb2", KEY_MESSAGES)
    importlib.import_module("hivemind.dht.node")


async def _start_p2p(settings: HiveSettings, arguments: dict[str, Any], folder: Path) -> Any:
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    try:
        return await _leashed_p2p(settings, folder).create(**arguments)
    except P2PDaemonError as error:
        raise NetError(f"the network daemon did not start: {error}; is its port in use?") from error


async def _start_table(identity: Identity, settings: HiveSettings, p2p: Any) -> Any:
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID

    if p2p.peer_id.to_base58() != identity.peer_id:
        raise IdentityError(f"the network daemon calls itself {p2p.peer_id} instead of {identity.peer_id}")
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(source=identity.peer_id),
        client_mode=settings.role == "volunteer",
        record_validator=OwnedRecords(identity),
        cache_size=STORED_KEYS_MAX,
    )
    node.protocol.storage.maxsize = STORED_KEYS_MAX
    return node


def _leashed_p2p(settings: HiveSettings, folder: Path) -> Any:
    """hivemind's `P2P`, whose daemon gets the flags that hivemind hides and dies with the thread that starts it.

    Its sockets lie in our folder: in hivemind's own place they would outlast a node that is killed.
    """
    from hivemind.p2p import P2P

    flags, environment = daemon_flags(settings), daemon_environment(settings)

    class LeashedP2P(P2P):
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

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
        if child.returncode is None:  # else it would wait for answers that can't come
            await portal.call(vendor_node.shutdown)
        await portal.call(vendor_node.p2p.shutdown)
    if scope.cancelled_caught and child.returncode is None:
        logger.warning("the network daemon (process %d) did not end when told to; killing it", child.pid)
        os.kill(child.pid, signal.SIGKILL)


def _vendor_peer_id(peer: str) -> Any:
    from hivemind.p2p import PeerID

    return PeerID(peer_id_bytes(peer))
