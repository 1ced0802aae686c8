"""The generic stage over Hugging Face transformers: one span of any decoder family. Knows no network and no sampling.

Names, layer numbers and the family's own forward stay, so a chain computes the whole model's bits.
"""

# The policy is bf16 by definition: weights are rounded on loading, whatever precision then computes with them.

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from echo_p2p.chain.adapters import adapted
from echo_p2p.chain.lanes import Entered, Lane, Lanes
from echo_p2p.chain.layouts import experts_apart
from echo_p2p.chain.live_weights import LiveWeights, TorchWeights, live_parameters, shapes_of
from echo_p2p.chain.stage import Bits, TensorUpdate, check_inputs
from echo_p2p.chain.torch_cache import LaneCache, is_ragged, use_grouped_attention
from echo_p2p.chain.torch_model import build_model, read_config
from echo_p2p.chain.torch_products import use_onednn
from echo_p2p.errors import ModelError
from echo_protocols.adapter import AdapterSpec
from echo_protocols.values import Span

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda", "mps"]


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
    config = read_config(model_path)
    if config.num_hidden_layers != span.layers:
        raise ModelError(f"span {span} is not of {model_path}, which has {config.num_hidden_layers} layers")
    model = build_model(model_path, config, span, dtype, weights=weights)
    try:
        model = model.to(where).eval()
    except RuntimeError as error:  # as torch says that there is no room
        raise ModelError(f"span {span} of {model_path} can't be moved to {where} ({error}): free its memory") from error
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
        use_onednn(model)
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
        config = self._model.config
        check_inputs(self.span, len(rows), inputs, hidden=config.hidden_size, vocabulary=config.vocab_size)
        return self._lanes.compute(lane, rows, positions, inputs, self._compute)

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """As `Stage.join` says. Raises ChainError; a lane whose computation failed is closed."""
        self._lanes.share(lane, rows, source, _copy)

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


def _copy(lane: Lane[LaneCache], shared: Lane[LaneCache], count: int) -> None:
    shared.cache.stand_at(shared.longest)
    lane.cache.stand_at(lane.longest)
    lane.cache.join(shared.cache, held=len(lane.rows) - count, rows=count)


def free_on_gpu() -> int | None:
    """Bytes that are free on the NVIDIA GPU that a stage would take; None if torch has none."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def _pick_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
