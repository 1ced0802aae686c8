"""The weights of a running torch module, read and written as bf16 bits. Knows no model family and no release.

Writing is in place and exact in float32 and bfloat16 alike, and happens whole or not at all.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from echo_p2p.chain.stage import Bits, TensorUpdate
from echo_p2p.errors import WeightsError


def live_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Make a loaded module's weights a policy: rounded to bf16, held in `dtype`, and off any mapped file.

    A tied matrix counts once, under its first name.
    """
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.data = parameter.data.to(torch.bfloat16, copy=True).to(dtype)
            parameter.requires_grad_(False)
    return parameters


def read_bits(parameters: Mapping[str, nn.Parameter]) -> dict[str, Bits]:
    """Copies of all tensors."""
    return {name: _to_bits(parameter) for name, parameter in parameters.items()}


def write_bits(parameters: Mapping[str, nn.Parameter], updates: Mapping[str, TensorUpdate]) -> None:
    """Write updates into live tensors. Raises WeightsError before anything changes."""
    for name, update in updates.items():
        _check(parameters, name, update)
    with torch.no_grad():
        for name, update in updates.items():
            live = parameters[name].data
            values = _from_bits(update.values).to(live.device, live.dtype)
            if update.index is None:
                live.copy_(values)
            else:
                live.view(-1)[torch.tensor(update.index).to(live.device)] = values


def _check(parameters: Mapping[str, nn.Parameter], name: str, update: TensorUpdate) -> None:
    if name not in parameters:
        raise WeightsError(f"tensor {name!r} is not of this span: fetch the parts of this span only")
    index, values, live = update.index, update.values, parameters[name]
    if index is None:
        fits = values.shape == tuple(live.shape)
    elif index.ndim == 1 and values.shape == index.shape:
        fits = not index.size or bool(index.min() >= 0 and index.max() < live.numel())
    else:
        fits = False
    if not fits or values.dtype != np.uint16:
        raise WeightsError(f"the update of {name!r} does not fit its shape {tuple(live.shape)}: fetch it again")


def _to_bits(parameter: torch.Tensor) -> Bits:
    bits: Bits = parameter.detach().to(torch.bfloat16, copy=True).view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def _from_bits(bits: Bits) -> torch.Tensor:
    return torch.tensor(bits.view(np.int16)).view(torch.bfloat16)  # copies, for `bits` may be read-only
