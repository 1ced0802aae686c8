"""verl's configuration of a trainer: which workers, engines, optimisers and losses. Knows no batch."""

import functools
import importlib
from typing import Any

from echo_p2p.rl.algorithms import Recipe
from echo_protocols.run import Algorithm


def build_policy(model_path: str, algorithm: Algorithm, recipe: Recipe, *, longest: int, device: str) -> Any:
    """A worker with the policy in fp32, its optimiser and its loss. `prepare_verl` must have run.

    `longest` is the length of the longest possible answer, in tokens.
    """
    worker = _build(model_path, device, optimizer=_optimizer(algorithm, algorithm.learning_rate))
    config = verl_module("workers.config")
    actor = config.FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=recipe.clip_ratio_low,
        clip_ratio_low=recipe.clip_ratio_low,
        clip_ratio_high=recipe.clip_ratio_high,
        clip_ratio_c=recipe.clip_ratio_c,
        policy_loss=config.PolicyLossConfig(loss_mode=recipe.loss_mode),
        loss_agg_mode=recipe.loss_aggregation,
        loss_scale_factor=longest if recipe.loss_aggregation == "seq-mean-token-sum-norm" else None,
        use_kl_loss=recipe.kl_place == "loss",
        kl_loss_coef=recipe.kl_coefficient,
        kl_loss_type=recipe.kl_estimator,
    )
    worker.set_loss_fn(functools.partial(verl_module("workers.utils.losses").ppo_loss, config=actor))
    return worker


def build_critic(model_path: str, algorithm: Algorithm, recipe: Recipe, *, device: str) -> Any:
    """A worker with the policy's first weights under a new value head, its own optimiser, and the value loss."""
    worker = _build(
        model_path, device, optimizer=_optimizer(algorithm, recipe.critic_learning_rate), model_type="value_model"
    )
    critic = verl_module("workers.config").FSDPCriticConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, cliprange_value=recipe.value_clip
    )
    worker.set_loss_fn(functools.partial(verl_module("workers.utils.losses").value_loss, config=critic))
    return worker


def build_reference(model_path: str, device: str) -> Any:
    """A worker with the policy's first weights, frozen: in fp32 like the policy, so that the two can be compared."""
    return _build(model_path, device, optimizer=None)


def _build(model_path: str, device: str, *, optimizer: Any, model_type: str = "language_model") -> Any:
    config, checkpoints = verl_module("workers.config"), verl_module("trainer.config")
    precision = "fp32" if device == "cpu" else "bf16"  # of the passes; the parameters are fp32
    worker = verl_module("workers.engine_workers_tinker").TinkerTrainingWorker(
        config.TrainingWorkerConfig(
            model_type=model_type,
            model_config=config.HFModelConfig(
                path=model_path,
                load_tokenizer=False,
                use_remove_padding=False,
                enable_gradient_checkpointing=device != "cpu",
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=config.FSDPEngineConfig(
                strategy="fsdp2",
                forward_only=optimizer is None,
                model_dtype="fp32",
                mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=False,
                use_dynamic_bsz=False,
                reshard_after_forward=False,
            ),
            optimizer_config=optimizer,
            checkpoint_config=checkpoints.CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    return worker


def _optimizer(algorithm: Algorithm, learning_rate: float) -> Any:
    return verl_module("workers.config").FSDPOptimizerConfig(
        lr=learning_rate,
        weight_decay=algorithm.weight_decay,
        clip_grad=algorithm.grad_clip,
        lr_warmup_steps=0,
        total_training_steps=1,
    )


def verl_module(name: str) -> Any:
    """A module of verl, imported at its first use: only once `prepare_verl` has chosen the platform."""
    return importlib.import_module(f"verl.{name}")
