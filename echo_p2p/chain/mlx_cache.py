"""The KV cache of a lane for mlx-lm's modules: rows of unlike lengths, as if padded on the left.

All rows end at one place, so that a step writes one slice, and the longest row's slots are all that attention sees.
Knows no lane numbers and no weights; `Lane` tells it how long its rows are. Memory: up to `STEP` positions a row more,
and twice the rows it has now; what left is overwritten, and what no living row reaches goes with the next buffer.
"""

# mlx-lm's BatchKVCache computes the same, but copies a lane whenever a row comes or goes. Here places are used again.
# A slot left of a row's start is zero, never another row's: a masked weight of 0 times a NaN would be a NaN.
# mlx writes in place only while nothing else refers to the buffer: a view of it must not outlive the call.

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

STEP = 64
"""Positions by which a buffer is larger than it need be when it is made."""


def is_ragged(config: Mapping[str, Any]) -> bool:
    """Whether rows of unlike lengths can be computed together, each as if alone."""
    rope = config.get("rope_scaling") or {}
    # dynamic rotates all rows by what the longest needs; longrope is so in transformers, the reference
    return not {"dynamic", "longrope", "su"} & {rope.get("type"), rope.get("rope_type")}


class LaneCache:
    """KV of the span's layers."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache() for _ in range(layers)]

    def stand_at(self, lengths: NDArray[np.int32]) -> None:
        """The rows are `lengths` (rows,) tokens long now; if these are unlike, each row gets one token next."""
        longest = int(lengths.max())
        offset: int | mx.array = longest
        mask = None
        if (lengths != longest).any():
            offset = mx.array(lengths)
            mask = mx.arange(longest + 1) >= mx.array(longest - lengths)[:, None, None, None]  # (rows, 1, 1, slots)
        for layer in self.layers:
            layer.length, layer.offset, layer.mask = longest, offset, mask

    def select(self, kept: list[int]) -> None:
        """Keep these rows, in this order; each of the first `len(kept)` is at its place, or comes from behind them."""
        places = [place for place, origin in enumerate(kept) if place != origin]
        if places:
            origins = mx.array([kept[place] for place in places])
            for layer in self.layers:
                layer.move(places, origins)

    def join(self, source: "LaneCache", *, held: int, rows: int) -> None:
        """`rows` rows come after the `held` ones, each with the KV of the source's only row."""
        for layer, other in zip(self.layers, source.layers, strict=True):
            layer.join(other, held=held, rows=rows)

    def arrays(self) -> list[mx.array]:
        """All that outlives a call."""
        return [array for layer in self.layers for array in (layer.keys, layer.values)]


class LayerCache:
    """Keys and values (rows, heads, slots, head size) of one layer, as mlx-lm's modules use a cache."""

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.length = 0
        self.offset: int | mx.array = 0
        """Position of the next token: of all rows, or (rows,)."""
        self.mask: mx.array | None = None
        """(rows, 1, 1, slots) which of them are a row's own; None: all."""
        self._end = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (rows, heads, count, head size); what attention sees is returned."""
        rows, count = keys.shape[0], keys.shape[2]
        self._make_room(keys, values, rows=rows, more=count)
        start, self._end = self._end, self._end + count
        self.keys[:rows, :, start : self._end] = keys
        self.values[:rows, :, start : self._end] = values
        seen = slice(start - self.length, self._end)
        return self.keys[:rows, :, seen], self.values[:rows, :, seen]

    def make_mask(self, count: int, **_: Any) -> Any:
        """What `count` tokens a row may see, in the form that mlx's attention takes."""
        return self.mask if count == 1 else "causal"

    def move(self, places: Sequence[int], origins: mx.array) -> None:
        """Put to each place the row that is at its origin."""
        for buffer in (self.keys, self.values):
            moved = buffer[origins]  # a copy
            mx.eval(moved)  # so that nothing refers to the buffer
            for i, place in enumerate(places):
                buffer[place] = moved[i]

    def join(self, source: "LayerCache", *, held: int, rows: int) -> None:
        """As `LaneCache.join` says."""
        self._make_room(source.keys, source.values, rows=held + rows, more=1)
        before = [(0, 0), (0, 0), (self._end - source.length, 0), (0, 0)]
        for buffer, other in ((self.keys, source.keys), (self.values, source.values)):
            shared = other[:1, :, source._end - source.length : source._end]
            buffer[held : held + rows, :, : self._end] = mx.pad(shared, before)

    def _make_room(self, keys: mx.array, values: mx.array, *, rows: int, more: int) -> None:
        """Have buffers for `rows` rows of `length` slots before `_end`, and `more` after it."""
        there = slots = 0
        if self.keys is not None:
            there, slots = self.keys.shape[0], self.keys.shape[2]
            if rows <= there and self.length <= self._end and self._end + more <= slots:
                return
            rows = rows if rows > there or 2 * rows < there else there
        staying, count = min(rows, there), min(self.length, self._end)
        for name, like in (("keys", keys), ("values", values)):
            made = mx.zeros((rows, like.shape[1], self.length + more + STEP, like.shape[3]), like.dtype)
            if staying:
                old = getattr(self, name)[:staying, :, self._end - count : self._end]
                made[:staying, :, self.length - count : self.length] = old
            setattr(self, name, made)
        self._end = self.length
