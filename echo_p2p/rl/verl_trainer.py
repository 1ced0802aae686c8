"""The training engine on verl, in this process: group advantages, off-policy correction, one optimiser step a batch.

Advantages, correction and loss are verl's own functions. Knows no network, task, version or file but its checkpoints.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from echo_p2p.errors import TrainerError, UnknownName
from echo_p2p.rl.batch import check_rows, pad_rows, rows_of_varying_groups
from echo_p2p.rl.checkpoint import Progress, read_checkpoint, write_checkpoint
from echo_p2p.rl.drift import measure_drift
from echo_p2p.rl.trainer import StepReport, TrainingRow
from echo_p2p.rl.verl_cpu import prepare_verl, quietly
from echo_p2p.rl.verl_worker import build_worker, verl_module
from echo_protocols.run import Algorithm

# The decoupled form (arXiv 2505.24298): the clipped ratio is taken against the policy before the step, and the weight
# of a token for having been drawn by an older one is `rollout_is_weights`. verl's `bypass_mode` computes those weights
# for its metrics only, and its `*_k1` rejection bounds act on the inverse ratio: neither is used.

_ADVANTAGES = ("grpo", "rloo")
"""verl's estimators for which a group of equal rewards has no advantage, and no group depends on another."""


class VerlTrainer:
    """A policy in fp32 that learns on one device. Satisfies `Trainer`; several may live in one process."""

    def __init__(
        self,
        model_path: Path | str,
        algorithm: Algorithm,
        *,
        seed: int,
        temperature: float = 1.0,
        device: str = "cpu",
        micro_batch_rows: int = 64,
    ) -> None:
        """`temperature` is the one that the answers are sampled at; `micro_batch_rows` bounds the memory of a pass."""
        if algorithm.name not in _ADVANTAGES:
            known = ", ".join(_ADVANTAGES)
            raise UnknownName(f"algorithm.name is {algorithm.name!r}: the trainer knows {known}.")
        prepare_verl(device)
        self._algorithm = algorithm
        self._seed = seed
        self._temperature = temperature
        self._micro_batch_rows = micro_batch_rows
        self._fork_devices: list[int] | None = [] if device == "cpu" else None
        self._updates = 0
        with quietly(), self._generators():
            self._worker = build_worker(str(model_path), algorithm, device)
        self._aliases = _tied_names(self._engine.module)

    @property
    def updates(self) -> int:
        """Optimiser steps since the model was loaded, over all restarts."""
        return self._updates

    @property
    def _engine(self) -> Any:
        if self._worker is None:
            raise TrainerError("The trainer is closed: make a new one.")
        return self._worker.engine

    def step(self, rows: tuple[TrainingRow, ...]) -> StepReport:
        """One update on exactly these rows. Groups of equal rewards have no gradient: they only count in the mean.

        Raises TrainerError if a row can't be trained on, or if the loss or the gradient is not finite.
        """
        engine = self._engine
        check_rows(rows, engine.module.config.vocab_size)
        varying = rows_of_varying_groups(rows)
        learning_rate = self._algorithm.learning_rate
        if not varying:
            return StepReport(updated=False, figures={"lr": learning_rate, "trained_rows": 0.0})
        share = sum(len(row.response) for row in varying) / sum(len(row.response) for row in rows)
        with self._generators():
            batch = _batch(varying, self._temperature)
            proximal, entropy = self._infer(batch)
            figures = self._prepare(batch, proximal, share)
            figures["entropy"] = float(entropy[batch.batch["response_mask"].bool()].mean())
            figures |= {"lr": learning_rate, "trained_rows": float(len(varying)), "trained_token_share": share}
            if not _has_signal(batch.batch):
                return StepReport(updated=False, figures=figures)
            figures |= self._update(batch)
        self._updates += 1
        return StepReport(updated=True, figures=figures)

    def _infer(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the responses before the step, and entropies; both (rows, response)."""
        tensors, padding = verl_module("utils.tensordict_utils"), verl_module("workers.utils.padding")
        data = self._data(batch, calculate_entropy=True, compute_loss=False)
        out = self._worker.infer_batch(data)
        logprobs, entropy = (
            padding.no_padding_2_padding(tensors.get(out, name), data).float() for name in ("log_probs", "entropy")
        )
        return logprobs, entropy

    def _prepare(self, batch: Any, proximal: torch.Tensor, share: float) -> dict[str, float]:
        """Adds what the loss reads to the batch; returns the figures of the drift and of its correction."""
        fields, mask = batch.batch, batch.batch["response_mask"]
        behaviour = fields["rollout_log_probs"]
        estimator = verl_module("trainer.ppo.core_algos").get_adv_estimator_fn(self._algorithm.name)
        advantages, _ = estimator(
            token_level_rewards=fields["token_level_rewards"].clone(),
            response_mask=mask,
            index=batch.non_tensor_batch["uid"],
        )
        # The loss is a mean over the tokens of this batch; `share` makes it the mean over all rows of the step.
        fields["advantages"] = advantages * share
        fields["old_log_probs"] = proximal
        rejected = 0.0
        if self._algorithm.correction != "none":
            weights, rejected = _correction_weights(self._algorithm, proximal, behaviour, mask)
            fields["rollout_is_weights"] = weights
        drift = measure_drift(proximal.numpy(), behaviour.numpy(), mask.numpy(), clip_ratio=self._algorithm.clip_ratio)
        return {
            "k3_kl": drift.k3_kl,
            "ess": drift.ess,
            "clip_fraction": drift.clip_fraction,
            "logprob_gap": drift.logprob_gap,
            "logprob_gap_max": drift.logprob_gap_max,
            "correction_rejected_share": rejected,
        }

    def _update(self, batch: Any) -> dict[str, float]:
        worker = self._worker
        tensors = verl_module("utils.tensordict_utils")
        worker.optimizer_zero_grad()
        out = worker.forward_backward(self._data(batch, calculate_entropy=False, compute_loss=True))
        loss = float(tensors.get(out, "metrics")["loss"])
        if not np.isfinite(loss):
            worker.optimizer_zero_grad()
            raise TrainerError(f"The loss is {loss}: nothing was changed; lower algorithm.learning_rate.")
        grad_norm = float(worker.optimizer_step()["grad_norm"])
        if not np.isfinite(grad_norm):  # verl skips the step by itself
            raise TrainerError(f"The gradient's norm is {grad_norm}: nothing was changed; lower the learning rate.")
        return {"loss": loss, "grad_norm": grad_norm}

    def _data(self, batch: Any, **settings: Any) -> Any:
        """The batch in verl's form without padding, cut into micro-batches of equal size."""
        data = verl_module("workers.utils.padding").left_right_2_no_padding(batch.to_tensordict())
        rows = len(batch)
        micro = next(size for size in range(min(rows, self._micro_batch_rows), 0, -1) if rows % size == 0)
        verl_module("utils.tensordict_utils").assign_non_tensor(
            data, global_batch_size=rows, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False, **settings
        )
        return data

    def _generators(self) -> Any:
        """Random numbers of the block are a function of the seed and of the step; the process's own are untouched."""
        return _seeded(self._seed * 1_000_003 + self._updates, self._fork_devices)

    def weights(self) -> Mapping[str, NDArray[np.uint16]]:
        """The policy as bf16 bits by Hugging Face name; aliases of tied tensors are left out."""
        parameters, _ = self._engine.get_per_tensor_param()
        with torch.no_grad():
            return {
                name: value.to(torch.bfloat16, copy=True).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
                for name, value in parameters
                if name not in self._aliases
            }

    def save(self, folder: Path) -> None:
        """Write the whole state into `folder`, all or nothing. An older checkpoint of that name is replaced."""
        progress = Progress(updates=self._updates, seed=self._seed)
        write_checkpoint(folder, dict(self._state(create=False)), progress)

    def load(self, folder: Path) -> None:
        """Resume from `save`. Raises TrainerError, with nothing changed, if the checkpoint is incomplete or foreign."""
        optimizer_state = self._engine.optimizer.state
        saved, progress = read_checkpoint(folder)
        stepped = any(name.startswith("optimizer/") for name in saved)
        state = {name: tensor for name, tensor in self._state(create=stepped) if stepped or name.startswith("model/")}
        if {name: tensor.shape for name, tensor in saved.items()} != {name: own.shape for name, own in state.items()}:
            raise TrainerError(f"{folder} is a checkpoint of another model: name the folder of this run.")
        if not stepped:
            optimizer_state.clear()
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(saved[name])
        self._updates, self._seed = progress.updates, progress.seed

    def _state(self, *, create: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the state, by name; those of Adam exist after its first step, or at once with `create`."""
        optimizer_state = self._engine.optimizer.state
        for name, parameter in self._engine.module.named_parameters():
            yield f"model/{name}", _local(parameter.detach())
            if create and not optimizer_state[parameter]:
                optimizer_state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.detach()),
                    "exp_avg_sq": torch.zeros_like(parameter.detach()),
                }
            for slot, value in sorted(optimizer_state.get(parameter, {}).items()):
                yield f"optimizer/{slot}/{name}", _local(value)

    def close(self) -> None:
        """Let go of the model. The process group of one stays: it is the process's, and has no peer."""
        self._worker = None


@contextmanager
def _seeded(seed: int, devices: list[int] | None) -> Iterator[None]:
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: in a world of one, the only shard is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tied_names(module: Any) -> frozenset[str]:
    """Names in the state dict that are other names of a parameter."""
    return frozenset(module.state_dict()) - {name for name, _ in module.named_parameters()}


def _batch(rows: tuple[TrainingRow, ...], temperature: float) -> Any:
    """The rows as verl's DataProto."""
    return verl_module("protocol").DataProto.from_dict(
        tensors={name: torch.from_numpy(field) for name, field in pad_rows(rows).items()},
        non_tensors={"uid": np.array([row.group for row in rows], dtype=object)},
        meta_info={"temperature": temperature},
    )


def _correction_weights(
    algorithm: Algorithm, proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Per-token weights, and the share of tokens that the correction cut off (`tis`) or rejected (`icepop`)."""
    low, high = algorithm.correction_bounds
    ratios = (proximal - behaviour)[mask.bool()].exp()
    if algorithm.correction == "icepop" and not ((ratios >= low) & (ratios <= high)).any():
        return torch.zeros_like(proximal), 1.0  # verl's metrics divide by zero here
    weights, metrics = verl_module("trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights(
        log_ratio=proximal - behaviour,
        response_mask=mask,
        rollout_is="token",
        rollout_is_threshold=f"{low}_{high}" if algorithm.correction == "icepop" else high,
    )
    if algorithm.correction == "icepop":
        return weights, float(metrics["rollout_is_oob_ratio"])
    return weights, float((weights[mask.bool()] >= high).float().mean())


def _has_signal(fields: Any) -> bool:
    """Whether any token has a gradient: without one, the optimiser would still move by its momentum."""
    signal = fields["advantages"] * fields["response_mask"]
    if "rollout_is_weights" in fields.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        signal = signal * fields["rollout_is_weights"]
    return bool((signal != 0.0).any())
