"""Model references: the built-in tiny model, a local folder, or a hub id with an optional `@revision`.

Turns a reference into a folder, and text into token ids and back. Knows nothing of weights, layers or devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_p2p.errors import ModelError

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


def resolve_model(reference: str) -> Path:
    """The folder that holds the model's files; a hub id is downloaded if it isn't in the cache. Raises ModelError."""
    if reference == TINY:
        return _TINY_FOLDER
    folder = Path(reference).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ModelError(f"{folder} holds no config.json: name the folder that save_pretrained wrote.")
    name, _, revision = reference.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f'No model "{reference}": use "{TINY}", the path of a model\'s folder, or a hub id such as Qwen/Qwen3-0.6B.'
        )
    return _resolve_hub(name, revision or None)


def _resolve_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        cure = "connect to the internet once, or name a local folder"
        raise ModelError(f"Model {name} is not in the cache and the hub can't be reached: {cure}.") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        # The hub's own message runs over many lines and repeats its address.
        cure = "check the id, the revision, and your access to it"
        raise ModelError(f"The hub has no model {name} at revision {revision or 'main'}: {cure}.") from error


def load_tokenizer(reference: str) -> Any:
    """The tokenizer of a model, as transformers loads it. Raises ModelError."""
    folder = resolve_model(reference)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
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
    folder = resolve_model(reference)
    found = {load_tokenizer(reference).eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_bytes()).get("eos_token_id")
            found.update(named if isinstance(named, list) else [named])
    return tuple(sorted(token for token in found if isinstance(token, int)))


def longest_sequence(reference: str) -> int:
    """Positions of the longest sequence that the model's configuration allows; 2^31 where it says nothing."""
    config = json.loads((resolve_model(reference) / "config.json").read_bytes())
    found = (config.get("text_config") or config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else 2**31


def tokenizer_hash(reference: str) -> str:
    """SHA-256 over the tokenizer's files: two peers with one hash turn a text into the same ids. Raises ModelError."""
    folder = resolve_model(reference)
    digest = hashlib.sha256()
    found = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ModelError(f"Model {reference} has no tokenizer files: save a tokenizer beside its config.json.")
    for name in found:
        content = (folder / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
