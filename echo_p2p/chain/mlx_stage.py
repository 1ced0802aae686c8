"""The stage over mlx-lm, for Apple silicon: one span of a family that it computes as transformers does.

mlx-lm's own module runs; what the span does not host becomes a pass-through, so that names and layer numbers stay.
Knows no network, no sampling, and not how well it agrees: `parity` measures that.
"""

# An mlx array that is not computed yet can only be computed by the thread that made it, and stages change threads:
# whatever outlives a call is computed in it.
# mlx-lm has defaults of its own for what a config.json leaves out, and ignores what it does not know: `_normalised`.

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import _get_classes
from numpy.typing import NDArray

from echo_p2p.chain.lanes import Entered, Lanes
from echo_p2p.chain.mlx_weights import MlxWeights, live_arrays
from echo_p2p.chain.parity import Loader, check_parity
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Bits, TensorUpdate
from echo_p2p.errors import ChainError, ModelError
from echo_p2p.models.layout import span_tensors, tensor_entries
from echo_protocols.values import Span

FAMILIES = frozenset({
    "ernie4_5", "glm4", "granite", "helium", "hunyuan_v1_dense", "llama", "mistral", "mixtral",
    "olmo2", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
})  # fmt: skip
"""The `model_type`s whose parity with transformers the tests hold. gemma3 is known to be wrong in mlx-lm chains."""

MlxDevice = Literal["auto", "cpu", "mps"]


def load_stage(
    model_path: Path,
    span: Span,
    *,
    device: MlxDevice = "auto",
    dtype: mx.Dtype | None = None,
    max_lanes: int = 64,
    max_length: int | None = None,
) -> "MlxStage":
    """Load the tensors of `span`, and no others, from a folder in Hugging Face format.

    `dtype` computes: float32 on a CPU (default), bfloat16 on a GPU. `max_length` bounds a lane's positions (default:
    what the model was made for). Raises ModelError.
    """
    where = _pick_device(device)
    dtype = dtype or (mx.float32 if where == mx.cpu else mx.bfloat16)
    config = _normalised(model_path)
    if config["num_hidden_layers"] != span.layers:
        raise ModelError(f"span {span} is not of {model_path}, which has {config['num_hidden_layers']} layers")
    with mx.stream(where):
        model = _read_model(model_path, config, span, dtype)
    bound = max_length or int(config.get("max_position_embeddings") or 4096)
    return MlxStage(model, span, where, dtype, max_lanes=max_lanes, max_length=bound)


def prove(model_path: Path, span: Span, reference: Loader, *, device: MlxDevice = "auto") -> float:
    """How far mlx is from the reference, at worst, on this device. Raises ModelError if further than tolerated.

    Checked in float32, which shows any wrong formula, and also in bfloat16 where that is what computes.
    """
    worst = 0.0
    for dtype in (mx.float32,) if _pick_device(device) == mx.cpu else (mx.float32, mx.bfloat16):
        load = partial(load_stage, device=device, dtype=dtype)
        worst = max(worst, check_parity(load, reference, model_path, span))
    return worst


class MlxStage:
    """A `Stage` computed by mlx. Keeps one KV cache a lane, bounded as `Lanes` says."""

    def __init__(
        self, model: Any, span: Span, device: Any, dtype: mx.Dtype, *, max_lanes: int, max_length: int
    ) -> None:
        self.span = span
        self.ragged = False
        self._model = model
        self._device = device
        self._dtype = dtype
        self._weights = MlxWeights(model)
        self._lanes = Lanes(lambda: [KVCache() for _ in range(len(span))], most=max_lanes, longest=max_length)
        kind = "cpu" if device == mx.cpu else "gpu"
        self.engine = f"mlx-{version('mlx')}-{kind}-{str(dtype).removeprefix('mlx.core.')}"

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
            for layer, other in zip(state.cache, shared.cache, strict=True):
                for name in ("keys", "values"):
                    new = mx.repeat(getattr(other, name)[:1, :, : other.offset], len(rows), axis=0)
                    if len(rows) < len(state.rows):
                        new = mx.concatenate([getattr(layer, name)[:, :, : other.offset], new])
                    setattr(layer, name, new)
                layer.offset = other.offset
            mx.eval([(layer.keys, layer.values) for layer in state.cache])

    def close(self, lane: int) -> None:
        """Free the lane's KV cache; unknown lanes are no error."""
        self._lanes.close(lane)
        mx.clear_cache()

    def tensors(self) -> Mapping[str, Bits]:
        """The span's tensors by global name, as bf16 bits (copies)."""
        return self._weights.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Write bf16 values into the live weights; lanes keep their KV. Raises WeightsError before anything changes."""
        self._weights.apply(updates)

    @contextmanager
    def _closing(self, lane: int) -> Iterator[None]:
        try:
            with mx.stream(self._device):
                yield
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # of the vendor
            self.close(lane)
            raise ChainError(f"lane {lane} failed on span {self.span} ({error}): replay it elsewhere") from error

    def _compute(
        self, entered: Entered[list[Any]], inputs: NDArray[np.int32] | NDArray[np.float32]
    ) -> NDArray[np.float32]:
        here = entered.lane.cache
        if entered.kept is not None:
            index = mx.array(entered.kept)
            for layer in here:
                layer.keys, layer.values = layer.keys[index], layer.values[index]
        caches = [here[min(max(i - self.span.start, 0), len(here) - 1)] for i in range(self.span.layers)]
        carried = mx.array(inputs) if self.span.first else mx.array(inputs).astype(self._dtype)
        # if last, (rows, vocabulary) of the model's own forward, which may scale its logits
        outputs = self._model(carried, caches)[:, -1] if self.span.last else self._model.model(carried, caches)
        outputs = outputs.astype(mx.float32)
        mx.eval(outputs, [(layer.keys, layer.values) for layer in here])
        return np.array(outputs)

    def _check(self, rows: int, inputs: NDArray[np.int32] | NDArray[np.float32]) -> None:
        arguments = self._model.args
        shape = (rows, inputs.shape[1] if inputs.ndim > 1 else 0, arguments.hidden_size)
        if inputs.shape != (shape[:2] if self.span.first else shape):
            raise ChainError(f"inputs of shape {inputs.shape} do not fit span {self.span} of {arguments.model_type}")
        if self.span.first and inputs.size and not 0 <= inputs.min() <= inputs.max() < arguments.vocab_size:
            raise ChainError(f"a token id is outside the vocabulary of {arguments.vocab_size}: use the run's tokenizer")


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


def _pick_device(device: str) -> Any:
    if device == "mps" and not mx.is_available(mx.gpu):
        raise ModelError("mlx has no GPU here, so inference.device='mps' can't be had: choose 'auto' or 'cpu'")
    return mx.gpu if device != "cpu" and mx.is_available(mx.gpu) else mx.cpu


def _normalised(model_path: Path) -> dict[str, Any]:
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


def _read_model(model_path: Path, config: dict[str, Any], span: Span, dtype: mx.Dtype) -> Any:
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
