"""Asynchronous delivery: groups are made while the lag allows it and a trainer is heard of, and gossiped.

While none is, as many are made as it could still use, and published again when it is back. Knows no plan.
"""

import logging
import time

import trio

from echo_node.feed import Feed
from echo_node.outbox import Outbox, usable_groups
from echo_node.produce import RETRY_S, GroupDropped, Head
from echo_p2p.chain.answerer import Answerer
from echo_p2p.errors import ChainError, NetError, WeightsError
from echo_p2p.net.base import GOSSIP_MAX_BYTES
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT
from echo_protocols.rollout import LargeRollout
from echo_protocols.sync import may_generate

log = logging.getLogger(__name__)


class Pusher:
    """Keeps all lanes of the ring at hand full, and a group more for each.

    Between two rings it holds the groups that the last one left unfinished: as many as it had under way.
    """

    def __init__(self, presence: Presence, run: Run, head: Head, feed: Feed, store: Store) -> None:
        self._presence = presence
        self._run = run
        self._head = head
        self._feed = feed
        self._store = store
        self._working = self._wanted = 0
        self._outbox = Outbox(usable_groups(run.manifest))
        self._sign = trio.Event()

    @property
    def stalled(self) -> bool:
        """Whether the ring has to wait for a newer version, or for the trainer."""
        driver = self._head.driver
        return driver is not None and not (self._may(driver) and self._outbox.may_begin(trio.current_time()))

    async def run(self) -> None:
        """Make groups until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            while True:
                answerer = await self._head.ring()
                self._wanted = answerer.groups_at_once(self._run.manifest.group_size)
                while self._working < self._wanted:
                    self._working += 1
                    nursery.start_soon(self._work)
                await self._head.changed()

    def _may(self, driver: Answerer) -> bool:
        return may_generate(driver.version, self._feed.version, self._run.manifest.max_lag)

    async def _listen(self) -> None:
        """Let the outbox know of the trainers, and publish again what it says."""
        swarm, outbox = self._presence.swarm, self._outbox
        while True:
            signs = {(each.peer, each.record.started_at): each.heard_at for each in swarm.trainers()}
            is_sign, again = outbox.note(signs, self._feed.version, trio.current_time())
            if is_sign:
                self._sign.set()
                self._sign = trio.Event()
            if again:
                log.info("the trainer is back; %d groups that it may not have are sent again", len(again))
            for sealed in again:
                await self._publish(sealed)
            await swarm.changed()

    async def _work(self) -> None:
        outbox = self._outbox
        while self._working <= self._wanted:
            if not self._may(await self._head.ring()):
                await self._head.changed()
                continue
            if not outbox.may_begin(trio.current_time()):
                if not self._sign.statistics().tasks_waiting:
                    log.info("the trainer is silent, and has %d groups to come; waiting for it", outbox.held)
                await self._sign.wait()
                continue
            outbox.begin()
            try:
                group = await self._head.make(lambda: self._feed.version)
                sealed = self._head.seal(group)
                await self._publish(sealed)
                outbox.put(sealed, trio.current_time())
            except GroupDropped as error:
                log.info("%s", error)
            except ChainError as error:
                log.warning("a group could not be made: %s", error)
                await trio.sleep(RETRY_S)
            finally:
                outbox.ended()
        self._working -= 1

    async def _publish(self, sealed: bytes) -> None:
        presence, swarm = self._presence, self._presence.swarm.name
        try:
            if len(sealed) <= GOSSIP_MAX_BYTES:
                await presence.gossip.publish(names.rollout_topic(swarm), sealed)
                return
            hash = await trio.to_thread.run_sync(self._store.put, sealed)
            pointer = LargeRollout(blob=hash, size_bytes=len(sealed))
            message = presence.sealer.seal(LARGE_ROLLOUT, self._run.run_id, pointer, time.time())
            await presence.gossip.publish(names.large_rollout_topic(swarm), message)
        except (NetError, WeightsError) as error:
            log.warning("a group of %d bytes could not be published: %s", len(sealed), error)
