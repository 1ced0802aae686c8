"""Which engine computes a peer's span: chosen from what is asked for, installed and proven here.

The choice is pure. An engine's home is imported once it is chosen, so that this costs nothing to ask.
"""

import logging
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from echo_p2p.chain.stage import Stage
from echo_p2p.errors import ConfigError, ModelError
from echo_protocols.values import Span

log = logging.getLogger(__name__)

Engine = Literal["auto", "torch", "mlx", "vllm"]
Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the choice depends on."""

    apple_silicon: bool
    mlx_installed: bool
    vllm_installed: bool = False
    cuda: bool = False


def this_machine() -> Machine:
    """The machine that we run on; imports no engine."""
    return Machine(
        apple_silicon=sys.platform == "darwin" and platform.machine() == "arm64",
        mlx_installed=all(find_spec(package) is not None for package in ("mlx", "mlx_lm")),
        vllm_installed=find_spec("vllm") is not None,
        cuda=Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(),  # Linux, and Linux inside Windows
    )


def takes_vllm(engine: Engine, device: Device, machine: Machine, span: Span) -> bool:
    """Whether vLLM answers by itself: a whole model on an NVIDIA GPU, or wherever it is asked for by name."""
    if not (span.first and span.last):
        return False
    wanted = device == "cuda" or (device == "auto" and machine.cuda)
    return engine == "vllm" or (engine == "auto" and machine.vllm_installed and wanted)


def vllm_device(device: Device, machine: Machine) -> Literal["cpu", "cuda"]:
    """Where vLLM computes."""
    return "cuda" if device == "cuda" or (device == "auto" and machine.cuda) else "cpu"


def _free_on_gpu() -> int | None:
    from echo_p2p.chain.torch_stage import free_on_gpu

    return free_on_gpu()


def free_where_it_computes(
    device: Device, machine: Machine, free_bytes: int, on_gpu: Callable[[], int | None] = _free_on_gpu
) -> int:
    """Memory for a stage, of a machine with so much that is free: on an NVIDIA GPU, no more than the GPU has free.

    All that a GPU holds passes through the machine's memory, which also keeps a copy of the weights.
    """
    found = on_gpu() if vllm_device(device, machine) == "cuda" else None
    return free_bytes if found is None else min(free_bytes, found)


def engines_to_try(engine: Engine, device: Device, machine: Machine) -> tuple[Engine, ...]:
    """The engines of a stage, best first; the later ones are for models that the first can't compute.

    vLLM is none of them: it takes whole models only, and torch computes a part. Raises ConfigError if what is asked
    for can't be had on any model.
    """
    if engine == "auto":
        fast = machine.apple_silicon and machine.mlx_installed and device in ("auto", "mps")
        return ("mlx", "torch") if fast else ("torch",)
    if engine == "mlx" and not machine.mlx_installed:
        package = "echo-p2p[mlx]" if machine.apple_silicon else "mlx-lm[cpu]"
        raise ConfigError(f"--engine mlx needs mlx-lm: run pip install '{package}', or choose --engine torch.")
    if engine == "mlx" and device == "cuda":
        raise ConfigError("--engine mlx does not compute on inference.device='cuda': choose --engine torch.")
    if engine == "vllm" and not machine.vllm_installed:
        raise ConfigError(
            "--engine vllm needs vllm: run pip install 'echo-p2p[vllm]' where there is no trainer (make env-vllm), "
            "or choose --engine torch."
        )
    if engine == "vllm" and device == "mps":
        raise ConfigError("--engine vllm does not compute on inference.device='mps': choose --engine mlx or torch.")
    return ("torch",) if engine == "vllm" else (engine,)


def needs_files(engine: Engine) -> bool:
    """Whether an engine that is asked for by name computes nothing without the model's own weights on this machine."""
    return engine in ("mlx", "vllm")


def load_engine(
    engine: Engine,
    model_path: Path,
    span: Span,
    *,
    device: Device = "auto",
    weights: bool = True,
    machine: Machine | None = None,
) -> Stage:
    """Load a span with the first engine that computes this model rightly. Raises ConfigError, ModelError.

    Without `weights` they are zero until they are applied, and the folder needs none.
    """
    names = engines_to_try(engine, device, machine or this_machine())
    if not weights:
        return _load_empty(names, model_path, span, device)
    for name in names[:-1]:
        try:
            return _LOADERS[name](model_path, span, device)
        except ModelError as error:
            log.warning("%s; taking %s instead", error, names[-1])
    return _LOADERS[names[-1]](model_path, span, device)


def _load_empty(names: tuple[Engine, ...], model_path: Path, span: Span, device: Device) -> Stage:
    from echo_p2p.chain.torch_stage import load_stage

    if "torch" not in names:
        cure = "name a folder that has them with inference.model, or choose --engine torch"
        raise ModelError(f"--engine {names[0]} proves itself on the model's own weights, and they are not here: {cure}")
    return load_stage(model_path, span, device=device, weights=False)


def _load_torch(model_path: Path, span: Span, device: Device) -> Stage:
    from echo_p2p.chain.torch_stage import load_stage

    return load_stage(model_path, span, device=device)


def _load_mlx(model_path: Path, span: Span, device: Device) -> Stage:
    from echo_p2p.chain.mlx_stage import load_stage, prove

    assert device != "cuda"  # engines_to_try has refused it
    apart = prove(model_path, span, lambda path, alone: _load_torch(path, alone, "cpu"), device=device)
    log.info("mlx computes %s as transformers does, within %.1e", model_path.name, apart)
    return load_stage(model_path, span, device=device)


_LOADERS: dict[Engine, Callable[[Path, Span, Device], Stage]] = {"torch": _load_torch, "mlx": _load_mlx}
