"""The stage over mlx-lm, for Apple silicon: one span of a family that it computes as transformers does.

Knows no network, no sampling, no file (`mlx_model` reads those), and not how well it agrees: `parity` measures that.
"""

# An mlx array that is not computed yet can only be computed by the thread that made it, and stages change threads:
# whatever outlives a call is computed in it.

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from echo_p2p.chain.lanes import Entered, Lane, Lanes
from echo_p2p.chain.mlx_cache import LaneCache, is_ragged
from echo_p2p.chain.mlx_model import read_config, read_model
from echo_p2p.chain.mlx_weights import MlxWeights
from echo_p2p.chain.parity import Loader, check_parity
from echo_p2p.chain.stage import Bits, TensorUpdate, check_inputs
from echo_p2p.errors import ModelError
from echo_protocols.values import Span

MlxDevice = Literal["auto", "cpu", "mps"]


def load_stage(
    model_path: Path,
    span: Span,
    *,
    device: MlxDevice = "auto",
    dtype: mx.Dtype | None = None,
    max_lanes: int = 64,
    max_length: int | None = None,
    kv_positions: int | None = None,
) -> "MlxStage":
    """Load the tensors of `span`, and no others, from a folder in Hugging Face format.

    `dtype` computes: float32 on a CPU (default), bfloat16 on a GPU. `max_length` bounds a lane's positions (default:
    what the model was made for), `kv_positions` those of all lanes (default: by lanes alone). Raises ModelError.
    """
    where = _pick_device(device)
    dtype = dtype or (mx.float32 if where == mx.cpu else mx.bfloat16)
    config = read_config(model_path)
    if config["num_hidden_layers"] != span.layers:
        raise ModelError(f"span {span} is not of {model_path}, which has {config['num_hidden_layers']} layers")
    with mx.stream(where):
        model = read_model(model_path, config, span, dtype)
    bound = max_length or int(config.get("max_position_embeddings") or 4096)
    return MlxStage(
        model,
        span,
        where,
        dtype,
        ragged=is_ragged(config),
        max_lanes=max_lanes,
        max_length=bound,
        kv_positions=kv_positions,
    )


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
        self,
        model: Any,
        span: Span,
        device: Any,
        dtype: mx.Dtype,
        *,
        ragged: bool,
        max_lanes: int,
        max_length: int,
        kv_positions: int | None = None,
    ) -> None:
        self.span = span
        self.ragged = ragged
        self._model = model
        self._device = device
        self._dtype = dtype
        self._weights = MlxWeights(model)
        self._lanes = Lanes(
            lambda: LaneCache(len(span)),
            most=max_lanes,
            longest=max_length,
            kv_positions=kv_positions,
            ragged=ragged,
        )
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
        sizes = self._model.args
        check_inputs(self.span, len(rows), inputs, hidden=sizes.hidden_size, vocabulary=sizes.vocab_size)
        with mx.stream(self._device):
            return self._lanes.compute(lane, rows, positions, inputs, self._compute)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """As `Stage.join` says. Raises ChainError; a lane whose computation failed is closed."""
        with mx.stream(self._device):
            self._lanes.share(lane, rows, source, _copy)

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

    def _compute(
        self, entered: Entered[LaneCache], inputs: NDArray[np.int32] | NDArray[np.float32]
    ) -> NDArray[np.float32]:
        cache = entered.lane.cache
        if entered.kept is not None:
            cache.select(entered.kept)
        cache.stand_at(entered.lane.lengths)
        last = len(self.span) - 1  # what stands for layers elsewhere only says how long the rows are
        caches = [cache.layers[min(max(i - self.span.start, 0), last)] for i in range(self.span.layers)]
        carried = mx.array(inputs) if self.span.first else mx.array(inputs).astype(self._dtype)
        # if last, (rows, vocabulary) of the model's own forward, which may scale its logits
        outputs = self._model(carried, caches)[:, -1] if self.span.last else self._model.model(carried, caches)
        outputs = outputs.astype(mx.float32)
        mx.eval(outputs, cache.arrays())
        return np.array(outputs)


def _copy(lane: Lane[LaneCache], shared: Lane[LaneCache], count: int) -> None:
    shared.cache.stand_at(shared.lengths)
    lane.cache.stand_at(lane.lengths)
    lane.cache.join(shared.cache, held=len(lane.rows) - count, rows=count)
    mx.eval(lane.cache.arrays())


def _pick_device(device: str) -> Any:
    if device == "mps" and not mx.is_available(mx.gpu):
        raise ModelError("mlx has no GPU here, so inference.device='mps' can't be had: choose 'auto' or 'cpu'")
    return mx.gpu if device != "cpu" and mx.is_available(mx.gpu) else mx.cpu
