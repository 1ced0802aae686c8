"""Whom a stop blames when its chain has failed, and the word to the plan's leader. The choice is pure.

Only what was seen from here counts: a peer that does not answer, a step that hangs, a fault found in what a neighbour
sent. What a neighbour tells of a third peer is that one's neighbours' to say, for it may be a lie.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from echo_p2p.chain.link import LOADING
from echo_p2p.chain.troubles import NOBODYS
from echo_p2p.errors import NetError
from echo_p2p.net.ping import Pong, ping
from echo_p2p.net.reach import Allowance
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import COMPLAINT
from echo_protocols.hop import Failure
from echo_protocols.peer import Complaint, Stop

log = logging.getLogger(__name__)

AT_ONCE: Final = frozenset({"garbage", "bad-frame", "bad-rows", "bad-lane"})
"""Reasons that no accident explains; others may be one, and have to come twice."""

SLOW: Final = frozenset({"silent", "stalled"})
"""Reasons for which a step that still runs is to blame."""

TIMES: Final = 2
TIMES_HEARD: Final = 4
STUCK_S: Final = 2.0
AGAIN_S: Final = 30.0
PING_TIMEOUT_S: Final = 2.0

_PINGS_AT_ONCE = 8
_TRAINERS_MAX = 4
_COMPLAINTS_A_MINUTE = 5  # one less than is heard
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """A chain that ended: its stops, the number of its plan, why, and the neighbour that said so, if one did.

    `times` counts how often that came lately. `ready` are the stops that are known to serve their spans by now.
    """

    chain: tuple[Stop, ...]
    plan: int
    failure: Failure
    told_by: str | None
    times: int = 1
    ready: frozenset[str] = frozenset()


def blame(ours: str, trouble: Trouble, pongs: Mapping[str, Pong | None]) -> tuple[str, str] | None:
    """The accused and the reason; None if nobody is to blame. `pongs` is what other stops answered just now."""
    failure = trouble.failure
    if failure.reason in NOBODYS:
        return None
    for peer, pong in pongs.items():
        if pong is None:
            return peer, "no-answer"
    stuck = {peer: pong.busy_s for peer, pong in pongs.items() if pong is not None and pong.busy_s >= STUCK_S}
    if failure.reason in SLOW and stuck:
        return max(stuck, key=stuck.__getitem__), "stuck"
    if failure.reason == LOADING and failure.peer not in trouble.ready:
        return None  # and whoever says so of it is right
    accused = _accused(ours, trouble)
    if accused is None or not (trouble.times >= TIMES or failure.reason in AT_ONCE):
        return None
    if failure.reason == "unreachable" and accused not in trouble.ready:
        return None  # it is loading its span
    return accused, failure.reason


def _accused(ours: str, trouble: Trouble) -> str | None:
    peers = [stop.peer for stop in trouble.chain]
    named, told_by = trouble.failure.peer, trouble.told_by
    if told_by is not None and named in (ours, None):
        return told_by if trouble.times >= TIMES else None  # it says that we are at fault, or not who is
    if told_by is not None and named != told_by:
        return told_by if trouble.times >= TIMES_HEARD else None  # else its own neighbours have accused it by now
    if named is None and trouble.failure.reason in AT_ONCE:
        return peers[(peers.index(ours) + 1) % len(peers)]  # somebody's fault: in other company it shows whose
    return named if named in peers and named != ours else None


class Accuser:
    """Looks into each chain that failed, and complains where somebody is to blame. One at a time."""

    def __init__(self, presence: Presence, run: Run) -> None:
        self._presence = presence
        self._run = run
        self._allowance = Allowance(_COMPLAINTS_A_MINUTE)
        self._chain: tuple[Stop, ...] = ()
        self._failed_at: list[float] = []  # of that chain, lately
        self._looking = False

    async def look_into(self, chain: tuple[Stop, ...], plan: int, failure: Failure, told_by: str | None) -> None:
        """Ask who is there, and complain if that, or the failure, says of whom."""
        if failure.reason in NOBODYS or self._looking or len(chain) < 2:
            return
        now = trio.current_time()
        before = self._failed_at if chain == self._chain else []
        self._chain, self._failed_at = chain, [*(at for at in before if now - at < AGAIN_S), now]
        self._looking = True
        try:
            pongs = await self._ask(self._whom(chain))
            trouble = Trouble(chain, plan, failure, told_by, len(self._failed_at), self._ready(chain))
            found = blame(self._presence.identity.peer_id, trouble, pongs)
            if found is not None and self._allowance.take("", now):
                await self._complain(Complaint(plan=plan, accused=found[0], reason=found[1][:256] or "unknown"))
        finally:
            self._looking = False

    def _whom(self, chain: Sequence[Stop]) -> list[str]:
        """The head asks everybody who is said to serve by now; others their neighbours."""
        ours, members = self._presence.identity.peer_id, self._presence.swarm.members
        peers = [stop.peer for stop in chain]
        place = peers.index(ours)
        around = peers if place == 0 else [peers[place - 1], peers[(place + 1) % len(peers)]]
        return [peer for peer in dict.fromkeys(around) if peer != ours and peer in members]

    def _ready(self, chain: Sequence[Stop]) -> frozenset[str]:
        members = self._presence.swarm.members
        records = {stop: members[stop.peer].record for stop in chain if stop.peer in members}
        return frozenset(stop.peer for stop, record in records.items() if record.span == stop.span and record.version)

    async def _ask(self, peers: Sequence[str]) -> dict[str, Pong | None]:
        pongs: dict[str, Pong | None] = {}
        limiter = trio.CapacityLimiter(_PINGS_AT_ONCE)

        async def ask(peer: str) -> None:
            async with limiter:
                pongs[peer] = await ping(self._presence.hive, peer, PING_TIMEOUT_S)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        return pongs

    async def _complain(self, complaint: Complaint) -> None:
        presence = self._presence
        log.warning("peer %s is to blame (%s): the plan's leader is told", complaint.accused, complaint.reason)
        sealed = presence.sealer.seal(COMPLAINT, self._run.run_id, complaint, time.time())
        for member in presence.swarm.trainers()[:_TRAINERS_MAX]:
            try:
                with trio.fail_after(_DEADLINE_S):
                    async with presence.hive.open(member.peer, names.COMPLAIN, timeout_s=_DEADLINE_S) as stream:
                        await stream.send(sealed)
            except (NetError, trio.TooSlowError) as error:
                log.info("trainer %s can't be told: %s", member.peer, error)
