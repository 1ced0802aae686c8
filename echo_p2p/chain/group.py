"""A group at the head of its chain: what is asked for, and the answers that grow token by token. Pure."""

from collections.abc import Sequence
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
class AnswerSoFar:
    """The first tokens of one answer, with what `Sample` says of them; none if it has not begun."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    segments: tuple[Segment, ...] = ()

    def cut(self, length: int) -> "AnswerSoFar":
        """The first `length` tokens."""
        segments = tuple(segment for segment in self.segments if segment.start < length)
        return AnswerSoFar(self.tokens[:length], self.logprobs[:length], segments)

    def fault(self, request: GroupRequest) -> str | None:
        """Why this can't be the beginning of an answer to the request; None when it can."""
        starts = [segment.start for segment in self.segments]
        versions = [segment.version for segment in self.segments]
        if len(self.tokens) != len(self.logprobs) or len(self.tokens) > request.sampling.max_new_tokens:
            return f"{len(self.tokens)} tokens with {len(self.logprobs)} log-probabilities are no beginning of it"
        if not request.stop_tokens.isdisjoint(self.tokens[:-1]):
            return "tokens follow a stop token"
        if bool(starts) != bool(self.tokens) or (starts and (starts[0] != 0 or starts[-1] >= len(self.tokens))):
            return "the segments are not those of the tokens"
        if starts != sorted(set(starts)) or versions != sorted(set(versions)):
            return "segments or their versions do not grow"
        return None


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a group has: of each sample the tokens that need not be drawn again. Any ring may go on with it."""

    answers: tuple[AnswerSoFar, ...]

    @property
    def token_count(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def versions(self) -> frozenset[PolicyVersion]:
        """All versions that tokens are of."""
        return frozenset(segment.version for answer in self.answers for segment in answer.segments)

    def fault(self, request: GroupRequest) -> str | None:
        """Why this can't be of the request; None when it can."""
        if len(self.answers) != request.samples:
            return f"{len(self.answers)} answers so far are not those of {request.samples} samples"
        return next((fault for answer in self.answers if (fault := answer.fault(request)) is not None), None)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of some rows of a lane, all from logits of `version`; no row for part of a prompt."""

    step: int
    version: PolicyVersion
    rows: Integers  # (rows,)
    tokens: Integers  # (rows,)
    logprobs: Floats  # (rows,)

    def fault(self, step: int, rows: Integers, version: PolicyVersion, vocabulary: int) -> str | None:
        """Why this can't be the answer to a step of these rows; None when it can. `vocabulary` may be 0: unknown."""
        if self.step != step or not np.array_equal(self.rows, rows):
            return f"tokens of other rows or of step {self.step} came where step {step} was due"
        if self.version != version:
            return f"tokens came from version {self.version} where {version} was asked"
        if (self.tokens < 0).any() or (vocabulary and (self.tokens >= vocabulary).any()):
            return "tokens are outside of the vocabulary"
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 0.0).any():
            return "log-probabilities are out of range"
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

    def __init__(self, request: GroupRequest, so_far: SoFar | None = None) -> None:
        self._request = request
        begun = so_far.answers if so_far else (AnswerSoFar(),) * request.samples
        self._answers = [_Answer(list(each.tokens), list(each.logprobs), list(each.segments)) for each in begun]
        for answer in self._answers:
            answer.stopped = bool(answer.tokens) and answer.tokens[-1] in request.stop_tokens
        self._growing = len(self.unfinished)

    @property
    def finished(self) -> bool:
        """Whether all are."""
        return not self._growing

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The samples that go on."""
        return tuple(sample for sample, answer in enumerate(self._answers) if self._goes_on(answer))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each answer."""
        return tuple(len(answer.tokens) for answer in self._answers)

    def so_far(self, lengths: Sequence[int]) -> SoFar:
        """The first tokens of each answer, so many of each."""
        every = (
            AnswerSoFar(tuple(answer.tokens), tuple(answer.logprobs), tuple(answer.segments))
            for answer in self._answers
        )
        return SoFar(tuple(answer.cut(length) for answer, length in zip(every, lengths, strict=True)))

    def tokens(self, sample: int) -> tuple[int, ...]:
        """The tokens of an answer."""
        return tuple(self._answers[sample].tokens)

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
        goes_on = self._goes_on(answer)
        self._growing -= not goes_on
        return goes_on

    def _goes_on(self, answer: _Answer) -> bool:
        return not answer.stopped and len(answer.tokens) < self._request.sampling.max_new_tokens

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
