"""One node on the network: both stacks, the border and the swarm, brought up together. Knows no role's work."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import trio

from echo_p2p.config import NetworkConfig
from echo_p2p.errors import NetError, Unreachable
from echo_p2p.identity import Identity
from echo_p2p.net.dialing import dialable
from echo_p2p.net.gossip import GossipNode, GossipSettings, open_gossip
from echo_p2p.net.hive import HiveNode, HiveSettings, open_hive
from echo_p2p.net.ping import serve_ping
from echo_p2p.net.reach import WITNESSES_MAX, Finding, Lookout, said_reach, serve_dial_back
from echo_p2p.swarm import Swarm
from echo_protocols.envelope import Border, Sealer
from echo_protocols.peer import Role, RoleRecord

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_RECORD_ADDRESSES_MAX = 16


@dataclass(slots=True)
class Presence:
    """Everything that a role needs of the network.

    `record` is what we say of ourselves, but for the addresses, for `reach`, and for `figures`: fields that are read at
    each renewal. `busy` is what we answer to pings: the age of the step that we compute.
    """

    identity: Identity
    network: NetworkConfig
    hive: HiveNode
    gossip: GossipNode
    border: Border
    sealer: Sealer
    swarm: Swarm
    record: RoleRecord
    figures: Callable[[], dict[str, Any]] = dict
    busy: Callable[[], float] = float
    stream_addresses: tuple[str, ...] = ()
    gossip_addresses: tuple[str, ...] = ()
    found: Finding = field(default_factory=Finding)
    started_at: float = field(default_factory=time.time)

    def say(self, **changes: object) -> None:
        """Change what our role record says, and tell the others at once."""
        self.record = msgspec.structs.replace(self.record, **changes)
        self.swarm.announce()

    @property
    def connected(self) -> bool:
        """Whether a bootstrap answered at the last look, or none was asked for."""
        return bool(self.hive.bootstraps) or not self.network.peers

    async def refresh_addresses(self) -> None:
        """Ask both stacks where they can be dialled now."""
        self.stream_addresses = tuple(await self.hive.visible_addresses())
        self.gossip_addresses = _reachable(self.gossip.listen_addresses(), self.stream_addresses)


@asynccontextmanager
async def open_presence(
    identity: Identity, *, swarm: str, network: NetworkConfig, record: RoleRecord
) -> AsyncIterator[Presence]:
    """Bring a node up; it joins in the background and is gone when the context is left. Raises NetError."""
    hive_settings = HiveSettings(
        role="volunteer" if record.role == "inference" else record.role,
        listen=(f"/ip4/{network.host}/tcp/{network.port}",),
        announce=network.announce,
        initial_peers=network.peers,
    )
    gossip_settings = GossipSettings(listen=(f"/ip4/{network.host}/tcp/{network.gossip_port}",))
    async with open_hive(identity, hive_settings) as hive, open_gossip(identity, gossip_settings) as gossip:
        border = Border()
        sealer = Sealer(identity.public_key, identity.sign, first_sequence=time.time_ns() // 1000)
        members = Swarm(
            swarm,
            peer=identity.peer_id,
            records=hive,
            sealer=sealer,
            border=border,
            describe=lambda: _describe(presence),
        )
        presence = Presence(identity, network, hive, gossip, border, sealer, members, record)
        await presence.refresh_addresses()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(members.run)
            if record.role in _HUBS:
                await nursery.start(serve_dial_back, hive, hive.seen_at)
            await nursery.start(partial(serve_ping, hive, lambda: presence.busy(), refused=border.refused))
            nursery.start_soon(_follow_reach, presence)
            nursery.start_soon(_meet_members, presence, nursery)
            yield presence
            nursery.cancel_scope.cancel()


def _describe(presence: Presence) -> RoleRecord:
    return msgspec.structs.replace(
        presence.record,
        streams=presence.stream_addresses[:_RECORD_ADDRESSES_MAX],
        gossip=presence.gossip_addresses[:_RECORD_ADDRESSES_MAX],
        reach=presence.found.reach,
        started_at=presence.started_at,
        **presence.figures(),
    )


async def _follow_reach(presence: Presence) -> None:
    """Addresses and relays come and go, and others can dial us or not: say so when that changes."""
    lookout = Lookout(presence.hive)
    while True:
        before = (presence.stream_addresses, presence.found)
        try:
            await presence.refresh_addresses()
            presence.found = await lookout.look(presence.stream_addresses, _witnesses(presence))
            presence.hive.prove(presence.found.addresses)
            await presence.refresh_addresses()
        except NetError as error:
            log.warning("can't ask where this node can be dialled (%s); trying again", error)
        if presence.found.reach != before[1].reach:
            log.info("reach: %s", said_reach(presence.found.reach, presence.found.addresses))
        if (presence.stream_addresses, presence.found) != before:
            presence.swarm.announce()
        await trio.sleep(_LOOK_EVERY_S)


def _witnesses(presence: Presence) -> tuple[str, ...]:
    """Whom to ask whether we can be dialled: peers that we were told of first, then the longest here."""
    told = {address.rpartition("/p2p/")[2] for address in presence.network.peers}
    members = [member for member in presence.swarm.members.values() if member.record.role in _HUBS]
    others = [member for member in members if member.peer != presence.identity.peer_id]
    others.sort(key=lambda member: (member.peer not in told, member.record.started_at, member.peer))
    return tuple(sorted(member.peer for member in others[:WITNESSES_MAX]))


async def _meet_members(presence: Presence, nursery: trio.Nursery) -> None:
    """Learn where members can be dialled; keep gossip with bootstraps and trainers, who forward everybody's."""
    dialling: set[str] = set()
    dialled: dict[str, tuple[float, tuple[str, ...]]] = {}  # by peer: when, and where

    async def dial(peer: str, addresses: tuple[str, ...]) -> None:
        dialling.add(peer)
        await _dial_first(presence.gossip, addresses)
        dialling.discard(peer)

    while True:
        hubs = _hubs(presence)
        others = [peer for peer in presence.swarm.members if peer not in hubs and peer != presence.identity.peer_id]
        for peer in (*others, *hubs):  # an address book that is full forgets the first
            presence.hive.learn(peer, presence.swarm.members[peer].record.streams)
        for peer in dialled.keys() - hubs.keys():  # its record is gone
            presence.gossip.forget(peer)
            del dialled[peer]
        now = trio.current_time()
        for peer, addresses in hubs.items():
            last_at, last = dialled.get(peer, (-_HUB_AGAIN_S, ()))
            if addresses and addresses != last and peer not in dialling and now - last_at >= _HUB_AGAIN_S:
                dialled[peer] = (now, addresses)
                nursery.start_soon(dial, peer, addresses)
        await presence.swarm.changed()


def _hubs(presence: Presence) -> dict[str, tuple[str, ...]]:
    """Whom to keep gossip with, and where: those that we were told of, the run's trainers, and few who just say so.

    Anybody may call himself a trainer and name any address: only addresses of its own PeerID are dialled.
    """
    swarm = presence.swarm
    trusted = {address.rpartition("/p2p/")[2] for address in presence.network.peers}
    trusted |= {member.peer for member in swarm.trainers()}
    claiming = [member for peer, member in swarm.members.items() if peer != presence.identity.peer_id]
    claiming = [member for member in claiming if member.record.role in _HUBS]
    ordered = sorted(claiming, key=lambda member: (member.peer not in trusted, member.record.started_at, member.peer))
    hubs = [member for member in ordered if member.peer in trusted]
    hubs += ordered[len(hubs) :][: max(0, _HUBS_MAX - len(hubs))]
    return {
        member.peer: tuple(address for address in member.record.gossip if dialable(address, member.peer))
        for member in hubs
    }


_HUBS: tuple[Role, ...] = ("bootstrap", "trainer")
_HUBS_MAX = 8
_HUB_AGAIN_S = 30.0


async def _dial_first(gossip: GossipNode, addresses: tuple[str, ...]) -> None:
    """Task boundary: an address that another peer gave must not end us, whatever it does to a vendor."""
    for address in addresses:
        try:
            await gossip.connect(address)
        except Unreachable as error:
            log.info("%s", error)
        except Exception:
            log.exception("gossip address %s can't be dialled", address)
        else:
            return


def _reachable(listening: list[str], visible: tuple[str, ...]) -> tuple[str, ...]:
    """Gossip addresses with `0.0.0.0` replaced by the hosts that the stream stack is visible under."""
    hosts = list(dict.fromkeys(address.split("/")[2] for address in visible if _is_direct_ip4(address)))
    spelled = []
    for address in listening:
        parts = address.split("/")
        for host in hosts if parts[2] == "0.0.0.0" else [parts[2]]:
            spelled.append("/".join([*parts[:2], host, *parts[3:]]))
    return tuple(spelled)


def _is_direct_ip4(address: str) -> bool:
    return address.startswith("/ip4/") and "/p2p-circuit" not in address
