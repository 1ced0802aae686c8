"""Membership of one swarm: who is in it, which run it works on, which plan and release are the latest.

Everything is a signed envelope in an expiring record, renewed each 20 s. What a peer says of itself lives for 60 s: one
that dies is gone within a minute, and one that leaves says so. What a trainer says of its run outlives it by an hour.
Knows no gossip, no chain and no training.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from echo_p2p.errors import NetError
from echo_p2p.net.base import Records
from echo_p2p.records import CheckedRecords, LastWord
from echo_protocols import names
from echo_protocols.envelope import LATEST, NO_RUN, PLAN, ROLE, RUN, Border, Kind, Opened, Sealer
from echo_protocols.peer import Plan, RoleRecord
from echo_protocols.run import RunManifest
from echo_protocols.sync import LatestRelease

T = TypeVar("T")

log = logging.getLogger(__name__)

ROLE_TTL_S = 60.0
RUN_TTL_S = 3600.0
"""Of manifest, plan and latest release: for who joins while the trainer is away. Newer ones replace them at once."""

RENEW_EVERY_S = 20.0
WATCH_EVERY_S = 2.0
LOOK_EVERY_S = 0.3
"""How often at most, whoever asks."""

_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """A live peer. `heard_at` is when it signed its record, in Unix seconds by its own clock."""

    peer: str
    record: RoleRecord
    heard_at: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run as a member sees it: the manifest, its id and who published it; `model` is where its trainer has it."""

    manifest: RunManifest
    run_id: bytes
    owner: str
    issued_at: float
    model: Path | None = None


class Swarm:
    """The swarm as one peer sees it. `run` must be running for anything here to move.

    `members`, `runs`, `plan` and `latest` are replaced, never changed in place; `changed` wakes who waits.
    """

    def __init__(
        self,
        name: str,
        *,
        peer: str,
        records: Records,
        sealer: Sealer,
        border: Border,
        describe: Callable[[], RoleRecord],
    ) -> None:
        self.name = name
        self.peer = peer
        self.members: dict[str, Member] = {}
        self.runs: tuple[Run, ...] = ()
        self.plan: Plan | None = None
        self.latest: LatestRelease | None = None
        self.joined: Run | None = None
        self.trainers_word = LastWord(())
        self._records = records
        self._sealer = sealer
        self._border = border
        self._describe = describe
        self._roles = CheckedRecords(records, border, names.role_key(name), ROLE, NO_RUN)
        self._manifests = CheckedRecords(records, border, names.run_key(name), RUN, NO_RUN)
        self._of_run: _RunRecords | None = None
        self._twin_started_at = 0.0
        self._published: dict[str, bytes] = {}
        self._renew_now = trio.Event()
        self._look_now = trio.Event()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Renew our records and watch the others' until cancelled; then say that we left."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew)
                nursery.start_soon(self._watch)
        finally:
            with trio.move_on_after(2.0, shield=True):
                await self._leave()

    async def changed(self, timeout_s: float = WATCH_EVERY_S) -> None:
        """Return when anything here has changed, or after `timeout_s`."""
        with trio.move_on_after(timeout_s):
            await self._changed.wait()

    def announce(self) -> None:
        """Renew our role record at once: something in it that others wait for has changed."""
        self._renew_now.set()

    def look_again(self) -> None:
        """Read the others' records soon: there is reason to think that they have changed."""
        self._look_now.set()

    def wake(self) -> None:
        """Have everybody look who waits for changes: what they decide by has changed, though not here."""
        self._notify()

    def join(self, run: Run) -> None:
        """From now on, plan and release are those of `run`; what was known of another run's is forgotten."""
        if self.joined is None or self.joined.run_id != run.run_id:
            self.plan, self.latest = None, None
            self.trainers_word = LastWord(run.manifest.trainers, run.issued_at)
            self._of_run = _RunRecords(
                run,
                CheckedRecords(self._records, self._border, names.plan_key(self.name), PLAN, run.run_id),
                CheckedRecords(self._records, self._border, names.release_key(self.name), LATEST, run.run_id),
            )
        self.joined = run
        self._notify()

    def trainers(self) -> list[Member]:
        """Live members that may train the joined run."""
        allowed = self.joined.manifest.trainers if self.joined else ()
        return [member for peer, member in self.members.items() if peer in allowed and member.record.role == "trainer"]

    async def publish_run(self, manifest: RunManifest) -> None:
        """Publish a manifest and keep it alive."""
        await self._publish(names.run_key(self.name), RUN, NO_RUN, manifest)

    async def publish_plan(self, run_id: bytes, plan: Plan) -> None:
        """Publish a plan for a run and keep it alive."""
        await self._publish(names.plan_key(self.name), PLAN, run_id, plan)

    async def publish_latest(self, run_id: bytes, latest: LatestRelease) -> None:
        """Publish which release is the latest, and keep it alive."""
        await self._publish(names.release_key(self.name), LATEST, run_id, latest)

    async def _publish(self, key: str, kind: Kind[T], run_id: bytes, value: T) -> None:
        self._published[key] = self._sealer.seal(kind, run_id, value, time.time())
        await self._put(key, self._published[key], RUN_TTL_S)

    async def _renew(self) -> None:
        while True:
            self._renew_now = trio.Event()
            role = self._sealer.seal(ROLE, NO_RUN, self._describe(), time.time())
            await self._put(names.role_key(self.name), role, ROLE_TTL_S)
            for key, sealed in list(self._published.items()):
                await self._put(key, sealed, RUN_TTL_S)
            with trio.move_on_after(RENEW_EVERY_S):
                await self._renew_now.wait()

    async def _leave(self) -> None:
        # a record is only ever replaced by one that expires later, so leaving is said, not withdrawn
        farewell = msgspec.structs.replace(self._describe(), leaving=True)
        role = self._sealer.seal(ROLE, NO_RUN, farewell, time.time())
        await self._put(names.role_key(self.name), role, ROLE_TTL_S)

    async def _put(self, key: str, value: bytes, ttl_s: float) -> None:
        try:
            with trio.fail_after(_DEADLINE_S):
                await self._records.put(key, value, ttl_s)
        except (NetError, trio.TooSlowError) as error:
            level = logging.WARNING if self.members else logging.DEBUG  # nobody has answered yet: joining says so
            log.log(level, "record %s was not stored (%s); trying again in %.0f s", key, error, RENEW_EVERY_S)
        except Exception:  # a vendor's own error must not end the node: the next renewal tries again
            log.exception("record %s was not stored; trying again in %.0f s", key, RENEW_EVERY_S)

    async def _watch(self) -> None:
        """Task boundary of all that is read of the swarm."""
        while True:
            try:
                with trio.fail_after(_DEADLINE_S):
                    await self._look()
            except (NetError, trio.TooSlowError) as error:
                log.warning("records of swarm %s can't be read (%s); trying again", self.name, error)
            except Exception:
                log.exception("records of swarm %s can't be read; trying again", self.name)
            await trio.sleep(LOOK_EVERY_S)
            with trio.move_on_after(WATCH_EVERY_S - LOOK_EVERY_S):
                await self._look_now.wait()
            self._look_now = trio.Event()

    async def _look(self) -> None:
        before = (self.members, self.runs, self.plan, self.latest)
        roles = await self._roles.read(time.time())
        self._look_for_twin(roles)
        self.trainers_word.hear(roles)
        self.members = {
            each.signer: Member(each.signer, each.payload, each.issued_at) for each in roles if not each.payload.leaving
        }
        self.runs = _valid_runs(await self._manifests.read(time.time()), self.name) or self.runs
        if self._of_run is not None:
            await self._look_at(self._of_run)
        if before != (self.members, self.runs, self.plan, self.latest):
            self._notify()

    async def _look_at(self, records: "_RunRecords") -> None:
        run = records.run
        plans, releases = await records.plans.read(time.time()), await records.releases.read(time.time())
        if records is not self._of_run:
            return  # another run was joined meanwhile
        self.trainers_word.hear((*plans, *releases))
        for plan in _by_trainers(plans, run):
            if plan.layers == run.manifest.layers and (self.plan is None or plan.number > self.plan.number):
                self.plan = plan
        for latest in _by_trainers(releases, run):
            if self.latest is None or latest.version > self.latest.version:
                self.latest = latest

    def _look_for_twin(self, roles: list[Opened[RoleRecord]]) -> None:
        """Say so, once for each, if a node that is not this process speaks with our key."""
        started_at = self._describe().started_at
        for each in roles:
            theirs = each.payload.started_at
            # what our own predecessor left behind was signed before we started
            alive = each.signer == self.peer and not each.payload.leaving and each.issued_at > started_at
            if alive and theirs not in (started_at, self._twin_started_at):
                self._twin_started_at = theirs
                log.error(
                    "another %s node of swarm %s runs with this node's key %s, and each hides the other: stop one of "
                    "them, or move its identity.key away so that it gets a key of its own",
                    each.payload.role, self.name, self.peer,
                )  # fmt: skip

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@dataclass(frozen=True, slots=True)
class _RunRecords:
    """Where the records of the joined run are read from."""

    run: Run
    plans: CheckedRecords[Plan]
    releases: CheckedRecords[LatestRelease]


def _valid_runs(manifests: list[Opened[RunManifest]], swarm: str) -> tuple[Run, ...]:
    """Runs of this swarm whose publisher may train them, oldest first."""
    runs = [
        Run(each.payload, each.payload.run_id(), each.signer, each.issued_at)
        for each in manifests
        if each.payload.swarm == swarm and each.signer in each.payload.trainers
    ]
    return tuple(sorted(runs, key=lambda run: (run.issued_at, run.run_id)))


def _by_trainers(opened: list[Opened[T]], run: Run) -> list[T]:
    return [each.payload for each in opened if each.signer in run.manifest.trainers]
