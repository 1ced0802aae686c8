"""One span of a model as a module of mlx-lm, read from a folder in Hugging Face format. Computes nothing.

The family's own class is made; what the span does not host becomes a pass-through, so that names and layer numbers
stay. Refuses what mlx-lm is known to compute otherwise than transformers.
"""

# mlx-lm has defaults of its own for what a config.json leaves out, and ignores what it does not know: `read_config`.

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import _get_classes

from echo_p2p.chain.mlx_weights import live_arrays
from echo_p2p.chain.shape import model_shape
from echo_p2p.errors import ModelError
from echo_p2p.models.layout import span_tensors, tensor_entries
from echo_protocols.values import Span

FAMILIES = frozenset({
    "ernie4_5", "glm4", "granite", "helium", "hunyuan_v1_dense", "llama", "mistral", "mixtral",
    "olmo2", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
})  # fmt: skip
"""The `model_type`s whose parity with transformers the tests hold. gemma3 is known to be wrong in mlx-lm chains."""


class _PassThrough(nn.Module):  # type: ignore[misc]
    """Stands where another stage hosts a module."""

    use_sliding = False

    def __call__(self, carried: mx.array, *_: Any, **__: Any) -> mx.array:
        return carried


class _Head(nn.Linear):  # type: ignore[misc]
    """The output matrix, of the last position only."""

    def __call__(self, hidden: mx.array) -> mx.array:
        logits: mx.array = super().__call__(hidden[:, -1:])
        return logits


class _TiedEmbedding(nn.Embedding):  # type: ignore[misc]
    """Likewise, where it is the embedding matrix; inputs are embedded here only if the span is the first one."""

    embeds = True

    def __call__(self, carried: mx.array) -> mx.array:
        return super().__call__(carried) if self.embeds else carried

    def as_linear(self, hidden: mx.array) -> mx.array:
        logits: mx.array = super().as_linear(hidden[:, -1:])
        return logits


def read_config(model_path: Path) -> dict[str, Any]:
    """The model's configuration in the names that mlx-lm reads. Raises ModelError for what it would compute wrongly."""
    shape = model_shape(model_path)
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    if (family := config.get("model_type")) not in FAMILIES:
        raise ModelError(f"the mlx engine is not proven for {family!r}: choose --engine torch, which computes it")
    sliding = config.get("sliding_window") and config.get("use_sliding_window", not str(family).startswith("qwen"))
    if sliding or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError(f"{model_path} has a sliding window, which the mlx engine has not: choose --engine torch")
    if "quantization" in config or "quantization_config" in config:
        raise ModelError(f"{model_path} is quantised, and a policy is bf16: name the model that it was made from")
    rope = config.get("rope_parameters") or {}
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    if "rope_theta" not in config:
        raise ModelError(f"{model_path / 'config.json'} names no rope_theta, which mlx-lm would guess: add it")
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    return config | {"tie_word_embeddings": shape.tied}


def read_model(model_path: Path, config: dict[str, Any], span: Span, dtype: mx.Dtype) -> Any:
    """mlx-lm's module of this configuration, hosting only `span`, its weights a policy held in `dtype`.

    Raises ModelError.
    """
    try:
        model = _opened_model(model_path, config, span)
        live_arrays(model, dtype)
        # also the tables that are no parameters
        mx.eval(model.filter_and_map(lambda _module, _name, value: isinstance(value, dict | list | mx.array)))
    except (ValueError, RuntimeError, KeyError, TypeError) as error:  # of the vendor
        raise ModelError(f"mlx-lm can't read span {span} of {model_path} ({error}): choose --engine torch") from error
    return model.eval()


def _opened_model(model_path: Path, config: dict[str, Any], span: Span) -> Any:
    """The span, with nothing read yet; what is read later is held by the model alone."""
    entries = tensor_entries(model_path)
    names = span_tensors(entries, span, tied=config["tie_word_embeddings"])
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    files: dict[Path, Any] = {file: mx.load(str(file)) for file in {entries[name].file for name in names}}
    stored = {_moved(name, -span.start): files[entries[name].file][name] for name in names}
    if hasattr(model, "sanitize"):  # it looks for what it renames in layer 0
        stored = model.sanitize(stored)
    _leave_out(model, span)
    model.load_weights([(_moved(name, span.start), array) for name, array in stored.items()])
    return model


def _moved(name: str, by: int) -> str:
    """The name of the same tensor `by` layers further up."""
    before, layers, after = name.partition(".layers.")
    number, dot, rest = after.partition(".")
    return f"{before}{layers}{int(number) + by}{dot}{rest}" if layers else name


def _leave_out(model: Any, span: Span) -> None:
    """Replace what the span does not host, before any of it is allocated."""
    inner, arguments = model.model, model.args
    for i in (i for i in range(span.layers) if not span.start <= i < span.end):
        inner.layers[i] = _PassThrough()
    if span.last and "lm_head" not in model:
        inner.embed_tokens = _TiedEmbedding(arguments.vocab_size, arguments.hidden_size)
        inner.embed_tokens.embeds = span.first
    elif not span.first:
        inner.embed_tokens = _PassThrough()
    if not span.first and hasattr(inner, "embedding_multiplier"):
        inner.embedding_multiplier = 1.0  # granite scales whatever enters; the first stage has done that
    if not span.last:
        inner.norm = _PassThrough()
    if "lm_head" in model:
        bias = "bias" in model.lm_head
        model.lm_head = _Head(arguments.hidden_size, arguments.vocab_size, bias=bias) if span.last else _PassThrough()
