"""verl's configuration of a trainer: which worker, engine, optimiser and loss. Knows no batch."""

import functools
import importlib
from typing import Any

from echo_protocols.run import Algorithm


def build_worker(model_path: str, algorithm: Algorithm, device: str) -> Any:
    """A TinkerTrainingWorker with its model loaded in fp32 and its loss set. `prepare_verl` must have run."""
    config, checkpoints = verl_module("workers.config"), verl_module("trainer.config")
    precision = "fp32" if device == "cpu" else "bf16"  # of the passes; the parameters are fp32
    worker = verl_module("workers.engine_workers_tinker").TinkerTrainingWorker(
        config.TrainingWorkerConfig(
            model_type="language_model",
            model_config=config.HFModelConfig(
                path=model_path,
                load_tokenizer=False,
                use_remove_padding=False,
                enable_gradient_checkpointing=device != "cpu",
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=config.FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=False,
                use_dynamic_bsz=False,
                reshard_after_forward=False,
            ),
            optimizer_config=config.FSDPOptimizerConfig(
                lr=algorithm.learning_rate,
                weight_decay=algorithm.weight_decay,
                clip_grad=algorithm.grad_clip,
                lr_warmup_steps=0,
                total_training_steps=1,
            ),
            checkpoint_config=checkpoints.CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    actor = config.FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=algorithm.clip_ratio,
        clip_ratio_low=algorithm.clip_ratio, clip_ratio_high=algorithm.clip_ratio,
    )  # fmt: skip
    worker.set_loss_fn(functools.partial(verl_module("workers.utils.losses").ppo_loss, config=actor))
    return worker


def verl_module(name: str) -> Any:
    """A module of verl, imported at its first use: only once `prepare_verl` has chosen the platform."""
    return importlib.import_module(f"verl.{name}")
