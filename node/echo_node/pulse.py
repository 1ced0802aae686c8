"""Which peers of the plan are there, by pings of their leader: pure rules, and the task that asks.

A record says only that a peer was there a minute ago; a daemon takes streams for a node that is stopped. An answer
comes from the node's own event loop, with the age of the step that it computes. Knows no plan.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from statistics import median
from typing import Final

import trio

from echo_p2p.net.base import Streams
from echo_p2p.net.ping import ping

log = logging.getLogger(__name__)

PING_EVERY_S: Final = 3.0
PING_TIMEOUT_S: Final = 2.0
MISSES: Final = 2
"""In a row. The second is tried at once: a peer that stalls is known as lost after 4 to 7 seconds."""

STEADY: Final = 20
"""Answers in a row after which a peer is as good as any other."""

STUCK_S: Final = 10.0
"""A step counts as stuck at this age, or at `TIMES_USUAL` that of others of the peer, whichever is later."""

TIMES_USUAL: Final = 8.0

_AT_ONCE = 32
_KEPT = 32
_LATE_S = 0.5


class Pulse:
    """What peers answered lately. Keeps only those that `keep` names."""

    def __init__(self) -> None:
        self._missed: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._ages: dict[str, deque[float]] = {}

    def answered(self, peer: str, busy_s: float) -> bool:
        """Note an answer; whether the peer is well, and not stuck in a step."""
        ages = self._ages.setdefault(peer, deque(maxlen=_KEPT))
        usual_s = median(ages) if ages else 0.0
        if busy_s > max(STUCK_S, TIMES_USUAL * usual_s):
            self.missed(peer)
            return False
        if busy_s > 0.0:
            ages.append(busy_s)
        del self._missed[peer]
        self._answers[peer] += 1
        return True

    def missed(self, peer: str) -> None:
        """Note a ping without an answer in time."""
        self._missed[peer] += 1
        del self._answers[peer]

    def misses(self, peer: str) -> int:
        """Pings in a row that had no answer."""
        return self._missed[peer]

    def lost(self, peer: str) -> bool:
        """Whether the peer counts as gone, until it answers again."""
        return self.misses(peer) >= MISSES

    def steady(self, peer: str) -> bool:
        """Whether it has answered for long."""
        return self._answers[peer] >= STEADY

    def missing(self) -> frozenset[str]:
        """All that are lost."""
        return frozenset(peer for peer in self._missed if self.lost(peer))

    def keep(self, peers: Collection[str]) -> None:
        """Forget all others."""
        for known in (self._missed, self._answers, self._ages):
            for peer in known.keys() - set(peers):
                del known[peer]


async def check(streams: Streams, pulse: Pulse, peer: str) -> None:
    """Ask a peer until it answers or is lost. Checks at the same time count one silence once."""
    while True:
        asked_at, misses = trio.current_time(), pulse.misses(peer)
        pong = await ping(streams, peer, PING_TIMEOUT_S)
        if pong is not None and pulse.answered(peer, pong.busy_s):
            return
        if pong is None:
            if trio.current_time() - asked_at > PING_TIMEOUT_S + _LATE_S:
                return log.info("this node was too busy to hear whether %s answers", peer)
            if pulse.misses(peer) == misses:
                pulse.missed(peer)
        if pong is not None or pulse.lost(peer):
            return


async def keep_checking(
    streams: Streams, pulse: Pulse, peers: Callable[[], Collection[str]], checked: Callable[[str], None]
) -> None:
    """Ask all of `peers` now and then, until cancelled; `checked` hears of each that was asked."""
    limiter = trio.CapacityLimiter(_AT_ONCE)

    async def one(peer: str) -> None:
        async with limiter:
            await check(streams, pulse, peer)
        checked(peer)

    while True:
        next_at = trio.current_time() + PING_EVERY_S
        asked = set(peers())
        pulse.keep(asked)
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(one, peer)
        await trio.sleep_until(next_at)
