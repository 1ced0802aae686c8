"""Makes releases known: sealed, kept as a blob, announced by gossip and named in the records. Knows no training."""

import time

import trio

from echo_p2p.net.base import GOSSIP_MAX_BYTES
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import RELEASE
from echo_protocols.release import Release
from echo_protocols.sync import LatestRelease


class Herald:
    """Announces one run's releases, one after the other. `run` must be running for the records to follow."""

    def __init__(self, presence: Presence, run: Run, store: Store, publisher: Publisher) -> None:
        self._presence = presence
        self._run = run
        self._store = store
        self._publisher = publisher
        self._news = trio.Event()

    async def announce(self, release: Release) -> None:
        """Seal a release and tell the swarm; who misses the gossip hears of it from the records."""
        presence = self._presence
        sealed = presence.sealer.seal(RELEASE, self._run.run_id, release, time.time())
        with trio.CancelScope(shield=True):  # the next release can only be made of one that is sealed
            hash = await trio.to_thread.run_sync(self._store.put, sealed)
            self._publisher.sealed(hash)
        presence.swarm.latest = LatestRelease(version=release.version, release=hash, size_bytes=len(sealed))
        self._news.set()
        if len(sealed) <= GOSSIP_MAX_BYTES:
            await presence.gossip.publish(names.release_topic(presence.swarm.name), sealed)

    async def run(self) -> None:
        """Keep the record of the latest release up to date until cancelled, a write at a time."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            latest = self._presence.swarm.latest
            if latest is not None:
                await self._presence.swarm.publish_latest(self._run.run_id, latest)
