"""The weights of a running torch module, read and written as bit patterns. Knows no model family and no release.

Writing is in place and exact, and happens whole or not at all.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import nn

from echo_p2p.chain.layouts import Layout, Shape, UnsignedBits, check_layout, check_update
from echo_p2p.chain.stage import Bits, TensorUpdate
from echo_p2p.errors import WeightsError

_BITS: dict[torch.dtype, tuple[UnsignedBits, torch.dtype]] = {
    torch.bfloat16: (np.dtype(np.uint16), torch.int16),
    torch.float16: (np.dtype(np.uint16), torch.int16),
    torch.float32: (np.dtype(np.uint32), torch.int32),
}
"""How the values of a policy are carried: by numpy without a sign, by torch with one."""


class LiveWeights(Protocol):
    """What a stage's weights are changed through: the policy's tensors themselves, or an adapter's."""

    def tensors(self) -> dict[str, Bits]:
        """Copies of the published tensors."""

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change them in place. Raises WeightsError before anything changes."""


class TorchWeights:
    """Published tensors that lie in live ones as `layout` says. Satisfies `LiveWeights`.

    `policy` is the precision that the policy is defined in; live tensors hold it exactly, as float32 or as itself.
    """

    def __init__(
        self, live: Mapping[str, torch.Tensor], layout: Layout, *, policy: torch.dtype = torch.bfloat16
    ) -> None:
        self._flat = {name: tensor.detach().view(-1) for name, tensor in live.items()}
        check_layout(layout, shapes_of(live))
        for name, tensor in live.items():
            if tensor.dtype not in (policy, torch.float32):
                raise WeightsError(f"{name!r} in {tensor.dtype} can't hold a policy in {policy}: load it in float32")
        self.layout = layout
        self._policy = policy
        self._bits, self._signed = _BITS[policy]

    def view(self, name: str) -> torch.Tensor:
        """A published tensor, as a view of the live one."""
        place = self.layout[name]
        return self._flat[place.live].as_strided(place.shape, place.strides, place.offset)

    def tensors(self) -> dict[str, Bits]:
        """Copies of the published tensors."""
        return {name: self._read(name) for name in self.layout}

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Write updates into the live tensors. Raises WeightsError before anything changes."""
        for name, update in updates.items():
            check_update(self.layout, name, update, self._bits)
        with torch.no_grad():
            for name, update in updates.items():
                self._write(name, update)

    def _read(self, name: str) -> Bits:
        live = self.view(name)
        if self._policy == torch.bfloat16 and live.dtype == torch.float32:  # its upper half, NaN or not
            values = (live.view(torch.int32) >> 16).to(torch.int16)
        else:
            values = live.to(self._policy, copy=True, memory_format=torch.contiguous_format).view(self._signed)
        bits: Bits = values.contiguous().cpu().numpy().view(self._bits)
        return bits

    def _write(self, name: str, update: TensorUpdate) -> None:
        values = _shared(update.values).view(self._signed).view(self._policy)
        if update.index is None:
            self.view(name).copy_(values)
            return
        place = self.layout[name]
        flat = self._flat[place.live]
        positions = place.positions(update.index)
        if flat.is_cpu:  # numpy scatters faster than torch, by a fifth to a third
            word = _BITS[flat.dtype][1]
            flat.view(word).numpy()[positions] = values.to(flat.dtype).view(word).numpy()
        else:
            flat[_shared(positions).to(flat.device)] = values.to(flat.device, flat.dtype)


def live_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Make a loaded module's weights a policy: rounded to bf16, held in `dtype`, and off any mapped file.

    A tied matrix counts once, under its first name.
    """
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            rounded = parameter.data.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
            parameter.data = rounded.to(dtype)
            parameter.requires_grad_(False)
    return parameters


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _shared(array: np.ndarray[Shape, np.dtype[np.generic]]) -> torch.Tensor:
    """The array's own memory; a copy of what torch has no tensors of: what is read-only, or runs backwards."""
    fits = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if fits else array.copy())
