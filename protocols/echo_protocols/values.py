"""The base of every value on the wire, and the small values that all others use. Knows no I/O.

Values are decoded with `msgspec` and checked while they are decoded: a value that exists has the right types and
bounds. Unknown fields are ignored, so that a minor version may add some.
"""

from typing import Annotated

from msgspec import Meta, Struct

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""BLAKE2b-256 of some bytes."""

Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
PeerId = Annotated[str, Meta(min_length=40, max_length=64, pattern="^[1-9A-HJ-NP-Za-km-z]+$")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


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
