"""From a plan whose chains work to a better one without a pause: first its stops load, then it takes over. Pure.

Who serves loads what comes beside what it holds, and who is free holds it as if it stood by. Groups under way go on in
the new chain with the tokens that they have.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec import UNSET

from echo_node.plans import PEERS_MAX
from echo_protocols.peer import Plan, RoleRecord, Stop

HANDOVER_S: Final = 120.0
"""After so long the better plan takes over anyway: a device may have no room for two spans at once."""


def ready_stops(records: Mapping[str, RoleRecord]) -> frozenset[Stop]:
    """The stops that peers say they could serve at once."""
    held = [(peer, each.span) for peer, each in records.items() if each.version is not None]
    prepared = [(peer, each.prepared) for peer, each in records.items()]
    return frozenset(Stop(peer=peer, span=span) for peer, span in (*held, *prepared) if span)


def preparing(current: Plan, wanted: Plan, ready: Collection[Stop]) -> Plan | None:
    """The plan that has the stops of `wanted` load while the chains of `current` go on; None: nothing to wait for.

    Chains of free peers alone begin at once.
    """
    serving = {stop for chain in current.chains for stop in chain}
    busy = {stop.peer for stop in serving}
    new = [chain for chain in wanted.chains if chain not in current.chains]
    apart = [chain for chain in new if busy.isdisjoint(stop.peer for stop in chain)]
    coming = [stop for chain in new if chain not in apart for stop in chain if stop not in serving]
    if set(current.chains) <= set(wanted.chains) or all(stop in ready for stop in coming):
        return None
    chains = (*current.chains, *apart)
    placed = {stop.peer for chain in chains for stop in chain}
    loading = [stop for stop in coming if stop.peer not in busy]
    placed |= {stop.peer for stop in loading}
    standby = (*loading, *(stop for stop in wanted.standby if stop.peer not in placed))
    upcoming = tuple(stop for stop in coming if stop.peer in busy)
    if sum(map(len, (*chains, standby, upcoming))) > PEERS_MAX:  # more would not fit into the record
        return None
    return msgspec.structs.replace(wanted, chains=chains, standby=standby, upcoming=upcoming or UNSET)


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans say the same, whatever their numbers."""
    return (one.chains, one.standby, one.upcoming) == (other.chains, other.standby, other.upcoming)
