"""Where a trainer's batches come from: pulled slot by slot (sequential), or taken from the buffer (asynchronous).

Both check everything that a peer sent at the one border and count what they refuse. Knows no engine and no release.
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import trio

from echo_node.learner import Learner
from echo_node.learning import Graded, grade
from echo_node.prompts import Prompts
from echo_p2p.errors import CorruptChunk, NetError, RemoteError
from echo_p2p.net.base import Message, Stream
from echo_p2p.net.blobs import fetch_blob
from echo_p2p.presence import Presence
from echo_p2p.rl.buffer import ReplayBuffer, StoredRollout
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, PULL, ROLLOUT, Opened, Refusal, reopen
from echo_protocols.rollout import RolloutGroup, Slot, group_fault
from echo_protocols.sync import PullReply, PullRequest, SequentialStep, lag_fault
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

_SLOTS_A_PULL = 2
_FETCH_TIMEOUT_S = 20.0
_RETRY_S = 1.0


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
    return opened


class BufferGather:
    """Asynchronous: admit what is gossiped into the buffer, and train on the freshest."""

    def __init__(self, presence: Presence, run: Run, learner: Learner, buffer: ReplayBuffer) -> None:
        self.lag_bound = run.manifest.max_lag
        self._presence = presence
        self._run = run
        self._learner = learner
        self._buffer = buffer
        self._arrived = trio.Event()

    async def run(self) -> None:
        """Receive rollouts until cancelled."""
        swarm = self._presence.swarm.name
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, names.rollout_topic(swarm), self._admit_message)
            nursery.start_soon(self._receive, names.large_rollout_topic(swarm), self._fetch_large)

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
        opened = [reopen(each.rollout.body, ROLLOUT) for each in taken]
        return [grade(learner.prompts, each.signer, each.payload) for each in opened]

    def _lag(self, version: PolicyVersion) -> int | str:
        return self._learner.lineage.lag(version, self._learner.version)

    async def _receive(self, topic: str, handle: "_Handler") -> None:
        async with self._presence.gossip.subscribe(topic) as messages:
            async for message in messages:
                await handle(message)

    async def _admit_message(self, message: Message) -> None:
        await self._admit(message.data)

    async def _fetch_large(self, message: Message) -> None:
        presence = self._presence
        opened = presence.border.open(message.data, LARGE_ROLLOUT, self._run.run_id, time.time(), once=True)
        if isinstance(opened, Refusal):
            return
        blob = opened.payload
        try:
            data = await fetch_blob(
                presence.hive, opened.signer, blob.blob, blob.size_bytes, timeout_s=_FETCH_TIMEOUT_S
            )
        except (NetError, CorruptChunk, RemoteError) as error:
            presence.border.refuse("unfetchable", str(error))
            return
        await self._admit(data)

    async def _admit(self, data: bytes) -> None:
        opened = check_group(self._presence, self._run, data, once=True)
        if isinstance(opened, Refusal):
            return
        learner, group = self._learner, opened.payload
        fault = lag_fault(group, learner.lineage, learner.version, self._run.manifest.max_lag)
        if fault is not None:
            self._presence.border.refuse(fault, opened.signer)
            return
        if not await trio.to_thread.run_sync(self._store, opened, data):
            self._presence.border.refuse("duplicate", f"{opened.signer} {group.counter}")
            return
        self._arrived.set()
        self._arrived = trio.Event()

    def _store(self, opened: Opened[RolloutGroup], data: bytes) -> bool:
        group = opened.payload
        return self._buffer.add(
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
            for head in self._heads() - pulling:
                pulling.add(head)
                nursery.start_soon(self._pull_from, step, head, pulling)
            await self._presence.swarm.changed()

    def _heads(self) -> set[str]:
        plan, members = self._presence.swarm.plan, self._presence.swarm.members
        return {chain[0].peer for chain in plan.chains if chain[0].peer in members} if plan else set()

    async def _pull_from(self, step: SequentialStep, head: str, pulling: set[str]) -> None:
        while head in self._heads():
            slots = step.take(head, _SLOTS_A_PULL, trio.current_time())
            if not slots:
                await self._until_late(step)
                continue
            try:
                with trio.fail_after(self._deadline_s):
                    await self._pull(step, head, slots)
            except (NetError, RemoteError, trio.TooSlowError, msgspec.DecodeError) as error:
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
        reply = msgspec.msgpack.decode(await stream.receive(), type=PullReply)
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
        if (fault := step.accept(head, opened.payload)) is not None:
            border.refuse(fault, head)
        self._progress.set()


def _grade_all(prompts: Prompts, answers: list[tuple[str, RolloutGroup]]) -> list[Graded]:
    return [grade(prompts, worker, group) for worker, group in answers]
