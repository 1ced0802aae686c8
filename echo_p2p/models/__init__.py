"""Model references: the built-in tiny model, a local folder, or a hub id with an optional `@revision`.

Turns a reference into a folder, and text into token ids and back. Knows no layer and no device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_p2p.errors import ModelError, UnknownModel
from echo_p2p.models.hub import Report, Snapshot, fetch_large, fetch_small, find_snapshot
from echo_p2p.models.layout import INDEX, files_with, is_tied, span_tensors, tensor_shapes
from echo_protocols.values import Span

TINY = "tiny"
_TINY_FOLDER = Path(__file__).parent / "tiny"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


SMALL_FILES = ("config.json", "generation_config.json", *_TOKENIZER_FILES)
"""What a model has beside its weights and their index, as far as anybody here reads it."""


def resolve_model(reference: str, report: Report = lambda done, total: None) -> Path:
    """The folder that holds all of the model's files; what is not here of a hub id is fetched. Raises ModelError.

    `report` hears of large files, as in `models.hub`.
    """
    folder = local_folder(reference)
    return folder or fetch_weights(_snapshot(reference), None, report)


def model_folder(reference: str) -> Path:
    """The folder with the model's small files; of a hub id, the weights may be absent. Raises ModelError."""
    folder = local_folder(reference)
    if folder is None:
        snapshot = _snapshot(reference)
        fetch_small(snapshot, (*SMALL_FILES, INDEX))
        folder = snapshot.folder
    return folder


def hub_id(reference: str) -> tuple[str, str | None] | None:
    """Name and revision of a hub id; None for what can only be a folder. Opens nothing."""
    name, _, revision = reference.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    return name, revision or None


def fetch_weights(snapshot: Snapshot, names: Collection[str] | None, report: Report) -> Path:
    """Fetch the files of a hub's model that hold some tensors (None: all), and its small files.

    Returns their folder. Of a model in one file, that is the whole file. Raises ModelError.
    """
    fetch_small(snapshot, (*SMALL_FILES, INDEX))
    fetch_large(snapshot, files_with(snapshot.folder, names), report)
    return snapshot.folder


def tensors_of(folder: Path, span: Span) -> list[str]:
    """The names of a span's tensors, by a folder's layout and config.json. Raises ModelError."""
    shapes = tensor_shapes(folder)
    return span_tensors(shapes, span, tied=is_tied(_config(folder), shapes))


def _config(folder: Path) -> dict[str, Any]:
    """What a configuration says of the decoder of text. Raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        inner = config.get("text_config")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ModelError(f"the config.json of {folder} can't be read ({error}): get the model anew.") from None
    return inner if isinstance(inner, dict) else dict(config)


def _snapshot(reference: str) -> Snapshot:
    found = hub_id(reference)
    if found is None:
        raise UnknownModel(
            f'No model "{reference}": use "{TINY}", the path of a model\'s folder, or a hub id such as Qwen/Qwen3-0.6B.'
        )
    return find_snapshot(*found)


def local_folder(reference: str) -> Path | None:
    """The folder that a reference names on this machine, if it is no hub id."""
    if reference == TINY:
        return _TINY_FOLDER
    folder = Path(reference).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise UnknownModel(f"{folder} holds no config.json: name the folder that save_pretrained wrote.")
    return None


def load_tokenizer(reference: str) -> Any:
    """The tokenizer of a model, as transformers loads it. Raises ModelError."""
    folder = model_folder(reference)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower one, and its files may be a stranger's
        raise ModelError(f"Model {reference} has no tokenizer that loads: save one beside its config.json.") from error


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt: as a user's turn where the tokenizer has a chat template, else the text as it is."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]
    return [int(token) for token in tokenizer(text)["input_ids"]]


def encode_chat(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation, from where the model goes on: by the tokenizer's chat template, else end to end.

    A turn is a role and its content. Raises ModelError for a conversation that the template has no form for.
    """
    if not getattr(tokenizer, "chat_template", None):
        return [int(token) for token in tokenizer("".join(turn["content"] for turn in turns))["input_ids"]]
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, TypeError, ValueError) as error:
        cure = "leave out what this model doesn't know, such as a system message"
        raise ModelError(f"The model's chat template can't take these messages ({error}): {cure}.") from error
    return [int(token) for token in encoded["input_ids"]]


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of token ids, without special tokens such as the end of a turn."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stop_tokens(reference: str) -> tuple[int, ...]:
    """The token ids that end an answer, ascending: the tokenizer's, and what the model's configuration names."""
    folder = model_folder(reference)
    found = {load_tokenizer(reference).eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_bytes()).get("eos_token_id")
            found.update(named if isinstance(named, list) else [named])
    return tuple(sorted(token for token in found if isinstance(token, int)))


def longest_sequence(reference: str) -> int:
    """Positions of the longest sequence that the model's configuration allows; 2^31 where it says nothing."""
    found = _config(model_folder(reference)).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else 2**31


def tokenizer_hash(reference: str) -> str:
    """SHA-256 over the tokenizer's files: two peers with one hash turn a text into the same ids. Raises ModelError."""
    folder = model_folder(reference)
    digest = hashlib.sha256()
    found = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ModelError(f"Model {reference} has no tokenizer files: save a tokenizer beside its config.json.")
    for name in found:
        content = (folder / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
