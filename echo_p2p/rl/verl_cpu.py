"""verl in this process, on a machine without an accelerator too: its platform and its process group.

Through verl's public plug points only. Nothing happens on import: `prepare_verl` must run before anything else of verl
is imported. On CUDA it leaves verl's own platform in place. Knows no training.
"""

import contextlib
import functools
import importlib
import io
import logging
import os
import resource
import socket
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from echo_p2p.errors import TrainerError
from echo_p2p.rl.verl_engines import register_engines

logger = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 600.0


@functools.cache
def prepare_verl(device: str) -> None:
    """Make verl train on `device` (`cpu` or `cuda`) in this process, as a world of one. Later calls do nothing.

    A process trains on one kind of device: verl keeps it in module globals. Raises TrainerError if it is another one.
    """
    with quietly():
        _import_verl()
        platforms = importlib.import_module("verl.plugin.platform")
        if device == "cpu":
            platforms.PlatformRegistry.register(platform="cpu")(
                type("CpuPlatform", (_CpuPlatform, platforms.PlatformBase), {})
            )
            os.environ["VERL_PLATFORM"] = "cpu"
        found = platforms.get_platform().device_name
        if found != device:
            raise TrainerError(f"verl trains on {found} in this process, not on {device}: use one device a process.")
        _join_world_of_one(device)
        # Warns once of a renamed function of torch's own, which nested tensors call.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # A value head's output is a view, and nothing writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    with quietly():
        register_engines(device)


@contextmanager
def quietly() -> Iterator[None]:
    """Turns what verl and transformers print, draw and warn of inside the block into debug lines of our log."""
    said = io.StringIO()
    transformers = logging.getLogger("transformers")  # writes to the stderr of when it was imported
    level = transformers.level
    transformers.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.setLevel(level)
        for line in said.getvalue().splitlines():
            logger.debug("verl: %s", line)


def _import_verl() -> None:
    # verl calls logging.basicConfig while it is imported: whoever starts the process decides about the root logger.
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        importlib.import_module("verl")
    except ImportError as error:
        raise TrainerError(f"verl can't be imported ({error}): install echo-p2p[trainer].") from error
    finally:
        root.handlers[:], root.level = handlers, level


def _join_world_of_one(device: str) -> None:
    """A process group of this process alone: an in-memory store, no port, gloo bound to the loopback interface."""
    # verl's Worker reads these, and nobody connects to the address.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if torch.distributed.is_initialized():
        return
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    hook = sys.excepthook  # torch would prefix every line of a traceback with the rank
    torch.distributed.init_process_group(
        "cpu:gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    sys.excepthook = hook


def _cpu_device_module() -> types.ModuleType:
    """`torch.cpu` with the memory and random-state functions that verl calls on `torch.<device>`."""
    module = types.ModuleType("echo_torch_cpu")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))

    def resident_bytes(*_: Any, **__: Any) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def nothing(*_: Any, **__: Any) -> None:
        return None

    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, resident_bytes)
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "synchronize"):
        setattr(module, name, nothing)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    vars(module).update(
        mem_get_info=lambda *_: (os.sysconf("SC_PHYS_PAGES") * page_bytes,) * 2,
        get_device_name=lambda *_: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


class _CpuPlatform:
    """verl's PlatformBase, answered for a CPU. Mixed with that base in `prepare_verl`, once verl is imported."""

    device_name = "cpu"
    vendor_name = "cpu"

    @functools.cached_property
    def device_module(self) -> types.ModuleType:
        return _cpu_device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never found by probing: chosen by name only

    def current_device(self) -> str:
        return "cpu"  # verl passes it to Tensor.to

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
