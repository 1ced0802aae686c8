"""The trainer's leader: keeps the run's manifest alive and a plan that fits who is there. Knows no rollout."""

import logging
import time

import msgspec

from echo_p2p.chain.plan import plan
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols.peer import Capacity, Plan

log = logging.getLogger(__name__)


async def lead(presence: Presence, run: Run) -> None:
    """Publish a new plan whenever the peers that serve this run change; runs until cancelled."""
    swarm = presence.swarm
    while True:
        capacities = serving(presence, run)
        current = swarm.plan if swarm.plan is not None else Plan(number=0, layers=run.manifest.layers)
        wanted = plan(capacities, run.manifest.layers, current)
        if wanted.chains != current.chains:
            # numbers come from the clock, so that they grow over restarts of the leader
            wanted = msgspec.structs.replace(wanted, number=max(int(time.time()), current.number + 1))
            swarm.plan = wanted
            log.info("plan %d: %s", wanted.number, describe(wanted))
            await swarm.publish_plan(run.run_id, wanted)
        await swarm.changed()


def serving(presence: Presence, run: Run) -> dict[str, Capacity]:
    """The live inference peers of a run, with what each can hold."""
    return {
        peer: member.record.capacity
        for peer, member in presence.swarm.members.items()
        if member.record.role == "inference" and member.record.run_id == run.run_id and member.record.capacity
    }


def describe(found: Plan) -> str:
    """A plan in words."""
    chains = [" → ".join(f"…{stop.peer[-6:]} {stop.span}" for stop in chain) for chain in found.chains]
    return "; ".join(chains) or "no chain: the peers here can't hold the model together"
