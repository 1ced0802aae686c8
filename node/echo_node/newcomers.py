"""Whom a plan counts on: a peer that has just come says by and by what it is worth. Pure: `now` is passed in.

First it is a guess, then its speed is measured, then how it is reached, then the ways from it to others. A plan that
followed each of these would change with each; so while all chains work, a newcomer is planned with when all is said.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Final

from echo_node.complaints import Pair
from echo_protocols.peer import Plan, RoleRecord

SETTLED_S: Final = 60.0
"""After so long a peer is counted on, whatever it lacks: some have nobody who tells them how they are reached."""


class Newcomers:
    """Since when each peer is there. Knows those that it was last told of, and no others."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def counted(
        self, records: Mapping[str, RoleRecord], current: Plan, parted: Collection[Pair], now: float
    ) -> dict[str, RoleRecord]:
        """The records of those to plan with: all, unless the chains of `current` work without the newcomers."""
        self._since = {peer: self._since.get(peer, now) for peer in records}
        if not works(current, records, parted):
            return dict(records)
        return {
            peer: record
            for peer, record in records.items()
            if current.span_of(peer) or now - self._since[peer] >= SETTLED_S or has_said_all(record, current)
        }


def has_said_all(record: RoleRecord, current: Plan) -> bool:
    """Whether a peer has measured its speed, and the ways to all of some chain, and knows its reach.

    Who can hold the whole model needs nobody, and says enough with its speed.
    """
    capacity = record.capacity
    if capacity is None or capacity.layers_per_s == 0.0:
        return False
    if capacity.max_layers >= current.layers:
        return True
    if record.reach == "unknown":
        return False
    known = {way.peer for way in capacity.ways}
    return any(known.issuperset(stop.peer for stop in chain) for chain in current.chains)


def works(current: Plan, here: Collection[str], parted: Collection[Pair]) -> bool:
    """Whether there are chains, and all of their peers are there, none of them parted from its neighbour."""
    for chain in current.chains:
        peers = [stop.peer for stop in chain]
        ring = {frozenset(pair) for pair in pairwise([*peers, peers[0]])}
        if not set(peers) <= set(here) or any(frozenset(pair) in ring for pair in parted):
            return False
    return bool(current.chains)
