"""One node on the network: both stacks, the border and the swarm, brought up together. Knows no role's work."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio

from echo_p2p.config import NetworkConfig
from echo_p2p.errors import Unreachable
from echo_p2p.identity import Identity
from echo_p2p.net.gossip import GossipNode, GossipSettings, open_gossip
from echo_p2p.net.hive import HiveNode, HiveSettings, open_hive
from echo_p2p.swarm import Swarm
from echo_protocols.envelope import Border, Sealer
from echo_protocols.peer import Role, RoleRecord

log = logging.getLogger(__name__)

_ADDRESSES_EVERY_S = 30.0
_RECORD_ADDRESSES_MAX = 16


@dataclass(slots=True)
class Presence:
    """Everything that a role needs of the network. `record` is what we say of ourselves, but for the addresses."""

    identity: Identity
    network: NetworkConfig
    hive: HiveNode
    gossip: GossipNode
    border: Border
    sealer: Sealer
    swarm: Swarm
    record: RoleRecord
    stream_addresses: tuple[str, ...] = ()
    gossip_addresses: tuple[str, ...] = ()
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
            nursery.start_soon(_follow_addresses, presence)
            nursery.start_soon(_meet_members, presence, nursery)
            yield presence
            nursery.cancel_scope.cancel()


def _describe(presence: Presence) -> RoleRecord:
    return msgspec.structs.replace(
        presence.record,
        streams=presence.stream_addresses[:_RECORD_ADDRESSES_MAX],
        gossip=presence.gossip_addresses[:_RECORD_ADDRESSES_MAX],
        started_at=presence.started_at,
    )


async def _follow_addresses(presence: Presence) -> None:
    """Relayed addresses come and go: say so when they do."""
    while True:
        await trio.sleep(_ADDRESSES_EVERY_S)
        before = presence.stream_addresses
        await presence.refresh_addresses()
        if presence.stream_addresses != before:
            presence.swarm.announce()


async def _meet_members(presence: Presence, nursery: trio.Nursery) -> None:
    """Learn where members can be dialled; keep gossip with bootstraps and trainers, who forward everybody's."""
    dialled: set[tuple[str, ...]] = set()
    while True:
        for peer, member in presence.swarm.members.items():
            if peer == presence.identity.peer_id:
                continue
            presence.hive.learn(peer, member.record.streams)
            hub = member.record.role in _HUBS
            if hub and member.record.gossip not in dialled:
                dialled.add(member.record.gossip)
                nursery.start_soon(_dial_first, presence.gossip, member.record.gossip)
        await presence.swarm.changed()


_HUBS: tuple[Role, ...] = ("bootstrap", "trainer")


async def _dial_first(gossip: GossipNode, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        try:
            await gossip.connect(address)
        except Unreachable as error:
            log.info("%s", error)
        else:
            return


def _reachable(listening: list[str], visible: tuple[str, ...]) -> tuple[str, ...]:
    """Gossip addresses with `0.0.0.0` replaced by the hosts that the stream stack is visible under."""
    hosts = list(dict.fromkeys(address.split("/")[2] for address in visible if address.startswith("/ip4/")))
    spelled = []
    for address in listening:
        parts = address.split("/")
        for host in hosts if parts[2] == "0.0.0.0" else [parts[2]]:
            spelled.append("/".join([*parts[:2], host, *parts[3:]]))
    return tuple(spelled)
