"""The weights of a running mlx module, read and written as bf16 bits. Knows no model family and no release.

mlx arrays share their memory with numpy: values are written there, so nothing is allocated or copied, and no graph is
built. Call it between two steps, when nothing is being computed.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from numpy.typing import NDArray

from echo_p2p.chain.layouts import Layout, Place, Shape, check_layout, check_update, view_of
from echo_p2p.chain.stage import Bits, TensorUpdate
from echo_p2p.errors import WeightsError

_HALF, _SINGLE = np.dtype(np.uint16), np.dtype(np.uint32)


def live_arrays(module: nn.Module, dtype: mx.Dtype) -> None:
    """Make a loaded module's weights a policy: rounded to bf16, held in `dtype`, computed, and nobody else's memory."""
    module.update(tree_map(lambda a: mx.array(mx.contiguous(a.astype(mx.bfloat16).astype(dtype))), module.parameters()))
    mx.eval(module.parameters())


def stacked_experts(live: Mapping[str, Shape]) -> dict[str, Place]:
    """An mlx-lm module's tensors as trainers publish them: stacked experts one by one, all others as they are."""
    layout: dict[str, Place] = {}
    for name, shape in live.items():
        published, place = name.replace(".block_sparse_moe.", ".mlp."), Place.whole(name, shape)
        module, stack, kind = published.partition(".switch_mlp.")
        if stack:
            layout |= {f"{module}.experts.{i}.{kind}": place.item(i) for i in range(shape[0])}
        else:
            layout[published] = place
    return layout


class MlxWeights:
    """Published tensors that lie in a module's arrays as `layout` says (default: as mlx-lm keeps them).

    Satisfies `LiveWeights`. The arrays hold a bf16 policy, in bfloat16 or float32, as `live_arrays` leaves them.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None) -> None:
        self._module = module
        shapes = {name: tuple(array.shape) for name, array in _arrays(module).items()}
        self.layout = stacked_experts(shapes) if layout is None else layout
        check_layout(self.layout, shapes)
        if len({memory.ctypes.data for memory in self._flat().values()}) < len(shapes):
            raise WeightsError("two of the module's arrays are one: pass it to live_arrays first")

    def tensors(self) -> dict[str, Bits]:
        """Copies of the published tensors."""
        flat = self._flat()
        return {name: _narrow(view_of(flat[place.live], place)) for name, place in self.layout.items()}

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Write updates into the live arrays. Raises WeightsError before anything changes."""
        for name, update in updates.items():
            check_update(self.layout, name, update, _HALF)
        flat = self._flat()
        for name, update in updates.items():
            place = self.layout[name]
            live = flat[place.live]
            values = update.values if live.dtype == _HALF else update.values.astype(_SINGLE) << 16
            if update.index is None:
                view_of(live, place)[...] = values
            else:
                live[place.positions(update.index)] = values

    def _flat(self) -> dict[str, NDArray[Any]]:
        """The bits of each live array, in its own memory."""
        return {name: _memory_of(name, array) for name, array in _arrays(self._module).items()}


def _arrays(module: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def _memory_of(name: str, array: mx.array) -> NDArray[Any]:
    if array.dtype not in (mx.bfloat16, mx.float32):
        raise WeightsError(f"{name!r} in {array.dtype} can't hold a bf16 policy: load it in bfloat16 or float32")
    word = mx.uint16 if array.dtype == mx.bfloat16 else mx.uint32
    one, again = (np.array(array.view(word), copy=False) for _ in range(2))
    if not one.flags.c_contiguous or one.ctypes.data != again.ctypes.data:
        raise WeightsError(f"{name!r} has no memory that can be written to: pass the module to live_arrays first")
    return one.reshape(-1)


def _narrow(bits: NDArray[Any]) -> Bits:
    """bf16 bits, as a copy: a float32 that holds a bf16 value ends in zeros."""
    narrow: Bits = bits.copy() if bits.dtype == _HALF else (bits >> 16).astype(np.uint16)
    return narrow
