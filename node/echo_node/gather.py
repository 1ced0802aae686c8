"""Where a trainer's batches come from: pulled slot by slot (sequential), or taken from the buffer (asynchronous).

Both check everything that a peer sent at the one border and count what they refuse. Knows no engine and no release.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import trio

from echo_node.learner import Learner
from echo_node.learning import Graded, grade
from echo_node.prompts import Prompts
from echo_node.standing import Standing
from echo_p2p.errors import CorruptChunk, NetError, RemoteError, TrainerError
from echo_p2p.net.base import Message, Stream
from echo_p2p.net.blobs import fetch_blob
from echo_p2p.presence import Presence
from echo_p2p.rl.buffer import ADDED, DUPLICATE, ReplayBuffer, StoredRollout
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, PULL, ROLLOUT, Opened, Refusal, reopen
from echo_protocols.rollout import LargeRollout, RolloutGroup, Slot, group_fault
from echo_protocols.run import RunManifest
from echo_protocols.sync import PullReply, PullRequest, SequentialStep, lag_fault
from echo_protocols.values import PolicyVersion, decode

log = logging.getLogger(__name__)

_SLOTS_A_PULL = 2
_FETCH_TIMEOUT_S = 20.0
_FETCH_ALL_S = 60.0
_FETCHES = 8
_FETCHES_WAITING = 64
_FETCHES_A_WORKER = 4
_RETRY_S = 1.0

LOGPROB_MIN = -200.0
"""No draw has a probability below e^-200: a smaller log-probability is made up, to spoil the figures of a step."""


class Gather(Protocol):
    """A source of batches."""

    async def run(self) -> None:
        """Receive in the background until cancelled."""

    async def next_batch(self) -> Sequence[Graded]:
        """The groups of the learner's next step, in the order to train them in."""


def check_group(presence: Presence, run: Run, data: bytes, *, once: bool) -> Opened[RolloutGroup] | Refusal:
    """Everything about a sealed group that needs no version: envelope, admission, shape, prompt."""
    border = presence.border
    opened = border.open(data, ROLLOUT, run.run_id, time.time(), once=once)
    if isinstance(opened, Refusal):
        return opened
    if not run.manifest.admission.admits(opened.signer):
        return border.refuse("not-admitted", opened.signer)
    if (fault := group_fault(opened.payload, opened.signer, run.manifest)) is not None:
        return border.refuse(fault, opened.signer)
    if min(min(sample.logprobs) for sample in opened.payload.samples) < LOGPROB_MIN:
        return border.refuse("logprob", opened.signer)
    return opened


def largest_group_bytes(manifest: RunManifest) -> int:
    """No sealed group of a run is larger: 14 bytes a token and log-probability, 1,024 segments a sample."""
    return manifest.group_size * (manifest.sampling.max_new_tokens * 14 + 1024 * 16) + 8192


class BufferGather:
    """Asynchronous: admit what is gossiped into the buffer, and train on the freshest."""

    def __init__(self, presence: Presence, run: Run, learner: Learner, buffer: ReplayBuffer) -> None:
        self.lag_bound = run.manifest.max_lag
        self._presence = presence
        self._run = run
        self._learner = learner
        self._buffer = buffer
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
        """Wait until enough groups are fresh enough; take the freshest."""
        while True:
            arrived = self._arrived
            if batch := await trio.to_thread.run_sync(self._take):
                return batch
            await arrived.wait()

    def _take(self) -> Sequence[Graded]:
        learner, manifest = self._learner, self._run.manifest
        taken = self._buffer.take(
            manifest.groups_per_step, step=learner.version.step + 1, lag=self._lag, max_lag=self.lag_bound
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
            async with self._fetches:
                with trio.fail_after(_FETCH_ALL_S):
                    data = await fetch_blob(
                        presence.hive, worker, blob.blob, blob.size_bytes, timeout_s=_FETCH_TIMEOUT_S
                    )
            await self._admit(data)
        except (NetError, CorruptChunk, RemoteError, trio.TooSlowError) as error:
            presence.border.refuse("unfetchable", str(error))
        except Exception:
            presence.border.refuse("unreadable", worker)
            log.exception("a large group of %s was dropped", worker)
        finally:
            self._fetching[worker] -= 1
            if not self._fetching[worker]:
                del self._fetching[worker]

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
        added = self._buffer.add(
            StoredRollout(
                worker=opened.signer,
                counter=group.counter,
                version=group.oldest,
                newest=group.newest,
                body=data,
                reward=grade(self._learner.prompts, opened.signer, group).reward,
                accepted_at=time.time(),
            )
        )
        self.statistics = self._buffer.statistics()
        return added


class _Handler(Protocol):
    async def __call__(self, message: Message) -> None: ...


class PullGather:
    """Sequential: ask the heads of the plan's chains for the slots of the step, and put the answers in order."""

    def __init__(self, presence: Presence, run: Run, learner: Learner, *, deadline_s: float) -> None:
        self._presence = presence
        self._run = run
        self._learner = learner
        self._deadline_s = deadline_s
        self._progress = trio.Event()
        self._standing = Standing()

    async def run(self) -> None:
        """Nothing arrives unasked."""

    async def next_batch(self) -> Sequence[Graded]:
        """All slots of the next step, sampled by the current version, in slot order."""
        learner = self._learner
        step = SequentialStep(
            learner.version.step + 1, learner.version, self._run.manifest.groups_per_step, self._deadline_s
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_pulling, step, nursery)
            while step.missing:
                await self._progress.wait()
                self._progress = trio.Event()
            nursery.cancel_scope.cancel()
        if step.reassigned:
            log.info("step %d: %d slots were given to another chain", step.step, step.reassigned)
        return await trio.to_thread.run_sync(_grade_all, learner.prompts, list(step.ordered()))

    async def _keep_pulling(self, step: SequentialStep, nursery: trio.Nursery) -> None:
        pulling: set[str] = set()
        while True:
            for head in self._askable() - pulling:
                pulling.add(head)
                nursery.start_soon(self._pull_from, step, head, pulling)
            await self._presence.swarm.changed()

    def _heads(self) -> set[str]:
        plan, members = self._presence.swarm.plan, self._presence.swarm.members
        return {chain[0].peer for chain in plan.chains if chain[0].peer in members} if plan else set()

    def _askable(self) -> set[str]:
        """The heads, without those that failed lately; all of them if there are no others."""
        heads, now = self._heads(), trio.current_time()
        return {head for head in heads if not self._standing.benched(head, now)} or heads

    async def _pull_from(self, step: SequentialStep, head: str, pulling: set[str]) -> None:
        while head in self._askable():
            slots = step.take(head, _SLOTS_A_PULL, trio.current_time())
            if not slots:
                await self._until_late(step)
                continue
            asked_at = trio.current_time()
            try:
                with trio.fail_after(self._deadline_s):
                    await self._pull(step, head, slots)
            except (NetError, RemoteError, trio.TooSlowError, msgspec.DecodeError) as error:
                now = trio.current_time()
                self._standing.fail(head, now, cost_s=now - asked_at)
                lost = step.give_back(head)
                log.info("chain of %s left %d slots of step %d unanswered: %s", head, lost, step.step, error)
                await trio.sleep(_RETRY_S)
        step.give_back(head)
        pulling.discard(head)

    async def _until_late(self, step: SequentialStep) -> None:
        deadline = step.next_deadline()
        wait_s = _RETRY_S if deadline is None else max(0.05, min(_RETRY_S, deadline - trio.current_time()))
        with trio.move_on_after(wait_s):
            await self._progress.wait()

    async def _pull(self, step: SequentialStep, head: str, slots: tuple[Slot, ...]) -> None:
        presence = self._presence
        request = PullRequest(version=step.version, slots=slots)
        async with presence.hive.open(head, names.PULL) as stream:
            await stream.send(presence.sealer.seal(PULL, self._run.run_id, request, time.time()))
            for _ in slots:
                self._accept(step, head, await self._reply(stream))

    async def _reply(self, stream: Stream) -> bytes:
        reply = decode(await stream.receive(), PullReply)
        if reply.failure:
            raise RemoteError("pull", reply.failure)
        return reply.group

    def _accept(self, step: SequentialStep, head: str, data: bytes) -> None:
        border = self._presence.border
        opened = check_group(self._presence, self._run, data, once=True)
        if isinstance(opened, Refusal):
            raise RemoteError(opened.reason, f"its answer was refused: {opened.reason} {opened.detail}")
        if opened.signer != head:
            raise RemoteError("wrong-signer", f"its answer was signed by {opened.signer}")
        if (fault := step.accept(head, opened.payload)) is None:
            self._standing.clear(head)
        else:
            border.refuse(fault, head)
        self._progress.set()


def _grade_all(prompts: Prompts, answers: list[tuple[str, RolloutGroup]]) -> list[Graded]:
    return [grade(prompts, worker, group) for worker, group in answers]
