"""Chains cut from a sequence of peers: neighbours go together, and the cuts are the best ones. Knows no search.

As routes are cut from one long tour: Beasley, "Route first, cluster second", 1983.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from echo_p2p.chain.balance import rows_of, worths
from echo_p2p.chain.pricing import Costs, Floats

Order = tuple[int, ...]
"""A chain's peers by number."""

STOPS_MAX: Final = 256
"""Of a chain: more fit into no plan."""

_LONGER = 16  # runs that are tried to each end
_BANDS = (1, 3, 8)


def sequences(costs: Costs, free: Sequence[int]) -> list[list[int]]:
    """Orders in which neighbours go together well: alike in how long they take for all that they can hold, for then
    all of them can be full; or also near each other."""
    sorts = [[free[place] for place in np.argsort(key, kind="stable")] for key in sequence_keys(costs, free)]
    if costs.alike:
        return sorts
    return [*sorts, *(_tour(costs, sorts[0], bands) for bands in _BANDS)]


def sequence_keys(costs: Costs, free: Sequence[int]) -> list[Floats]:
    """Figures of peers (free,) to sort them by."""
    rooms = costs.rooms[:3, free].max(axis=0).astype(np.float64)
    return [rooms * costs.layer_s[free], costs.layer_s[free], rooms]


def _tour(costs: Costs, ordered: Sequence[int], bands: int) -> list[int]:
    """From one peer to the nearest that is left, in one band of an order after the other."""
    size = -(-len(ordered) // bands)
    tour = [ordered[0]]
    for begin in range(0, len(ordered), size):
        left = np.array([peer for peer in ordered[begin : begin + size] if peer != tour[0]], dtype=np.int64)
        while len(left):
            place = int(costs.hop_s[tour[-1], left].argmin())
            tour.append(int(left[place]))
            left = np.delete(left, place)
    return tour


def cut(costs: Costs, sequence: Sequence[int]) -> list[Order]:
    """The chains of neighbours in a sequence that are worth most together; who fits nowhere is left out."""
    runs = _runs(costs, sequence)
    orders = [_turned(costs, sequence[begin:end]) for begin, end in runs]
    values = worths(costs, rows_of(orders), closely=False).tolist() if runs else []
    ending: dict[int, list[tuple[float, int]]] = {}
    for (begin, end), value in zip(runs, values, strict=True):
        ending.setdefault(end, []).append((value, begin))
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first so many: their worth, and where their last chain begins
    for end in range(1, len(sequence) + 1):
        found = (best[-1][0], end)  # the last of them is left out
        for value, begin in ending.get(end, ()):
            found = max(found, (best[begin][0] + value, begin))
        best.append(found)
    chains, end = [], len(sequence)
    while end:
        begin = best[end][1]
        if begin < end:
            chains.append(_turned(costs, sequence[begin:end]))
        end = min(begin, end - 1)
    return chains


def _runs(costs: Costs, sequence: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of a sequence begin and end: to each end the shortest that holds the model, and some longer."""
    held = np.concatenate(([0], costs.rooms[:, sequence].max(axis=0).cumsum()))
    ends = np.arange(1, len(held))
    latest = np.searchsorted(held, held[1:] - costs.layers, side="right") - 1
    return [
        (begin, end)
        for end, last in zip(ends.tolist(), latest.tolist(), strict=True)
        for begin in range(max(0, last - _LONGER + 1, end - STOPS_MAX), last + 1)
    ]


def _turned(costs: Costs, members: Sequence[int]) -> Order:
    """A chain is a ring: where it is opened, the fastest is last and computes the output matrix."""
    place = min(range(len(members)), key=lambda place: costs.layer_s[members[place]]) + 1
    return (*members[place:], *members[:place])
