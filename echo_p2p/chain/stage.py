"""The seam of an engine: one span of a model, computed lane by lane. Knows no network and no sampling.

A lane is a micro-batch with its own KV cache. Arrays cross the seam as numpy, so that torch and mlx stages can stand
in one chain. All methods are synchronous, run in worker threads, and are never called concurrently on one stage.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import ChainError
from echo_p2p.tensors import Bits, TensorUpdate
from echo_protocols.values import PolicyVersion, Span

__all__ = ["Bits", "Stage", "TensorUpdate", "Weights", "check_inputs"]


class Stage(Protocol):
    """One span of a model."""

    span: Span
    engine: str
    """Fingerprint of what computes: backend, its version, dtype; e.g. `torch-2.13.0-cpu-float32`."""
    ragged: bool
    """Whether rows of one lane may stand at different positions; if not, `join` needs rows at the source's."""

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],  # (rows,) rows of the lane, each a sequence of its own
        positions: NDArray[np.int32],  # (rows,) position of the first input token of each row
        inputs: NDArray[np.int32] | NDArray[np.float32],  # (rows, length) token ids, or (rows, length, hidden)
    ) -> NDArray[np.float32]:
        """(rows, length, hidden) for the next stage, or (rows, vocabulary) logits of the last position if `span.last`.

        A lane begins with its first call, whose rows must be 0 … n-1, or with `join`. Rows that a later call does not
        name leave for good. Calls longer than one token need rows that all stand at one position.
        """

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """Rows (rows,) new to `lane` begin with the KV of lane `source`, which has one row and keeps it.

        `lane` may be new. Row numbers are any below 4096 that it does not hold now.
        """

    def close(self, lane: int) -> None:
        """Free the lane's KV cache; unknown lanes are no error."""

    def tensors(self) -> Mapping[str, Bits]:
        """The span's tensors by global Hugging Face name, as bf16 bits (copies)."""

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change weights in place, without reallocating; lanes keep their KV."""


def check_inputs(
    span: Span, rows: int, inputs: NDArray[np.int32] | NDArray[np.float32], *, hidden: int, vocabulary: int
) -> None:
    """Raises ChainError unless these are inputs of `rows` rows for a span of a model with these sizes."""
    shape = (rows, inputs.shape[1] if inputs.ndim > 1 else 0, hidden)
    if inputs.shape != (shape[:2] if span.first else shape):
        raise ChainError(f"inputs of shape {inputs.shape} do not fit {rows} rows of span {span}, {hidden} wide")
    if span.first and inputs.size and not 0 <= inputs.min() <= inputs.max() < vocabulary:
        raise ChainError(f"a token id is outside the vocabulary of {vocabulary}: use the run's tokenizer")


class Weights(Protocol):
    """Where a stage gets its next version from."""

    async def prepare(self, version: PolicyVersion) -> None:
        """Return once `version` is staged for this span. Raises WeightsError, or NetError when nobody has it."""

    def switch(self, version: PolicyVersion, stage: Stage) -> None:
        """Apply a staged version to the stage, between two steps (synchronous). Raises WeightsError."""
