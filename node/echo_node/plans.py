"""The trainer's leader: keeps the run's manifest alive and a plan that fits who is there. Knows no rollout."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log10
from typing import Final

import msgspec
import trio

from echo_node.standing import Standing
from echo_p2p.chain.fit import shortfall
from echo_p2p.chain.plan import plan
from echo_p2p.chain.pricing import USUAL_LINK, Device, Link, Links, Workload
from echo_p2p.chain.workload import workload_of
from echo_p2p.errors import ModelError, NetError
from echo_p2p.models import resolve_model
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.peer import Capacity, Plan, RoleRecord, Way

log = logging.getLogger(__name__)

PEERS_MAX = 192
"""A plan with more of them would not fit into its record."""

BALANCE_EVERY_S = 30.0
"""How often a plan may change because measurements did; whoever comes or leaves changes it at once."""

_PLANNED_AT_ONCE = 8  # peers that can't hold the model alone
_BY_REACH: Final[dict[str, Link | None]] = {"none": None, "relayed": Link(latency_s=0.1, bytes_s=5e5)}

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
    swarm, work = presence.swarm, workload_for(run)
    seen: _Seen | None = None
    looked_at = -inf
    while True:
        now = trio.current_time()
        current = swarm.plan if swarm.plan is not None else Plan(number=0, layers=work.layers)
        here = {peer: record for peer, record in serving(presence, run).items() if not standing.benched(peer, now)}
        chosen = bounded({peer: record.capacity for peer, record in here.items() if record.capacity}, current)
        asked = _Seen({peer: device_of(held) for peer, held in chosen.items()}, links_of(here), current)
        came_or_left = seen is None or seen.devices.keys() != asked.devices.keys() or seen.current != current
        if came_or_left or (asked != seen and now - looked_at >= BALANCE_EVERY_S):
            seen, looked_at = asked, now
            wanted = await _planned(asked, work)
            if wanted.chains != current.chains:
                # numbers come from the clock, so that they grow over restarts of the leader
                wanted = msgspec.structs.replace(wanted, number=max(int(time.time()), current.number + 1))
                seen = _Seen(asked.devices, asked.links, wanted)
                swarm.plan = wanted
                log.info("plan %d: %s", wanted.number, describe(wanted))
                if len(here) > len(chosen):
                    log.warning("%d peers are one too many for a plan of %d; they wait", len(here), len(chosen))
                await swarm.publish_plan(run.run_id, wanted)
            if not wanted.chains:
                log.info("no chain can be made: %s", shortfall(asked.devices, work))
        await swarm.changed()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a plan is made from."""

    devices: dict[str, Device]
    links: Links
    current: Plan


async def _planned(asked: _Seen, work: Workload) -> Plan:
    """The plan; a crowd's takes most of a second, and a thread."""
    parts = sum(work.room(device, first=True, last=True) < work.layers for device in asked.devices.values())
    if parts <= _PLANNED_AT_ONCE:
        return plan(asked.devices, work, asked.current, asked.links)
    return await trio.to_thread.run_sync(plan, asked.devices, work, asked.current, asked.links)


def missing(presence: Presence, run: Run, work: Workload) -> str:
    """What is missing for a chain, in words; empty if there is one."""
    if presence.swarm.plan is not None and presence.swarm.plan.chains:
        return ""
    here = {peer: record.capacity for peer, record in serving(presence, run).items() if record.capacity}
    return shortfall({peer: device_of(capacity) for peer, capacity in here.items()}, work)


def workload_for(run: Run) -> Workload:
    """What a plan for our own run is made with; of its layers alone if the model's files can't be read."""
    try:
        return workload_of(resolve_model(run.manifest.model), run.manifest)
    except ModelError as error:
        log.warning("the model's figures can't be read (%s); planning by numbers of layers alone", error)
        return Workload(layers=run.manifest.layers, rows=run.manifest.group_size)


def serving(presence: Presence, run: Run) -> dict[str, RoleRecord]:
    """The records of the live inference peers of a run that say what they can hold."""
    return {
        peer: member.record
        for peer, member in presence.swarm.members.items()
        if member.record.role == "inference" and member.record.run_id == run.run_id and member.record.capacity
    }


def bounded(capacities: Mapping[str, Capacity], current: Plan) -> dict[str, Capacity]:
    """As many peers as a plan has room for; those that serve already come first."""
    placed = {stop.peer for chain in current.chains for stop in chain}
    chosen = sorted(capacities, key=lambda peer: (peer not in placed, peer))[:PEERS_MAX]
    return {peer: capacities[peer] for peer in chosen}


def device_of(capacity: Capacity) -> Device:
    """What a peer says of its device, to steps of about a tenth: measurements swing."""
    return Device(
        max_layers=capacity.max_layers,
        layers_per_s=_stepped(capacity.layers_per_s),
        head_layers=_stepped(capacity.head_layers),
        memory_bytes=capacity.memory_bytes,
        value_bytes=capacity.value_bytes,
    )


def links_of(records: Mapping[str, RoleRecord]) -> Links:
    """The links between peers, as far as they are known: by their reach, and better by what they measured.

    A peer is believed what it says of its own links only, whichever way they go.
    """
    known: dict[tuple[str, str], Link | None] = {}
    for peer, record in records.items():
        if record.reach in _BY_REACH:
            for other in records.keys() - {peer}:
                for pair in ((peer, other), (other, peer)):
                    known[pair] = None if known.get(pair, USUAL_LINK) is None else _BY_REACH[record.reach]
    for back in (True, False):  # the sender's word goes before the receiver's
        for peer, record in records.items():
            for way in record.capacity.ways if record.capacity else ():
                pair = (way.peer, peer) if back else (peer, way.peer)
                if way.peer in records and way.peer != peer:
                    known[pair] = _link(way)
    return Links(known)


def _link(way: Way) -> Link | None:
    if way.latency_s is None:
        return None
    return Link(_stepped(way.latency_s), _stepped(way.bytes_s) or USUAL_LINK.bytes_s)


def _stepped(value: float) -> float:
    return float(10.0 ** (round(log10(value) * 20.0) / 20.0)) if value > 0.0 else 0.0


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
