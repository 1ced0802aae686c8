"""Where a policy's tensors lie in vLLM's module: projections fused by rows, an embedding that is padded. Knows no vllm.

A layout is only believed once every tensor reads back as the checkpoint has it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from echo_p2p.chain.layouts import Place, Shape
from echo_p2p.chain.live_weights import TorchWeights, shapes_of
from echo_p2p.chain.shape import model_shape
from echo_p2p.errors import ModelError, WeightsError
from echo_p2p.models.layout import span_tensors, tensor_entries
from echo_protocols.values import Span

_PADDED = ("model.embed_tokens.weight", "lm_head.weight")


def whole_weights(model: nn.Module, fused: Mapping[str, Sequence[str]], model_path: Path) -> TorchWeights:
    """The policy in a loaded module, proven against its checkpoint. `fused` says which projections lie in one matrix.

    Raises ModelError for a module that keeps its weights otherwise: packed, quantised, or experts in stacks.
    """
    files = _Checkpoint(model_path)
    live = {name: parameter.data for name, parameter in _parameters(model).items()}
    for name in _PADDED:
        if name in live and name in files.shapes:
            live[name] = live[name][: files.shapes[name][0]]
    try:
        weights = TorchWeights(live, _layout(files.shapes, shapes_of(live), fused))
        for name in files.shapes:
            if not torch.equal(weights.view(name).to(torch.bfloat16).cpu(), files.read(name)):
                raise WeightsError(f"{name} is not where it was looked for")
    except (WeightsError, RuntimeError) as error:
        raise ModelError(
            f"vllm keeps the weights of {model_path} in a way that they can't be changed in ({error}): "
            "choose --engine torch"
        ) from error
    return weights


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The live parameters, rounded to bf16 as a policy is; one that is tied to another counts once."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        raise ModelError(f"vllm holds weights in {dtypes}, and a policy is bf16: name the model that it was made from")
    distinct: dict[int, str] = {}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if distinct.setdefault(parameter.data_ptr(), name) == name:
                parameter.copy_(parameter.to(torch.bfloat16))
    return {name: parameters[name] for name in distinct.values()}


def _layout(
    published: Mapping[str, Shape], live: Mapping[str, Shape], fused: Mapping[str, Sequence[str]]
) -> dict[str, Place]:
    """Raises WeightsError for a tensor that has no place."""
    layout: dict[str, Place] = {}
    for name, shape in live.items():
        if name in published:
            layout[name] = Place.whole(name, shape)
            continue
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        row = 0
        for part in fused.get(last, ()):
            own = f"{parent}.{part}.{kind}"
            if own not in published:
                raise WeightsError(f"{name} is no tensor of the checkpoint")
            layout[own] = Place.whole(name, shape).rows(row, published[own][0])
            row += published[own][0]
    if missing := published.keys() - layout.keys():
        raise WeightsError(f"{min(missing)} is in no parameter")
    return layout


class _Checkpoint:
    """The tensors of a model's folder by their published names."""

    def __init__(self, model_path: Path) -> None:
        shape, entries = model_shape(model_path), tensor_entries(model_path)
        names = span_tensors(entries, Span(start=0, end=shape.layers, layers=shape.layers), tied=shape.tied)
        self._files = {file: safe_open(file, "pt") for file in {entries[name].file for name in names}}
        self._where: dict[str, Any] = {name: self._files[entries[name].file] for name in names}
        self.shapes: dict[str, Shape] = {name: tuple(self._where[name].get_slice(name).get_shape()) for name in names}

    def read(self, name: str) -> torch.Tensor:
        """As bf16."""
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor.to(torch.bfloat16)
