"""What a run asks of the devices that serve it, from its manifest and the model's folder. Knows no peer and no plan."""

import json
from pathlib import Path
from typing import Any

from echo_p2p.chain.pricing import Workload
from echo_p2p.chain.shape import model_shape
from echo_p2p.models.layout import span_tensors, tensor_entries
from echo_protocols.release import part_of
from echo_protocols.run import RunManifest
from echo_protocols.values import Span

PROMPT_POSITIONS = 512
"""What is kept for a prompt: the manifest bounds answers only."""

_STATE_BYTES = 4  # of a value of a token's states on the wire


def workload_of(model_path: Path, manifest: RunManifest) -> Workload:
    """The figures that a plan for the run is made with. Raises ModelError if the folder holds no model."""
    shape = model_shape(model_path)
    entries = tensor_entries(model_path)
    values: dict[str, int] = {}
    for name in span_tensors(entries, Span(start=0, end=shape.layers, layers=shape.layers), tied=shape.tied):
        values[part_of(name)] = values.get(part_of(name), 0) + entries[name].values
    ends = {part: values.pop(part, 0) for part in ("embed", "head")}
    layer_values = max(values.values(), default=0)
    kv_values, longest = _cache_figures(model_path, shape.hidden)
    return Workload(
        layers=manifest.layers,
        layer_values=layer_values,
        embedding_values=ends["embed"],
        head_values=ends["head"],
        tied=shape.tied,
        head_layers=shape.vocabulary * shape.hidden / max(1, layer_values),
        kv_values=kv_values,
        positions=min(longest, PROMPT_POSITIONS + manifest.sampling.max_new_tokens),
        rows=manifest.group_size,
        frame_bytes=_STATE_BYTES * shape.hidden,
    )


def cache_room(model_path: Path, span: Span, memory_bytes: int, value_bytes: int) -> int:
    """Positions, of all rows together, whose keys and values in the layers of a span fit into some memory."""
    kv_values, _ = _cache_figures(model_path, model_shape(model_path).hidden)
    return memory_bytes // (kv_values * value_bytes * len(span))


def cache_bytes(model_path: Path, span: Span, positions: int, value_bytes: int) -> int:
    """Memory that the keys and values of so many positions take in the layers of a span."""
    kv_values, _ = _cache_figures(model_path, model_shape(model_path).hidden)
    return positions * kv_values * value_bytes * len(span)


def longest_sequence(model_path: Path) -> int:
    """Positions of the longest sequence that the model takes, by its configuration."""
    return _cache_figures(model_path, 1)[1]


def _cache_figures(model_path: Path, hidden: int) -> tuple[int, int]:
    """Values of one token's keys and values in a layer, and the model's longest sequence; by the usual names."""
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    heads = config.get("num_attention_heads")
    kv_heads, head = config.get("num_key_value_heads", heads), config.get("head_dim")
    longest = config.get("max_position_embeddings")
    width = hidden
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads > 0 < kv_heads:
        width = kv_heads * (head if isinstance(head, int) and head > 0 else max(1, hidden // heads))
    return 2 * width, longest if isinstance(longest, int) and longest > 0 else 2**31
