"""Products of a few rows with large matrices on a CPU, which is what most of a decoding step is. Knows torch alone.

MKL reads a float32 matrix anew for every three rows until there are 16, oneDNN once for all of them, and torch takes
MKL. oneDNN costs a copy into its own order in each call, which pays where a matrix is large or read often: see
`tests/bench/products.py`. Both sum in float32; the last bits differ.
"""

# torch offers oneDNN's float32 product only through the operator that its own compiler emits.

from functools import partial
from typing import Any, Final

import torch
from torch import nn

FEW: Final = ((1 << 20, range(4, 49)), (1 << 19, range(7, 16)))
"""From so many values of a matrix on, and for so many rows, oneDNN is the faster one; the first that fits holds."""


def use_onednn(model: nn.Module) -> None:
    """Let a float32 model's large matrices be multiplied with few rows by oneDNN, where that helps."""
    if not onednn_helps():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_cpu:
            rows = next((rows for values, rows in FEW if module.weight.numel() >= values), None)
            if rows is not None:
                module.forward = partial(_product, module, rows)  # type: ignore[method-assign]


def onednn_helps() -> bool:
    """Whether torch has oneDNN here, and would take MKL instead."""
    return bool(torch._C._has_mkldnn) and bool(torch._C.has_mkl)


def onednn_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """inputs (…, in) · weight (out, in)ᵀ + bias, by oneDNN."""
    outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return outputs


def _product(module: Any, rows: range, inputs: torch.Tensor) -> torch.Tensor:
    if inputs.numel() // module.in_features in rows:
        return onednn_product(inputs, module.weight, module.bias)
    return nn.functional.linear(inputs, module.weight, module.bias)
