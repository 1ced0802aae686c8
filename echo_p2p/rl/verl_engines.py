"""verl's FSDP2 engines, with what they lack: a CPU for all of them, and value models without flash-attention.

Registered through verl's public registry. Knows no training.
"""

import importlib
from typing import Any

import torch

from echo_p2p.errors import TrainerError


def register_engines(device: str) -> None:
    """Once a process, after verl is imported and its platform chosen."""
    engines, transformer = (
        importlib.import_module(f"verl.workers.engine{name}") for name in ("", ".fsdp.transformer_impl")
    )
    register, vendor = engines.EngineRegistry.register, importlib.import_module("verl.utils.device").get_vendor()
    value = type("ValueEngine", (_ValueEngine, transformer.FSDPEngineWithValueHead), {})
    register(model_type="value_model", backend=["fsdp2"], device=device, vendor=vendor)(value)
    if device == "cpu":
        engine = type("CpuEngine", (_CpuEngine, _FrozenOnCpu, transformer.FSDPEngineWithLMHead), {})
        register(model_type="language_model", backend=["fsdp2"], device=device)(engine)


class _ValueEngine:
    """verl's value model, loaded as verl loads other models: its own loader insists on flash-attention."""

    def _build_module(self) -> Any:
        model: Any = self.model_config  # type: ignore[attr-defined]
        model.hf_config.architectures = ["ForTokenClassification"]  # what verl's choice of the class looks at
        model.hf_config.num_labels = 1
        model.hf_config.classifier_dropout = 0.0
        model.model_type = "language_model"
        try:
            return super()._build_module()  # type: ignore[misc]
        except ValueError as error:  # transformers has no such class for the family
            raise TrainerError(
                f"{model.path} can't be a critic: take an algorithm without one, such as grpo."
            ) from error
        finally:
            model.model_type = "value_model"


class _FrozenOnCpu:
    """Forward-only engines without the pinned host memory that verl forces on them, which needs an accelerator."""

    def _build_fsdp_module(self, module: Any) -> Any:
        config: Any = self.engine_config  # type: ignore[attr-defined]
        forward_only, config.forward_only = config.forward_only, False
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            config.forward_only = forward_only


class _CpuEngine:
    """verl's FSDP2 engine with log-probabilities of all tokens at once.

    Without flash-attention's kernel, verl's own loop over tokens costs as much as the forward pass of a small model.
    """

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, **_: Any) -> dict[str, Any]:
        """Log-probabilities, and entropies if asked for, of packed sequences: nested (rows, tokens of the row)."""
        offsets = micro_batch["input_ids"].offsets()
        logits = output.logits / output_args["temperature"][:, None, None]  # (rows, longest, vocab)
        real = torch.arange(logits.shape[1]) < offsets.diff()[:, None]  # (rows, longest)
        logprobs = torch.log_softmax(logits[real], dim=-1)  # (tokens, vocab)
        following = output_args["input_ids_rmpad_rolled"][:, None]  # (tokens, 1)
        packed = {"log_probs": logprobs.gather(-1, following)[:, 0]}
        if importlib.import_module("verl.utils.tensordict_utils").get(micro_batch, "calculate_entropy", default=False):
            packed["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
        return {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in packed.items()}
