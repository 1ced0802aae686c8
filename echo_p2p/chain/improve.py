"""A local search: chains get better by moving and exchanging single peers. Knows no plan and not where chains begin.

All moves of one peer are looked at together, and the best one is made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np

from echo_p2p.chain.balance import rows_of, weigh, worths
from echo_p2p.chain.cut import STOPS_MAX, Order, cut, sequence_keys
from echo_p2p.chain.pricing import Costs, Floats, Ints

_GAIN = 1e-12  # of a worth: less is rounding
_CALL_LOOKS = 50  # a call takes as long as so many looks
_SETTLING = 0.7  # share of the looks that is spent on single moves first
_IDLE_MAX = 8


@dataclass(frozen=True, slots=True)
class _Move:
    """New chains by place, and what they are worth more than the old ones."""

    gain: float = 0.0
    chains: dict[int, Order] = field(default_factory=dict)


class Search:
    """Chains of the peers of `free` while they are improved; peers may be in none."""

    def __init__(self, costs: Costs, free: Sequence[int], chains: Iterable[Order]) -> None:
        self._costs = costs
        self._free = list(free)
        self._random = Random(0)
        self._looks = 0
        self._chains = [chain for chain in chains if chain]
        self._speed: Floats = 1.0 / costs.layer_s
        self._head = float(costs.head_layers.min(initial=inf))
        self._refresh()

    def made(self) -> list[Order]:
        """The chains that there are, without those that can't be."""
        return [chain for chain, value in zip(self._chains, self._worths, strict=True) if value > 0.0]

    def improve(self, looks: int) -> None:
        """Move single peers until that helps no more; then cut few chains anew, as often as `looks` allows."""
        self._settle(self._free, looks * _SETTLING)
        while self._looks < looks and self._chains:
            before, total = self._chains, self._total
            pool = self._cut_anew()
            self._settle(pool, looks)
            if self._total < total * (1.0 + _GAIN):
                self._chains = before
                self._refresh()

    def _settle(self, peers: Sequence[int], looks: float) -> None:
        moved = True
        while moved and self._looks < looks:
            moved = False
            for peer in self._random.sample(peers, len(peers)):
                if self._looks < looks:
                    moved = self._improve_by(peer) or moved

    def _cut_anew(self) -> list[int]:
        """Make other chains of the peers of one to three, and of some that are free; those peers."""
        count = min(len(self._chains), self._random.randint(1, 3))
        chosen = set(self._random.sample(range(len(self._chains)), count))
        idle = [peer for peer in self._free if peer not in self._place]
        pool = [peer for place in sorted(chosen) for peer in self._chains[place]]
        pool += self._random.sample(idle, min(len(idle), _IDLE_MAX))
        keys = sequence_keys(self._costs, pool)
        key = keys[self._random.randrange(len(keys))]
        noise = np.array([self._random.uniform(0.5, 2.0) for _ in pool])
        sequence = [pool[place] for place in np.argsort(key * noise, kind="stable")]
        self._chains = [chain for place, chain in enumerate(self._chains) if place not in chosen]
        self._looks += _CALL_LOOKS + 4 * len(pool)
        self._chains += cut(self._costs, sequence)
        self._refresh()
        return pool

    def _improve_by(self, peer: int) -> bool:
        """Put a peer where that helps most: into another chain, in exchange for one of its peers, elsewhere, alone."""
        source = self._place.get(peer)
        moves = [self._turned(peer, source), self._exchanged(peer, source)]
        moves += self._moved(peer, source)
        best = max(moves, key=lambda move: move.gain)
        if best.gain <= _GAIN * self._most:
            return False
        for place, chain in best.chains.items():
            self._chains[place : place + 1] = [chain]  # a place after the last is a new one
        self._refresh()
        return True

    def _refresh(self) -> None:
        self._chains = [chain for chain in self._chains if chain]
        longest = max(map(len, self._chains), default=0)
        self._rows = rows_of([*self._chains, (0,) * (longest + 1)])[:-1]  # with room for another stop
        self._worths = self._worth(self._rows)
        self._most = float(self._worths.max(initial=0.0))
        self._total = float(self._worths.sum())
        self._place = {peer: place for place, chain in enumerate(self._chains) for peer in chain}

    def _worth(self, rows: Ints, above: Floats | None = None) -> Floats:
        self._looks += len(rows) + _CALL_LOOKS
        return worths(self._costs, rows, above, closely=False)

    def _moved(self, peer: int, source: int | None) -> list[_Move]:
        """Into the chain and place where that helps most, and into a chain of its own."""
        gone: dict[int, Order] = {}
        lost = 0.0
        if source is not None:
            gone = {source: tuple(each for each in self._chains[source] if each != peer)}
            lost = float(self._worths[source] - (self._worth(rows_of([gone[source]]))[0] if gone[source] else 0.0))
        alone = float(self._worth(rows_of([(peer,)]))[0]) - lost
        moves = [_Move(alone, gone | {len(self._chains): (peer,)})]
        lengths = (self._rows >= 0).sum(axis=1)
        targets = np.flatnonzero((lengths < STOPS_MAX) & (np.arange(len(lengths)) != source))
        if len(targets):
            longer, into = self._insertions(self._rows[targets], lengths[targets], peer), np.tile(targets, 3)
            gains = self._worth(longer, self._worths[into] + lost) - self._worths[into] - lost
            best = int(gains.argmax())
            moves.append(_Move(float(gains[best]), gone | {int(into[best]): _order(longer[best])}))
        return moves

    def _insertions(self, rows: Ints, lengths: Ints, peer: int) -> Ints:
        """(3 chains, stops) with a peer first, last, and where the way gets least longer."""
        hop_s = self._costs.hop_s
        before, after = rows[:, :-1], rows[:, 1:]
        with np.errstate(invalid="ignore"):  # a way that isn't there stays one that isn't there
            detours = hop_s[before, peer] + hop_s[peer, after] - hop_s[before, after]
        detours[(after < 0) | np.isnan(detours)] = inf
        places = np.concatenate((np.zeros_like(lengths), lengths, detours.argmin(axis=1) + 1))
        places = np.minimum(places, np.tile(lengths, 3))[:, None]
        column, shifted = np.arange(rows.shape[1])[None], np.roll(rows, 1, axis=1)
        rows, shifted = np.tile(rows, (3, 1)), np.tile(shifted, (3, 1))
        return np.where(column < places, rows, np.where(column == places, peer, shifted))

    def _exchanged(self, peer: int, source: int | None) -> _Move:
        """In exchange for the peer of another chain, each at the other's place."""
        places, columns = np.nonzero(self._rows >= 0)
        elsewhere = places != source
        places, columns = places[elsewhere], columns[elsewhere]
        if not len(places):
            return _Move()
        others = self._rows[places, columns]
        there = self._rows[places]
        there[np.arange(len(there)), columns] = peer
        base = self._worths[places] + (self._worths[source] if source is not None else 0.0)
        bound, here = self._sources(peer, source, others)
        values = self._worth(there, base - bound)
        if source is not None:
            promising = np.flatnonzero(values)
            left = np.zeros(len(values))
            left[promising] = self._worth(here[promising], (base - values)[promising])
            values = np.where(left > 0.0, values + left, 0.0)
        best = int((values - base).argmax())
        changed = {int(places[best]): _order(there[best])}
        if source is not None:
            changed[source] = _order(here[best])
        return _Move(float(values[best] - base[best]), changed)

    def _sources(self, peer: int, source: int | None, others: Ints) -> tuple[Floats, Ints]:
        """The chain that a peer leaves, with each of `others` in its place, and what each can be worth at most."""
        if source is None:
            return np.zeros(len(others)), np.empty((len(others), 0), dtype=np.int64)
        row = self._rows[source]
        here = np.where(row[None] == peer, others[:, None], row[None])
        members = list(self._chains[source])
        speed = self._speed[members].sum() - self._speed[peer] + self._speed[others]
        stops = np.full(len(others), len(members))
        return weigh(speed / (self._costs.layers + self._head), stops), here

    def _turned(self, peer: int, source: int | None) -> _Move:
        """At another place of its chain, or out of it."""
        if source is None:
            return _Move()
        rest = [each for each in self._chains[source] if each != peer]
        if not rest:
            return _Move()
        orders = [(*rest[:place], peer, *rest[place:]) for place in range(len(rest) + 1)]
        orders.append(tuple(rest))
        values = self._worth(rows_of(orders))
        best = int(values.argmax())
        return _Move(float(values[best] - self._worths[source]), {source: orders[best]})


def _order(row: Ints) -> Order:
    return tuple(int(peer) for peer in row if peer >= 0)
