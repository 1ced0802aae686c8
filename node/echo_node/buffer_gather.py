"""Asynchronous gathering: what is gossiped is admitted into the durable buffer; batches are its freshest groups.

Knows no engine and no release. No message of a peer may end the trainer.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import trio

from echo_node.gather import check_group, largest_group_bytes
from echo_node.learner import Learner
from echo_node.learning import Graded, grade
from echo_p2p.errors import CorruptChunk, NetError, RemoteError, TrainerError
from echo_p2p.net.base import Message
from echo_p2p.net.blobs import fetch_blob
from echo_p2p.presence import Presence
from echo_p2p.rl.algorithms import step_size
from echo_p2p.rl.buffer import ADDED, DUPLICATE, ReplayBuffer, StoredRollout
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, ROLLOUT, Opened, Refusal, reopen
from echo_protocols.rollout import LargeRollout, RolloutGroup
from echo_protocols.sync import lag_fault
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 20.0
_FETCH_ALL_S = 60.0
_BUSY_S = 1.0
_TRIES = 6  # at a worker that is busy, which it says after 10 s
_FETCHES = 8
_FETCHES_WAITING = 64
_FETCHES_A_WORKER = 4


class _Handler(Protocol):
    async def __call__(self, message: Message) -> None: ...


class BufferGather:
    """Asynchronous: admit what is gossiped into the buffer, and train on the freshest."""

    def __init__(self, presence: Presence, run: Run, learner: Learner, buffer: ReplayBuffer) -> None:
        self.lag_bound = run.manifest.max_lag
        self._presence = presence
        self._run = run
        self._learner = learner
        self._buffer = buffer
        self._size = step_size(run.manifest.algorithm, run.manifest.groups_per_step)
        self.statistics = buffer.statistics()
        self._arrived = trio.Event()
        self._fetching: Counter[str] = Counter()  # large groups by worker, waiting ones included
        self._fetches = trio.CapacityLimiter(_FETCHES)
        self._nursery: trio.Nursery | None = None

    def refused(self) -> Mapping[str, int]:
        """What was dropped after it had been admitted, by reason."""
        return {reason: count for reason, count in self.statistics.counts.items() if reason not in (ADDED, DUPLICATE)}

    async def run(self) -> None:
        """Receive rollouts until cancelled."""
        swarm = self._presence.swarm.name
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._receive, names.rollout_topic(swarm), self._admit_message)
            self._nursery.start_soon(self._receive, names.large_rollout_topic(swarm), self._consider_large)

    async def next_batch(self) -> Sequence[Graded]:
        """Wait until enough groups are fresh enough, and of varying rewards if asked for; take the freshest."""
        while True:
            arrived = self._arrived
            if batch := await trio.to_thread.run_sync(self._take):
                return batch
            await arrived.wait()

    def _take(self) -> Sequence[Graded]:
        learner, size = self._learner, self._size
        taken = self._buffer.take(
            size.groups, step=learner.version.step + 1, lag=self._lag, max_lag=self.lag_bound, bound=size.bound
        )
        self.statistics = self._buffer.statistics()
        opened = [reopen(each.rollout.body, ROLLOUT) for each in taken]
        return [grade(learner.prompts, each.signer, each.payload) for each in opened]

    def _lag(self, version: PolicyVersion) -> int | str:
        return self._learner.lineage.lag(version, self._learner.version)

    async def _receive(self, topic: str, handle: "_Handler") -> None:
        """Task boundary of what one topic brings: no message may end the trainer."""
        async with self._presence.gossip.subscribe(topic) as messages:
            async for message in messages:
                try:
                    await handle(message)
                except Exception:
                    self._presence.border.refuse("unreadable", message.sender)
                    log.exception("a message of %s on %s was dropped", message.sender, topic)

    async def _admit_message(self, message: Message) -> None:
        await self._admit(message.data)

    async def _consider_large(self, message: Message) -> None:
        border, manifest = self._presence.border, self._run.manifest
        opened = border.open(message.data, LARGE_ROLLOUT, self._run.run_id, time.time(), once=True)
        if isinstance(opened, Refusal):
            return
        if not manifest.admission.admits(opened.signer):
            border.refuse("not-admitted", opened.signer)
        elif opened.payload.size_bytes > largest_group_bytes(manifest):
            border.refuse("oversized", opened.signer)
        elif self._fetching[opened.signer] >= _FETCHES_A_WORKER or self._fetching.total() >= _FETCHES_WAITING:
            border.refuse("too-many-large", opened.signer)
        else:
            assert self._nursery is not None
            self._fetching[opened.signer] += 1
            self._nursery.start_soon(self._fetch_large, opened.signer, opened.payload)

    async def _fetch_large(self, worker: str, blob: LargeRollout) -> None:
        """Task boundary of one fetch; a worker that sends nothing, or slowly, holds up nobody else's."""
        presence = self._presence
        try:
            await self._admit(await self._fetched(worker, blob))
        except (NetError, CorruptChunk, RemoteError, trio.TooSlowError) as error:
            presence.border.refuse("unfetchable", str(error))
        except Exception:
            presence.border.refuse("unreadable", worker)
            log.exception("a large group of %s was dropped", worker)
        finally:
            self._fetching[worker] -= 1
            if not self._fetching[worker]:
                del self._fetching[worker]

    async def _fetched(self, worker: str, blob: LargeRollout) -> bytes:
        """The blob; a worker that is busy is asked again, and waits for no other's turn meanwhile."""
        hive, size_bytes = self._presence.hive, blob.size_bytes
        for tries_left in reversed(range(_TRIES)):
            try:
                async with self._fetches:
                    with trio.fail_after(_FETCH_ALL_S):
                        return await fetch_blob(
                            hive, worker, blob.blob, size_bytes, exact=True, timeout_s=_FETCH_TIMEOUT_S
                        )
            except RemoteError as error:
                if error.reason != "busy" or not tries_left:
                    raise
            await trio.sleep(_BUSY_S)
        raise AssertionError("the last try returns or raises")

    async def _admit(self, data: bytes) -> None:
        opened = check_group(self._presence, self._run, data, once=True)
        if isinstance(opened, Refusal):
            return
        border, learner, group = self._presence.border, self._learner, opened.payload
        fault = lag_fault(group, learner.lineage, learner.version, self._run.manifest.max_lag)
        if fault is not None:
            border.refuse(fault, opened.signer)
            return
        try:
            added = await trio.to_thread.run_sync(self._store, opened, data)
        except TrainerError as error:
            border.refuse("not-stored", opened.signer)
            log.error("a group of %s is lost: %s", opened.signer, error)
            return
        if not added:
            border.refuse("duplicate", f"{opened.signer} {group.counter}")
            return
        self._arrived.set()
        self._arrived = trio.Event()

    def _store(self, opened: Opened[RolloutGroup], data: bytes) -> bool:
        group = opened.payload
        graded = grade(self._learner.prompts, opened.signer, group)
        added = self._buffer.add(
            StoredRollout(
                worker=opened.signer,
                counter=group.counter,
                version=group.oldest,
                newest=group.newest,
                body=data,
                reward=graded.reward,
                varies=graded.varies,
                accepted_at=time.time(),
            )
        )
        self.statistics = self._buffer.statistics()
        return added
