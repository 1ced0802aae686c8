"""What a plan is made from, as peers say it in their records; and plans in words. Knows no network."""

import logging
from collections.abc import Mapping
from math import log10
from typing import Final

from echo_p2p.chain.fit import shortfall
from echo_p2p.chain.pricing import USUAL_LINK, Device, Link, Links, Workload
from echo_p2p.chain.workload import workload_of
from echo_p2p.errors import ModelError
from echo_p2p.models import resolve_model
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols.peer import Capacity, Plan, RoleRecord, Way

log = logging.getLogger(__name__)

PEERS_MAX = 192
"""A plan with more of them would not fit into its record."""

_BY_REACH: Final[dict[str, Link | None]] = {"none": None, "relayed": Link(latency_s=0.1, bytes_s=5e5)}


def missing(presence: Presence, run: Run, work: Workload) -> str:
    """What is missing for a chain, in words; empty if there is one."""
    if presence.swarm.plan is not None and presence.swarm.plan.chains:
        return ""
    here = {peer: record.capacity for peer, record in serving(presence, run).items() if record.capacity}
    return shortfall({peer: device_of(capacity) for peer, capacity in here.items()}, work)


def workload_for(run: Run) -> Workload:
    """What a plan for our own run is made with; of its layers alone if the model's files can't be read."""
    try:
        return workload_of(run.model or resolve_model(run.manifest.model), run.manifest)
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
    ready = [f"…{stop.peer[-6:]} stands by with {stop.span}" for stop in found.standby]
    coming = [f"…{stop.peer[-6:]} loads {stop.span} too" for stop in found.upcoming or ()]
    return "; ".join([*chains, *ready, *coming]) or "no chain: the peers here can't hold the model together"
