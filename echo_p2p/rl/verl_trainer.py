"""The training engine on verl, in this process: an update a batch, by the recipe that the algorithm names.

Advantages, correction and losses are verl's own functions. Knows no network, task, version or file but its checkpoints.
"""

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echo_p2p.errors import TrainerError
from echo_p2p.rl.algorithms import Recipe, recipe_of
from echo_p2p.rl.batch import check_rows, pad_rows, rows_of_varying_groups
from echo_p2p.rl.checkpoint import Progress, read_checkpoint, write_checkpoint
from echo_p2p.rl.shaping import shape_overlong
from echo_p2p.rl.trainer import StepReport, TrainingRow
from echo_p2p.rl.verl_advantage import add_advantages, correct, divergence_from_first, has_signal
from echo_p2p.rl.verl_cpu import prepare_verl, quietly
from echo_p2p.rl.verl_model import VerlModel
from echo_p2p.rl.verl_worker import build_critic, build_policy, build_reference, verl_module
from echo_protocols.run import Algorithm, Sampling

_CRITIC = "critic/"


class VerlTrainer:
    """A policy in fp32 that learns on one device. Satisfies `Trainer`; several may live in one process.

    Bytes a parameter: 16 (the weights, the gradient, Adam's two), 16 more with a critic, 4 more with a reference,
    which is the model that the run began with: read again at each start, so no checkpoint holds it.
    """

    def __init__(
        self,
        model_path: Path | str,
        algorithm: Algorithm,
        *,
        seed: int,
        sampling: Sampling | None = None,
        device: str = "cpu",
        micro_batch_rows: int = 64,
    ) -> None:
        """`sampling` is what the answers are drawn with; `micro_batch_rows` bounds the memory of a pass.

        Raises UnknownName for an algorithm that there is no recipe of.
        """
        self._recipe = recipe = recipe_of(algorithm)
        prepare_verl(device)
        self._algorithm = algorithm
        self._sampling = sampling or Sampling()
        self._seed = seed
        self._fork_devices: list[int] | None = [] if device == "cpu" else None
        self._updates = self._critic_updates = 0
        self._critic: VerlModel | None = None
        self._reference: VerlModel | None = None
        path, longest = str(model_path), self._sampling.max_new_tokens
        with quietly(), self._generators():
            worker = build_policy(path, algorithm, recipe, longest=longest, device=device)
            self._policy: VerlModel | None = VerlModel(worker, micro_batch_rows)
            if recipe.critic:
                self._critic = VerlModel(build_critic(path, algorithm, recipe, device=device), micro_batch_rows)
            if recipe.reference:
                self._reference = VerlModel(build_reference(path, device), micro_batch_rows)
        self._aliases = _tied_names(self._open.engine.module)

    @property
    def updates(self) -> int:
        """Optimiser steps of the policy since the model was loaded, over all restarts."""
        return self._updates

    @property
    def _open(self) -> VerlModel:
        if self._policy is None:
            raise TrainerError("The trainer is closed: make a new one.")
        return self._policy

    def step(self, rows: tuple[TrainingRow, ...]) -> StepReport:
        """One update on exactly these rows. Where groups of equal rewards have no gradient they only count in the mean.

        Raises TrainerError if a row can't be trained on, or if the loss or the gradient is not finite.
        """
        recipe = self._recipe
        check_rows(rows, self._open.engine.module.config.vocab_size)
        rows = shape_overlong(
            rows,
            longest=self._sampling.max_new_tokens,
            share=recipe.overlong_buffer,
            factor=recipe.overlong_penalty,
        )
        trained = rows_of_varying_groups(rows) if recipe.may_leave_out else rows
        figures = {"lr": self._algorithm.learning_rate, "trained_rows": float(len(trained))}
        if not trained:
            return StepReport(updated=False, figures=figures)
        share = _counted(trained, recipe) / max(1, _counted(rows, recipe))
        batch = _batch(trained, recipe, self._sampling.temperature)
        if batch.batch["response_mask"].sum() < 2:  # whitening divides by the tokens less one
            return StepReport(updated=False, figures=figures)
        figures["trained_token_share"] = sum(len(row.response) for row in trained) / sum(len(r.response) for r in rows)
        with self._generators():
            figures |= self._prepare(batch, share)
            updated = self._update(batch, figures) if batch.batch["response_mask"].sum() > 1 else False
        return StepReport(updated=updated, figures=figures)

    def _prepare(self, batch: Any, share: float) -> dict[str, float]:
        """Adds all that the losses read to the batch; the figures of it."""
        fields, recipe = batch.batch, self._recipe
        fields["old_log_probs"], entropy = self._open.infer(batch, "log_probs", "entropy")
        figures = {"entropy": float(entropy[fields["response_mask"].bool()].mean())}
        if self._reference is not None:
            (fields["ref_log_prob"],) = self._reference.infer(batch, "log_probs")
            figures["kl_from_first"] = divergence_from_first(batch, recipe)
        if self._critic is not None:
            (fields["values"],) = self._critic.infer(batch, "values")
        figures |= correct(batch, self._algorithm, recipe)
        if fields["response_mask"].sum() > 1:
            add_advantages(batch, recipe, share)
        return figures

    def _update(self, batch: Any, figures: dict[str, float]) -> bool:
        """One optimiser step a mini-batch of each model that learns now; whether the policy did. Adds the figures."""
        parts = np.array_split(np.arange(len(batch)), min(self._recipe.mini_batches, len(batch)))
        said = [self._update_on(batch.select_idxs(part) if len(parts) > 1 else batch) for part in parts]
        for name in sorted(set().union(*said)):
            figures[name] = float(np.mean([each[name] for each in said if name in each]))
        self._critic_updates += self._critic is not None
        return "loss" in figures

    def _update_on(self, batch: Any) -> dict[str, float]:
        """One optimiser step of each model that learns now, with its loss and its gradient's norm."""
        learning = []
        if self._critic is not None and batch.batch["response_mask"].any():
            learning.append(("critic_", "algorithm.critic.learning_rate", self._critic))
        waits = self._critic is not None and self._critic_updates < self._recipe.critic_warmup_steps
        if not waits and has_signal(batch, self._recipe):
            learning.append(("", "algorithm.learning_rate", self._open))
        figures = {}
        for name, rate, model in learning:
            figures[f"{name}loss"] = loss = model.accumulate(batch)
            if not np.isfinite(loss):
                raise TrainerError(f"The {name}loss is {loss}: no step was made on it; lower {rate}.")
        for name, rate, model in learning:
            figures[f"{name}grad_norm"] = norm = model.apply()
            if not np.isfinite(norm):  # verl skips the step by itself
                raise TrainerError(f"The norm of the {name}gradient is {norm}: no step was made on it; lower {rate}.")
        self._updates += "loss" in figures
        return figures

    def _generators(self) -> Any:
        """Random numbers of the block are a function of the seed and of the step; the process's own are untouched."""
        return _seeded(self._seed * 1_000_003 + self._updates, self._fork_devices)

    def weights(self) -> dict[str, NDArray[np.uint16]]:
        """The policy as bf16 bits by Hugging Face name; aliases of tied tensors are left out."""
        parameters, _ = self._open.engine.get_per_tensor_param()
        with torch.no_grad():
            return {
                name: value.to(torch.bfloat16, copy=True).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
                for name, value in parameters
                if name not in self._aliases
            }

    def save(self, folder: Path) -> None:
        """Write the whole state into `folder`, all or nothing. An older checkpoint of that name is replaced."""
        progress = Progress(
            updates=self._updates,
            seed=self._seed,
            critic_updates=self._critic_updates,
            reference=self._reference_hash,
        )
        state = {prefix + name: tensor for prefix, model in self._models() for name, tensor in model.state()}
        write_checkpoint(folder, state, progress)

    def load(self, folder: Path) -> None:
        """Resume from `save`. Raises TrainerError, with nothing changed, if the checkpoint is incomplete or foreign."""
        saved, progress = read_checkpoint(folder)
        parts = {prefix: dict[str, torch.Tensor]() for prefix, _ in self._models()}
        for name, tensor in saved.items():
            prefix = _CRITIC if name.startswith(_CRITIC) else ""
            parts.setdefault(prefix, {})[name.removeprefix(prefix)] = tensor
        own = {prefix: model.own_state(parts[prefix]) for prefix, model in self._models()}
        if _shapes(parts) != _shapes(own) or progress.reference != self._reference_hash:
            raise TrainerError(f"{folder} is a checkpoint of another model or algorithm: name the folder of this run.")
        for prefix, model in self._models():
            model.load(parts[prefix])
        self._updates, self._seed = progress.updates, progress.seed
        self._critic_updates = progress.critic_updates

    def _models(self) -> list[tuple[str, VerlModel]]:
        """The models that a checkpoint holds, by the prefix of their names in it."""
        return [("", self._open)] + ([(_CRITIC, self._critic)] if self._critic is not None else [])

    @functools.cached_property
    def _reference_hash(self) -> str:
        """Names the reference's weights; empty without one."""
        if self._reference is None:
            return ""
        digest = hashlib.blake2b(digest_size=32)
        for name, tensor in self._reference.parameters():
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Let go of the models. The process group of one stays: it is the process's, and has no peer."""
        self._policy = self._critic = self._reference = None


@contextmanager
def _seeded(seed: int, devices: list[int] | None) -> Iterator[None]:
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _shapes(parts: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Size]]:
    return {prefix: {name: tensor.shape for name, tensor in part.items()} for prefix, part in parts.items()}


def _tied_names(module: Any) -> frozenset[str]:
    """Names in the state dict that are other names of a parameter."""
    return frozenset(module.state_dict()) - {name for name, _ in module.named_parameters()}


def _counted(rows: tuple[TrainingRow, ...], recipe: Recipe) -> int:
    """What the loss divides by: rows, or tokens without those that are filtered."""
    if recipe.loss_aggregation.startswith("seq-mean"):
        return len(rows)
    return sum(len(row.response) for row in rows if not (recipe.overlong_filter and row.truncated))


def _batch(rows: tuple[TrainingRow, ...], recipe: Recipe, temperature: float) -> Any:
    """The rows as verl's DataProto; answers that are filtered count for baselines, and have no part in the loss."""
    fields = {name: torch.from_numpy(field) for name, field in pad_rows(rows).items()}
    if recipe.overlong_filter:
        fields["response_mask"] *= torch.tensor([[not row.truncated] for row in rows])
    return verl_module("protocol").DataProto.from_dict(
        tensors=fields,
        non_tensors={"uid": np.array([row.group for row in rows], dtype=object)},
        meta_info={"temperature": temperature},
    )
