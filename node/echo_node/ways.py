"""The ways from this peer to others of its run: whom to measure next, and what is said of it. Knows no stage.

Neighbours in the chain come first; then a sample of the others, the same ones each time, so that what is known of a
swarm does not flicker. Which ones is a hash of both names: nobody gets into everybody's sample by coming often.
"""

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from echo_p2p.net.ping import Pong, ping
from echo_p2p.presence import Presence
from echo_protocols.peer import Way

OTHERS_MAX: Final = 24
NEIGHBOURS_MAX: Final = 8
"""A record has room for 32 ways."""

NEIGHBOUR_EVERY_S: Final = 120.0
OTHER_EVERY_S: Final = 600.0
PADDED_EVERY_S: Final = 900.0
"""Bytes a second cost some, so they are measured less often."""

PACE_S: Final = 5.0
MISSES: Final = 3
"""In a row, until a peer counts as one that can't be reached."""

_WAITED_FOR = 8
_MISSED_AGAIN_S = 20.0
_MISSED_AGAIN_MAX_S = 600.0
_TIMEOUT_S = 5.0
_KEPT = 3  # measurements: the best of them is the way's own, without what else was under way


@dataclass(slots=True)
class _Seen:
    """What is known of one way. Times are in seconds."""

    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    misses: int = 0
    measured_at: float = -1e9
    padded_at: float = -1e9

    def due_at(self, *, neighbour: bool) -> float:
        if self.misses:
            return self.measured_at + min(_MISSED_AGAIN_MAX_S, _MISSED_AGAIN_S * 2.0 ** min(self.misses - 1, 16))
        return self.measured_at + (NEIGHBOUR_EVERY_S if neighbour else OTHER_EVERY_S)

    def way(self, peer: str) -> Way | None:
        if self.misses >= MISSES:
            return Way(peer=peer, latency_s=None)
        if not self.latencies_s:
            return None
        return Way(peer=peer, latency_s=min(self.latencies_s), bytes_s=max(self.rates, default=0.0))


class Ways:
    """Of the peer `own`. Remembers those that it was last told of, and no others. Pure: `now` is passed in."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._neighbours: tuple[str, ...] = ()
        self._others: dict[str, float] = {}
        self._seen: dict[str, _Seen] = {}

    def meet(self, neighbours: tuple[str, ...], others: Mapping[str, float]) -> None:
        """Who is there now: the neighbours in the chain, and all others with the Unix times of their starts."""
        self._neighbours = tuple(peer for peer in neighbours if peer != self._own)[:NEIGHBOURS_MAX]
        rest = sorted(others.keys() - {self._own, *self._neighbours}, key=self._place)
        self._others = {peer: others[peer] for peer in rest[:OTHERS_MAX]}
        self._seen = {peer: self._seen.get(peer, _Seen()) for peer in (*self._neighbours, *self._others)}

    def due(self, now: float) -> tuple[str, bool] | None:
        """Whom to measure now, and whether with bytes a second: neighbours first, then who came last."""
        for peer in sorted(self._seen, key=self._urgency):
            seen = self._seen[peer]
            if now >= seen.due_at(neighbour=peer in self._neighbours):
                return peer, not seen.misses and now - seen.padded_at >= PADDED_EVERY_S
        return None

    def note(self, peer: str, pong: Pong | None, now: float) -> None:
        """What came of measuring."""
        if (seen := self._seen.get(peer)) is None:
            return
        seen.measured_at = now
        if pong is None:
            seen.misses += 1
            return
        seen.misses = 0
        seen.latencies_s.append(pong.latency_s)
        if pong.bytes_s:
            seen.rates.append(pong.bytes_s)
            seen.padded_at = now

    def told(self) -> tuple[Way, ...]:
        """What the role record says."""
        ways = (seen.way(peer) for peer, seen in self._seen.items())
        return tuple(way for way in ways if way is not None)

    def _place(self, peer: str) -> bytes:
        return hashlib.blake2b(f"{self._own}/{peer}".encode(), digest_size=8).digest()

    def _urgency(self, peer: str) -> tuple[bool, bool, float, str]:
        """Never measured before known, newest first; then who was measured the longest ago."""
        seen, neighbour = self._seen[peer], peer in self._neighbours
        known = bool(seen.latencies_s or seen.misses)
        return not neighbour, known, seen.measured_at if known else -self._others.get(peer, 0.0), peer


async def keep_measuring_ways(presence: Presence) -> None:
    """Measure one way after the other, slowly, until cancelled; our next role records say what was found."""
    own = presence.identity.peer_id
    ways = Ways(own)
    while True:
        ways.meet(_neighbours(presence), _others(presence))
        if (due := ways.due(trio.current_time())) is not None:
            peer, padded = due
            pong = await ping(presence.hive, peer, _TIMEOUT_S, padded=padded)
            ways.note(peer, pong, trio.current_time())
        if (capacity := presence.record.capacity) is not None and capacity.ways != ways.told():
            said = msgspec.structs.replace(capacity, ways=ways.told())
            presence.record = msgspec.structs.replace(presence.record, capacity=said)
            if len(capacity.ways) < min(_WAITED_FOR, len(said.ways)):  # by who plans; the others have time
                presence.swarm.announce()
        await trio.sleep(PACE_S)


def _neighbours(presence: Presence) -> tuple[str, ...]:
    """Whom our frames go to, and whom we get them from."""
    plan, own = presence.swarm.plan, presence.identity.peer_id
    chain = plan.chain_of(own) if plan is not None else None
    if chain is None:
        return ()
    peers = [stop.peer for stop in chain]
    place = peers.index(own)
    return tuple(dict.fromkeys((peers[(place + 1) % len(peers)], peers[place - 1])))


def _others(presence: Presence) -> dict[str, float]:
    run_id = presence.record.run_id
    return {
        peer: member.record.started_at
        for peer, member in presence.swarm.members.items()
        if member.record.role == "inference" and member.record.run_id == run_id
    }
