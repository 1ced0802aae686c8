"""From rewards and log-probabilities to what the loss reads: correction, rejection, KL in the reward, advantages.

All of it verl's own functions on padded tensors (rows, response). Knows no model and no optimiser.
"""

# The decoupled form (arXiv 2505.24298): the clipped ratio is taken against the policy before the step, and the weight
# of a token for having been drawn by an older one is `rollout_is_weights`. verl's `bypass_mode` computes those weights
# for its metrics only, and its `*_k1` rejection bounds act on the inverse ratio: neither is used.

from typing import Any

import torch

from echo_p2p.rl.algorithms import Recipe
from echo_p2p.rl.drift import measure_drift
from echo_p2p.rl.verl_worker import verl_module
from echo_protocols.run import Algorithm

REJECTION = "seq_mean_k3"
"""An answer is rejected by the mean over its tokens, so that long answers are not rejected for being long."""


def correct(batch: Any, algorithm: Algorithm, recipe: Recipe) -> dict[str, float]:
    """Adds `rollout_is_weights` to the batch and takes rejected answers out of its `response_mask`; the figures.

    The drift is measured before anything is taken out.
    """
    fields, mask = batch.batch, batch.batch["response_mask"]
    proximal, behaviour = fields["old_log_probs"], fields["rollout_log_probs"]
    drift = measure_drift(proximal.numpy(), behaviour.numpy(), mask.numpy(), clip_ratio=recipe.clip_ratio_low)
    figures = {
        "k3_kl": drift.k3_kl,
        "ess": drift.ess,
        "clip_fraction": drift.clip_fraction,
        "logprob_gap": drift.logprob_gap,
        "logprob_gap_max": drift.logprob_gap_max,
        "correction_rejected_share": 0.0,
    }
    if algorithm.correction != "none":
        weights, figures["correction_rejected_share"] = _weights(algorithm, proximal - behaviour, mask)
        fields["rollout_is_weights"] = weights
    if recipe.rejection_k3 is not None:
        fields["response_mask"], said = verl_module("trainer.ppo.rollout_corr_helper").compute_rollout_rejection_mask(
            log_ratio=proximal - behaviour,
            response_mask=mask,
            rollout_rs=REJECTION,
            rollout_rs_threshold=recipe.rejection_k3,
        )
        figures["rejected_answers_share"] = float(said["rollout_rs_seq_masked_fraction"])
    return figures


def add_advantages(batch: Any, recipe: Recipe, share: float) -> None:
    """Adds `advantages` and `returns` to the batch. The loss is a mean over what is in the batch; `share` of it, by
    tokens or by rows as the loss counts, are the others that were left out of it for having no advantage.
    """
    core, fields, mask = verl_module("trainer.ppo.core_algos"), batch.batch, batch.batch["response_mask"]
    rewards = fields["token_level_rewards"].clone()
    if recipe.kl_place == "reward":
        divergence = core.kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], recipe.kl_estimator)
        rewards -= recipe.kl_coefficient * divergence * mask
    given: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask}
    match recipe.estimator:
        case "gae":
            given |= {"values": fields["values"], "gamma": recipe.gamma, "lam": recipe.gae_lambda}
        case "grpo":
            given |= {"index": batch.non_tensor_batch["uid"], "norm_adv_by_std_in_grpo": recipe.normalise_by_std}
        case _:
            config = verl_module("trainer.config").AlgoConfig(gamma=recipe.gamma, lam=recipe.gae_lambda)
            given |= {"index": batch.non_tensor_batch["uid"], "config": config}
    advantages, returns = core.get_adv_estimator_fn(recipe.estimator)(**given)
    fields["advantages"], fields["returns"] = advantages * share, returns


def divergence_from_first(batch: Any, recipe: Recipe) -> float:
    """The mean of verl's KL estimate over the tokens of the batch, of the policy before the step."""
    fields, mask = batch.batch, batch.batch["response_mask"].bool()
    penalty = verl_module("trainer.ppo.core_algos").kl_penalty
    estimates = penalty(fields["old_log_probs"], fields["ref_log_prob"], recipe.kl_estimator)
    return float(estimates[mask].mean())


def has_signal(batch: Any, recipe: Recipe) -> bool:
    """Whether any token has a gradient: without one, the optimiser would still move by its momentum."""
    fields = batch.batch
    signal, mask = fields["advantages"], fields["response_mask"]
    if "rollout_is_weights" in fields.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        signal = signal * fields["rollout_is_weights"]
    if recipe.kl_place == "loss":
        # at equal policies the gradient of k2 and k3 is zero, that of k1 is not
        pull = 1.0 if recipe.kl_estimator == "k1" else (fields["old_log_probs"] - fields["ref_log_prob"]).abs()
        signal = signal.abs() + recipe.kl_coefficient * pull
    return bool((signal * mask != 0.0).any())


def _weights(algorithm: Algorithm, log_ratio: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Per-token weights, and the share of tokens that the correction cut off (`tis`) or rejected (`icepop`)."""
    low, high = algorithm.correction_bounds
    ratios = log_ratio[mask.bool()].exp()
    if algorithm.correction == "icepop" and not ((ratios >= low) & (ratios <= high)).any():
        return torch.zeros_like(log_ratio), 1.0  # verl's metrics divide by zero here
    weights, metrics = verl_module("trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights(
        log_ratio=log_ratio,
        response_mask=mask,
        rollout_is="token",
        rollout_is_threshold=f"{low}_{high}" if algorithm.correction == "icepop" else high,
    )
    if algorithm.correction == "icepop":
        return weights, float(metrics["rollout_is_oob_ratio"])
    return weights, float((weights[mask.bool()] >= high).float().mean())
