"""The Stage and Weights seams in plain numpy: a small recurrent model, bitwise the same whole or in spans.

It stands in for an engine wherever the chain is what matters. Knows no file and no network; every tensor is a
function of the seed and its name, so that spans agree without sharing anything.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from echo_p2p.chain.stage import Bits, Stage, TensorUpdate
from echo_p2p.errors import WeightsError
from echo_protocols.values import PolicyVersion, Span

_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class MemoryStage:
    """A span of a model whose layer i keeps one state a row: state ← tanh(input @ W_i + state / 2)."""

    def __init__(self, span: Span, *, vocabulary: int = 32, hidden: int = 16, seed: int = 1) -> None:
        self.span = span
        self.engine = "memory-float32"
        shapes = {f"model.layers.{i}.mlp.weight": (hidden, hidden) for i in range(span.start, span.end)}
        if span.first:
            shapes[_EMBED] = (vocabulary, hidden)
        if span.last:
            shapes[_HEAD] = (hidden, vocabulary)
        self._bits = {name: _noise(name, seed, shape) for name, shape in shapes.items()}
        self._weights = {name: _floats(bits) for name, bits in self._bits.items()}
        self._lanes: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}

    @property
    def lanes(self) -> frozenset[int]:
        """Lanes that hold a state."""
        return frozenset(self._lanes)

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """See `Stage.forward`."""
        x: NDArray[np.float32] = self._weights[_EMBED][inputs] if self.span.first else inputs.astype(np.float32)
        if lane not in self._lanes:
            states = np.zeros((len(rows), len(self.span), x.shape[2]), np.float32)
            self._lanes[lane] = (np.zeros(len(rows), np.int32), states)
        lengths, states = self._lanes[lane]
        if not np.array_equal(lengths[rows], positions):
            raise ValueError(f"rows {rows.tolist()} do not go on at positions {positions.tolist()}")
        outputs = np.empty_like(x)  # (rows, length, hidden)
        for t in range(x.shape[1]):
            h = x[:, t]
            for i in range(len(self.span)):
                weight = self._weights[f"model.layers.{self.span.start + i}.mlp.weight"]
                states[rows, i] = h = np.tanh(h @ weight + states[rows, i] / 2)
            outputs[:, t] = h
        lengths[rows] += x.shape[1]
        logits: NDArray[np.float32] = outputs[:, -1] @ self._weights[_HEAD] * 4 if self.span.last else outputs
        return logits

    def close(self, lane: int) -> None:
        """See `Stage.close`."""
        self._lanes.pop(lane, None)

    def tensors(self) -> Mapping[str, Bits]:
        """See `Stage.tensors`."""
        return {name: bits.copy() for name, bits in self._bits.items()}

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """See `Stage.apply`."""
        for name, update in updates.items():
            bits = self._bits[name].reshape(-1)
            bits[slice(None) if update.index is None else update.index] = update.values.reshape(-1)
            self._weights[name][...] = _floats(self._bits[name])


class MemoryWeights:
    """Releases from a table: for each version, updates of any tensors; a stage takes those of its own."""

    def __init__(self, releases: Mapping[PolicyVersion, Mapping[str, TensorUpdate]]) -> None:
        self._releases = releases

    async def prepare(self, version: PolicyVersion) -> None:
        """See `Weights.prepare`."""
        if version not in self._releases:
            raise WeightsError(f"version {version} is not in the table; there are {sorted(self._releases)}")

    def switch(self, version: PolicyVersion, stage: Stage) -> None:
        """See `Weights.switch`."""
        own = stage.tensors()
        stage.apply({name: update for name, update in self._releases[version].items() if name in own})


def _noise(name: str, seed: int, shape: tuple[int, ...]) -> Bits:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    values = np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(shape, np.float32) / 2
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _floats(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
