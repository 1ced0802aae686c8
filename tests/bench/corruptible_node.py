"""A node whose stage can be made to compute wrongly: `echo-node`, and SIGUSR1 spoils what it computes from then on.

For the bench and the tests of failover alone: the product has no such switch, so this program puts the engine that is
loaded into a wrapper of its own. The environment variable SPOIL says how: `noise`, finite and small, or `nan`.
"""

import os
import signal
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from echo_node import cli, holding
from echo_p2p.chain.engines import load_engine
from echo_p2p.chain.stage import Stage
from echo_p2p.tensors import Bits, TensorUpdate

_spoilt = False


class Corruptible:
    """A stage, right until it is spoilt."""

    def __init__(self, stage: Stage) -> None:
        self.span = stage.span
        self.engine = stage.engine
        self.ragged = stage.ragged
        self._stage = stage
        self._noise = np.random.default_rng(1)

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        outputs = self._stage.forward(lane, rows, positions, inputs)
        if not _spoilt:
            return outputs
        if os.environ.get("SPOIL") == "nan":
            return np.full_like(outputs, np.nan)
        return outputs + self._noise.normal(0.0, 0.5, outputs.shape).astype(np.float32)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        self._stage.join(lane, rows, source)

    def close(self, lane: int) -> None:
        self._stage.close(lane)

    def tensors(self) -> Mapping[str, Bits]:
        return self._stage.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        self._stage.apply(updates)


def main() -> None:
    """Run the node."""

    def spoil(number: int, frame: object) -> None:
        global _spoilt
        _spoilt = True

    signal.signal(signal.SIGUSR1, spoil)
    holding.load_engine = lambda *given, **named: Corruptible(load_engine(*given, **named))  # type: ignore[assignment]
    sys.argv[0] = "echo-node"
    cli.main()


if __name__ == "__main__":
    main()
