"""Chains that lose or gain a peer, with as few layers moved as can be. Pure; knows no plan and no other chain.

Who leaves a gap is followed by its neighbours or by one standby: either way just the gap's layers are loaded anew. Who
joins takes layers of the two that it stands between, and loads just those.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np

from echo_p2p.chain.balance import rates, rows_of, weigh, worths
from echo_p2p.chain.pricing import Costs

_JOINS_MAX = 8  # in one plan: the next one takes more
_CUTS_MAX = 24  # ways to cut a neighbour's span that are tried
_PAIRS_MAX = 20_000  # places to join that are looked at

Edges = tuple[int, int]
"""The first layer of a span, and the one behind it."""

_NOTHING: Mapping[int, Edges] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Laid:
    """A chain: peers by number in order, -1 for one that is gone, and the layers of each."""

    order: tuple[int, ...]
    shares: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether all its peers are there."""
        return min(self.order) >= 0

    def tokens_s(self, costs: Costs) -> float:
        """What a whole chain makes; 0.0 if memory or links don't allow it any more."""
        return float(rates(costs, rows_of([self.order]), rows_of([self.shares]))[0])


def fits(costs: Costs, laid: Laid) -> bool:
    """Whether a chain can go on as it is."""
    return laid.whole and laid.tokens_s(costs) > 0.0


def edges_of(laid: Laid) -> list[Edges]:
    """The span of each stop."""
    return list(pairwise(accumulate(laid.shares, initial=0)))


def laid_worths(costs: Costs, chains: Sequence[Laid]) -> list[float]:
    """The worth of whole chains with their shares."""
    return _worths(costs, [laid.order for laid in chains], [laid.shares for laid in chains])


def repaired(costs: Costs, laid: Laid, standby: Sequence[int], held: Mapping[int, Edges] = _NOTHING) -> Laid | None:
    """A chain with one gap, closed by its neighbours or by one of `standby`, whichever makes more. None if none can.

    Who has `held` exactly the layers of the gap closes it before all others, for they would have to load them. Where
    nobody is gone, but two neighbours can't reach each other any more, one of these is left out.
    """
    gaps = _gaps(costs, laid)
    ready = [
        _with(laid, gone, peer)
        for gone in gaps
        for peer in standby
        if held.get(peer) == (sum(laid.shares[: gone[0]]), sum(laid.shares[: gone[-1] + 1]))
    ]
    if (found := _best(costs, [each.order for each in ready], [each.shares for each in ready])) is not None:
        return found
    others = [each for gone in gaps for each in (*_without(laid, gone), *(_with(laid, gone, peer) for peer in standby))]
    return _best(costs, [each.order for each in others], [each.shares for each in others])


def _gaps(costs: Costs, laid: Laid) -> list[list[int]]:
    """Places that follow each other, of those who are gone; or each place beside a link that is."""
    gone = [
        place
        for place, (peer, share) in enumerate(zip(laid.order, laid.shares, strict=True))
        if not _holds(costs, peer, share)
    ]
    if not gone:
        ring = enumerate(zip(laid.order, (*laid.order[1:], laid.order[0]), strict=True))
        apart = [place for place, pair in ring if len(laid.order) > 1 and not np.isfinite(costs.hop_s[pair])]
        places = {each % len(laid.order) for place in apart for each in (place, place + 1)}
        return [[place] for place in sorted(places)]
    follow = gone[-1] - gone[0] + 1 == len(gone)
    return [gone] if follow and len(gone) < len(laid.order) else []


def _without(laid: Laid, gone: Sequence[int]) -> list[Laid]:
    """The ways in which the neighbours of a gap can take its layers."""
    gap = sum(laid.shares[place] for place in gone)
    left, right = slice(0, gone[0]), slice(gone[-1] + 1, None)
    order = laid.order[left] + laid.order[right]
    if not order:
        return []
    ways = range(gap + 1) if laid.shares[left] and laid.shares[right] else range(1)
    return [Laid(order, _closed(laid.shares[left], laid.shares[right], taken, gap)) for taken in ways]


def _with(laid: Laid, gone: Sequence[int], peer: int) -> Laid:
    """The chain with a peer in place of a gap."""
    gap = sum(laid.shares[place] for place in gone)
    left, right = slice(0, gone[0]), slice(gone[-1] + 1, None)
    return Laid(
        (*laid.order[left], peer, *laid.order[right]),
        (*laid.shares[left], gap, *laid.shares[right]),
    )


def joined(costs: Costs, chains: Sequence[Laid], free: Sequence[int], margin: float) -> list[Laid]:
    """The chains, with those of `free` in them that make one worth more by `margin`; few at a time."""
    chains, free = list(chains), list(free)
    for _ in range(_JOINS_MAX):
        before = laid_worths(costs, chains)
        longer: list[tuple[int, Laid]] = []
        for place, slot, peer in _promising(costs, chains, free, margin)[:_JOINS_MAX]:
            found = _let_in(costs, chains[place], slot, peer)
            longer += [(place, found)] if found is not None else []
        after = laid_worths(costs, [laid for _, laid in longer])
        gains = [worth - before[place] for worth, (place, _) in zip(after, longer, strict=True)]
        worthy = [i for i, gain in enumerate(gains) if gain > margin * before[longer[i][0]]]
        if not worthy:
            break
        place, laid = longer[max(worthy, key=gains.__getitem__)]
        chains[place] = laid
        free = [peer for peer in free if peer not in laid.order]
    return chains


def _holds(costs: Costs, peer: int, share: int) -> bool:
    return peer >= 0 and int(costs.rooms[:, peer].max()) >= share


def _closed(left: Sequence[int], right: Sequence[int], taken: int, gap: int) -> tuple[int, ...]:
    """Shares after the neighbours of a gap have taken it: `taken` layers the left one, the rest the right one."""
    if not left:
        return (right[0] + gap, *right[1:])
    if not right:
        return (*left[:-1], left[-1] + gap)
    return (*left[:-1], left[-1] + taken, right[0] + gap - taken, *right[1:])


def _promising(costs: Costs, chains: Sequence[Laid], free: Sequence[int], margin: float) -> list[tuple[int, int, int]]:
    """Chain, slot and peer, where joining could bring more than the margin if all shares were open; the best first."""
    pairs = [(place, slot, peer) for peer in free for place, laid in enumerate(chains) for slot in _slots(costs, laid)]
    pairs = pairs[:_PAIRS_MAX]
    if not pairs:
        return []
    before = np.array(laid_worths(costs, chains))[[place for place, _, _ in pairs]]
    orders = [(*chains[place].order[:slot], peer, *chains[place].order[slot:]) for place, slot, peer in pairs]
    gains = worths(costs, rows_of(orders), before * (1.0 + margin)) - before
    return [pairs[i] for i in np.argsort(-gains, kind="stable") if gains[i] > 0.0]


def _slots(costs: Costs, laid: Laid) -> Iterable[int]:
    """Before and after the slowest stage: elsewhere nobody who joins makes it faster."""
    seconds = [share * float(costs.layer_s[peer]) for peer, share in zip(laid.order, laid.shares, strict=True)]
    seconds[-1] += float(costs.head_layers[laid.order[-1]] * costs.layer_s[laid.order[-1]])
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return slowest, slowest + 1


def _let_in(costs: Costs, laid: Laid, slot: int, peer: int) -> Laid | None:
    """A chain with a peer at `slot`, who takes the layers from its neighbours that make most tokens."""
    left, right = laid.shares[:slot], laid.shares[slot:]
    order = (*laid.order[:slot], peer, *laid.order[slot:])
    cuts = [(some, others) for some in _cuts(left[-1:]) for others in _cuts(right[:1]) if some + others > 0]
    shares = [
        (
            *left[:-1],
            *(share - some for share in left[-1:]),
            some + others,
            *(share - others for share in right[:1]),
            *right[1:],
        )
        for some, others in cuts
    ]
    return _best(costs, [order] * len(shares), shares)


def _cuts(share: Sequence[int]) -> list[int]:
    """How many layers of a span to give away, if there is a span: none to all but one."""
    if not share:
        return [0]
    return sorted({round(each) for each in np.linspace(0, share[0] - 1, min(share[0], _CUTS_MAX))})


def _best(costs: Costs, orders: Sequence[Sequence[int]], shares: Sequence[Sequence[int]]) -> Laid | None:
    """The first of those that are worth most."""
    if not orders:
        return None
    values = _worths(costs, orders, shares)
    best = values.index(max(values))
    return Laid(tuple(orders[best]), tuple(shares[best])) if values[best] > 0.0 else None


def _worths(costs: Costs, orders: Sequence[Sequence[int]], shares: Sequence[Sequence[int]]) -> list[float]:
    if not orders:
        return []
    rows = rows_of(orders)
    values: list[float] = weigh(rates(costs, rows, np.maximum(rows_of(shares), 0)), (rows >= 0).sum(axis=1)).tolist()
    return values
