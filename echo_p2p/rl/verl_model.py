"""One model in a verl worker: passes over a batch, an optimiser step, all tensors of its state. Knows no algorithm."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from echo_p2p.rl.verl_worker import verl_module


class VerlModel:
    """Owns a worker: policy, critic or reference. A pass takes no more than `micro_batch_rows` rows at once."""

    def __init__(self, worker: Any, micro_batch_rows: int) -> None:
        self._worker = worker
        self._micro_batch_rows = micro_batch_rows

    @property
    def engine(self) -> Any:
        """verl's engine."""
        return self._worker.engine

    def infer(self, batch: Any, *names: str) -> list[torch.Tensor]:
        """Outputs of a forward pass by verl's names (`log_probs`, `entropy`, `values`); each (rows, response)."""
        tensors, padding = verl_module("utils.tensordict_utils"), verl_module("workers.utils.padding")
        data = self._data(batch, calculate_entropy="entropy" in names, compute_loss=False)
        out = self._worker.infer_batch(data)
        return [padding.no_padding_2_padding(tensors.get(out, name), data).float() for name in names]

    def accumulate(self, batch: Any) -> float:
        """The loss of a batch; its gradient is left in the parameters, in place of what was there."""
        self._worker.optimizer_zero_grad()
        out = self._worker.forward_backward(self._data(batch, calculate_entropy=False, compute_loss=True))
        return float(verl_module("utils.tensordict_utils").get(out, "metrics")["loss"])

    def apply(self) -> float:
        """One optimiser step, none if the gradient is not finite; the gradient's norm before it was clipped."""
        return float(self._worker.optimizer_step()["grad_norm"])

    def _data(self, batch: Any, **settings: Any) -> Any:
        """The batch in verl's form without padding, cut into micro-batches of equal size."""
        data = verl_module("workers.utils.padding").left_right_2_no_padding(batch.to_tensordict())
        rows = len(batch)
        micro = next(size for size in range(min(rows, self._micro_batch_rows), 0, -1) if rows % size == 0)
        verl_module("utils.tensordict_utils").assign_non_tensor(
            data, global_batch_size=rows, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False, **settings
        )
        return data

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by name, not copied."""
        for name, parameter in self.engine.module.named_parameters():
            yield name, _local(parameter.detach())

    def state(self, *, create: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the state, by name; those of Adam exist after its first step, or at once with `create`."""
        optimizer_state = self.engine.optimizer.state
        for name, parameter in self.engine.module.named_parameters():
            yield f"model/{name}", _local(parameter.detach())
            if create and not optimizer_state[parameter]:
                optimizer_state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.detach()),
                    "exp_avg_sq": torch.zeros_like(parameter.detach()),
                }
            for slot, value in sorted(optimizer_state.get(parameter, {}).items()):
                yield f"optimizer/{slot}/{name}", _local(value)

    def own_state(self, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the state to copy `saved` into: those of Adam only if it has them."""
        stepped = any(name.startswith("optimizer/") for name in saved)
        return {name: own for name, own in self.state(create=stepped) if stepped or name.startswith("model/")}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Become what `state` gave; `saved` must have the names and shapes of `own_state`."""
        own = self.own_state(saved)
        if len(own) == len(list(self.engine.module.named_parameters())):  # saved before the first step
            self.engine.optimizer.state.clear()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: in a world of one, the only shard is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
