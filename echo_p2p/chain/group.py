"""A group at the head of its chain: what is asked for, and the answers that grow token by token. Pure."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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

    @property
    def positions(self) -> int:
        """Most positions of one answer, prompt included."""
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of some rows of a lane, all from logits of `version`; no row for part of a prompt."""

    step: int
    version: PolicyVersion
    rows: Integers  # (rows,)
    tokens: Integers  # (rows,)
    logprobs: Floats  # (rows,)

    def fault(self, step: int, rows: Integers, version: PolicyVersion) -> str | None:
        """Why this can't be the answer to a step of these rows; None when it can."""
        if self.step != step or not np.array_equal(self.rows, rows):
            return f"tokens of other rows or of step {self.step} came where step {step} was due"
        if self.version != version:
            return f"tokens came from version {self.version} where {version} was asked"
        if (self.tokens < 0).any() or not np.isfinite(self.logprobs).all() or (self.logprobs > 0.0).any():
            return "tokens or log-probabilities are out of range"
        return None


NOTHING = np.empty(0, np.int32)


def nothing_drawn(step: int, version: PolicyVersion) -> Drawn:
    """The answer to part of a prompt."""
    return Drawn(step=step, version=version, rows=NOTHING, tokens=NOTHING, logprobs=np.empty(0, np.float32))


@dataclass(slots=True)
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    stopped: bool = False


class Answers:
    """The answers of one group while they grow."""

    def __init__(self, request: GroupRequest) -> None:
        self._request = request
        self._answers = [_Answer() for _ in range(request.samples)]
        self._growing = request.samples

    @property
    def finished(self) -> bool:
        """Whether all are."""
        return not self._growing

    def last_token(self, sample: int) -> int:
        """The newest token of an answer."""
        return self._answers[sample].tokens[-1]

    def length(self, sample: int) -> int:
        """Tokens of an answer."""
        return len(self._answers[sample].tokens)

    def take(self, sample: int, token: int, logprob: float, version: PolicyVersion) -> bool:
        """Append one token to an answer that grows; whether it goes on."""
        answer = self._answers[sample]
        if not answer.segments or answer.segments[-1].version != version:
            answer.segments.append(Segment(start=len(answer.tokens), version=version))
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        answer.stopped = token in self._request.stop_tokens
        goes_on = not answer.stopped and len(answer.tokens) < self._request.sampling.max_new_tokens
        self._growing -= not goes_on
        return goes_on

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
