"""The KV cache of a lane, and attention over it, for transformers: rows of unlike lengths, as if padded on the left.

All rows end at one place, so that a step writes one slice, and the longest row's slots are all that attention sees.
Knows no lane numbers and no weights; `Lane` tells it how long its rows are. Memory: up to `STEP` positions a row more.
"""

# Left padding is what every family of transformers understands, for each kind of attention, by a mask (rows, slots).
# Its own `sdpa` copies all keys and values for each head of a group, as soon as there is a mask; ours does not.
# A slot left of a row's start is zero, never another row's: a masked weight of 0 times a NaN would be a NaN.

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from echo_p2p.errors import ModelError
from echo_protocols.values import Span

STEP = 64
"""Positions by which a buffer is larger than it need be when it is made."""

_RECURRENT = frozenset({"qwen3_next"})
"""Families with recurrent layers whose rows are proven to be independent of each other's lengths."""

_STATES = ("keys", "values", "conv_states", "recurrent_states")


def is_ragged(config: Any) -> bool:
    """Whether rows of unlike lengths can be computed together, each as if alone."""
    config = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}:
        return False
    if LinearAttentionLayer in kinds and config.model_type not in _RECURRENT:
        return False
    # these rotate all rows by what the longest needs
    return not {"dynamic", "longrope"} & set(_rope_types(getattr(config, "rope_parameters", None) or {}))


def _rope_types(parameters: dict[str, Any]) -> Iterable[str]:
    for key, value in parameters.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif key == "rope_type":
            yield value


def use_grouped_attention(model: Any) -> None:
    """Have `model` attend by `grouped_attention` where it would by transformers' `sdpa`."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register("echo_grouped", grouped_attention)
        AttentionMaskInterface.register("echo_grouped", sdpa_mask)
        model.config._attn_implementation = "echo_grouped"


def grouped_attention(
    module: Any,
    query: torch.Tensor,  # (rows, heads, count, head size)
    key: torch.Tensor,  # (rows, groups, slots, head size)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # (rows, 1, count, slots)
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(rows, count, heads, head size): what `sdpa` of transformers computes, on a CPU its bits."""
    if attention_mask is None or (query.device.type != "cpu" and query.shape[2] > 1):
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return attended
    if query.device.type == "cpu":
        outputs = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return outputs.transpose(1, 2).contiguous(), None
    return folded_attention(query, key, value, attention_mask, scaling), None


def folded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Likewise for one token a row, the heads of a group as if they were its tokens."""
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    outputs = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return outputs.reshape(rows, 1, heads, value.shape[3])


class LaneCache(DynamicCache):  # type: ignore[misc]
    """KV of the span's layers. For all other layers, whose KV other stages hold, it only knows how long they are."""

    layers: list[Any]

    def __init__(self, config: Any, span: Span) -> None:
        super().__init__(config=config)
        if len(self.layers) < span.layers and len(span) < span.layers:
            raise ModelError(f"{config.model_type} shares KV between layers: serve it whole, not as span {span}")
        self.layers = [_buffered(layer) for layer in self.layers]
        self._here = self.layers[span.start : span.end]
        elsewhere: dict[tuple[type, int | None], Any] = {}
        for i, layer in enumerate(self.layers):
            if not span.start <= i < span.end:
                self.layers[i] = elsewhere.setdefault((type(layer), getattr(layer, "window", None)), layer)
        self._elsewhere = list(elsewhere.values())

    def stand_at(self, length: int) -> None:
        """The longest row is `length` tokens long now."""
        for layer in (*self._here, *self._elsewhere):
            if isinstance(layer, _KvLayer):
                layer.length = length
        for layer in self._elsewhere:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.has_previous_state = length > 0

    def select(self, kept: list[int]) -> None:
        """Keep these rows, in this order; each of the first `len(kept)` is at its place, or comes from behind them."""
        with torch.inference_mode():
            for layer in self._here:
                if isinstance(layer, _KvLayer):
                    layer.select(kept)
                else:
                    layer.reorder_cache(torch.tensor(kept))

    def join(self, source: "LaneCache", *, held: int, rows: int) -> None:
        """`rows` rows come after the `held` ones, each with the KV of the source's only row."""
        with torch.inference_mode():
            for layer, other in zip(self._here, source._here, strict=True):
                if isinstance(layer, _KvLayer):
                    layer.join(other, held=held, rows=rows)
                else:
                    _extend(layer, other, held=held, rows=rows)


class _KvLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values (rows, heads, slots, head size) of one layer, whose rows all end at slot `_end`.

    A sliding window needs no more than its last `window - 1` tokens; what is older goes when the buffer is made anew.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window is not None
        self.length = 0
        self._end = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (rows, heads, count, head size); what attention sees is returned."""
        rows, count, held = keys.shape[0], keys.shape[2], self._kept(self.length)
        self._make_room(keys, values, rows=rows, held=held, more=count)
        start, self._end = self._end, self._end + count
        self.keys[:rows, :, start : self._end] = keys
        self.values[:rows, :, start : self._end] = values
        seen = slice(start - held, self._end)
        return self.keys[:rows, :, seen], self.values[:rows, :, seen]

    def select(self, kept: list[int]) -> None:
        """As `LaneCache.select` says."""
        for place, origin in enumerate(kept):
            if place != origin:
                for buffer in (self.keys, self.values):
                    buffer[place, :, : self._end] = buffer[origin, :, : self._end]

    def join(self, source: "_KvLayer", *, held: int, rows: int) -> None:
        """As `LaneCache.join` says."""
        length = source._kept(source.length)
        self._make_room(source.keys, source.values, rows=held + rows, held=self._kept(self.length), more=1)
        start = self._end - length
        for buffer, other in ((self.keys, source.keys), (self.values, source.values)):
            new = buffer[held : held + rows]
            new[:, :, :start] = 0
            new[:, :, start : self._end] = other[:1, :, source._end - length : source._end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots attention sees, and how many tokens came before them."""
        held = self._kept(self.length)
        return held + query_length, self.length - held

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return self.length

    def get_max_length(self) -> int:
        """The window; -1 without one."""
        return -1 if self.window is None else self.window

    def get_max_cache_shape(self) -> int:
        """Its name before transformers 5.12."""
        return self.get_max_length()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Buffers for what is given."""
        self._make_room(key_states, value_states, rows=key_states.shape[0], held=0, more=key_states.shape[2])

    def _kept(self, length: int) -> int:
        return length if self.window is None else min(length, self.window - 1)

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor, *, rows: int, held: int, more: int) -> None:
        """Have buffers for `rows` rows of `held` slots before `_end`, and `more` after it."""
        if self.is_initialized:
            there, slots = self.keys.shape[0], self.keys.shape[2]
            if rows <= there and held <= self._end and self._end + more <= slots:
                return
            rows = rows if rows > there or 2 * rows < there else there
        made = [like.new_zeros((rows, like.shape[1], held + more + STEP, like.shape[3])) for like in (keys, values)]
        if self.is_initialized:
            count, rows = min(held, self._end), min(rows, there)
            for new, old in zip(made, (self.keys, self.values), strict=True):
                new[:rows, :, held - count : held] = old[:rows, :, self._end - count : self._end]
        self.keys, self.values = made
        self._end, self.is_initialized = held, True


def _buffered(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return _KvLayer(None)
    return _KvLayer(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer


def _extend(layer: Any, source: Any, *, held: int, rows: int) -> None:
    """Likewise for a layer that keeps its states otherwise; all have the rows first."""
    if not held:
        vars(layer).update(vars(copy(source)))
    for name in _STATES:
        if isinstance(state := getattr(source, name, None), torch.Tensor):
            new = state[:1].expand(rows, *state.shape[1:])
            setattr(layer, name, torch.cat([getattr(layer, name)[:held], new]))
