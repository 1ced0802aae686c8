"""How the groups of a ring grow: prompts are read, answers begin from them in lanes, and end row by row.

A prompt is read once for all its answers. A lane computes rows of any groups together; a row that is finished makes
room for the next answer in the next step, so no row waits for another. Long prompts are read in parts, between which
lanes go on. Knows no version switch and no stream.
"""

from collections.abc import Awaitable, Callable
from itertools import count

import numpy as np
import trio

from echo_p2p.chain.answerer import OnToken
from echo_p2p.chain.group import Answers, Drawn, GroupRequest
from echo_p2p.chain.head import RingHead
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainBroken
from echo_p2p.chain.queue import Group, Queue
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.steps import Asked, Growing, Steps, Tokens
from echo_p2p.errors import ChainError
from echo_protocols.hop import MAX_ROWS
from echo_protocols.rollout import Sample

PROMPT_PART = 256
"""Most tokens of a prompt that are read in one step: what lanes that grow meanwhile have to wait for."""


class Growth:
    """The groups of one ring, and the tasks that let them grow. `lanes` are those that grow now; the rest counts."""

    def __init__(self, ring: Ring, host: StageHost, head: RingHead) -> None:
        self.lanes = self.groups = self.tokens = self.steps = 0
        self._ring = ring
        self._host = host
        self._head = head
        self._at = Steps(host, head)
        self._exclusive = ring.exclusive
        self._ahead = min(2 * ring.lane_count, host.limits.lanes - ring.lane_count)
        self._queue = Queue(host.limits.room, self._ahead)
        self._numbers = count(1)

    async def answer(self, request: GroupRequest, on_token: OnToken | None = None) -> tuple[Sample, ...]:
        """All answers to one prompt. Raises ChainError, also for a request that this ring could never hold.

        `on_token` is not called any more once this has returned, raised or been cancelled.
        """
        if (fault := self._fault_of(request)) is not None:
            raise ChainError(fault)
        group = Group(request, next(self._numbers), Answers(request), on_token=on_token)
        with self._head.until_failure():
            self._queue.add(group)
            try:
                await group.done.wait()
            finally:
                if not group.done.is_set():
                    self._drop(group)
        self.groups += 1
        return group.answers.samples()

    async def run(self) -> None:
        """Read and grow until the ring fails; it must be closed before."""
        self._exclusive = self._ring.exclusive or not (self._head.ragged and self._host.stage.ragged)
        self._queue.widen(self._head.room)
        async with trio.open_nursery() as nursery:
            for work, times in ((self._read_prompts, len(self._ring.route)), (self._run_lane, self._ring.lane_count)):
                for _ in range(times):
                    nursery.start_soon(self._until_failure, work)

    def leave(self) -> None:
        """Free everything at this peer's stage."""
        self._at.leave()

    async def _until_failure(self, work: Callable[[], Awaitable[None]]) -> None:
        """A task that ends with the ring; who waits for a group hears why."""
        try:
            with self._head.until_failure():
                await work()
        except ChainBroken:
            return

    def _fault_of(self, request: GroupRequest) -> str | None:
        limits, rows = self._host.limits, self._ring.rows if self._exclusive else MAX_ROWS
        if not request.prompt or request.samples < 1:
            return "a group has a prompt of at least one token and at least one sample"
        if request.samples > min(limits.rows, rows) or request.positions > limits.positions:
            return (
                f"{request.samples} samples of up to {request.positions} positions are more than a lane holds "
                f"({min(limits.rows, rows)} of {limits.positions}): ask for less, or raise the limits of every stage"
            )
        if Group(request, 0, Answers(request)).room > self._queue.room:
            return f"the answers may take more than the {self._queue.room} positions that every stage has room for"
        return None

    async def _read_prompts(self) -> None:
        while True:
            group = self._queue.to_read()
            if group is None:
                await self._queue.changed()
                continue
            await self._read(group)
            if group.dropped:
                self._at.end(group.number)
                self._queue.not_read()
                self._queue.free(group)
            else:
                self._queue.read(group)

    async def _read(self, group: Group) -> None:
        prompt = np.array(group.request.prompt, np.int32)[None]  # (1, length)
        self._at.begin(group)
        with self._head.tokens_of(group.number) as tokens:
            for step, start in enumerate(range(0, prompt.shape[1], PROMPT_PART)):
                asked = await self._at.read(group, step, start, prompt[:, start : start + PROMPT_PART])
                await self._at.answer(asked, tokens)
                group.version = asked.version
                if group.dropped:
                    return

    def _drop(self, group: Group) -> None:
        """Nobody waits for a group any more: lanes leave its answers out; who reads or joins its prompt frees that."""
        if self._queue.drop(group):
            if not group.joining:
                self._at.end(group.number)
            self._queue.free(group)
        elif group.begun == group.request.samples:
            self._queue.free(group)

    async def _run_lane(self) -> None:
        while True:
            if begin := self._queue.to_begin(self._ring.rows, whole=self._exclusive):
                number = next(self._numbers)
                self.lanes += 1
                try:
                    with self._head.tokens_of(number) as tokens:
                        await self._grow(number, begin, tokens)
                finally:
                    self.lanes -= 1
            else:
                await self._queue.changed()

    async def _grow(self, number: int, begin: list[tuple[Group, range]], tokens: Tokens) -> None:
        """Let answers grow in a lane until none is left; others take the places of those that are finished."""
        growing: list[Growing] = []
        step = row = 0
        while growing or begin:
            asked: list[Asked] = []
            if growing:
                asked.append(await self._at.decode(number, step, growing))
                step += 1
            for group, samples in begin:
                new = [Growing((row + place) % MAX_ROWS, group, sample) for place, sample in enumerate(samples)]
                row += len(new)
                if (joining := await self._at.join(number, step, new)) is not None:
                    asked.append(joining)
                    step += 1
            growing = []
            for each in asked:
                growing += self._take(each, await self._at.answer(each, tokens))
            growing = [answer for answer in growing if not answer.group.dropped]
            free = 0 if self._exclusive else self._ring.rows - len(growing)
            begin = self._queue.to_begin(free, whole=False)
        if step:
            self._at.end(number)

    def _take(self, asked: Asked, drawn: Drawn) -> list[Growing]:
        """Give each answer its token; those that go on."""
        going: list[Growing] = []
        self.steps += 1
        for answer, token, logprob in zip(asked.answers, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True):
            group = answer.group
            self.tokens += 1
            if group.on_token is not None and not group.dropped:
                group.on_token(answer.sample, token, drawn.version)
            if group.answers.take(answer.sample, token, logprob, drawn.version):
                going.append(answer)
            elif group.answers.finished and not group.dropped:
                group.done.set()
                self._queue.free(group)
        return going
