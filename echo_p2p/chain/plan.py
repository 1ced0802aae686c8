"""Decides which peers form chains and which layers each serves. Pure: the same peers, links and past, the same plan.

Sticky, for moving layers means loading weights: chains are balanced once. A peer that leaves or joins moves only the
layers that it served or takes; everything is laid out anew only where that makes the swarm worth three tenths more.
Knows no network.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from echo_p2p.chain.balance import balance, rows_of
from echo_p2p.chain.pricing import Costs, Device, Links, Workload, costs_of
from echo_p2p.chain.repair import Edges, Laid, edges_of, fits, joined, laid_worths, repaired
from echo_p2p.chain.search import LOOKS, best_chains
from echo_p2p.chain.standby import standbys
from echo_protocols.peer import Plan, Stop
from echo_protocols.values import Span

MARGIN: Final = 0.3
"""How much more a new layout must be worth than the old one before anybody else's layers are moved.

Speeds are measured to a tenth or two, the more so on machines that do something else too, and a peer more is one more
that may fail: what seems a fifth faster often is not.
"""

_REGROUPED_MAX = 8  # chains that are tried, those of least worth
_REGROUPED_EXACT = 8
_REGROUPED_LOOKS = 4_000
_ANYWHERE = Links()


def plan(devices: Mapping[str, Device], work: Workload, previous: Plan | None = None, links: Links = _ANYWHERE) -> Plan:
    """Chains over `devices` that each cover the layers of `work`, and what the others hold ready.

    `number` grows only if something changes.
    """
    costs = costs_of(devices, work, links)
    before = previous if previous is not None and previous.layers == work.layers else None
    chosen = _chosen(costs, before)
    free = _left(range(len(costs.peers)), chosen)
    ready = standbys(costs, chosen, free, _held(costs, before))
    chains = tuple(_stops(costs, zip(laid.order, edges_of(laid), strict=True)) for laid in chosen)
    standby = _stops(costs, sorted(ready.items()))
    if before is not None and (before.chains, before.standby) == (chains, standby):
        return before
    number = (previous.number if previous else 0) + (previous is not None or bool(chains))
    return Plan(number=number, layers=work.layers, chains=chains, standby=standby)


def tokens_per_s(devices: Mapping[str, Device], work: Workload, made: Plan, links: Links = _ANYWHERE) -> float:
    """What the chains of a plan make together, as far as `devices` and `links` say."""
    costs = costs_of(devices, work, links)
    return sum(laid.tokens_s(costs) for laid in _past(costs, made) if laid.whole)


def _chosen(costs: Costs, previous: Plan | None) -> list[Laid]:
    everybody = range(len(costs.peers))
    if previous is None or not previous.chains:
        return _laid_out(costs, best_chains(costs, everybody))
    looks = LOOKS - LOOKS // 4  # the rest is for those that are free
    anew = _laid_out(costs, best_chains(costs, everybody, looks))
    return _better(costs, _kept(costs, previous), anew)


def _better(costs: Costs, kept: Sequence[Laid], anew: Sequence[Laid]) -> list[Laid]:
    """The kept chains, except where others of the same peers are worth more by the margin.

    Decided for each group of chains that have no peer in common with the rest, so that nobody moves for others' gain.
    """
    groups: list[tuple[set[int], list[Laid], list[Laid]]] = []  # peers, their chains, and their chains anew
    for side, chains in enumerate((kept, anew)):
        for laid in chains:
            touched = [group for group in groups if not group[0].isdisjoint(laid.order)]
            groups = [group for group in groups if group[0].isdisjoint(laid.order)]
            merged: tuple[list[Laid], list[Laid]] = (
                [each for group in touched for each in group[1]],
                [each for group in touched for each in group[2]],
            )
            merged[side].append(laid)
            groups.append((set(laid.order).union(*(group[0] for group in touched)), *merged))
    chosen: set[Laid] = set()
    for _, old, new in groups:
        gained = sum(laid_worths(costs, new)) > sum(laid_worths(costs, old)) * (1.0 + MARGIN)
        chosen.update(new if gained else old)
    return [laid for laid in kept if laid in chosen] + [laid for laid in anew if laid in chosen and laid not in kept]


def _kept(costs: Costs, previous: Plan) -> list[Laid]:
    """The chains that were, repaired where that can be; with those that are free, in chains of their own or joining."""
    past = _past(costs, previous)
    staying = {place: laid for place, laid in enumerate(past) if fits(costs, laid)}
    placed = {peer for laid in staying.values() for peer in laid.order}
    free = [peer for peer in range(len(costs.peers)) if peer not in placed]
    serving = {peer for laid in past for peer in laid.order}  # a standby serves nowhere
    held = _held(costs, previous)
    for place, laid in enumerate(past):
        if place not in staying:
            standby = [peer for peer in free if peer not in serving]
            mended = repaired(costs, laid, standby, held)
            if mended is not None:
                staying[place] = mended
                free = [peer for peer in free if peer not in mended.order]
    chains = [staying[place] for place in sorted(staying)]
    new = _laid_out(costs, best_chains(costs, free, LOOKS // 4))
    free = _left(free, new)
    if len(staying) < len(past) and free:
        chains, free = _regrouped(costs, chains, free)
    return joined(costs, chains + new, free, MARGIN)


def _regrouped(costs: Costs, chains: list[Laid], free: list[int]) -> tuple[list[Laid], list[int]]:
    """Instead of one of the chains others, of its peers and those that a broken one left free, if that gains enough."""
    before = laid_worths(costs, chains)
    best: tuple[float, int, list[Laid]] = (0.0, -1, [])
    for place in sorted(range(len(chains)), key=before.__getitem__)[:_REGROUPED_MAX]:
        pool = [*free, *chains[place].order]
        new = _laid_out(costs, best_chains(costs, pool, _REGROUPED_LOOKS, exact_peers=_REGROUPED_EXACT))
        gain = sum(laid_worths(costs, new)) - before[place]
        if gain > max(best[0], MARGIN * before[place]):
            best = (gain, place, new)
    if best[1] < 0:
        return chains, free
    kept = [laid for place, laid in enumerate(chains) if place != best[1]]
    return kept + best[2], _left([*free, *chains[best[1]].order], best[2])


def _left(free: Sequence[int], chains: Sequence[Laid]) -> list[int]:
    placed = {peer for laid in chains for peer in laid.order}
    return [peer for peer in free if peer not in placed]


def _past(costs: Costs, previous: Plan) -> list[Laid]:
    number = {peer: place for place, peer in enumerate(costs.peers)}
    return [
        Laid(tuple(number.get(stop.peer, -1) for stop in chain), tuple(len(stop.span) for stop in chain))
        for chain in previous.chains
    ]


def _laid_out(costs: Costs, orders: Sequence[Sequence[int]]) -> list[Laid]:
    """Chains with the shares that make most tokens."""
    if not orders:
        return []
    shares = balance(costs, rows_of(orders)).shares.tolist()
    return [Laid(tuple(order), tuple(each[: len(order)])) for order, each in zip(orders, shares, strict=True)]


def _held(costs: Costs, previous: Plan | None) -> dict[int, Edges]:
    """The spans of those that stood by."""
    number = {peer: place for place, peer in enumerate(costs.peers)}
    stops = previous.standby if previous is not None else ()
    return {number[stop.peer]: (stop.span.start, stop.span.end) for stop in stops if stop.peer in number}


def _stops(costs: Costs, edges: Iterable[tuple[int, Edges]]) -> tuple[Stop, ...]:
    return tuple(
        Stop(peer=costs.peers[peer], span=Span(start=start, end=end, layers=costs.layers))
        for peer, (start, end) in edges
    )
