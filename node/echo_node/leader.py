"""The trainer's leader: keeps a plan that fits who is there, who answers and who works with whom. Knows no rollout."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final

import msgspec
import trio
from msgspec import UNSET

from echo_node.complaints import Complaints, Pair
from echo_node.handover import HANDOVER_S, preparing, ready_stops, same
from echo_node.newcomers import Newcomers, works
from echo_node.plans import bounded, describe, device_of, links_of, serving, workload_for
from echo_node.pulse import Pulse, check, keep_checking
from echo_node.standing import Standing
from echo_p2p.chain.fit import shortfall
from echo_p2p.chain.plan import plan
from echo_p2p.chain.pricing import Device, Link, Links, Workload
from echo_p2p.errors import FrameTooLarge, NetError
from echo_p2p.net.base import Stream
from echo_p2p.net.newest import Newest
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import COMPLAINT, Refusal
from echo_protocols.peer import Plan, Stop

log = logging.getLogger(__name__)

BALANCE_EVERY_S: Final = 30.0
"""How often a plan may change because measurements did; whoever comes, leaves or fails changes it at once."""

LEFT_OUT_S: Final = 10.0
"""For how long a peer that failed is planned without at least; twice as long each time that follows."""

_PLANNED_AT_ONCE = 8  # peers that can't hold the model alone
_COMPLAINT_MAX_BYTES = COMPLAINT.max_bytes + 512
_COMPLAINTS_AT_ONCE = 8
_COMPLAINT_IDLE_S = 5.0


async def lead(presence: Presence, run: Run, standing: Standing) -> None:
    """Publish a new plan whenever the peers that serve this run change; runs until cancelled.

    A chain is only as good as its worst peer, and anybody can announce himself: whoever does not answer is planned
    without until it does, and those that complain of each other are kept apart.
    """
    leader = _Leader(presence, run, standing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leader.keep_checking)
        nursery.start_soon(leader.hear_complaints)
        await leader.keep_planning()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a plan is made from."""

    devices: dict[str, Device]
    links: Links
    parted: frozenset[Pair]
    current: Plan


class _Leader:
    def __init__(self, presence: Presence, run: Run, standing: Standing) -> None:
        self._presence = presence
        self._run = run
        self._standing = standing
        self._pulse = Pulse()
        self._complaints = Complaints()
        self._speaking = Newest(_COMPLAINTS_AT_ONCE)
        self._newcomers = Newcomers()
        self._loading: tuple[tuple[Stop, ...], ...] = ()  # the chains that are to take over when their stops are ready
        self._loading_since = 0.0

    # -- the plan -----------------------------------------------------------------------------------------------------

    async def keep_planning(self) -> None:
        swarm, work = self._presence.swarm, workload_for(self._run)
        seen: _Seen | None = None
        wanted = Plan(number=0, layers=work.layers)
        looked_at = -inf
        while True:
            now = trio.current_time()
            asked, waiting = self._look(work, now)
            at_once = (
                seen is None
                or seen.devices.keys() != asked.devices.keys()
                or (seen.parted, seen.current) != (asked.parted, asked.current)
            )
            settled = wanted.chains == asked.current.chains  # else it is on its way, and may be what is measured next
            if at_once or (settled and asked != seen and now - looked_at >= BALANCE_EVERY_S):
                looked_at, seen = now, asked
                wanted = await _planned(asked, work)
                if not wanted.chains:
                    log.info("no chain can be made: %s", shortfall(asked.devices, work))
            assert seen is not None
            step = self._step(asked, wanted, now)
            if not same(step, asked.current):
                # numbers come from the clock, so that they grow over restarts of the leader
                step = msgspec.structs.replace(step, number=max(int(time.time()), asked.current.number + 1))
                seen = replace(seen, current=step)
                await self._publish(step, waiting)
            await swarm.changed()

    def _step(self, asked: _Seen, wanted: Plan, now: float) -> Plan:
        """The plan to publish on the way to `wanted`: that, unless chains work meanwhile and its stops have to load."""
        unlinked = {pair for pair, link in asked.links.known.items() if link is None}
        if works(asked.current, asked.devices, asked.parted | unlinked):
            step = preparing(asked.current, wanted, ready_stops(serving(self._presence, self._run)))
            if step is not None:
                if self._loading != wanted.chains:
                    self._loading, self._loading_since = wanted.chains, now
                if now - self._loading_since < HANDOVER_S:
                    return step
        return msgspec.structs.replace(wanted, upcoming=UNSET)

    def _look(self, work: Workload, now: float) -> tuple[_Seen, int]:
        """Who is there to be planned with, and how many there are too many."""
        swarm = self._presence.swarm
        current = swarm.plan if swarm.plan is not None else Plan(number=0, layers=work.layers)
        self._complaints.planned(current)
        records = serving(self._presence, self._run)
        here = {
            peer: record
            for peer, record in records.items()
            if not (self._pulse.lost(peer) or self._standing.benched(peer, now))
        }
        parted = self._complaints.parted(now)
        here = self._newcomers.counted(here, current, parted, now)
        chosen = bounded({peer: record.capacity for peer, record in here.items() if record.capacity}, current)
        devices = {peer: device_of(held) for peer, held in chosen.items()}
        links = links_of({peer: here[peer] for peer in chosen})  # of all that are here they would be a million
        return _Seen(devices, links, parted, current), len(here) - len(chosen)

    async def _publish(self, wanted: Plan, waiting: int) -> None:
        swarm = self._presence.swarm
        swarm.plan = wanted
        self._complaints.planned(wanted)
        log.info("plan %d: %s", wanted.number, describe(wanted))
        if waiting > 0:
            log.warning("%d peers are more than a plan has room for; they wait", waiting)
        await swarm.publish_plan(self._run.run_id, wanted)

    # -- who is there -------------------------------------------------------------------------------------------------

    async def keep_checking(self) -> None:
        await keep_checking(self._presence.hive, self._pulse, self._whom, self._checked)

    def _whom(self) -> Collection[str]:
        """Those that others depend on, and those that are lost: they may come back."""
        found, members = self._presence.swarm.plan, self._presence.swarm.members
        planned = [stop.peer for chain in found.chains if len(chain) > 1 for stop in chain] if found else []
        ready = [stop.peer for stop in found.standby] if found else []
        return {peer for peer in (*planned, *ready, *self._pulse.missing()) if peer in members}

    def _checked(self, peer: str) -> None:
        now = trio.current_time()
        if self._pulse.lost(peer):
            if not self._standing.benched(peer, now) and self._planned(peer):
                self._leave_out(peer, "announces itself but does not answer")
        elif self._pulse.steady(peer):
            self._standing.clear(peer)

    def _planned(self, peer: str) -> bool:
        found = self._presence.swarm.plan
        return found is not None and found.span_of(peer) is not None

    def _leave_out(self, peer: str, why: str) -> None:
        self._standing.fail(peer, trio.current_time(), cost_s=LEFT_OUT_S)
        log.warning("peer %s %s; the plan goes on without it", peer, why)
        self._presence.swarm.wake()

    # -- complaints ---------------------------------------------------------------------------------------------------

    async def hear_complaints(self) -> None:
        streams = self._presence.hive
        await streams.serve(
            names.COMPLAIN,
            self._on_complaint,
            max_frame_bytes=_COMPLAINT_MAX_BYTES,
            max_streams=2 * _COMPLAINTS_AT_ONCE,
        )

    async def _on_complaint(self, stream: Stream) -> None:
        border = self._presence.border
        try:
            with trio.fail_after(_COMPLAINT_IDLE_S), self._speaking.place() as scope:
                data = await stream.receive()
        except (NetError, trio.TooSlowError) as error:
            border.refuse("oversized" if isinstance(error, FrameTooLarge) else "no-request", stream.peer)
            return
        if scope.cancelled_caught:
            border.refuse("no-request", stream.peer)
            return
        opened = border.open(data, COMPLAINT, self._run.run_id, time.time(), once=True)
        if isinstance(opened, Refusal):
            return
        accused, now = opened.payload.accused, trio.current_time()
        if (fault := self._complaints.hear(opened.signer, opened.payload, now)) is not None:
            border.refuse(fault, opened.signer)
            return
        log.warning("peer %s complains of %s (%s)", opened.signer, accused, opened.payload.reason)
        await check(self._presence.hive, self._pulse, accused)
        self._checked(accused)
        if self._complaints.agreed(accused, now) and not self._standing.benched(accused, now):
            self._leave_out(accused, "is blamed by two others")
        self._presence.swarm.wake()


async def _planned(asked: _Seen, work: Workload) -> Plan:
    """The plan; a crowd's takes most of a second, and a thread.

    Those who are parted are neighbours all the same where nobody could make a chain otherwise.
    """
    apart: dict[Pair, Link | None] = {(one, other): None for one, other in asked.parted}
    apart |= {(other, one): None for one, other in asked.parted}
    parts = sum(work.room(device, first=True, last=True) < work.layers for device in asked.devices.values())
    for links in (Links({**asked.links.known, **apart}), asked.links) if apart else (asked.links,):
        make = partial(plan, asked.devices, work, asked.current, links)
        found = make() if parts <= _PLANNED_AT_ONCE else await trio.to_thread.run_sync(make)
        if found.chains:
            break
    return found
