"""Which tensors a model has, of what shapes, in which files: from safetensors headers, or from `echo_tensors.json`.

`echo_tensors.json` says the shapes of all tensors where the weights themselves are not, or not all: a JSON object of
names and shapes, in the order of the names. Reads no weights, needs no torch; files may come from anybody.

A header is the file's first 8 bytes (its length, little endian) and then JSON: name, type, shape of each tensor.
"""

import json
import re
import struct
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from echo_p2p.errors import ModelError
from echo_protocols.release import part_of, parts_of
from echo_protocols.values import Span

LAYOUT = "echo_tensors.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own bound
_WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")

_UNREADABLE = (
    *(OSError, struct.error, ValueError, LookupError, TypeError, AttributeError),
    *(OverflowError, RecursionError),  # an infinite shape, and lists in lists
)

Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=8)]
Shapes = Mapping[str, tuple[int, ...]]

_Layout = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=256)], Shape], Meta(max_length=2**20)]


class TensorEntry(NamedTuple):
    """Where one tensor lies, or would lie, and how many values it has."""

    file: Path
    values: int


def encode_layout(shapes: Shapes) -> bytes:
    """`echo_tensors.json`: the same bytes for the same tensors."""
    return msgspec.json.encode({name: list(shapes[name]) for name in sorted(shapes)}, order="deterministic")


def decode_layout(content: bytes) -> dict[str, tuple[int, ...]]:
    """The shapes that a `echo_tensors.json` says. Raises ModelError, and nothing else, whatever the content is."""
    try:
        return msgspec.json.decode(content, type=_Layout)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{LAYOUT} can't be read ({error}): get the files of the model anew") from None


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model's folder: by `echo_tensors.json` if it has one, else by its weights' headers.

    Buffers that are computed from the configuration are left out: some old files have them. Raises ModelError.
    """
    layout = folder / LAYOUT
    if layout.is_file():
        return decode_layout(layout.read_bytes())
    files = sorted({folder / name for name in weight_files(folder).values()}) or [folder / SINGLE]
    if not files[0].is_file():
        raise ModelError(f"{folder} holds no {files[0].name}: save the model in safetensors format")
    return {name: shape for file in files for name, shape in read_header(file).items()}


def tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a model's folder: one safetensors file, or many with an index. Raises ModelError."""
    named = weight_files(folder)
    return {
        name: TensorEntry(folder / named.get(name, SINGLE), prod(shape))
        for name, shape in tensor_shapes(folder).items()
    }


def span_tensors(names: Mapping[str, object], span: Span, *, tied: bool) -> list[str]:
    """The tensors of a span, by the names they are stored under; a tied output matrix is no tensor of its own."""
    parts = set(parts_of(span, tied=tied))
    return [name for name in names if part_of(name) in parts and not (tied and name == "lm_head.weight")]


def is_tied(config: Mapping[str, Any], names: Mapping[str, object]) -> bool:
    """Whether the output matrix is the embedding matrix; where the configuration doesn't say, the tensors tell."""
    return bool(config.get("tie_word_embeddings", "lm_head.weight" not in names))


def files_with(folder: Path, names: Collection[str] | None) -> list[str]:
    """The weight files of a folder that hold some tensors (None: all), by its index. Raises ModelError if it has none.

    Without an index all are in one file; whether that has them is not looked at.
    """
    named = weight_files(folder)
    if not named:
        return [SINGLE]
    if absent := sorted(set(names or ()) - named.keys()):
        raise ModelError(f"the index of {folder} lacks {absent[0]!r} and {len(absent) - 1} more: name another model")
    return sorted(set(named.values()) if names is None else {named[name] for name in names})


def weight_files(folder: Path) -> dict[str, str]:
    """The file of each tensor by a folder's index; empty if it has none. Raises ModelError."""
    index = folder / INDEX
    return parse_index(index.read_bytes()) if index.is_file() else {}


def parse_index(content: bytes) -> dict[str, str]:
    """The file of each tensor, as an index says. Raises ModelError for a name that leads out of the folder."""
    try:
        named = msgspec.json.decode(content)["weight_map"]
        found = {str(name): str(file) for name, file in named.items()}
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{INDEX} can't be read ({error}): fetch the model again") from None
    for file in found.values():
        if not _WEIGHT_FILE.fullmatch(file):
            raise ModelError(f"{INDEX} names {file!r:.80}, which is no safetensors file beside it: name another model")
    return found


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a safetensors file. Raises ModelError."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _HEADER_LIMIT_BYTES:
                raise ModelError(f"{file} has a header of {length} bytes, so it is no safetensors file: fetch it again")
            header = json.loads(stream.read(length))
        shapes = {name: tuple(int(n) for n in entry["shape"]) for name, entry in header.items() if _is_tensor(name)}
    except _UNREADABLE as error:
        raise ModelError(f"{file} can't be read as safetensors ({error}): fetch it again") from error
    return shapes


def _is_tensor(name: str) -> bool:
    return name != "__metadata__" and not name.endswith(".rotary_emb.inv_freq")
