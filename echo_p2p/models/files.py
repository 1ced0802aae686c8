"""The small files of a model as peers give them to each other: what a trainer offers, and what a stranger's are worth.

Names and bounds are the manifest's; here is what can be wrong with the content. Knows no network and no weights.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, cast, get_args

from echo_p2p.errors import ModelError
from echo_p2p.models import SMALL_FILES
from echo_p2p.models.layout import LAYOUT, Shapes, decode_layout, encode_layout
from echo_p2p.net.blobs import blob_hash
from echo_protocols.run import ModelFile, ModelFileName, ModelFiles, check_model_files

log = logging.getLogger(__name__)

_HARMLESS = ("special_tokens_map_file", "added_tokens_file")  # transformers opens neither under these keys
_NUMBER_MAX, _EXPERTS_MAX, _HIDDEN_MAX, _VALUES_MAX = 2**40, 2**16, 2**20, 2**44
_KERNELS = ("attn_implementation", "experts_implementation")

Contents = Mapping[str, bytes]


def small_files(folder: Path, shapes: Shapes) -> dict[str, bytes]:
    """What other peers need of a model's folder beside its weights, by name. Raises ModelError."""
    names = [name for name in get_args(ModelFileName) if name in SMALL_FILES and (folder / name).is_file()]
    try:
        contents = {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise ModelError(f"{folder} can't be read ({error.strerror}): check who may read its files.") from error
    return contents | {LAYOUT: encode_layout(shapes)}


def offered(contents: Contents) -> ModelFiles | None:
    """The files as a manifest names them; None, with the reason in the log, if no manifest may."""
    files = tuple(
        ModelFile(name=cast(ModelFileName, name), hash=blob_hash(contents[name]), size_bytes=len(contents[name]))
        for name in sorted(contents)
    )
    try:
        check_model_files(files)
    except ValueError as error:
        log.warning("peers have to bring the model themselves: %s", error)
        return None
    return files


def check_contents(contents: Contents, layers: int, vocabulary: int) -> None:
    """Raises ModelError if a stranger's files describe no model of so many layers, or do more than describe one."""
    if "config.json" not in contents:
        raise ModelError("the model has no config.json: name the folder that save_pretrained wrote.")
    config = _object("config.json", contents["config.json"])
    for where in _objects(config):
        if where.get("quantization_config") is not None:
            raise ModelError("the run's config.json names a quantisation, and a policy is bf16: join another run.")
        for key, value in where.items():
            if key.removeprefix("_") in _KERNELS and "/" in str(value):
                raise ModelError(f"the run's config.json names code to be downloaded ({key}): join another run.")
            if isinstance(value, int) and abs(value) > (_EXPERTS_MAX if "expert" in key else _NUMBER_MAX):
                raise ModelError(f"the run's config.json has a {key} that no model has: join another run.")
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    found = tuple(inner.get(key) for key in ("num_hidden_layers", "vocab_size"))
    if found != (layers, vocabulary):
        raise ModelError(f"the run's config.json has not the {layers} layers and {vocabulary} tokens that the run has.")
    hidden = inner.get("hidden_size")
    if not isinstance(hidden, int) or not 0 < hidden <= _HIDDEN_MAX:
        raise ModelError("the run's config.json has no hidden_size that a model can have: join another run.")
    if sum(prod(shape) for shape in decode_layout(contents[LAYOUT]).values()) > _VALUES_MAX:
        raise ModelError("the run's model is larger than any that there is: join another run.")
    if "tokenizer_config.json" in contents:
        for key, value in _object("tokenizer_config.json", contents["tokenizer_config.json"]).items():
            if key.endswith("_file") and key not in _HARMLESS and value is not None:
                raise ModelError(f"the run's tokenizer_config.json names a file to open ({key}): join another run.")


def _object(name: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the run's {name} is no JSON ({error}): join another run.") from None
    if not isinstance(value, dict):
        raise ModelError(f"the run's {name} is no JSON object: join another run.")
    return value


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value, itself included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
