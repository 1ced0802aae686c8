"""A stage that is slower than its device: for experiments with peers that are."""

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from echo_p2p.chain.stage import Stage
from echo_p2p.tensors import Bits, TensorUpdate


class SlowStage:
    """A stage that waits after each step: a slow device, for experiments."""

    def __init__(self, stage: Stage, slowdown_s: float) -> None:
        self.span = stage.span
        self.engine = stage.engine
        self.ragged = stage.ragged
        self._stage = stage
        self._slowdown_s = slowdown_s

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """As `Stage.forward`, later."""
        outputs = self._stage.forward(lane, rows, positions, inputs)
        time.sleep(self._slowdown_s)
        return outputs

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """As `Stage.join`."""
        self._stage.join(lane, rows, source)

    def close(self, lane: int) -> None:
        """As `Stage.close`."""
        self._stage.close(lane)

    def tensors(self) -> Mapping[str, Bits]:
        """As `Stage.tensors`."""
        return self._stage.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """As `Stage.apply`."""
        self._stage.apply(updates)
