"""The generic stage over Hugging Face transformers: one span of any decoder family. Knows no network and no sampling.

The family's own class is subclassed; what the span does not host becomes a pass-through without parameters. Names,
layer numbers and the family's own forward stay, so a chain computes the whole model's bits.
"""

# transformers keeps no public list of causal classes by config other than this mapping.
# The policy is bf16 by definition: weights are rounded on loading, whatever precision then computes with them.

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from echo_p2p.chain.adapters import adapted
from echo_p2p.chain.lanes import Entered, Lanes
from echo_p2p.chain.layouts import experts_apart
from echo_p2p.chain.live_weights import LiveWeights, TorchWeights, live_parameters, shapes_of
from echo_p2p.chain.stage import Bits, TensorUpdate
from echo_p2p.chain.torch_cache import LaneCache, is_ragged, use_grouped_attention
from echo_p2p.errors import ChainError, ModelError
from echo_p2p.models.layout import span_tensors, tensor_entries, tensor_shapes
from echo_protocols.adapter import AdapterSpec
from echo_protocols.values import Span

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda", "mps"]

_VENDOR_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, OSError)


def load_stage(
    model_path: Path,
    span: Span,
    *,
    device: Device = "auto",
    dtype: torch.dtype | None = None,
    max_lanes: int = 64,
    max_length: int | None = None,
    kv_positions: int | None = None,
    weights: bool = True,
) -> "TorchStage":
    """Load the tensors of `span`, and no others, from a folder in Hugging Face format.

    Without `weights` all of them are zero until they are applied: the folder needs no more than the layout of its
    tensors. `dtype` computes: float32 on a CPU (default), bfloat16 elsewhere. `max_length` bounds a lane's positions
    (default: what the model was made for), `kv_positions` those of all lanes (default: by lanes alone). Raises
    ModelError.
    """
    where = torch.device(_pick_device() if device == "auto" else device)
    dtype = dtype or (torch.float32 if where.type == "cpu" else torch.bfloat16)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"a stage can't compute in {dtype}: choose float32 or bfloat16, which hold a bf16 policy")
    config = _read_config(model_path)
    if config.num_hidden_layers != span.layers:
        raise ModelError(f"span {span} is not of {model_path}, which has {config.num_hidden_layers} layers")
    model = _read_model(model_path, config, span, dtype, weights=weights).to(where).eval()
    use_grouped_attention(model)
    bound = max_length or int(getattr(config, "max_position_embeddings", 4096))
    logger.debug("loaded span %s of %s on %s in %s", span, model_path, where, dtype)
    return TorchStage(model, span, dtype, max_lanes=max_lanes, max_length=bound, kv_positions=kv_positions)


class TorchStage:
    """A `Stage` computed by torch. Keeps one KV cache a lane, bounded as `Lanes` says."""

    def __init__(
        self,
        model: Any,
        span: Span,
        dtype: torch.dtype,
        *,
        max_lanes: int,
        max_length: int,
        kv_positions: int | None = None,
    ) -> None:
        self.span = span
        self.ragged = is_ragged(model.config)
        self._model = model
        self._lanes = Lanes(
            lambda: LaneCache(model.config, span),
            most=max_lanes,
            longest=max_length,
            kv_positions=kv_positions,
            ragged=self.ragged,
        )
        live = live_parameters(model, dtype)
        self._base = TorchWeights(live, experts_apart(shapes_of(live), model.config.model_type))
        self._weights: LiveWeights = self._base
        self._device: torch.device = model.device
        version = torch.__version__.split("+")[0]
        self.engine = f"torch-{version}-{self._device.type}-{str(dtype).removeprefix('torch.')}"
        self._dtype = dtype

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """As `Stage.forward` says. Raises ChainError; a lane whose computation failed is closed."""
        self._check(len(rows), inputs)
        entered = self._lanes.enter(lane, rows, positions, inputs.shape[1])
        with self._closing(lane):
            outputs = self._compute(entered, entered.in_cache_order(inputs))
        entered.lane.lengths += inputs.shape[1]
        return entered.in_call_order(outputs)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """As `Stage.join` says. Raises ChainError; a lane whose computation failed is closed."""
        state, shared = self._lanes.join(lane, rows, source)
        with self._closing(lane):
            shared.cache.stand_at(shared.longest)
            state.cache.stand_at(state.longest)
            state.cache.join(shared.cache, held=len(state.rows) - len(rows), rows=len(rows))

    def close(self, lane: int) -> None:
        """Free the lane's KV cache; unknown lanes are no error."""
        self._lanes.close(lane)

    def tensors(self) -> Mapping[str, Bits]:
        """The span's tensors by global name, as bf16 bits (copies); once it is adapted, the adapter's."""
        return self._weights.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Write bf16 values into the live weights; lanes keep their KV. Raises WeightsError before anything changes."""
        self._weights.apply(updates)

    def adapt(self, spec: AdapterSpec, *, merged: bool) -> None:
        """From now on the tensors are an adapter's, at first zero, and the base stays as it is.

        `merged` makes a step as fast as without one and a switch slower. Raises ModelError if the span has no such
        modules, or has one already.
        """
        if self._weights is not self._base:
            raise ModelError(f"span {self.span} has an adapter already: load the stage anew for another one")
        self._weights = adapted(self._model, self._base, spec, merged=merged)

    @contextmanager
    def _closing(self, lane: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # of the vendor
            self._lanes.close(lane)
            raise ChainError(f"lane {lane} failed on span {self.span} ({error}): replay it elsewhere") from error

    def _compute(
        self, entered: Entered[LaneCache], inputs: NDArray[np.int32] | NDArray[np.float32]
    ) -> NDArray[np.float32]:
        lane, length = entered.lane, inputs.shape[1]
        cache, longest = lane.cache, lane.longest
        if entered.kept is not None:
            cache.select(entered.kept)
        cache.stand_at(longest)
        with torch.inference_mode():
            common: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
            if lane.ragged:
                lengths = torch.from_numpy(lane.lengths).to(self._device, torch.int64)[:, None]  # (rows, 1)
                common["position_ids"] = lengths + torch.arange(length, device=self._device)  # (rows, length)
                slots = torch.arange(longest + length, device=self._device)
                common["attention_mask"] = slots >= longest - lengths  # (rows, slots): rows are padded on the left
            else:
                common["position_ids"] = torch.arange(longest, longest + length, device=self._device)[None]
            if self.span.first:
                common["input_ids"] = torch.tensor(inputs, dtype=torch.int64).to(self._device)
            else:
                common["inputs_embeds"] = torch.tensor(inputs).to(self._device, self._dtype)
            if self.span.last:  # the model's own forward: it may scale or cap its logits
                outputs = self._model(**common, logits_to_keep=1).logits[:, -1]  # (rows, vocabulary)
            else:
                outputs = self._model.base_model(**common).last_hidden_state  # (rows, length, hidden)
            return outputs.float().cpu().numpy()

    def _check(self, rows: int, inputs: NDArray[np.int32] | NDArray[np.float32]) -> None:
        config = self._model.config
        shape = (rows, inputs.shape[1] if inputs.ndim > 1 else 0, config.hidden_size)
        if inputs.shape != (shape[:2] if self.span.first else shape):
            raise ChainError(f"inputs of shape {inputs.shape} do not fit span {self.span} of {config.model_type}")
        if self.span.first and inputs.size and not 0 <= inputs.min() <= inputs.max() < config.vocab_size:
            raise ChainError(f"a token id is outside the vocabulary of {config.vocab_size}: use the run's tokenizer")


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


def _read_config(model_path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model_path} holds no readable config.json ({error}): name a Hugging Face folder") from error
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(f"{model_path} is of type {config.model_type!r}, which is no decoder of text: name another")
    return config


def _read_model(model_path: Path, config: Any, span: Span, dtype: torch.dtype, *, weights: bool) -> Any:
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


def _pick_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
