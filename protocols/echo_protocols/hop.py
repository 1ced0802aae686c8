"""Frames of a chain's streams, as bytes. Knows no socket, no numpy and no stage.

A frame is a 20-byte prefix (`magic`, format, kind, chain id) and a body. Bodies of `Forward` and `Tokens` are a fixed
little-endian head and raw arrays; all other bodies are MessagePack. Every bound is checked before anything is built,
and `decode` raises nothing but `BadFrame`.
"""

import struct
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from echo_protocols.peer import Chain, Plan, Stop
from echo_protocols.run import Sampling
from echo_protocols.values import Count, Hash, Name, PeerId, PolicyVersion

CHAIN_ID_BYTES: Final = 16
MAX_ROWS: Final = 4096
MAX_LENGTH: Final = 262_144
MAX_WIDTH: Final = 65_536
CANARY: Final = b"echo/canary/1"
"""The group id of a prompt that shows whether the ring still computes what it did; its answers are nobody's."""

_PREFIX = struct.Struct("<2sBB16s")  # magic, format, kind, chain id
_FORWARD = struct.Struct("<IIIIIIIB3x")  # lane, step, epoch, version step, rows, length, width, dtype
_TOKENS = struct.Struct("<IIIII")  # lane, step, epoch, version step, rows
_MAGIC: Final = b"eh"
_FORMAT: Final = 1
_VALUE_BYTES: Final = {1: 4, 2: 2}  # float32; bfloat16, which is what a stage that computes in it has anyway

Number = Annotated[int, Meta(ge=0, lt=2**32)]
Text = Annotated[str, Meta(max_length=512)]
Reason = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f-\x9f]+\Z")]
"""As `Name`: it is counted, shown, and said on in complaints, which take no control characters."""

Key = Annotated[bytes, Meta(min_length=1, max_length=64)]
Buffer = bytes | memoryview


class BadFrame(ValueError):
    """Bytes that are no frame of this protocol."""


class Open(Struct, frozen=True, kw_only=True, array_like=True):
    """First frame of a stream: the ring to be built. Every stage adds its version, its engine, the positions that its
    cache has room for, and whether rows of one lane may stand at different positions, as it passes.

    The head receives it from the last stage when the ring is closed.
    """

    route: Chain
    run_id: Hash
    plan: Count
    lanes: Annotated[int, Meta(ge=1, le=4096)]
    versions: Annotated[tuple[PolicyVersion, ...], Meta(max_length=256)] = ()
    engines: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    room: Annotated[tuple[Count, ...], Meta(max_length=256)] = ()
    ragged: Annotated[tuple[bool, ...], Meta(max_length=256)] = ()

    def __post_init__(self) -> None:
        layers = self.route[0].span.layers
        if any(stop.span.layers != layers for stop in self.route):
            raise ValueError("the stops of a route are spans of one model")
        Plan(number=self.plan, layers=layers, chains=(self.route,))

    def place_of(self, peer: str) -> int | None:
        """The index of a peer's stop in the route, if it has one."""
        return next((place for place, stop in enumerate(self.route) if stop.peer == peer), None)

    def after(self, place: int) -> Stop:
        """The stop that follows; the head's after the last."""
        return self.route[(place + 1) % len(self.route)]


class BeginPrompt(Struct, frozen=True, kw_only=True, array_like=True):
    """A lane of one row that is to read a prompt, which `samples` answers of at most `positions` tokens grow from.

    `positions` counts the prompt's too. The last `drawn` tokens of the prompt are the first ones of an answer that
    another ring began: the next is drawn as its token number `drawn`. The rest is what draws their tokens.
    """

    lane: Number
    group_id: Key
    run_seed: Key
    sampling: Sampling
    samples: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    positions: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    drawn: Annotated[int, Meta(ge=0, lt=MAX_LENGTH)] = 0


class Join(Struct, frozen=True, kw_only=True, array_like=True):
    """Rows that are new to `lane` begin with the cache of a prompt that has been read: each is one of its samples.

    The last stage draws their first tokens. A lane that is new begins with it. `step` is the lane's next.
    """

    lane: Number
    prompt: Number
    step: Number
    rows: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_ROWS)], ...], Meta(min_length=1, max_length=MAX_ROWS)]
    samples: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_ROWS)], ...], Meta(min_length=1, max_length=MAX_ROWS)]


class EndLane(Struct, frozen=True, kw_only=True, array_like=True):
    """The cache of the lane, or of the prompt, may be freed."""

    lane: Number


class Prepare(Struct, frozen=True, kw_only=True, array_like=True):
    """Stage `version`. Passed on once it is staged, or at once with the `fault` that prevents it."""

    version: PolicyVersion
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)]
    fault: Text = ""


class Switch(Struct, frozen=True, kw_only=True, array_like=True):
    """All frames that follow belong to `version`."""

    version: PolicyVersion


class Beat(Struct, frozen=True, kw_only=True, array_like=True):
    """Goes around the ring to show that it is whole."""

    number: Number


class Failure(Struct, frozen=True, kw_only=True, array_like=True):
    """The chain has ended: why, as a reason to count and a sentence, and at which peer."""

    reason: Reason
    text: Text = ""
    peer: PeerId | None = None


class Forward(Struct, frozen=True, kw_only=True):
    """Hidden states of some rows of a lane, for the next stage; of a prompt, or one token a row.

    `step` counts what the lane was sent. Rows of the lane that are not named leave it.
    """

    lane: int
    step: int
    version: PolicyVersion
    length: int
    width: int
    rows: Buffer  # (rows,) int32
    positions: Buffer  # (rows,) int32, of the first hidden state of each row
    payload: Buffer  # (rows, length, width) float32, or bfloat16 if `halves`
    halves: bool = False


class Tokens(Struct, frozen=True, kw_only=True):
    """What the last stage answers to each Join and Forward: a drawn token for each row, none for part of a prompt.

    `version` is the one that the logits were computed by.
    """

    lane: int
    step: int
    version: PolicyVersion
    rows: Buffer  # (rows,) int32
    tokens: Buffer  # (rows,) int32
    logprobs: Buffer  # (rows,) float32


Frame = Open | BeginPrompt | EndLane | Prepare | Switch | Beat | Failure | Forward | Tokens | Join

_KINDS: Final[dict[type, int]] = {
    Open: 1,
    BeginPrompt: 2,
    EndLane: 3,
    Prepare: 4,
    Switch: 5,
    Beat: 6,
    Failure: 7,
    Forward: 8,
    Tokens: 9,
    Join: 10,
}
_encoder = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Frame]]] = {
    number: msgspec.msgpack.Decoder(kind) for kind, number in _KINDS.items() if kind not in (Forward, Tokens)
}


def encode(chain: bytes, frame: Frame) -> tuple[Buffer, ...]:
    """The frame as parts to be sent as one; large arrays are not copied."""
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, _KINDS[type(frame)], chain)
    match frame:
        case Forward(lane=lane, step=step, version=version, rows=rows, length=length, width=width):
            dtype = 1 + frame.halves
            head = _FORWARD.pack(lane, step, version.epoch, version.step, len(rows) // 4, length, width, dtype)
            return prefix + head + rows + frame.positions, frame.payload
        case Tokens(lane=lane, step=step, version=version, rows=rows):
            head = _TOKENS.pack(lane, step, version.epoch, version.step, len(rows) // 4)
            return (prefix + head + rows + frame.tokens + frame.logprobs,)
        case _:
            return (prefix + _encoder.encode(frame),)


def decode(data: bytes) -> tuple[bytes, Frame]:
    """The chain id and the frame. Arrays are views of `data`. Raises BadFrame."""
    if len(data) < _PREFIX.size:
        raise BadFrame(f"a frame of {len(data)} bytes is shorter than its prefix")
    magic, format_, kind, chain = _PREFIX.unpack_from(data)
    if magic != _MAGIC or format_ != _FORMAT:
        raise BadFrame(f"{magic!r} format {format_} is not a hop frame")
    body = memoryview(data)[_PREFIX.size :]
    try:
        if kind == _KINDS[Forward]:
            return chain, _decode_forward(body)
        if kind == _KINDS[Tokens]:
            return chain, _decode_tokens(body)
        if kind not in _DECODERS:
            raise BadFrame(f"kind {kind} is unknown")
        return chain, _DECODERS[kind].decode(body)
    except (msgspec.MsgspecError, struct.error, RecursionError) as error:
        raise BadFrame(f"a frame of kind {kind} is malformed: {error}") from None


def _decode_forward(body: memoryview) -> Forward:
    lane, step, epoch, number, rows, length, width, dtype = _FORWARD.unpack_from(body)
    if dtype not in _VALUE_BYTES:
        raise BadFrame(f"dtype {dtype} is unknown")
    if not (1 <= rows <= MAX_ROWS and 1 <= length <= MAX_LENGTH and 1 <= width <= MAX_WIDTH):
        raise BadFrame(f"hidden states of shape ({rows}, {length}, {width}) are out of bounds")
    states = _VALUE_BYTES[dtype] * rows * length * width
    indices, positions, payload = _split(body[_FORWARD.size :], 4 * rows, 4 * rows, states)
    return Forward(
        lane=lane,
        step=step,
        version=_version(epoch, number),
        length=length,
        width=width,
        rows=indices,
        positions=positions,
        payload=payload,
        halves=_VALUE_BYTES[dtype] == 2,
    )


def _decode_tokens(body: memoryview) -> Tokens:
    lane, step, epoch, number, rows = _TOKENS.unpack_from(body)
    if rows > MAX_ROWS:
        raise BadFrame(f"{rows} rows are out of bounds")
    indices, tokens, logprobs = _split(body[_TOKENS.size :], 4 * rows, 4 * rows, 4 * rows)
    return Tokens(lane=lane, step=step, version=_version(epoch, number), rows=indices, tokens=tokens, logprobs=logprobs)


def _split(body: memoryview, *sizes: int) -> list[memoryview]:
    if len(body) != sum(sizes):
        raise BadFrame(f"a body of {len(body)} bytes should have {sum(sizes)}")
    parts, start = [], 0
    for size in sizes:
        parts.append(body[start : start + size])
        start += size
    return parts


def _version(epoch: int, step: int) -> PolicyVersion:
    if max(epoch, step) > 2**31:
        raise BadFrame(f"version {epoch}.{step} is out of bounds")
    return PolicyVersion(epoch=epoch, step=step)
