"""Peers that serve the stages of one model in one process, over the in-memory network: to try what a ring does.

Knows no plan: the ring of all stages, in their order, is opened by whoever holds the first.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.memory_stage import MemoryWeights
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.stage import Stage, TensorUpdate
from echo_p2p.net.memory import MemoryNetwork
from echo_protocols.peer import Stop
from echo_protocols.values import PolicyVersion

Releases = Mapping[PolicyVersion, Mapping[str, TensorUpdate]]

_PEERS = "ABCDEFGHJK"


@dataclass(frozen=True, slots=True)
class MemoryRing:
    """The peers, in order of their stages."""

    network: MemoryNetwork
    route: tuple[Stop, ...]
    hosts: tuple[StageHost, ...]
    servers: tuple[ChainServer, ...]

    def ring(self, *, lanes: int = 0, rows: int = 16, exclusive: bool = False, vocabulary: int = 0) -> Ring:
        """What all stages together are opened as."""
        return Ring(self.route, bytes(32), lanes=lanes, rows=rows, exclusive=exclusive, vocabulary=vocabulary)


@asynccontextmanager
async def memory_ring(
    stages: Sequence[Stage],
    *,
    version: PolicyVersion,
    releases: Releases | None = None,
    limits: ChainLimits | None = None,
) -> AsyncIterator[MemoryRing]:
    """Serve stages, whose spans follow each other, at `version`, each by a peer of its own."""
    network = MemoryNetwork()
    route = tuple(Stop(peer=peer * 44, span=stage.span) for peer, stage in zip(_PEERS, stages, strict=False))
    hosts = tuple(
        StageHost(stop.peer, stage, MemoryWeights(releases or {}), version, limits=limits)
        for stop, stage in zip(route, stages, strict=True)
    )
    servers = tuple(ChainServer(network.node(host.peer), host) for host in hosts)
    async with trio.open_nursery() as nursery:
        for server in servers:
            await nursery.start(server.serve)
        yield MemoryRing(network, route, hosts, servers)
        nursery.cancel_scope.cancel()
