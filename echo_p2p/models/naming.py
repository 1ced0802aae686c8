"""What a run calls its model. Peers read it, so it says nothing of where the model lies."""

import hashlib
from pathlib import Path
from typing import Final

from echo_p2p.errors import ModelError
from echo_p2p.models import TINY, local_folder
from echo_p2p.models.layout import files_with

MARK_DIGITS: Final = 8
_NAME_MAX = 64
_BLOCKS = 64  # of a file are looked at: any training changes nearly all
_BLOCK_BYTES = 4096


def run_name(reference: str) -> str:
    """The built-in model and a hub id as they are; a folder by the last part of its path and a mark of its weights.

    So a folder that is moved or copied is the same model, and another one of the same name is not. Raises ModelError.
    """
    folder = local_folder(reference)
    if folder is None or reference == TINY:
        return reference
    name = "".join(letter for letter in folder.resolve().name if letter.isprintable())[:_NAME_MAX]
    return f"{name or 'model'}:{mark_of(folder)}"


def mark_of(folder: Path) -> str:
    """A few digits that follow what a folder's weights are, by size and samples. Raises ModelError."""
    digest = hashlib.blake2b(digest_size=32, person=b"echo/mark/1")
    for name in sorted(files_with(folder, None)):
        path = folder / name
        try:
            size_bytes = path.stat().st_size
            digest.update(f"{name} {size_bytes}\n".encode())
            with path.open("rb") as file:
                for block in range(_BLOCKS):
                    file.seek(block * max(_BLOCK_BYTES, (size_bytes - _BLOCK_BYTES) // (_BLOCKS - 1)))
                    digest.update(file.read(_BLOCK_BYTES))
        except OSError as error:
            raise ModelError(f"{path} can't be read ({error.strerror}): check that the model is whole.") from error
    return digest.hexdigest()[:MARK_DIGITS]
