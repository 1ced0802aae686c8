"""The Stage and Weights seams in plain numpy: a small recurrent model, bitwise the same whole or in spans.

It stands in for an engine wherever the chain is what matters. Knows no file and no network; every tensor is a
function of the seed and its name, so that spans agree without sharing anything.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_p2p.chain.lanes import Lanes
from echo_p2p.chain.stage import Bits, Stage, TensorUpdate
from echo_p2p.errors import WeightsError
from echo_protocols.values import PolicyVersion, Span

_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class MemoryStage:
    """A span of a model whose layer i keeps one state a row: state ← tanh(input @ W_i + state / 2)."""

    def __init__(
        self, span: Span, *, vocabulary: int = 32, hidden: int = 16, seed: int = 1, kv_positions: int | None = None
    ) -> None:
        self.span = span
        self.engine = "memory-float32"
        self.ragged = True
        shapes = {f"model.layers.{i}.mlp.weight": (hidden, hidden) for i in range(span.start, span.end)}
        if span.first:
            shapes[_EMBED] = (vocabulary, hidden)
        if span.last:
            shapes[_HEAD] = (hidden, vocabulary)
        self._bits = {name: _noise(name, seed, shape) for name, shape in shapes.items()}
        self._weights = {name: _floats(bits) for name, bits in self._bits.items()}
        empty = np.zeros((0, len(span), hidden), np.float32)
        self._lanes = Lanes(
            lambda: _States(empty), most=4096, longest=1 << 20, kv_positions=kv_positions, ragged=self.ragged
        )

    @property
    def lanes(self) -> frozenset[int]:
        """Lanes that hold a state."""
        return self._lanes.numbers

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """See `Stage.forward`. Raises ChainError."""
        entered = self._lanes.enter(lane, rows, positions, inputs.shape[1])
        cache = entered.lane.cache
        if not len(cache.rows):
            cache.rows = np.zeros((len(rows), *cache.rows.shape[1:]), np.float32)
        if entered.kept is not None:
            cache.rows = cache.rows[entered.kept]
        ordered = entered.in_cache_order(inputs)
        x = self._weights[_EMBED][ordered] if self.span.first else ordered.astype(np.float32)
        outputs = np.empty_like(x)  # (rows, length, hidden)
        for t in range(x.shape[1]):
            h = x[:, t]
            for i in range(len(self.span)):
                weight = self._weights[f"model.layers.{self.span.start + i}.mlp.weight"]
                cache.rows[:, i] = h = np.tanh(_times(h, weight) + cache.rows[:, i] / 2)
            outputs[:, t] = h
        entered.lane.lengths += x.shape[1]
        return entered.in_call_order(_times(outputs[:, -1], self._weights[_HEAD]) * 4 if self.span.last else outputs)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """See `Stage.join`. Raises ChainError."""
        joined, shared = self._lanes.join(lane, rows, source)
        joined.cache.rows = np.concatenate([joined.cache.rows, np.repeat(shared.cache.rows, len(rows), axis=0)])

    def close(self, lane: int) -> None:
        """See `Stage.close`."""
        self._lanes.close(lane)

    def tensors(self) -> Mapping[str, Bits]:
        """See `Stage.tensors`."""
        return {name: bits.copy() for name, bits in self._bits.items()}

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """See `Stage.apply`."""
        for name, update in updates.items():
            bits = self._bits[name].reshape(-1)
            bits[slice(None) if update.index is None else update.index] = update.values.reshape(-1)
            self._weights[name][...] = _floats(self._bits[name])


@dataclass(slots=True)
class _States:
    rows: NDArray[np.float32]  # (rows, layers, hidden)


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


def _times(rows: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """`rows @ matrix`, each row by itself, so that its bits do not depend on the others."""
    product: NDArray[np.float32] = (rows[:, None] @ matrix)[:, 0]
    return product


def _noise(name: str, seed: int, shape: tuple[int, ...]) -> Bits:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    values = np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(shape, np.float32) / 2
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _floats(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
