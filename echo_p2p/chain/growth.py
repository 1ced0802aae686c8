"""How the groups of a ring grow: prompts are read, answers begin from them in lanes, and end row by row.

A prompt is read once for all its answers. A lane computes rows of any groups together; a row that is finished makes
room for the next answer in the next step, so no row waits for another. Long prompts are read in parts, between which
lanes go on. An answer that another ring has begun is read with its tokens so far, and goes on likewise. Knows no
version switch and no stream.
"""

from collections.abc import Awaitable, Callable
from itertools import count

import numpy as np
import trio

from echo_p2p.chain.answerer import OnToken
from echo_p2p.chain.canary import LANES, Canary
from echo_p2p.chain.group import Answers, Drawn, GroupRequest, SoFar
from echo_p2p.chain.head import RingHead
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainBroken, GroupBroken
from echo_p2p.chain.proofs import Proofs
from echo_p2p.chain.queue import Group, Queue, Reading, readings_of
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.steps import Asked, Growing, Steps, Tokens
from echo_p2p.chain.verdict import Judge
from echo_p2p.errors import ChainError
from echo_protocols.hop import MAX_ROWS
from echo_protocols.rollout import Sample

PROMPT_PART = 256
"""Most tokens of a prompt that are read in one step: what lanes that grow meanwhile have to wait for."""


class Growth:
    """The groups of one ring, and the tasks that let them grow. `lanes` are those that grow now; the rest counts."""

    def __init__(self, ring: Ring, host: StageHost, head: RingHead, judge: Judge | None) -> None:
        self.lanes = self.groups = self.tokens = self.steps = 0
        self._ring = ring
        self._host = host
        self._head = head
        self._at = Steps(host, head)
        self._exclusive = ring.exclusive
        self._numbers = count(1)
        canary = Canary(ring, host, self._at, head, self._numbers) if judge else None
        self.proofs = Proofs(ring, canary, judge)
        left = host.limits.lanes - ring.lane_count - (LANES if canary else 0)
        self._queue = Queue(host.limits.room - self.proofs.room, ahead=min(2 * ring.lane_count, left))

    async def answer(
        self, request: GroupRequest, on_token: OnToken | None = None, so_far: SoFar | None = None
    ) -> tuple[Sample, ...]:
        """All answers to one prompt. Raises GroupBroken when the ring fails, ChainError for a request, or what it has
        so far, that this ring could never go on with.

        `on_token` hears of new tokens only, and not any more once this has returned, raised or been cancelled.
        """
        if (fault := self._fault_of(request, so_far)) is not None:
            raise ChainError(fault)
        group = Group(request, Answers(request, so_far), on_token=on_token)
        group.given = group.proven = group.answers.lengths
        group.readings = readings_of(group, self._numbers)
        if any(reading.room > self._queue.room for reading in group.readings):
            most = self._queue.room
            raise ChainError(f"the answers may take more than the {most} positions that every stage has room for")
        try:
            with self._head.until_failure():
                await self._grown(group)
        except ChainBroken as error:
            raise GroupBroken(error.failure, group.answers.so_far(self.proofs.kept(group, error.failure))) from error
        self.groups += 1
        return group.answers.samples()

    async def _grown(self, group: Group) -> None:
        if group.answers.finished:
            return
        self.proofs.add(group)
        self._queue.add(group)
        try:
            await group.done.wait()
        finally:
            self.proofs.discard(group)
            if not group.done.is_set():
                self._drop(group)

    async def run(self) -> None:
        """Read and grow until the ring fails; it must be closed before."""
        self._exclusive = self._ring.exclusive or not (self._head.ragged and self._host.stage.ragged)
        self._queue.widen(self._head.room - self.proofs.room)
        if len(set(self._head.versions)) <= 1:  # else a switch has to bring them together first
            self.proofs.begin()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_failure, self.proofs.run)
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

    def _fault_of(self, request: GroupRequest, so_far: SoFar | None) -> str | None:
        limits, rows = self._host.limits, self._ring.rows if self._exclusive else MAX_ROWS
        if not request.prompt or request.samples < 1:
            return "a group has a prompt of at least one token and at least one sample"
        if request.samples > min(limits.rows, rows) or request.positions > limits.positions:
            return (
                f"{request.samples} samples of up to {request.positions} positions are more than a lane holds "
                f"({min(limits.rows, rows)} of {limits.positions}): ask for less, or raise the limits of every stage"
            )
        return self._fault_of_beginning(request, so_far) if so_far else None

    def _fault_of_beginning(self, request: GroupRequest, so_far: SoFar) -> str | None:
        version = self._host.version
        if (fault := so_far.fault(request)) is not None:
            return fault
        if any(theirs > version for theirs in so_far.versions):
            return (
                f"tokens so far are of a newer version than {version}, and versions only grow: switch the chain first"
            )
        if self._ring.exclusive and so_far.versions - {version}:
            return f"tokens so far are of another version than {version}, which all of the group has to be of"
        return None

    async def _read_prompts(self) -> None:
        while True:
            reading = self._queue.to_read()
            if reading is None:
                await self._queue.changed()
                continue
            await self._read(reading)
            if reading.group.dropped:
                self._end(reading)
                self._queue.free(reading)
            else:
                self._queue.read(reading)

    async def _read(self, reading: Reading) -> None:
        inputs = np.array(reading.tokens, np.int32)[None]  # (1, length)
        self._at.begin(reading)
        with self._head.tokens_of(reading.number) as tokens:
            for step, start in enumerate(range(0, inputs.shape[1], PROMPT_PART)):
                asked = await self._at.read(reading, step, start, inputs[:, start : start + PROMPT_PART])
                await self._at.answer(asked, tokens)
                reading.version = asked.version
                if reading.group.dropped:
                    return

    def _drop(self, group: Group) -> None:
        """Nobody waits for a group any more: lanes leave its answers out; who reads or joins its prompt frees that."""
        group.dropped = True
        for reading in group.readings:
            if self._queue.drop(reading):
                if not reading.joining:
                    self._end(reading)
                self._queue.free(reading)
            elif reading.left and reading.begun == len(reading.samples):
                self._queue.free(reading)

    def _end(self, reading: Reading) -> None:
        """Free what was read: for as long as a stage holds it, it counts."""
        self._at.end(reading.number)
        self._queue.ended()

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

    async def _grow(self, number: int, begin: list[tuple[Reading, tuple[int, ...]]], tokens: Tokens) -> None:
        """Let answers grow in a lane until none is left; others take the places of those that are finished."""
        growing: list[Growing] = []
        step, rows = 0, (place % MAX_ROWS for place in count())
        while growing or begin:
            asked: list[Asked] = []
            if growing:
                asked.append(await self._at.decode(number, step, growing))
                step += 1
            taken = {answer.row for answer in growing}
            unused = (row for row in rows if row not in taken)
            for reading, samples in begin:
                new = [Growing(next(unused), reading, sample) for sample in samples]
                if (joining := await self._at.join(number, step, new)) is not None:
                    asked.append(joining)
                    step += 1
                if reading.joined == len(reading.samples) or (reading.group.dropped and not reading.joining):
                    self._end(reading)
            growing = []
            for each in asked:
                growing += self._take(each, await self._at.answer(each, tokens))
            growing = [answer for answer in growing if not answer.group.dropped]
            # Stages drop finished rows with the next step of the others: without others, the lane ends here.
            free = self._ring.rows - len(growing) if growing and not self._exclusive else 0
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
            elif not group.dropped:
                answer.reading.left -= 1
                if not answer.reading.left:
                    self._queue.free(answer.reading)
                if group.answers.finished:
                    self.proofs.finished(group)
        return going
