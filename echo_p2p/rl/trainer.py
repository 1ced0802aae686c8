"""The seam of a training engine: a batch in, a step done, weights out. Knows no network, no task and no verl."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One answer with all that an update needs of it."""

    group: int
    """Rows of one prompt share a number; advantages are computed inside a group."""
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]  # (len(response),) of the distribution truly sampled from
    reward: float
    truncated: bool = False
    """Whether the answer was cut off at its longest length."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one update did. `figures` are numbers by name (`loss`, `grad_norm`, `k3_kl`, `ess`, `clip_fraction` …).

    `updated` is False when the policy stays as it was, not even moved by momentum: no answer had an advantage, or only
    the critic is learning yet.
    """

    updated: bool
    figures: Mapping[str, float]


class Trainer(Protocol):
    """A policy that learns. Synchronous; driven from one worker thread."""

    def step(self, rows: tuple[TrainingRow, ...]) -> StepReport:
        """One update on exactly these rows, in this order. Raises TrainerError."""

    def weights(self) -> Mapping[str, NDArray[np.uint16]]:
        """The policy as bf16 bits by Hugging Face name, rounded to nearest even from the fp32 masters.

        Aliases of tied tensors are left out. The arrays are copies.
        """

    def save(self, folder: Path) -> None:
        """Write the whole state (weights, optimiser, generators) into `folder`, atomically."""

    def load(self, folder: Path) -> None:
        """Resume from `save`: the next step is the same, bit for bit. Raises TrainerError if it is incomplete."""
