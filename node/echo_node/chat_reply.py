"""A conversation's answers from drawn tokens to OpenAI's documents, whole or as server-sent events. Pure."""

import secrets
from dataclasses import dataclass, field

import msgspec

from echo_node.chat_text import Decode, Words
from echo_node.chat_wire import Fault
from echo_p2p.chain.group import GroupRequest
from echo_protocols.rollout import Finish, Segment
from echo_protocols.values import PolicyVersion

END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to an answer."""

    sample: int
    text: str
    version: PolicyVersion
    first: bool
    finish: Finish | None


@dataclass(slots=True)
class _Choice:
    words: Words
    text: list[str] = field(default_factory=list)
    tokens: int = 0
    segments: list[Segment] = field(default_factory=list)
    finish: Finish | None = None


class Reply:
    """All answers to one request. `version` is the newest that has computed a token."""

    def __init__(
        self, request: GroupRequest, model: str, engine: str, *, decode: Decode, stops: tuple[str, ...], now: float
    ) -> None:
        self.version = PolicyVersion(epoch=0, step=0)
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._request = request
        self._model = model
        self._engine = engine
        self._created = int(now)
        self._choices = [_Choice(Words(decode, stops)) for _ in range(request.samples)]

    @property
    def finished(self) -> bool:
        """Whether nothing is to be added to any answer."""
        return all(choice.finish is not None for choice in self._choices)

    def take(self, sample: int, token: int, version: PolicyVersion) -> Delta | None:
        """Add a token; None if its answer has ended, as one does that came to a stop string."""
        choice = self._choices[sample]
        if choice.finish is not None:
            return None
        if not choice.segments or choice.segments[-1].version != version:
            choice.segments.append(Segment(start=choice.tokens, version=version))
        self.version = max(self.version, version)
        choice.tokens += 1
        text = self._text_of(choice, token)
        choice.text.append(text)
        return Delta(sample, text, version, first=choice.tokens == 1, finish=choice.finish)

    def _text_of(self, choice: _Choice, token: int) -> str:
        if token in self._request.stop_tokens:
            choice.finish = "stop"
            return choice.words.end()
        text = choice.words.add(token)
        if not choice.words.stopped and choice.tokens == self._request.sampling.max_new_tokens:
            choice.finish = "length"
            text += choice.words.end()
        if choice.words.stopped:
            choice.finish = "stop"
        return text

    def whole(self) -> bytes:
        """The document of a reply that is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text)},
                "logprobs": None,
                "finish_reason": choice.finish,
                "segments": _segments(choice),
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._document("chat.completion", self.version, choices=choices, usage=self._usage())

    def event(self, delta: Delta) -> bytes:
        """The event of one token."""
        said = {"role": "assistant", "content": delta.text} if delta.first else {"content": delta.text}
        choice: dict[str, object] = {"index": delta.sample, "delta": said, "finish_reason": delta.finish}
        if delta.finish is not None:
            choice["segments"] = _segments(self._choices[delta.sample])
        return _event(self._document("chat.completion.chunk", delta.version, choices=[choice]))

    def usage_event(self) -> bytes:
        """The event that ends a stream whose reader asked for its usage."""
        return _event(self._document("chat.completion.chunk", self.version, choices=[], usage=self._usage()))

    def _usage(self) -> dict[str, int]:
        prompt, answers = len(self._request.prompt), sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}

    def _document(self, kind: str, version: PolicyVersion, **rest: object) -> bytes:
        return msgspec.json.encode(
            {
                "id": self._id,
                "object": kind,
                "created": self._created,
                "model": f"{self._model}@{version}",
                "policy_version": str(version),
                "system_fingerprint": self._engine,
                **rest,
            }
        )


def fault_event(fault: Fault) -> bytes:
    """The event of a stream that can't go on."""
    return _event(fault.body())


def _event(document: bytes) -> bytes:
    return b"data: " + document + b"\n\n"


def _segments(choice: _Choice) -> list[dict[str, object]]:
    return [{"start": segment.start, "policy_version": str(segment.version)} for segment in choice.segments]
