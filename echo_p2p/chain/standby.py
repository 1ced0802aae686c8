"""Which span each peer without a chain holds ready, for whoever is lost. Pure; knows chains, and no plan.

What a span is worth to hold is what the chains through it would make with the peer in the place of who serves it now,
half of it where neighbours could take the span over, and half again for each peer that stands by for it already.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_p2p.chain.balance import rates, rows_of
from echo_p2p.chain.pricing import Costs
from echo_p2p.chain.repair import Edges, Laid, edges_of, repaired

ANOTHER_STANDBY: Final = 0.5
"""What is left of the worth of a span with each peer that stands by for it."""

MENDED: Final = 0.5
"""What is left of it where the neighbours can take it over, though they have to load it."""

STAYING: Final = 1.2
"""How much more the span counts that a peer holds already: another one has to be loaded."""

_PLACES_MAX = 256  # stops that are looked at
_PEERS_MAX = 64  # peers that are given a span in one plan; the next one gives it to more


@dataclass(frozen=True, slots=True)
class _Place:
    """A stop of a chain that may be lost, and what is left of its worth if that can be mended without a standby."""

    laid: Laid
    place: int
    edges: Edges
    share: float


def standbys(
    costs: Costs, chains: Sequence[Laid], free: Sequence[int], before: Mapping[int, Edges]
) -> dict[int, Edges]:
    """The span of each peer of `free` that can hold one, by peer. `before` is what they hold."""
    places = [_Place(laid, place, edges, _mended(costs, laid, place)) for laid, place, edges in _stops(chains)]
    worths = _worths(costs, places, sorted(free, key=lambda peer: (peer not in before, peer))[:_PEERS_MAX])
    chosen: dict[int, Edges] = {}
    taken: Counter[Edges] = Counter()
    while worths:
        peer, edges = max(worths, key=lambda pair: _value(worths[pair], pair, before, taken))
        chosen[peer] = edges
        taken[edges] += 1
        worths = {pair: worth for pair, worth in worths.items() if pair[0] != peer}
    return chosen


def _stops(chains: Sequence[Laid]) -> list[tuple[Laid, int, Edges]]:
    several = [laid for laid in chains if len(laid.order) > 1]  # who can hold the whole model is a chain alone
    return [(laid, place, edges) for laid in several for place, edges in enumerate(edges_of(laid))][:_PLACES_MAX]


def _mended(costs: Costs, laid: Laid, place: int) -> float:
    lost = Laid((*laid.order[:place], -1, *laid.order[place + 1 :]), laid.shares)
    return 1.0 if repaired(costs, lost, ()) is None else MENDED


def _worths(costs: Costs, places: Sequence[_Place], free: Sequence[int]) -> dict[tuple[int, Edges], float]:
    """By peer and span, where that is possible: the sum over all chains through the span."""
    pairs = [(peer, each) for peer in free for each in places]
    if not pairs:
        return {}
    orders = [(*each.laid.order[: each.place], peer, *each.laid.order[each.place + 1 :]) for peer, each in pairs]
    made = rates(costs, rows_of(orders), np.maximum(rows_of([each.laid.shares for _, each in pairs]), 0))
    found: dict[tuple[int, Edges], float] = {}
    for (peer, each), tokens_s in zip(pairs, made.tolist(), strict=True):
        if tokens_s > 0.0:
            found[peer, each.edges] = found.get((peer, each.edges), 0.0) + tokens_s * each.share
    return found


def _value(worth: float, pair: tuple[int, Edges], before: Mapping[int, Edges], taken: Counter[Edges]) -> float:
    peer, edges = pair
    staying = STAYING if before.get(peer) == edges else 1.0
    return worth * staying * ANOTHER_STANDBY ** taken[edges]
