"""The base of every value on the wire, and the small values that all others use. Knows no I/O.

Values are decoded with `msgspec` and checked while they are decoded: a value that exists has the right types and
bounds. Unknown fields are ignored, so that a minor version may add some.
"""

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""BLAKE2b-256 of some bytes."""

Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
PeerId = Annotated[str, Meta(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+\Z")]
"""Text that ends up on screens: no control characters."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
Rate = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Something a second, as a peer says of itself. The bounds refuse NaN and infinity too."""

Time = Annotated[float, Meta(ge=0.0, le=2.0**53)]
"""Unix seconds."""

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


def encode(value: object) -> bytes:
    """MessagePack of a value: structs in the order of their fields, mappings in the order of their keys."""
    return _ENCODER.encode(value)


def decode(data: bytes, type: type[T]) -> T:
    """The checked value of what a peer sent. Raises msgspec.DecodeError and nothing else, however hostile it is."""
    try:
        return msgspec.msgpack.decode(data, type=type)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def canonical(value: T) -> bytes:
    """The one encoding of a value, which hashes are taken of: `encode` of what a receiver decodes. Raises ValueError.

    Differs from `encode` where a field of type float was given an integer.
    """
    return encode(decode(encode(value), type(value)))


class PolicyVersion(Struct, frozen=True, kw_only=True, order=True, array_like=True):
    """Names one policy. Ordered by epoch, then step.

    A trainer that restarts from a checkpoint opens a new epoch; within an epoch the step grows by one a release.
    """

    epoch: Annotated[int, Meta(ge=0, le=2**31)]
    step: Annotated[int, Meta(ge=0, le=2**31)]

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"


class Span(Struct, frozen=True, kw_only=True, order=True, array_like=True):
    """Layers `start` (included) to `end` (excluded) of a model of `layers` layers."""

    start: Annotated[int, Meta(ge=0, le=65535)]
    end: Annotated[int, Meta(ge=1, le=65536)]
    layers: Annotated[int, Meta(ge=1, le=65536)]

    def __post_init__(self) -> None:
        if not self.start < self.end <= self.layers:
            raise ValueError(f"span {self.start}:{self.end} is not inside {self.layers} layers")

    @property
    def first(self) -> bool:
        """Whether this span embeds the tokens."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether this span computes the logits."""
        return self.end == self.layers

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.end}/{self.layers}"
