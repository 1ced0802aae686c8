"""Decides which peers form chains and which layers each serves. Pure: the same peers and the same past, the same plan.

Sticky: a chain whose members all stay is left alone, for moving layers means loading weights. Does not know latency,
reachability or the price of the output matrix yet.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from statistics import median

from echo_protocols.peer import Capacity, Plan, Stop
from echo_protocols.values import Span


def plan(peers: Mapping[str, Capacity], layers: int, previous: Plan | None) -> Plan:
    """Chains over `peers` that each cover `layers` layers; `number` grows only if the chains change.

    A chain that lost a member, or holds one that no longer fits its span, dissolves and its members are placed anew.
    """
    staying = [chain for chain in _chains(previous, layers) if all(_fits(stop, peers) for stop in chain)]
    placed = {stop.peer for chain in staying for stop in chain}
    free = {peer: peers[peer] for peer in sorted(peers) if peer not in placed and peers[peer].max_layers > 0}
    usual = _usual_speed(peers)
    chains = (*staying, *(_lay_out(group, free, layers, usual) for group in _groups(free, layers)))
    if previous is not None and previous.layers == layers and previous.chains == chains:
        return previous
    changed = previous is not None or bool(chains)
    return Plan(number=(previous.number if previous else 0) + changed, layers=layers, chains=chains)


def split(capacities: list[int], speeds: list[float], layers: int) -> list[int]:
    """How many layers each stage serves: at least one, within its capacity, the slowest stage as fast as can be.

    Gives one layer at a time to whichever stage would then be least late, which is exact for this objective.
    """
    shares = [1] * len(capacities)
    for _ in range(layers - len(capacities)):
        room = [i for i, share in enumerate(shares) if share < capacities[i]]
        shares[min(room, key=lambda i: ((shares[i] + 1) / speeds[i], i))] += 1
    return shares


def _chains(previous: Plan | None, layers: int) -> tuple[tuple[Stop, ...], ...]:
    return previous.chains if previous is not None and previous.layers == layers else ()


def _fits(stop: Stop, peers: Mapping[str, Capacity]) -> bool:
    return stop.peer in peers and peers[stop.peer].max_layers >= len(stop.span)


def _usual_speed(peers: Mapping[str, Capacity]) -> float:
    """What to assume of a peer that has not measured itself."""
    return median([peer.layers_per_s for peer in peers.values() if peer.layers_per_s > 0.0] or [1.0])


def _groups(free: Mapping[str, Capacity], layers: int) -> list[list[str]]:
    """Peers that can hold all layers alone; then, while the rest can, groups of few: the largest that leave a gap,
    and the smallest that fills it."""
    room = {peer: capacity.max_layers for peer, capacity in free.items()}
    groups = [[peer] for peer in room if room[peer] >= layers]
    rest = sorted((peer for peer in room if room[peer] < layers), key=lambda peer: (-room[peer], peer))
    while sum(room[peer] for peer in rest) >= layers:
        group, gap = [], layers
        while gap > 0:
            filling = [peer for peer in rest if room[peer] >= gap]
            peer = filling[-1] if filling else rest[0]
            rest.remove(peer)
            group.append(peer)
            gap -= room[peer]
        groups.append(group)
    return groups


def _lay_out(group: list[str], free: Mapping[str, Capacity], layers: int, usual: float) -> tuple[Stop, ...]:
    """One chain of a group. The fastest goes last, where the output matrix is computed too."""
    speed = {peer: free[peer].layers_per_s or usual for peer in group}
    order = sorted(group, key=lambda peer: (speed[peer], peer))
    shares = split([free[peer].max_layers for peer in order], [speed[peer] for peer in order], layers)
    edges = pairwise(accumulate(shares, initial=0))
    return tuple(
        Stop(peer=peer, span=Span(start=start, end=end, layers=layers))
        for peer, (start, end) in zip(order, edges, strict=True)
    )
