"""Low-rank adapters (LoRA, arXiv 2106.09685): what two peers must agree on, and the names of their tensors.

A module's matrix W (out, in) stands for W + scale · B · A, with A (rank, in) and B (out, rank). Knows no engine.
"""

from collections.abc import Iterable
from math import sqrt
from typing import Annotated

from msgspec import Meta, Struct

from echo_protocols.values import Name

_PREFIX = "base_model.model."  # as PEFT saves an adapter


class AdapterSpec(Struct, frozen=True, kw_only=True):
    """Which modules have an adapter, by the last part of their names, and how it is scaled."""

    rank: Annotated[int, Meta(ge=1, le=4096)] = 16
    alpha: Annotated[float, Meta(gt=0.0, le=65536.0)] = 32.0
    targets: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    rslora: bool = False
    """Scale by the root of the rank (arXiv 2312.03732)."""

    @property
    def scale(self) -> float:
        """What B · A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def modules(self, tensors: Iterable[str]) -> tuple[str, ...]:
        """The modules that have an adapter, among those that own these tensors."""
        owners = (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
        return tuple(owner for owner in owners if owner.rpartition(".")[2] in self.targets)


def adapter_names(module: str) -> tuple[str, str]:
    """What the tensors A and B of a module are published as: PEFT's names."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"
