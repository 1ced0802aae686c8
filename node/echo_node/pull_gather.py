"""Sequential gathering: the heads of the plan's chains are asked for the slots of a step, and put in slot order.

Knows no engine and no release. A head that fails is left alone for a while; its slots go to others.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import msgspec
import trio

from echo_node.gather import check_group, enough
from echo_node.learner import Learner
from echo_node.learning import Graded, grade
from echo_node.prompts import Prompts
from echo_node.standing import Standing
from echo_p2p.errors import NetError, RemoteError
from echo_p2p.net.base import Stream
from echo_p2p.presence import Presence
from echo_p2p.rl.algorithms import step_size
from echo_p2p.rl.buffer import EQUAL_REWARDS
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import PULL, Refusal
from echo_protocols.rollout import RolloutGroup, Slot
from echo_protocols.sync import PullReply, PullRequest, SequentialStep
from echo_protocols.values import decode

log = logging.getLogger(__name__)

_SLOTS_A_PULL = 2
_RETRY_S = 1.0


class PullGather:
    """Sequential: ask the heads of the plan's chains for the slots of the step, and put the answers in order."""

    def __init__(self, presence: Presence, run: Run, learner: Learner, *, deadline_s: float) -> None:
        self._presence = presence
        self._run = run
        self._learner = learner
        self._deadline_s = deadline_s
        self._size = step_size(run.manifest.algorithm, run.manifest.groups_per_step)
        self._progress = trio.Event()
        self._passed_over = 0
        self._standing = Standing()

    async def run(self) -> None:
        """Nothing arrives unasked."""

    async def next_batch(self) -> Sequence[Graded]:
        """All slots of the next step, sampled by the current version, in slot order.

        With dynamic sampling, more slots are asked for once all before are there, as many as groups of varying rewards
        are still missing.
        """
        learner = self._learner
        step = SequentialStep(learner.version.step + 1, learner.version, 0, self._deadline_s)

        async def ask(first: int, count: int) -> Sequence[Graded]:
            step.slots = first + count
            self._progress.set()  # whoever waits for slots
            self._progress = trio.Event()
            while step.missing:
                await self._progress.wait()
                self._progress = trio.Event()
            return await trio.to_thread.run_sync(_grade_all, learner.prompts, list(step.ordered())[first:])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_pulling, step, nursery)
            batch = await enough(self._size, ask)
            nursery.cancel_scope.cancel()
        if step.reassigned:
            log.info("step %d: %d slots were given to another chain", step.step, step.reassigned)
        self._passed_over += len(batch) - self._size.groups
        return batch

    def refused(self) -> Mapping[str, int]:
        """How many groups were passed over since this process began."""
        return {EQUAL_REWARDS: self._passed_over} if self._passed_over else {}

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
