"""The bootstrap: a rendezvous that a swarm can always find. Forwards gossip, relays streams, keeps nothing."""

import logging

import trio

from echo_p2p.presence import Presence
from echo_protocols import names

log = logging.getLogger(__name__)


async def run_bootstrap(presence: Presence) -> None:
    """Serve a swarm until cancelled.

    Peers that only dial us reach each other's gossip through us, so every topic of the swarm is subscribed to here.
    """
    swarm = presence.swarm.name
    async with trio.open_nursery() as nursery:
        for topic in names.topics(swarm):
            nursery.start_soon(_forward, presence, topic)


async def _forward(presence: Presence, topic: str) -> None:
    async with presence.gossip.subscribe(topic) as messages:
        log.info("forwarding %s", topic)
        async for _ in messages:
            pass
