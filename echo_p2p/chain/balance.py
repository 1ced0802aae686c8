"""How many layers each stage of a chain serves, and what the chain is worth; many chains at once. Knows no plan.

A chain makes a token whenever its slowest stage is done with one, 1 / max stage, if enough lanes are in flight; else
lanes / (Σ stage + Σ hop). Its worth is that rate, weighted: see `weigh`. Chains are rows of peers' numbers, in order,
filled up with -1 at the end.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo_p2p.chain.pricing import Costs, Floats, Ints

ALONE: Final = 2.0
"""How much more the tokens of a peer without others count: it runs its own best engine, needs no link, and waits for
nobody. So it is joined by others only if they more than double what it makes."""

ANOTHER_STOP: Final = 0.98
"""What is left of a chain's worth with each further stop: it may fail, and then the chain stands."""

_ROUNDING = 1e-9
_HALVINGS = 16

Flags = NDArray[np.bool_]


class Balanced(NamedTuple):
    """Tokens a second, 0.0 where memory or links allow no chain, and layers by stage."""

    tokens_s: Floats  # (chains,)
    shares: Ints  # (chains, stops)


class _Stages(NamedTuple):
    """The stages of some chains; a stage that isn't there has no room and no speed."""

    layer_s: Floats  # (chains, stops)
    speed: Floats  # (chains, stops), layers a second
    head: Floats  # (chains, stops), layers' time that a stage needs besides its layers
    rooms: Ints  # (chains, stops)
    hops_s: Floats  # (chains,), of a whole round
    busy_s: Floats  # (chains,), of the busiest link

    def of(self, chosen: Flags | Ints) -> "_Stages":
        layers = self.layer_s[chosen], self.speed[chosen], self.head[chosen], self.rooms[chosen]
        return _Stages(*layers, self.hops_s[chosen], self.busy_s[chosen])

    def times(self, shares: Ints) -> Floats:
        return np.where(shares > 0, (shares + self.head) * self.layer_s, 0.0)


def rows_of(orders: Sequence[Sequence[int]]) -> Ints:
    """Chains as rows."""
    rows = np.full((len(orders), max([1, *map(len, orders)])), -1, dtype=np.int64)
    for row, order in zip(rows, orders, strict=True):
        row[: len(order)] = order
    return rows


def weigh(tokens_s: Floats, stops: Ints) -> Floats:
    """What is maximised over all chains of a swarm."""
    weights: Floats = np.where(stops == 1, ALONE, ANOTHER_STOP ** (stops - 1.0))
    return tokens_s * weights


def worths(costs: Costs, rows: Ints, above: Floats | None = None, *, closely: bool = True) -> Floats:
    """The worth of each chain (chains,); 0.0 for what can't be one, and for what isn't worth more than `above`."""
    stops = (rows >= 0).sum(axis=1)
    least = None if above is None else above / weigh(np.ones(len(rows)), stops)
    return weigh(balance(costs, rows, least, closely=closely).tokens_s, stops)


def balance(costs: Costs, rows: Ints, above: Floats | None = None, *, closely: bool = True) -> Balanced:
    """The shares that make most tokens, at least a layer each. Chains that can't make more than `above` are left out.

    Unless `closely`, chains with too few lanes are taken to have the shortest cycle, though a longer one may make more.

    Of equal ones, those that compute least: the fastest stages are as full as the slowest allows.
    """
    tokens_s, shares = np.zeros(len(rows)), np.zeros(rows.shape, dtype=np.int64)
    stages = _stages(costs, rows)
    stops = (rows >= 0).sum(axis=1)
    possible = (stages.rooms >= 1).sum(axis=1) == stops
    possible &= (stages.rooms.sum(axis=1) >= costs.layers) & (stops <= costs.layers) & (stops > 0)
    chosen = np.flatnonzero(possible & np.isfinite(stages.hops_s))
    stages = stages.of(chosen)
    cycle_s = _cycle_bound(stages, costs.layers)
    if above is not None:
        around_s = stages.hops_s + costs.layers / stages.speed.max(axis=1, initial=0.0)
        promising = 1.0 / np.maximum(cycle_s, around_s / costs.lanes) > above[chosen]
        chosen, stages, cycle_s = chosen[promising], stages.of(promising), cycle_s[promising]
    if len(chosen):
        cycle_s = _shortest_cycle(stages, costs.layers, cycle_s)
        shares[chosen] = _fill(stages, costs.layers, cycle_s)
        tokens_s[chosen] = tokens_per_s(stages, costs.lanes, shares[chosen])
        few = np.flatnonzero(tokens_s[chosen] * cycle_s < 1.0 - _ROUNDING)
        if closely and len(few):
            _lengthen(costs, stages.of(few), chosen[few], cycle_s[few], Balanced(tokens_s, shares))
    return Balanced(tokens_s, shares)


def rates(costs: Costs, rows: Ints, shares: Ints) -> Floats:
    """Tokens a second of chains with given shares (chains, stops); 0.0 where memory or links don't allow them."""
    stages = _stages(costs, rows)
    fits = (shares <= stages.rooms).all(axis=1) & np.isfinite(stages.hops_s)
    found = np.zeros(len(rows))
    found[fits] = tokens_per_s(stages.of(fits), costs.lanes, shares[fits])
    return found


def tokens_per_s(stages: _Stages, lanes: int, shares: Ints) -> Floats:
    """What chains make with some shares."""
    times = stages.times(shares)
    cycle_s = np.maximum(times.max(axis=1), stages.busy_s)
    made: Floats = 1.0 / np.maximum(cycle_s, (times.sum(axis=1) + stages.hops_s) / lanes)
    return made


def _stages(costs: Costs, rows: Ints) -> _Stages:
    used, each = rows >= 0, np.arange(len(rows))
    number = np.where(used, rows, 0)
    stops = used.sum(axis=1)
    first, end = number[:, 0], np.maximum(stops - 1, 0)
    last = number[each, end]
    rooms = np.where(used, costs.rooms[0][number], 0)
    rooms[:, 0] = costs.rooms[1][first]
    rooms[each, end] = np.where(stops == 1, costs.rooms[3][last], costs.rooms[2][last])
    head = np.zeros(rows.shape)
    head[each, end] = costs.head_layers[last]
    layer_s = np.where(used, costs.layer_s[number], 1.0)
    pairs = number[:, :-1], number[:, 1:]
    hops_s = np.where(used[:, 1:], costs.hop_s[pairs], 0.0).sum(axis=1)
    hops_s += np.where(stops > 1, costs.back_s[last, first], 0.0)
    busy_s = np.where(used[:, 1:], costs.busy_s[pairs], 0.0).max(axis=1, initial=0.0)
    return _Stages(layer_s, np.where(used, 1.0 / layer_s, 0.0), head, rooms, hops_s, busy_s)


def _cycle_bound(stages: _Stages, layers: int) -> Floats:
    """(chains,) the cycle if layers could be cut: a stage that is full leaves the rest to the others."""
    full_s = stages.times(stages.rooms)
    order = full_s.argsort(axis=1)  # those that are full first, first
    full_s, speed = np.take_along_axis(full_s, order, 1), np.take_along_axis(stages.speed, order, 1)
    takes = np.take_along_axis(stages.rooms + stages.head, order, 1)
    left = layers + stages.head.sum(axis=1, keepdims=True) - (takes.cumsum(axis=1) - takes)
    speed = speed[:, ::-1].cumsum(axis=1)[:, ::-1]  # of it and all that are full later
    reached = left <= full_s * speed
    reached[:, -1] = True
    place = reached.argmax(axis=1)
    each = np.arange(len(order))
    cycle_s = left[each, place] / speed[each, place]
    one_layer = stages.times(np.minimum(stages.rooms, 1)).max(axis=1, initial=0.0)
    bound: Floats = np.maximum(np.maximum(cycle_s, one_layer), stages.busy_s)
    return bound


def _shortest_cycle(stages: _Stages, layers: int, cycle_s: Floats) -> Floats:
    """(chains,) the shortest cycle of whole layers: one more for whichever stage it makes least late."""
    held, cycle_s = _held(stages, cycle_s), cycle_s.copy()
    while len(short := np.flatnonzero(held.sum(axis=1) < layers)):  # at most about once a stage
        room = held[short] < stages.rooms[short]
        late_s = np.where(room, (held[short] + 1 + stages.head[short]) * stages.layer_s[short], np.inf)
        stage = late_s.argmin(axis=1)
        held[short, stage] += 1
        cycle_s[short] = np.maximum(cycle_s[short], late_s[np.arange(len(short)), stage])
    return cycle_s


def _held(stages: _Stages, cycle_s: Floats) -> Ints:
    """(chains, stops) layers that each stage is done with in a cycle; at least one."""
    done = np.floor(cycle_s[:, None] * stages.speed * (1.0 + _ROUNDING) - stages.head)
    return np.minimum(np.maximum(done, 1.0), stages.rooms).astype(np.int64)


def _fill(stages: _Stages, layers: int, cycle_s: Floats) -> Ints:
    """(chains, stops) shares that keep to a cycle and take the least time in total: the slowest give up most."""
    held = _held(stages, cycle_s)
    slowest = (-stages.layer_s).argsort(axis=1, kind="stable")
    spare = np.take_along_axis(np.maximum(held - 1, 0), slowest, 1)
    over = held.sum(axis=1, keepdims=True) - layers - (spare.cumsum(axis=1) - spare)
    given = np.zeros_like(held)
    np.put_along_axis(given, slowest, np.clip(over, 0, spare), 1)
    return held - given


def _lengthen(costs: Costs, stages: _Stages, places: Ints, short_s: Floats, found: Balanced) -> None:
    """When lanes are too few, a longer cycle with more layers on fast stages may make more; put that into `found`.

    The cycle's rate falls with its length, the lanes' rate grows: the best is where they meet.
    """
    long_s = np.maximum(stages.times(stages.rooms).max(axis=1), short_s)
    for halving in range(_HALVINGS):
        middle_s = (short_s + long_s) / 2.0 if halving else long_s
        shares = _fill(stages, costs.layers, middle_s)
        made = tokens_per_s(stages, costs.lanes, shares)
        better = made > found.tokens_s[places] * (1.0 + _ROUNDING)
        found.tokens_s[places[better]], found.shares[places[better]] = made[better], shares[better]
        waiting = (stages.times(shares).sum(axis=1) + stages.hops_s) > costs.lanes * middle_s
        short_s, long_s = np.where(waiting, middle_s, short_s), np.where(waiting, long_s, middle_s)
