"""An adapter's weights in a live torch stage, merged into the base's matrices or kept beside them.

Published and applied are A and B alone, by PEFT's names; the base never changes. Until a first release both are zero,
so that the stage is the base. Knows no release and no training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echo_p2p.chain.layouts import same_layout
from echo_p2p.chain.live_weights import LiveWeights, TorchWeights, shapes_of
from echo_p2p.chain.stage import Bits, TensorUpdate
from echo_p2p.errors import ModelError
from echo_protocols.adapter import AdapterSpec, adapter_names


def adapted(root: nn.Module, base: TorchWeights, spec: AdapterSpec, *, merged: bool) -> LiveWeights:
    """An adapter's weights in a module whose own are `base`. Raises ModelError."""
    return MergedAdapter(base, spec) if merged else SeparateAdapter(root, base, spec)


@dataclass(frozen=True, slots=True)
class _Factors:
    """The adapter of one module."""

    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (out, rank)

    def named(self, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from zip(adapter_names(module), (self.a, self.b), strict=True)


class MergedAdapter:
    """The matrices of the live weights are base + scale · B · A, in their own precision. Satisfies `LiveWeights`.

    Costs nothing in a step, and a bf16 copy of the base's adapted matrices. A matrix is computed anew from the base
    when its A or B changes, in float32, so that nothing adds up; with B = 0 it is the base bit for bit.

    Of an adapter's policy the base, A and B are bf16, and not their sum: a trainer and a `SeparateAdapter` compute it
    unrounded, and much of what an adapter adds is less than a bf16 unit of the base. So float32 matrices keep the sum
    as it is; bfloat16 ones lose what they can't hold: keep the adapter beside the base where that matters.
    """

    def __init__(self, base: TorchWeights, spec: AdapterSpec) -> None:
        self._scale = spec.scale
        modules = _adapted(spec, base)
        self._matrices = {module: base.view(f"{module}.weight") for module in modules}
        self._base = {module: matrix.to(torch.bfloat16, copy=True) for module, matrix in self._matrices.items()}
        self._factors = {module: _factors(matrix, spec.rank) for module, matrix in self._matrices.items()}
        self._weights = _weights_of(self._factors)

    def tensors(self) -> dict[str, Bits]:
        """Copies of all A and B."""
        return self._weights.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change A and B, then the matrices that they belong to. Raises WeightsError before anything changes."""
        self._weights.apply(updates)
        with torch.no_grad():
            for module, factors in self._factors.items():
                if not updates.keys().isdisjoint(adapter_names(module)):
                    self._merge(module, factors)

    def _merge(self, module: str, factors: _Factors) -> None:
        matrix, base = self._matrices[module], self._base[module]
        sums = matrix.copy_(base) if matrix.dtype == torch.float32 else base.float()
        if factors.b.count_nonzero():  # adding 0 would turn -0 into +0
            sums.addmm_(factors.b, factors.a, alpha=self._scale)
        if sums is not matrix:
            matrix.copy_(sums)


class SeparateAdapter:
    """Each adapted module adds scale · B · A · input to its output; the base stays as it is. Satisfies `LiveWeights`.

    A switch costs no more than the adapter's own bytes; a step costs two thin products a module.
    """

    def __init__(self, root: nn.Module, base: TorchWeights, spec: AdapterSpec) -> None:
        linears = {module: _linear(root, module) for module in _adapted(spec, base)}
        factors = {module: _factors(own.weight, spec.rank, dtype=own.weight.dtype) for module, own in linears.items()}
        for module, linear in linears.items():
            linear.register_forward_hook(_adding(factors[module], spec.scale))
        self._weights = _weights_of(factors)

    def tensors(self) -> dict[str, Bits]:
        """Copies of all A and B."""
        return self._weights.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change A and B in place. Raises WeightsError before anything changes."""
        self._weights.apply(updates)


def _adapted(spec: AdapterSpec, base: TorchWeights) -> tuple[str, ...]:
    modules = spec.modules(base.layout)
    if not modules:
        raise ModelError(f"no module of this span is one of {', '.join(spec.targets)}: name targets that the model has")
    for module in modules:
        if len(shape := base.layout[f"{module}.weight"].shape) != 2:
            raise ModelError(f"{module} has a weight of shape {shape}, which is no matrix: take it off the targets")
    return modules


def _linear(root: nn.Module, module: str) -> nn.Linear:
    try:
        found = root.get_submodule(module)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        raise ModelError(f"{module} is no linear module of its own; no adapter can stand beside it: merge the adapter")
    return found


def _factors(matrix: torch.Tensor, rank: int, dtype: torch.dtype = torch.float32) -> _Factors:
    outputs, inputs = matrix.shape
    return _Factors(
        a=torch.zeros(rank, inputs, dtype=dtype, device=matrix.device),
        b=torch.zeros(outputs, rank, dtype=dtype, device=matrix.device),
    )


def _weights_of(factors: Mapping[str, _Factors]) -> TorchWeights:
    live = {name: tensor for module, both in factors.items() for name, tensor in both.named(module)}
    return TorchWeights(live, same_layout(shapes_of(live)))


def _adding(factors: _Factors, scale: float) -> Any:
    def add(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        low = nn.functional.linear(inputs[0], factors.a)  # (…, rank)
        return output + nn.functional.linear(low, factors.b) * scale

    return add
