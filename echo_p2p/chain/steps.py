"""Steps of a ring as its head takes them: its own stage computes first, the others follow, and tokens come back.

Knows which answers a step is of, but not what becomes of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import trio

from echo_p2p.chain.group import NOTHING, Drawn, Integers
from echo_p2p.chain.head import RingHead
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import broken
from echo_p2p.chain.queue import Group, Reading
from echo_p2p.chain.seat import Seat
from echo_p2p.chain.wire import to_forward
from echo_protocols.hop import BeginPrompt, EndLane, Join
from echo_protocols.values import PolicyVersion

Tokens = trio.MemoryReceiveChannel[Drawn]

_ROW_0 = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True)
class Growing:
    """An answer in a lane."""

    row: int
    reading: Reading
    sample: int

    @property
    def group(self) -> Group:
        """Whose answer it is."""
        return self.reading.group


@dataclass(frozen=True, slots=True)
class Asked:
    """A step that is under way: of some answers, or of part of a prompt. `drawn` at once in a ring of one."""

    step: int
    version: PolicyVersion
    answers: Sequence[Growing]
    drawn: Drawn | None

    @property
    def rows(self) -> Integers:
        """Those that tokens are drawn for (rows,)."""
        return np.array([answer.row for answer in self.answers], np.int32) if self.answers else NOTHING


class Steps:
    """Takes steps at this peer's stage and in its ring. Everything raises ChainBroken when the ring fails."""

    def __init__(self, host: StageHost, head: RingHead) -> None:
        self._host = host
        self._head = head
        self._seat = Seat(host)

    def begin(self, reading: Reading) -> None:
        """Tokens are to be read, as the lane of their number."""
        request = reading.group.request
        order = BeginPrompt(
            lane=reading.number,
            group_id=request.group_id,
            run_seed=request.run_seed,
            sampling=request.sampling,
            samples=request.samples,
            positions=request.positions,
            drawn=reading.drawn,
        )
        self._seat.begin(order)
        self._head.send(order)

    def end(self, number: int) -> None:
        """Free a prompt or a lane."""
        self._seat.end(number)
        self._head.send(EndLane(lane=number))

    def leave(self) -> None:
        """Free everything at this peer's stage."""
        self._seat.leave()

    async def read(self, reading: Reading, step: int, start: int, part: Integers) -> Asked:
        """Read a part of it (1, length), from position `start` on."""
        return await self._forward(reading.number, step, (), _ROW_0, np.array([start], np.int32), part)

    async def join(self, lane: int, step: int, new: Sequence[Growing]) -> Asked | None:
        """Let answers of one reading begin in a lane, each with its next token; None if nobody wants them any more."""
        reading = new[0].reading
        order = Join(
            lane=lane,
            prompt=reading.number,
            step=step,
            rows=tuple(answer.row for answer in new),
            samples=tuple(answer.sample for answer in new),
        )
        with await self._host.turns.begin() as turn:
            asked = None
            if not reading.group.dropped:
                assert reading.version is not None
                asked = Asked(step, reading.version, new, await self._seat.join(turn, order))
                self._head.send(order)
            reading.joined += len(new)
        return asked

    async def decode(self, lane: int, step: int, growing: Sequence[Growing]) -> Asked:
        """One more token for each answer of a lane."""
        rows = np.array([answer.row for answer in growing], np.int32)
        positions = np.array([answer.group.position(answer.sample) for answer in growing], np.int32)
        last = np.array([[answer.group.answers.last_token(answer.sample)] for answer in growing], np.int32)
        return await self._forward(lane, step, growing, rows, positions, last)

    async def answer(self, asked: Asked, tokens: Tokens) -> Drawn:
        """What was drawn in a step."""
        drawn = asked.drawn if asked.drawn is not None else await tokens.receive()
        if (fault := drawn.fault(asked.step, asked.rows, asked.version, self._head.vocabulary)) is not None:
            raise broken("bad-tokens", fault, self._head.last)
        return drawn

    async def _forward(
        self, lane: int, step: int, answers: Sequence[Growing], rows: Integers, positions: Integers, inputs: Integers
    ) -> Asked:
        with await self._host.turns.begin() as turn:
            version = self._host.version
            result = await self._seat.forward(turn, lane, step, rows, positions, inputs)
            if isinstance(result, Drawn):
                return Asked(step, version, answers, result)
            self._head.send(to_forward(lane, step, version, rows=rows, positions=positions, hidden=result))
        return Asked(step, version, answers, None)
