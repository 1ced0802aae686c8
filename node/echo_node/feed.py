"""The releases of a run as an inference peer hears of them: gossip, records, and chunks from whoever holds them.

Checks each one at the border, and passes on what has come. Knows no stage.
"""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Sequence

import trio

from echo_p2p.errors import EchoError, Unreachable, WeightsError
from echo_p2p.net.absentees import Absentees
from echo_p2p.net.base import Message
from echo_p2p.net.blobs import blob_hash, fetch_from_any
from echo_p2p.presence import Presence
from echo_p2p.spread.announce import Announcer
from echo_p2p.spread.exchange import Exchange
from echo_p2p.spread.holdings import Holdings
from echo_p2p.swarm import Member, Run
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import RELEASE, Refusal
from echo_protocols.release import Chunk, Release
from echo_protocols.sync import release_fault
from echo_protocols.values import PolicyVersion, Span

log = logging.getLogger(__name__)

_SEALED_MAX_BYTES = RELEASE.max_bytes + 512
_KNOWN_MAX = 512
_OTHER_HOLDERS = 6
_RETRY_S = 1.0
_ASKED_ONE_BY_ONE = 2


class Feed:
    """The newest release, and older ones by hash. Remembers the last 512 that it opened.

    `announcer` tells other peers which chunks they can have here; it is the watcher of the blobs that are served.
    """

    def __init__(self, presence: Presence, run: Run, store: Store) -> None:
        self.newest: Release | None = None
        self._presence = presence
        self._run = run
        self._store = store
        self._known: OrderedDict[bytes, Release] = OrderedDict()
        self._news = trio.Event()
        self.announcer = Announcer(presence.hive, Holdings(store.__contains__), refused=presence.border.refused)
        self._exchange = Exchange(
            presence.hive,
            keep=self._keep,
            kept=self.announcer.gained,
            report=presence.border.refuse,
            seed=random.getrandbits(32),
        )
        self._one_by_one = trio.CapacityLimiter(_ASKED_ONE_BY_ONE)
        self._absentees = Absentees()

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version that a trainer has announced."""
        return self.newest.version if self.newest else None

    async def run(self) -> None:
        """Listen, and exchange chunks, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.announcer.serve)
            nursery.start_soon(self._exchange.run)
            nursery.start_soon(self._meet)
            nursery.start_soon(self._hear)
            nursery.start_soon(self._look)

    async def keep_staged(self, replica: Replica) -> None:
        """Stage every new release into a replica, newest first, until cancelled; failures are tried again."""
        while True:
            news, release = self._news, self.newest
            if release is None or (replica.version is not None and replica.version >= release.version):
                await news.wait()
                continue
            try:
                await replica.stage(release, self.lookup, self.fetch)
            except EchoError as error:
                log.warning("version %s can't be staged yet: %s", release.version, error)
                with trio.move_on_after(_RETRY_S):
                    await news.wait()

    async def lookup(self, hash: bytes) -> Release:
        """The release of that sealed hash. Raises WeightsError, NetError, RemoteError."""
        if hash in self._known:
            return self._known[hash]
        sealed = await trio.to_thread.run_sync(self._store.get, hash)
        if sealed is None:
            sealed = await self._ask_for(hash, _SEALED_MAX_BYTES, exact=False)
            await self._keep(sealed)
        release = self._open(sealed, once=False)
        if release is None:
            raise WeightsError(f"what hashes to {hash.hex()[:12]} is no release of this run")
        self._known[hash] = release
        while len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return release

    async def fetch(self, chunk: Chunk) -> bytes:
        """A chunk's blob, from whoever announces it. Raises CorruptChunk, NetError, RemoteError.

        When nobody does for long, those who should have it are asked one by one.
        """
        try:
            return await self._exchange.fetch(chunk.hash, chunk.size_bytes)
        except Unreachable as error:
            log.info("chunk of %s: %s", chunk.part, error)
        async with self._one_by_one:
            return await self._ask_for(chunk.hash, chunk.size_bytes, exact=True)

    async def _ask_for(self, hash: bytes, size_bytes: int, *, exact: bool) -> bytes:
        """One after the other; who is dead for one blob is not waited for again for the next."""
        return await fetch_from_any(
            self._presence.hive, self._holders(), hash, size_bytes, exact=exact, absentees=self._absentees
        )

    def neighbours(self) -> list[str]:
        """Other peers of the run to exchange chunks with: first who serves layers of ours, else in an order of ours."""
        span, ours = self._presence.record.span, self._presence.swarm.peer

        def rank(member: Member) -> tuple[bool, bytes]:
            return not _overlap(span, member.record.span), blob_hash(f"{ours} {member.peer}".encode())

        return [member.peer for member in sorted(self._participants()[1], key=rank)]

    async def _meet(self) -> None:
        while True:
            self._exchange.meet(self._participants()[0], self.neighbours())
            await self._presence.swarm.changed()

    def _participants(self) -> tuple[Sequence[str], list[Member]]:
        """The run's trainers, and its other peers."""
        swarm = self._presence.swarm
        trainers = [member.peer for member in swarm.trainers()] or list(self._run.manifest.trainers)
        others = [
            member
            for peer, member in swarm.members.items()
            if member.record.run_id == self._run.run_id and peer not in trainers and peer != swarm.peer
        ]
        return trainers, others

    def _holders(self) -> list[str]:
        """Who may hold blobs of this run: its trainers first, then its other peers in no order."""
        trainers, others = self._participants()
        # few: anybody may say that it takes part, and each that never answers costs a deadline
        chosen = random.sample(others, min(_OTHER_HOLDERS, len(others)))
        return [*trainers, *(member.peer for member in chosen)]

    async def _hear(self) -> None:
        async with self._presence.gossip.subscribe(names.release_topic(self._presence.swarm.name)) as messages:
            async for message in messages:
                await self._consider_message(message)

    async def _consider_message(self, message: Message) -> None:
        release = self._open(message.data, once=True)
        if release is not None:
            self._consider(release)
            await self._keep(message.data)  # so that whoever looks for it by its hash finds it here too

    async def _look(self) -> None:
        while True:
            latest = self._presence.swarm.latest
            if latest is not None and (self.version is None or latest.version > self.version):
                try:
                    self._consider(await self.lookup(latest.release))
                except EchoError as error:
                    log.info("release %s can't be had yet: %s", latest.version, error)
            await self._presence.swarm.changed()

    async def _keep(self, blob: bytes) -> bool:
        try:
            await trio.to_thread.run_sync(self._store.put, blob)
        except WeightsError as error:
            log.warning("a blob is used but not kept: %s", error)
            return False
        return True

    def _open(self, sealed: bytes, *, once: bool) -> Release | None:
        border = self._presence.border
        opened = border.open(sealed, RELEASE, self._run.run_id, time.time(), once=once)
        if isinstance(opened, Refusal):
            return None
        if opened.signer not in self._run.manifest.trainers:
            border.refuse("not-a-trainer", opened.signer)
            return None
        return opened.payload

    def _consider(self, release: Release) -> None:
        fault = release_fault(release.version, self.version)
        if fault == "regressed-version":
            self._presence.border.refuse(fault, str(release.version))
        if fault is None:
            self.newest = release
            self._news.set()
            self._news = trio.Event()
            self._presence.swarm.wake()  # a trainer that releases is there


def _overlap(one: Span | None, other: Span | None) -> bool:
    return one is not None and other is not None and one.start < other.end and other.start < one.end
