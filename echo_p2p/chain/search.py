"""Which peers together make the chains that are worth most. Exact for few peers, a bounded local search for many.

Pure, and the same for equal costs: the search's luck is seeded, and it stops by count, not by clock. Knows no plan that
came before.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np

from echo_p2p.chain.balance import ALONE, rows_of, worths
from echo_p2p.chain.cut import Order, cut, sequences
from echo_p2p.chain.improve import Search
from echo_p2p.chain.pricing import Costs

EXACT_PEERS: Final = 10
"""So many peers are tried in all combinations."""

LOOKS: Final = 100_000
"""Chains that a search of many peers may look at."""

_GAIN = 1e-12  # of a worth: less is rounding


def best_chains(
    costs: Costs, free: Sequence[int], looks: int = LOOKS, *, exact_peers: int = EXACT_PEERS
) -> list[Order]:
    """Chains of the peers numbered in `free`, in the order of their first peers; peers may be left over."""
    free = sorted(free)
    if _need_nobody(costs, free):
        return [(peer,) for peer in free]
    return sorted(_exact(costs, free) if len(free) <= exact_peers else _searched(costs, free, looks))


def total_worth(costs: Costs, chains: Sequence[Order]) -> float:
    """What chains are worth together."""
    return float(worths(costs, rows_of(chains)).sum()) if chains else 0.0


def _need_nobody(costs: Costs, free: Sequence[int]) -> bool:
    """Whether each can hold the model alone; then no chain of several is worth more, unless output matrices differ."""
    if not free or not costs.rooms[3, free].all():
        return False
    head = costs.head_layers[free]
    return bool(costs.layers + head.max() <= ALONE * (costs.layers + head.min()))


def _exact(costs: Costs, free: Sequence[int]) -> list[Order]:
    """The best of all partitions: a subset's best chain first, then which subsets (by bit mask) go together."""
    found = _best_orders(costs, free)
    best: list[tuple[float, int]] = [(0.0, 0)]  # by mask: what its peers are worth, and the chain of its highest
    for mask in range(1, 1 << len(free)):
        top = 1 << (mask.bit_length() - 1)
        rest = subset = mask ^ top
        value, chain = best[rest][0], 0
        while True:
            if (subset | top) in found:
                other = found[subset | top][0] + best[rest ^ subset][0]
                if other > value * (1.0 + _GAIN):
                    value, chain = other, subset | top
            if subset == 0:
                break
            subset = (subset - 1) & rest
        best.append((value, chain))
    chains, mask = [], len(best) - 1
    while mask:
        chain = best[mask][1]
        if chain:
            chains.append(found[chain][1])
        mask ^= chain or 1 << (mask.bit_length() - 1)
    return chains


def _best_orders(costs: Costs, free: Sequence[int]) -> dict[int, tuple[float, Order]]:
    """By mask: the worth and order of the best chain of all these peers, where there is one.

    Tried are every first and every last, and the shortest way between them.
    """
    ways = [way for first in range(len(free)) for way in _ways_from(costs, free, first)]
    found: dict[int, tuple[float, Order]] = {}
    values = worths(costs, rows_of([order for _, order in ways])) if ways else np.zeros(0)
    for (mask, order), value in zip(ways, values.tolist(), strict=True):
        if value > found.get(mask, (0.0,))[0] * (1.0 + _GAIN):
            found[mask] = (value, order)
    return found


def _ways_from(costs: Costs, free: Sequence[int], first: int) -> list[tuple[int, Order]]:
    """The shortest ways from one peer over every subset of the others, to each of it, with the subset's mask.

    Held and Karp, "A dynamic programming approach to sequencing problems", 1962.
    """
    hop_s: list[list[float]] = costs.hop_s[np.ix_(free, free)].tolist()
    alone: Order = (free[first],)
    ways = {(1 << first, first): (0.0, alone)}
    made = [(1 << first, alone)]
    for _ in range(min(len(free), costs.layers) - 1):
        longer: dict[tuple[int, int], tuple[float, Order]] = {}
        for (mask, last), (seconds, order) in ways.items():
            for place, peer in enumerate(free):
                after = seconds + hop_s[last][place]
                key = (mask | 1 << place, place)
                if not mask >> place & 1 and after < longer.get(key, (inf,))[0]:
                    longer[key] = (after, (*order, peer))
        ways = longer
        made += [(mask, order) for (mask, _), (_, order) in ways.items()]
    return made


def _searched(costs: Costs, free: Sequence[int], looks: int) -> list[Order]:
    """The best of some starts, improved step by step."""
    starts = [cut(costs, sequence) for sequence in sequences(costs, free)]
    values = [total_worth(costs, start) for start in starts]
    search = Search(costs, free, starts[values.index(max(values))])
    search.improve(looks)
    return search.made()
