"""What this machine brings along, check by check: software, memory, key, disk, ports, device. Changes nothing."""

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from echo_node.charts import bytes_text
from echo_node.node import check_start
from echo_node.places import Places
from echo_node.state import NodeState
from echo_p2p.config import NodeConfig
from echo_p2p.errors import ConfigError, IdentityError
from echo_p2p.identity import load_or_create

MEMORY_MIN_BYTES = 512 << 20
_PACKAGES = ("hivemind", "libp2p", "torch", "transformers")


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was looked at; `ok` nil means that it can't be told from here."""

    name: str
    ok: bool | None
    says: str
    cure: str = ""


def versions() -> Iterator[Check]:
    """Python, and the packages that a node stands on, at the versions that this one was made for."""
    python = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Check(
        name="python", ok=fits, says=python, cure="" if fits else "Make an environment with Python 3.11 or 3.12."
    )
    wanted = dict(_pins())
    found = {name: _version(name) for name in dict.fromkeys((*_PACKAGES, *wanted))}
    wrong = [
        f"{name} {found[name] or 'missing'} instead of {pin}" for name, pin in wanted.items() if found[name] != pin
    ]
    wrong += [f"{name} missing" for name, there in found.items() if there is None]
    said = ", ".join(f"{name} {there}" for name, there in (("echo-p2p", _version("echo-p2p")), *found.items()))
    cure = "Install again, into an environment of its own: pip install -e ." if wrong else ""
    yield Check(name="packages", ok=not wrong, says="; ".join(wrong) or said, cure=cure)


def _pins() -> Iterator[tuple[str, str]]:
    for requirement in importlib.metadata.requires("echo-p2p") or ():
        if (pinned := re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9.]+)", requirement)) is not None:
            yield pinned[1], pinned[2]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory(config: NodeConfig, available_bytes: int) -> Check:
    """Whether there is memory for some layers."""
    if config.role != "inference":
        return Check(name="memory", ok=True, says=f"{bytes_text(available_bytes)} free")
    share = config.inference.memory_share
    given = int(available_bytes * share)
    says = f"{bytes_text(available_bytes)} free, of which a node takes {bytes_text(given)} (memory_share {share:g})"
    cure = "" if given >= MEMORY_MIN_BYTES else "End other programs, or raise inference.memory_share."
    return Check(name="memory", ok=not cure, says=says, cure=cure)


def home(places: Places) -> Check:
    """Whether the node's folder can be written to, and its key is sound."""
    if not places.identity.exists():
        folder = _existing(places.data)
        if _writable(folder):
            return Check(name="home", ok=True, says=f"{places.data}; its key will be made at the first start")
        return Check(
            name="home", ok=False, says=f"{folder} can't be written to", cure="Set ECHO_HOME to a folder of your own."
        )
    try:
        peer = load_or_create(places.identity).peer_id
    except IdentityError as error:
        return Check(name="home", ok=False, says=str(error), cure="Put the key right, or move it away for a new one.")
    return Check(name="home", ok=True, says=f"{places.data}, peer {peer}")


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def disk(config: NodeConfig, places: Places) -> Check:
    """Whether the store of weights can grow to its bound."""
    key = "trainer.store_bytes" if config.role == "trainer" else "inference.store_bytes"
    bound = {"trainer": config.trainer.store_bytes, "inference": config.inference.store_bytes}.get(config.role, 1 << 30)
    free = shutil.disk_usage(_existing(places.data)).free
    cure = "" if free >= bound else f"Free some, lower {key}, or set ECHO_HOME to another disk."
    says = f"{bytes_text(free)} free; a node stores at most {bytes_text(bound)}"
    return Check(name="disk", ok=not cure, says=says, cure=cure)


def port(config: NodeConfig, running: NodeState | None) -> Check:
    """Whether the ports can be listened on."""
    if running is not None:
        return Check(name="port", ok=True, says=f"in use by the running {running.role}, process {running.pid}")
    try:
        check_start(msgspec.structs.replace(config, role="bootstrap"))  # of which only ports are asked
    except ConfigError as error:
        return Check(name="port", ok=False, says=str(error), cure="Or end the program that has it.")
    chosen = [str(number) for number in (config.network.port, config.network.gossip_port) if number]
    says = f"{' and '.join(chosen)} can be used" if chosen else "a free one is taken at each start"
    return Check(name="port", ok=True, says=says)


def device(config: NodeConfig) -> Check:
    """What would compute here."""
    import torch

    asked = config.inference.device if config.role == "inference" else config.trainer.device
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    has = {"auto": True, "cpu": True, "cuda": cuda, "mps": mps}
    if not has[asked]:
        cure = f"Install a torch that supports it, or set {config.role}.device to 'auto'."
        return Check(name="device", ok=False, says=f"{asked} is asked for, and torch has none", cure=cure)
    used = asked if asked != "auto" else "cuda" if cuda else "mps" if mps else "cpu"
    cores = psutil.cpu_count(logical=False) or 1
    name = torch.cuda.get_device_name() if used == "cuda" else f"{cores} cores"
    return Check(name="device", ok=True, says=f"{used} ({name})")
