"""A node's records and streams, seen from trio: deadlines, bounds and the address book. Knows no vendor.

The record table lives on the far side of a portal (`net.hive` makes it); the streams come from the daemon.
"""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple

import trio
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, Unreachable
from echo_p2p.net.base import FRAME_MAX_BYTES, RECORD_MAX_BYTES, Record, Stream, StreamHandler
from echo_p2p.net.daemon import Daemon
from echo_p2p.net.dialing import split_address
from echo_p2p.net.joining import Bootstraps, Joining
from echo_p2p.net.portal import Portal
from echo_p2p.net.relay import RelaySlots, relay_limit_bytes
from echo_p2p.net.signed import TTL_MAX_S

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RECORD_DEADLINE_S = 15.0
ADDRESS_BOOK_MAX = 1024


class RecordTable(Protocol):
    """The distributed table; its coroutines run on the portal's loop."""

    async def store(self, key: str, value: bytes, expires_at: float) -> bool:
        """Store our record; whether anybody took it."""

    async def find(self, key: str) -> dict[str, Record]:
        """All records under `key`, by owner, checked."""

    async def knows(self, peer: str) -> bool:
        """Whether `peer` stands in our routing table."""

    async def greet(self, peer: str) -> bool:
        """Enter each other's routing table; whether `peer` answered. Raises NetError if it refused."""


class HiveNode:
    """`Records` and `Streams` of one node. Made by `net.hive.open_hive`.

    The address book keeps the latest addresses of `ADDRESS_BOOK_MAX` peers; the peer learnt longest ago goes first.
    """

    def __init__(
        self,
        peer_id: str,
        daemon_pid: int,
        daemon: Daemon,
        table: RecordTable,
        portal: Portal,
        *,
        relays: tuple[str, ...],
        seen_at: Callable[[str], Awaitable[list[str]]],
        join: tuple[str, ...],
        join_check_s: float,
    ) -> None:
        self._peer_id = peer_id
        self._daemon_pid = daemon_pid
        self._daemon = daemon
        self._table = table
        self._portal = portal
        self._slots = RelaySlots(
            relays,
            connected=daemon.peers,
            connect=daemon.connect,
            reserve=partial(relay_limit_bytes, daemon),
        )
        self._seen_at = seen_at
        self._proved: tuple[str, ...] = ()
        self._addresses: dict[str, tuple[str, ...]] = {}
        for address in join:
            transport, peer = split_address(address)
            self.learn(peer, (*self._addresses.get(peer, ()), transport))
        joining = Joining(connected=daemon.peers, connect=daemon.connect, knows=self._knows, greet=self._greet)
        self._bootstraps = Bootstraps(join, join_check_s, joining)

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def daemon_pid(self) -> int:
        """Process id of the go-libp2p daemon."""
        return self._daemon_pid

    @property
    def bootstraps(self) -> frozenset[str]:
        """PeerIDs of the bootstraps that answered at the last look; empty: cut off, and trying again."""
        return self._bootstraps.reached

    @property
    def refused(self) -> Counter[str]:
        """Incoming streams that were refused or failed, by reason."""
        return self._daemon.refused

    async def wait_joined(self) -> None:
        """Wait until a bootstrap has let us in, once. Put a deadline around it."""
        await self._bootstraps.wait_joined()

    async def keep_joined(self) -> None:
        """The background task of a node; `open_hive` runs it."""
        await self._bootstraps.keep_joined()

    async def keep_slots(self) -> None:
        """Another background task of a node: hold its slots at relays."""
        await self._slots.keep()

    @property
    def needs_relay(self) -> bool:
        """Whether it looks for a slot at relays."""
        return self._slots.wanted

    @property
    def relay_limits(self) -> dict[str, int | None]:
        """Bytes that one connection may carry through each relay that we have a slot at; None: no limit."""
        return dict(self._slots.limits)

    async def visible_addresses(self) -> list[str]:
        """Where others can dial us now, relayed addresses included, each with `/p2p/…`."""
        _, addresses = await self._daemon.identify()
        known = dict.fromkeys((*self._proved, *addresses, *self._slots.addresses))
        return [f"{address}/p2p/{self.peer_id}" for address in known]

    def prove(self, addresses: Sequence[str]) -> None:
        """Addresses (without `/p2p/…`) where others have reached us: the daemon of a volunteer doesn't name them."""
        self._proved = tuple(addresses)

    async def seen_at(self, peer: str) -> list[str]:
        """The remote addresses of our connections with `peer`, relayed ones included."""
        return await self._within_deadline(self._seen_at, peer)

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
        if not await self._within_deadline(self._table.store, key, value, expires_at):
            raise Unreachable(f"record {key!r} was stored nowhere: nobody answered, or ours there lives longer")

    async def get(self, key: str) -> dict[str, Record]:
        """As `Records.get`."""
        found = await self._within_deadline(self._table.find, key)
        now = time.time()
        return {owner: record for owner, record in found.items() if record.expires_at > now}

    async def _knows(self, peer: str) -> bool:
        return await self._within_deadline(self._table.knows, peer)

    async def _greet(self, peer: str) -> bool:
        return await self._within_deadline(self._table.greet, peer)

    async def _within_deadline(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        try:
            with trio.fail_after(RECORD_DEADLINE_S):
                return await self._portal.call(function, *args)
        except trio.TooSlowError as error:
            raise Unreachable(f"the record table did not answer within {RECORD_DEADLINE_S:g} s") from error

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
