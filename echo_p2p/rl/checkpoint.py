"""Checkpoints of a trainer: named tensors and a few numbers in one folder, all or nothing. Knows no engine.

A checkpoint is written beside its place, synced and renamed; its manifest is written last and names the hash of the
state, so that an incomplete or damaged one is refused instead of resumed from.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from echo_p2p.errors import TrainerError

_STATE, _MANIFEST = "state.safetensors", "checkpoint.json"
_FORMAT = 1


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands."""

    updates: int
    seed: int
    critic_updates: int = 0
    reference: str = ""
    """Hash of the weights that the policy is compared with; empty where it is not compared."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    progress: Progress
    state_bytes: int
    state_hash: str


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
    """Write a checkpoint into `folder`; an older one of that name is replaced. It is durable when this returns."""
    partial = _beside(folder, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / _STATE)
    state_hash, state_bytes = _hash_file(partial / _STATE)
    manifest = _Manifest(format=_FORMAT, progress=progress, state_bytes=state_bytes, state_hash=state_hash)
    (partial / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for path in (partial / _STATE, partial / _MANIFEST, partial):
        _sync(path)
    _replace(partial, folder)


def read_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], Progress]:
    """What `write_checkpoint` wrote, after checking it. Raises TrainerError if any of it is missing or damaged."""
    older = _beside(folder, "older")
    if older.exists() and not folder.exists():  # stopped between the two renames of a replacement
        older.rename(folder)
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=_Manifest)
        found = _hash_file(folder / _STATE)
    except (OSError, msgspec.MsgspecError) as error:
        raise TrainerError(f"{folder} holds no complete checkpoint ({error}): resume from an older one.") from error
    if manifest.format != _FORMAT:
        raise TrainerError(f"{folder} has format {manifest.format}, not {_FORMAT}: use the release it is of.")
    if found != (manifest.state_hash, manifest.state_bytes):
        raise TrainerError(f"{folder / _STATE} is not what was written: resume from an older checkpoint.")
    return safetensors.torch.load_file(folder / _STATE), manifest.progress


def _replace(partial: Path, folder: Path) -> None:
    older = _beside(folder, "older")
    if folder.exists():
        shutil.rmtree(older, ignore_errors=True)
        folder.rename(older)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(older, ignore_errors=True)


def _beside(folder: Path, word: str) -> Path:
    return folder.with_name(f"{folder.name}.{word}")


def _hash_file(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        return digest.hexdigest(), file.tell()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
