"""One span of a decoder as transformers builds it: read from a folder, or of zeros. Knows no lane and no cache.

The family's own class is subclassed; what the span does not host becomes a pass-through without parameters.
"""

# transformers keeps no public list of causal classes by config other than this mapping.

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from echo_p2p.errors import ModelError
from echo_p2p.models.layout import span_tensors, tensor_entries, tensor_shapes
from echo_protocols.values import Span

_VENDOR_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, OSError)


class _PassThrough(nn.Module):
    """Stands where another stage hosts a module."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def _stage_class(config: Any, span: Span) -> Any:
    """The family's causal class, hosting only `span`."""
    try:
        family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ModelError(f"transformers has no causal language model of type {config.model_type!r}") from error

    def initialise(self: Any, config: Any) -> None:
        family.__init__(self, config)
        inner = self.base_model
        if len(span) == span.layers:
            return  # whole, so its layout does not matter
        if not {"layers", "embed_tokens", "norm"} <= {name for name, _ in inner.named_children()}:
            raise ModelError(f"{config.model_type} is not laid out as embed_tokens, layers, norm: serve it whole")
        for i in range(span.layers):
            if not span.start <= i < span.end:
                inner.layers[i] = _PassThrough()
        if not span.first and hasattr(inner, "embedding_multiplier"):
            inner.embedding_multiplier = 1.0  # granite scales whatever enters; the first stage has done that
        if not span.first and not (span.last and config.tie_word_embeddings):
            inner.embed_tokens = _PassThrough()
        if not span.last:
            inner.norm, self.lm_head = _PassThrough(), _PassThrough()

    body: dict[str, Any] = {"__init__": initialise, "__module__": family.__module__}
    if not span.last:
        body["_tied_weights_keys"] = {}  # there is no output matrix to tie
    return type(family.__name__, (family,), body)


def read_config(model_path: Path) -> Any:
    """The configuration of a folder, as transformers reads it. Raises ModelError."""
    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model_path} holds no readable config.json ({error}): name a Hugging Face folder") from error
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(f"{model_path} is of type {config.model_type!r}, which is no decoder of text: name another")
    return config


def build_model(model_path: Path, config: Any, span: Span, dtype: torch.dtype, *, weights: bool) -> Any:
    """The family's causal class with the tensors of a span alone, on the CPU: as stored, or zero. Raises ModelError."""
    stage_class = _stage_class(config, span)
    with _quiet():
        try:
            state = _stored(model_path, config, span) if weights else _zeros(model_path, config, span, stage_class)
            read: Callable[..., Any] = stage_class.from_pretrained
            model, report = read(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
        except _VENDOR_FAILURES as error:
            cure = "name another model, or free memory"
            raise ModelError(f"transformers can't build span {span} of {model_path} ({error}): {cure}") from error
    absent = sorted(report["missing_keys"]) + sorted(report["mismatched_keys"])
    if absent:
        raise ModelError(f"{model_path} lacks {absent[0]!r} and {len(absent) - 1} more: fetch the model again")
    return model


def _stored(model_path: Path, config: Any, span: Span) -> dict[str, torch.Tensor]:
    entries = tensor_entries(model_path)
    names = span_tensors(entries, span, tied=bool(config.tie_word_embeddings))
    with ExitStack() as stack:
        try:
            files = {f: stack.enter_context(safe_open(f, framework="pt")) for f in {entries[n].file for n in names}}
            return {name: files[entries[name].file].get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights of {model_path} can't be read ({error}): fetch the model again") from error


def _zeros(model_path: Path, config: Any, span: Span, stage_class: Any) -> dict[str, torch.Tensor]:
    """In the place of what is stored. The layout may come from a stranger: nothing larger than it says is allocated."""
    shapes = tensor_shapes(model_path)
    names = span_tensors(shapes, span, tied=bool(config.tie_word_embeddings))
    with torch.device("meta"):
        hosted = sum(parameter.numel() for parameter in stage_class(config).parameters())
    if hosted > sum(prod(shapes[name]) for name in names):
        raise ModelError(f"{model_path} has a config.json of larger tensors than its layout says: name another model")
    return {name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar on a screen that is not ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
