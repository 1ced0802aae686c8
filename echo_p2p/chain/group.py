"""A lane seen from both ends: what a stage knows of one, and the answers that grow at the head. Pure."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from echo_protocols.hop import BeginLane
from echo_protocols.rollout import Sample, Segment
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion

Integers = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt to be answered `samples` times. `group_id` and `run_seed` decide which tokens are drawn."""

    group_id: bytes
    run_seed: bytes
    prompt: tuple[int, ...]
    samples: int
    sampling: Sampling
    stop_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of some rows of a lane, all computed by `version`."""

    step: int
    version: PolicyVersion
    rows: Integers  # (rows,)
    tokens: Integers  # (rows,)
    logprobs: Floats  # (rows,)


class Lane:
    """What a stage holds of a lane: its number in the stage, and which position each row must bring next."""

    def __init__(self, number: int, order: BeginLane) -> None:
        self.number = number
        self.order = order
        self._step = 0
        self._next = np.zeros(order.rows, np.int32)  # (rows,), -1 for a row that has left

    def fault(self, step: int, rows: Integers, positions: Integers, length: int) -> str | None:
        """Why these rows can't come next, or None after they are taken."""
        if step != self._step:
            return f"step {step} came where step {self._step} was due"
        if rows[0] < 0 or rows[-1] >= self.order.rows or (rows[1:] <= rows[:-1]).any():
            return f"rows are not in order below {self.order.rows}"
        if step == 0 and len(rows) != self.order.rows:
            return f"{len(rows)} rows came where {self.order.rows} begin"
        if (positions != self._next[rows]).any():
            return "a row came at a position that is not its next"
        if int(positions.max()) + length > self.order.positions:
            return f"a row is longer than the {self.order.positions} positions of its lane"
        self._step += 1
        self._next[:] = -1
        self._next[rows] = positions + length
        return None


@dataclass(slots=True)
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    stopped: bool = False


class Answers:
    """The answers of one group while they grow, token by token."""

    def __init__(self, request: GroupRequest) -> None:
        self._request = request
        self._answers = [_Answer() for _ in range(request.samples)]
        self.step = 0
        self.rows: Integers = np.arange(request.samples, dtype=np.int32)  # those that go on

    def inputs(self) -> tuple[Integers, Integers]:
        """Positions (rows,) and token ids (rows, length) that the first stage needs next."""
        prompt = self._request.prompt
        if self.step == 0:
            tokens = np.tile(np.array(prompt, np.int32), (len(self.rows), 1))
            return np.zeros(len(self.rows), np.int32), tokens
        last = np.array([[self._answers[row].tokens[-1]] for row in self.rows], np.int32)
        return np.full(len(self.rows), len(prompt) + self.step - 1, np.int32), last

    def fault(self, drawn: Drawn, version: PolicyVersion) -> str | None:
        """Why what came back can't be the next tokens of these answers; None when it can."""
        if drawn.step != self.step or not np.array_equal(drawn.rows, self.rows):
            return f"tokens of other rows or of step {drawn.step} came where step {self.step} was due"
        if drawn.version != version:
            return f"tokens came from version {drawn.version} where {version} was asked"
        if (drawn.tokens < 0).any() or not np.isfinite(drawn.logprobs).all() or (drawn.logprobs > 0.0).any():
            return "tokens or log-probabilities are out of range"
        return None

    def take(self, drawn: Drawn) -> None:
        """Append one token to each row that goes on; rows that stop or are full leave."""
        going: list[int] = []
        full = self.step + 1 >= self._request.sampling.max_new_tokens
        drawings = zip(drawn.rows.tolist(), drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
        for row, token, logprob in drawings:
            answer = self._answers[row]
            if not answer.segments or answer.segments[-1].version != drawn.version:
                answer.segments.append(Segment(start=len(answer.tokens), version=drawn.version))
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.stopped = token in self._request.stop_tokens
            if not answer.stopped and not full:
                going.append(row)
        self.rows = np.array(going, np.int32)
        self.step += 1

    def samples(self) -> tuple[Sample, ...]:
        """The finished answers."""
        return tuple(
            Sample(
                tokens=tuple(answer.tokens),
                logprobs=tuple(answer.logprobs),
                finish="stop" if answer.stopped else "length",
                segments=tuple(answer.segments),
            )
            for answer in self._answers
        )
