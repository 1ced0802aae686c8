"""The trainer's leader: keeps the run's manifest alive and a plan that fits who is there. Knows no rollout."""

import logging
import time
from collections.abc import Mapping

import msgspec
import trio

from echo_node.standing import Standing
from echo_p2p.chain.plan import plan
from echo_p2p.errors import NetError
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.peer import Capacity, Plan

log = logging.getLogger(__name__)

PEERS_MAX = 192
"""A plan with more of them would not fit into its record."""

KNOCK_EVERY_S = 10.0
_KNOCK_TIMEOUT_S = 10.0
_KNOCKS_AT_ONCE = 8
_MISSES = 3


async def lead(presence: Presence, run: Run, standing: Standing) -> None:
    """Publish a new plan whenever the peers that serve this run change; runs until cancelled.

    A chain is only as good as its worst peer, and anybody can announce himself: whoever can't be reached three times
    in a row is planned without for a while.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_knocking, presence, standing)
        await _keep_planning(presence, run, standing)


async def _keep_planning(presence: Presence, run: Run, standing: Standing) -> None:
    swarm = presence.swarm
    while True:
        now = trio.current_time()
        current = swarm.plan if swarm.plan is not None else Plan(number=0, layers=run.manifest.layers)
        here = {peer: held for peer, held in serving(presence, run).items() if not standing.benched(peer, now)}
        capacities = bounded(here, current)
        wanted = plan(capacities, run.manifest.layers, current)
        if wanted.chains != current.chains:
            # numbers come from the clock, so that they grow over restarts of the leader
            wanted = msgspec.structs.replace(wanted, number=max(int(time.time()), current.number + 1))
            swarm.plan = wanted
            log.info("plan %d: %s", wanted.number, describe(wanted))
            if len(here) > len(capacities):
                log.warning("%d peers are one too many for a plan of %d; they wait", len(here), len(capacities))
            await swarm.publish_plan(run.run_id, wanted)
        await swarm.changed()


def serving(presence: Presence, run: Run) -> dict[str, Capacity]:
    """The live inference peers of a run, with what each can hold."""
    return {
        peer: member.record.capacity
        for peer, member in presence.swarm.members.items()
        if member.record.role == "inference" and member.record.run_id == run.run_id and member.record.capacity
    }


def bounded(capacities: Mapping[str, Capacity], current: Plan) -> dict[str, Capacity]:
    """As many peers as a plan has room for; those that serve already come first."""
    placed = {stop.peer for chain in current.chains for stop in chain}
    chosen = sorted(capacities, key=lambda peer: (peer not in placed, peer))[:PEERS_MAX]
    return {peer: capacities[peer] for peer in chosen}


def describe(found: Plan) -> str:
    """A plan in words."""
    chains = [" → ".join(f"…{stop.peer[-6:]} {stop.span}" for stop in chain) for chain in found.chains]
    return "; ".join(chains) or "no chain: the peers here can't hold the model together"


async def _keep_knocking(presence: Presence, standing: Standing) -> None:
    """See whether the peers of chains of several can be reached; a peer alone in its chain holds nobody up."""
    missed: dict[str, int] = {}
    limiter = trio.CapacityLimiter(_KNOCKS_AT_ONCE)

    async def knock(peer: str) -> None:
        async with limiter:
            if await _answers(presence, peer):
                missed.pop(peer, None)
                standing.clear(peer)
                return
        missed[peer] = missed.get(peer, 0) + 1
        if missed[peer] >= _MISSES:
            standing.fail(peer, trio.current_time(), cost_s=_MISSES * KNOCK_EVERY_S)
            log.warning("peer %s announces itself but can't be reached; the plan goes on without it", peer)

    while True:
        await trio.sleep(KNOCK_EVERY_S)
        found = presence.swarm.plan
        peers = [stop.peer for chain in found.chains if len(chain) > 1 for stop in chain] if found else []
        missed = {peer: count for peer, count in missed.items() if peer in peers}
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(knock, peer)


async def _answers(presence: Presence, peer: str) -> bool:
    try:
        async with presence.hive.open(peer, names.BLOB, timeout_s=_KNOCK_TIMEOUT_S):
            return True
    except NetError as error:
        log.debug("knocked at %s: %s", peer, error)
        return False
