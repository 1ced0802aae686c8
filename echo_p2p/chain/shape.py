"""What a model folder holds, from its `config.json` and its layout alone. Reads no weights, needs no torch."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from echo_p2p.errors import ModelError
from echo_p2p.models.layout import is_tied, span_tensors, tensor_entries
from echo_protocols.values import Span


class ModelShape(NamedTuple):
    """The figures of a model that others plan with."""

    layers: int
    vocabulary: int
    tied: bool  # the output matrix is the embedding matrix
    hidden: int
    size_bytes: int  # of the policy: all tensors in bf16


def model_shape(model_path: Path) -> ModelShape:
    """The shape of the model in a folder. Raises ModelError if the folder holds none."""
    config = _text_config(model_path)
    entries = tensor_entries(model_path)
    try:
        layers, vocabulary, hidden = (int(config[k]) for k in ("num_hidden_layers", "vocab_size", "hidden_size"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{model_path / 'config.json'} lacks {error}: name a causal language model") from error
    tied = is_tied(config, entries)
    names = span_tensors(entries, Span(start=0, end=layers, layers=layers), tied=tied)
    return ModelShape(layers, vocabulary, tied, hidden, 2 * sum(entries[name].values for name in names))


def span_bytes(model_path: Path, span: Span, *, value_bytes: int = 4) -> int:
    """Bytes that the weights of a span take, at `value_bytes` a value (4 on a CPU, 2 on a GPU)."""
    entries = tensor_entries(model_path)
    names = span_tensors(entries, span, tied=model_shape(model_path).tied)
    return value_bytes * sum(entries[name].values for name in names)


def _text_config(model_path: Path) -> dict[str, Any]:
    config = _object(model_path / "config.json")
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _object(file: Path) -> dict[str, Any]:  # of JSON
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read ({error}): is its folder a model in Hugging Face format?") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is no JSON object: is its folder a model in Hugging Face format?")
    return value
