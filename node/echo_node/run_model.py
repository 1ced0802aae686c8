"""A run's model on this machine: its small files, and links to those weights that are here. Knows no peer.

Weights come from the folder that the user named, or from the hub, if they are the run's by name and shape; what neither
has comes with the releases. Whatever its origin, it serves only once it hashes to what a release promises.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from msgspec import UNSET

from echo_node.places import write_whole
from echo_p2p.chain.engines import Engine, needs_files
from echo_p2p.errors import ConfigError, ModelError, UnknownModel
from echo_p2p.models import SMALL_FILES, TINY, fetch_weights, hub_id, model_folder, tensors_of
from echo_p2p.models.files import check_contents, small_files
from echo_p2p.models.hub import Report, Snapshot, fetch_small, find_snapshot, remote_shapes, sizes_of
from echo_p2p.models.layout import (
    INDEX,
    LAYOUT,
    Shapes,
    encode_layout,
    files_with,
    read_header,
    tensor_shapes,
    weight_files,
)
from echo_p2p.net.blobs import blob_hash
from echo_protocols.run import RunManifest
from echo_protocols.values import Span

log = logging.getLogger(__name__)

_VALUE_BYTES_MAX = 8  # of what a file of the hub may store
_HEADER_BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class Nearby:
    """Where a run's model may be found without asking a peer; `why` says why it isn't in other places."""

    local: Path | None = None
    snapshot: Snapshot | None = None
    why: tuple[str, ...] = ()

    @property
    def folder(self) -> Path | None:
        """What holds small files."""
        return self.local or (self.snapshot.folder if self.snapshot else None)


def named_folder(named: str) -> Path:
    """The folder that the user gave as `inference.model`. Raises UnknownModel if it is none."""
    local = Path(named).expanduser()
    if not local.is_dir():
        raise UnknownModel(f"inference.model={named} is no folder: name the one that holds your copy of the model.")
    return local


def look_nearby(manifest: RunManifest, named: str) -> Nearby:
    """Look for a run's model: in the folder that the user named, else as built in, else at the hub.

    A path in the manifest is another machine's, and is not opened. Blocks. Raises ModelError if `named` is no folder.
    """
    if named:
        return Nearby(named_folder(named))
    if manifest.model == TINY:
        return Nearby(model_folder(TINY))
    found = hub_id(manifest.model)
    if found is None:
        return Nearby(why=("it is a folder on its trainer's machine",))
    try:
        snapshot = find_snapshot(*found)
        fetch_small(snapshot, SMALL_FILES)
    except ModelError as error:
        return Nearby(why=(str(error),))
    return Nearby(snapshot=snapshot)


def contents_nearby(manifest: RunManifest, nearby: Nearby, held: Path) -> dict[str, bytes]:
    """The small files that the manifest means, as far as they are here, or in `held`. Raises ModelError.

    If the manifest names none, all that were found. Blocks.
    """
    if manifest.model_files is UNSET:
        return _all_contents(manifest, nearby)
    found: dict[str, bytes] = {}
    for file in manifest.model_files:
        candidates = [_read(held / file.name, file.size_bytes)]
        if file.name == LAYOUT:
            candidates.append(_layout_of(nearby))
        elif nearby.folder is not None:
            candidates.append(_read(nearby.folder / file.name, file.size_bytes))
        for content in candidates:
            if content is not None and blob_hash(content) == file.hash:
                found[file.name] = content
    return found


def _layout_of(nearby: Nearby) -> bytes | None:
    """As the user's folder has it, if that is whole."""
    try:
        return encode_layout(tensor_shapes(nearby.local)) if nearby.local is not None else None
    except ModelError as error:
        log.debug("%s", error)
        return None


def _all_contents(manifest: RunManifest, nearby: Nearby) -> dict[str, bytes]:
    if nearby.local is not None:
        return small_files(nearby.local, tensor_shapes(nearby.local))
    if nearby.snapshot is None:
        cure = "name the folder of your copy with inference.model"
        raise ModelError(f"run's model {manifest.model} can't be had ({nearby.why[0]}): {cure}.")
    fetch_small(nearby.snapshot, (INDEX,))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files_with(nearby.snapshot.folder, None):
        shapes |= remote_shapes(nearby.snapshot, name)
    return small_files(nearby.snapshot.folder, shapes)


def _read(path: Path, size_bytes: int) -> bytes | None:
    """A file of that size, if it is one."""
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size == size_bytes else None
    except OSError as error:
        log.debug("%s can't be read: %s", path, error)
        return None


class RunModel:
    """The model of one run in a `folder` of its own: exactly the small files given, and links to weights.

    Raises ModelError for small files that are not a model's, or would do more than describe one.
    """

    def __init__(self, manifest: RunManifest, nearby: Nearby, folder: Path, contents: Mapping[str, bytes]) -> None:
        check_contents(contents, manifest.layers, manifest.vocabulary)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_symlink() or path.name not in contents:
                path.unlink()
        for name, content in contents.items():
            if _read(folder / name, len(content)) != content:
                write_whole(folder / name, content)
        self.folder = folder
        self._nearby = nearby
        self._contents = contents

    @property
    def local(self) -> Path | None:
        """The folder on this machine that has all weights, if the user named one or the model is built in."""
        return self._nearby.local

    def check_engine(self, engine: Engine) -> None:
        """Raises ConfigError for an engine, asked for by name, that can't do with weights which only peers have."""
        nearby = self._nearby
        if needs_files(engine) and nearby.local is None and nearby.snapshot is None:
            raise ConfigError(
                f"--engine {engine} proves itself on the model's own files, and this run's weights come from peers "
                f"alone ({'; '.join(nearby.why)}): name the folder of your copy with --set inference.model=FOLDER, or "
                "choose --engine torch or auto."
            )

    def bring_weights(self, span: Span, report: Report) -> Literal["folder", "hub", "peers"]:
        """Link the files with the span's tensors into the folder, fetched if need be; says where they come from.

        From "peers": there are no files, and the stage is to be filled from releases. Blocks.
        """
        for path in (*self.folder.glob("*.safetensors"), self.folder / INDEX):
            path.unlink(missing_ok=True)
        nearby, reasons = self._nearby, list(self._nearby.why)
        try:
            if nearby.local is not None:
                self._link(nearby.local, tensors_of(self.folder, span))
                log.info("weights of span %s: from %s", span, nearby.local)
                return "folder"
            if nearby.snapshot is not None:
                self._fetch(nearby.snapshot, span, report)
                log.info("weights of span %s: from the hub, %s", span, nearby.snapshot.name)
                return "hub"
        except (ModelError, OSError) as error:
            reasons.append(str(error))
        log.info("weights of span %s: from peers, since %s", span, "; ".join(reasons))
        return "peers"

    def _fetch(self, snapshot: Snapshot, span: Span, report: Report) -> None:
        """Raises ModelError, also for files that are larger than their tensors can be."""
        if (snapshot.folder / "config.json").read_bytes() != self._contents["config.json"]:
            raise ModelError(f"the hub's {snapshot.name} is another one than the run's by now")
        fetch_small(snapshot, (INDEX,))
        names, shapes = tensors_of(self.folder, span), tensor_shapes(self.folder)
        bound = _VALUE_BYTES_MAX * sum(prod(shape) for shape in shapes.values()) + _HEADER_BYTES_MAX
        for file, size_bytes in sizes_of(snapshot, files_with(snapshot.folder, names)).items():
            if size_bytes > bound:
                raise ModelError(
                    f"{file} of the hub's {snapshot.name} has {size_bytes} bytes, more than the run's model"
                )
        self._link(fetch_weights(snapshot, names, report), names)

    def _link(self, source: Path, names: list[str]) -> None:
        """Raises ModelError if the folder lacks some of these tensors, or has them in other shapes."""
        wanted, files = tensor_shapes(self.folder), files_with(source, names)
        stored: dict[str, tuple[int, ...]] = {}
        for file in files:
            stored |= read_header(source / file)
        if wrong := [name for name in names if stored.get(name) != wanted[name]]:
            raise ModelError(f"{source} holds another model than the run's: {_difference(wrong[0], stored, wanted)}")
        for file in (*files, *([INDEX] if weight_files(source) else [])):
            (self.folder / file).symlink_to((source / file).absolute())


def _difference(name: str, stored: Shapes, wanted: Shapes) -> str:
    found = f"has shape {stored[name]}" if name in stored else "isn't there"
    return f"{name} {found}, where the run's has {wanted[name]}"
