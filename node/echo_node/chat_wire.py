"""What is said at `/v1/chat/completions`: OpenAI's shapes, checked in one place. Knows no socket and no chain.

Beyond OpenAI's fields an answer carries `policy_version`, and in `segments` which version computed its tokens from
where on, since a policy may be replaced in mid-answer.
"""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from echo_p2p.chain.group import GroupRequest
from echo_protocols.run import RunManifest, Sampling

BODY_MAX_BYTES = 256 << 10

_GREEDY_BELOW = 1e-3  # temperatures that would overflow the logits draw the best token anyway
_NOT_HERE = (
    "tools", "functions", "logprobs", "logit_bias", "frequency_penalty", "presence_penalty", "response_format",
)  # fmt: skip


class Fault(Struct, frozen=True, kw_only=True):
    """Why a request gets no answer; `status` is HTTP's."""

    status: int
    message: str
    code: str

    def body(self) -> bytes:
        """As OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return msgspec.json.encode({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}})


class Part(Struct, frozen=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[Part, ...]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Struct, frozen=True):
    """What a stream says besides."""

    include_usage: bool | None = None


_Stop = Annotated[str, Meta(min_length=1, max_length=256)]
_Tokens = Annotated[int, Meta(ge=1, le=131_072)]


class Ask(Struct, frozen=True):
    """A request. What is left out is as the run samples; other fields of OpenAI's are ignored or refused by name."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=1024)]
    model: str = ""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: _Stop | Annotated[tuple[_Stop, ...], Meta(max_length=4)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: object = None
    functions: object = None
    logprobs: object = None
    logit_bias: object = None
    frequency_penalty: object = None
    presence_penalty: object = None
    response_format: object = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation, as chat templates take it."""
        return [{"role": message.role, "content": message.text} for message in self.messages]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a chain takes: answers to one prompt, and positions of one answer with its prompt."""

    samples: int
    positions: int


def read_ask(content_type: str, body: bytes) -> Ask | Fault:
    """Check a request as far as it can be checked without a model."""
    # A web page of another origin may send a form or plain text without asking first, but never JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return Fault(status=415, message="Send the request as application/json.", code="unsupported_media_type")
    try:
        ask = msgspec.json.decode(body, type=Ask)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return invalid(f"The request can't be read: {error}.")
    for name in _NOT_HERE:
        value = getattr(ask, name)
        if value and value != {"type": "text"}:
            return invalid(f"`{name}` is not served here: leave it out.", "unsupported_parameter")
    return ask


def invalid(message: str, code: str = "invalid_value") -> Fault:
    """A request that has to be changed."""
    return Fault(status=400, message=message, code=code)


def group_of(ask: Ask, prompt: tuple[int, ...], manifest: RunManifest, bounds: Bounds) -> GroupRequest | Fault:
    """What a chain is asked for. Its randomness is apart from that of the run's rollouts; a seed decides it."""
    name = manifest.model
    if ask.model and ask.model != name and not ask.model.startswith(f"{name}@"):
        return Fault(status=404, message=f"There is no model {ask.model!r} here: ask for {name!r}.", code="not_found")
    if not prompt:
        return invalid("The messages say nothing: give at least one with some text.")
    samples, left = ask.n or 1, bounds.positions - len(prompt)
    if samples > bounds.samples:
        return invalid(f"`n` is {samples}, and this chain takes up to {bounds.samples}: ask for fewer.")
    wanted = ask.max_completion_tokens or ask.max_tokens
    if left < (wanted or 1):
        return invalid(
            f"The messages are {len(prompt)} tokens and {wanted or 1} are to follow, and a conversation has room for "
            f"{bounds.positions}: shorten it, or lower max_tokens.",
            "context_length_exceeded",
        )
    return GroupRequest(
        group_id=secrets.token_bytes(32) if ask.seed is None else _digest(b"%d" % ask.seed),
        run_seed=_digest(manifest.randomness()),
        prompt=prompt,
        samples=samples,
        sampling=_sampling(ask, manifest.sampling, wanted or min(left, manifest.sampling.max_new_tokens)),
        stop_tokens=frozenset(manifest.stop_tokens),
    )


def _sampling(ask: Ask, run: Sampling, max_new_tokens: int) -> Sampling:
    temperature = run.temperature if ask.temperature is None else ask.temperature
    if temperature < _GREEDY_BELOW:
        return Sampling(top_k=1, max_new_tokens=max_new_tokens)
    top_p = ask.top_p or run.top_p
    return Sampling(temperature=temperature, top_p=top_p, top_k=run.top_k, max_new_tokens=max_new_tokens)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=b"echo/chat/1").digest()
