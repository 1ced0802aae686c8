"""Models on the Hugging Face hub, file by file, into the hub's own cache. Knows no layer and no screen.

A revision is resolved to a commit once, and everything else is asked for at that commit. Functions block: call them in
a worker thread. `report` is called with (bytes that are here, bytes of all) as they come; what it raises ends the
download, which goes on from there the next time.
"""

# huggingface_hub 1.x gives up what it has of a file when its process ends: so large files are fetched here, beside its
# cache's blobs, and it is asked for them once they are whole.

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from echo_p2p.errors import ModelError, UnknownModel

log = logging.getLogger(__name__)

Report = Callable[[int, int], None]

_ATTEMPTS = 5
_AGAIN_S = 1.0
_SILENCE_S = 20.0
_FIRST_WORD_S = 5.0
_LOCK_S = 1.0
_PIECE_BYTES = 2**20
_ETAG = re.compile(r"[0-9a-f]{32,64}")
_SHA256_DIGITS = 64
_SMALL_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of a model: `folder` holds those of its files that are here."""

    name: str
    commit: str
    folder: Path


@lru_cache(maxsize=64)
def find_snapshot(name: str, revision: str | None) -> Snapshot:
    """The commit that a revision (None: the main branch) stands for, as long as this process lives.

    The cache's last one if the hub can't be reached. Its config.json is here. Raises ModelError.
    """
    with _asking(name, revision):
        config = _fetch_small(name, "config.json", revision)
    return Snapshot(name, config.parent.name, config.parent)


def fetch_small(snapshot: Snapshot, files: Sequence[str]) -> None:
    """Fetch those of some small files that the model has. Raises ModelError."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in files:
        if try_to_load_from_cache(snapshot.name, file, revision=snapshot.commit) is not None:
            continue  # it is here, or known not to be
        with _asking(snapshot.name, snapshot.commit):
            try:
                _fetch_small(snapshot.name, file, snapshot.commit)
            except LocalEntryNotFoundError:
                log.debug("%s: %s is not in the cache", snapshot.name, file)  # offline: the model may have none
            except EntryNotFoundError:
                log.debug("%s has no %s", snapshot.name, file)


def sizes_of(snapshot: Snapshot, files: Sequence[str]) -> dict[str, int]:
    """Bytes of each file. Raises ModelError."""
    sizes: dict[str, int] = {}
    for file in files:
        path = snapshot.folder / file
        sizes[file] = path.stat().st_size if path.is_file() else _metadata(snapshot, file).size or 0
    return sizes


def fetch_large(snapshot: Snapshot, files: Sequence[str], report: Report) -> None:
    """Fetch files, each from where it stopped the last time. Raises ModelError."""
    sizes = sizes_of(snapshot, files)
    total, before = sum(sizes.values()), 0
    for file in files:
        so_far = before
        if not (snapshot.folder / file).is_file():
            _fetch(snapshot, file, lambda done, so_far=so_far: report(so_far + done, total))  # type: ignore[misc]
        before += sizes[file]
        report(before, total)


def remote_shapes(snapshot: Snapshot, file: str) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a safetensors file on the hub, from its header alone. Raises ModelError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    with _asking(snapshot.name, snapshot.commit):
        try:
            found = HfApi().parse_safetensors_file_metadata(snapshot.name, file, revision=snapshot.commit)
        except SafetensorsParsingError as error:
            raise ModelError(f"{file} of {snapshot.name} is no safetensors file: name another model.") from error
    return {name: tuple(int(n) for n in tensor.shape) for name, tensor in found.tensors.items()}


def _fetch_small(name: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        size_bytes = _knock(name, file, revision)
    except LocalEntryNotFoundError:
        if isinstance(held := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(held)
        raise
    if size_bytes > _SMALL_MAX_BYTES:
        raise ModelError(f"{file} of {name} has {size_bytes} bytes, which no such file needs: name another model.")
    return Path(hf_hub_download(name, file, revision=revision))


def _knock(name: str, file: str, revision: str | None) -> int:
    """The size of a file, asked for once; 0 if the hub says something else of it.

    Raises LocalEntryNotFoundError if nobody answers: huggingface_hub would try for 25 s.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        with suppress(HfHubHTTPError):  # an answer, of which `hf_hub_download` makes more
            found = get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=_FIRST_WORD_S)
            return found.size or 0
    except (*_vendor_failures(), OfflineModeIsEnabled) as error:
        raise LocalEntryNotFoundError(str(error)) from error
    return 0


def _fetch(snapshot: Snapshot, file: str, report: Callable[[int], None]) -> None:
    from filelock import Timeout
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import WeakFileLock

    metadata = _metadata(snapshot, file)
    if metadata.etag and _ETAG.fullmatch(metadata.etag) and metadata.size is not None:
        blob = snapshot.folder.parent.parent / "blobs" / metadata.etag
        blob.parent.mkdir(exist_ok=True)
        while not blob.exists():
            try:
                with WeakFileLock(f"{blob}.echo-lock", timeout=_LOCK_S):  # another node may want the same
                    if not blob.exists():
                        _fetch_blob(snapshot, file, blob, metadata.size, report)
            except Timeout:
                report(0)
    with _asking(snapshot.name, snapshot.commit):
        hf_hub_download(snapshot.name, file, revision=snapshot.commit)


def _fetch_blob(snapshot: Snapshot, file: str, blob: Path, size_bytes: int, report: Callable[[int], None]) -> None:
    """The blob, whole and checked, once this returns. Raises ModelError."""
    part = blob.with_name(f"{blob.name}.echo-part")
    if part.exists() and part.stat().st_size:
        log.info("%s goes on at %.0f %%", file, 100 * part.stat().st_size / max(1, size_bytes))
    if (free := shutil.disk_usage(blob.parent).free) < size_bytes - (part.stat().st_size if part.exists() else 0):
        cure = "free some, or set HF_HOME to another disk"
        raise ModelError(f"{file} of {snapshot.name} has {size_bytes >> 20} MiB, and {free >> 20} are free: {cure}.")
    failures = 0
    while (held := part.stat().st_size if part.exists() else 0) < size_bytes:
        try:
            _receive(snapshot, file, part, held, report)
        except _vendor_failures() as error:
            failures = 0 if part.exists() and part.stat().st_size > held else failures + 1
            if failures >= _ATTEMPTS:
                cure = "check the connection and start again: it goes on from there"
                raise ModelError(
                    f"{file} of {snapshot.name} can't be fetched from the hub ({error}): {cure}."
                ) from None
            log.info("%s of %s broke off (%s); going on", file, snapshot.name, error)
            time.sleep(_AGAIN_S)
    if part.stat().st_size != size_bytes or (len(blob.name) == _SHA256_DIGITS and _sha256(part) != blob.name):
        part.unlink()
        raise ModelError(f"{file} of {snapshot.name} came damaged from the hub: start again to fetch it anew.")
    part.replace(blob)


def _receive(snapshot: Snapshot, file: str, part: Path, held: int, report: Callable[[int], None]) -> None:
    """Add what the hub has beyond `held` bytes."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(snapshot.name, file, revision=snapshot.commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if held:
        headers["Range"] = f"bytes={held}-"
    with get_session().stream("GET", url, headers=headers, timeout=_SILENCE_S) as response:
        hf_raise_for_status(response)
        goes_on = held > 0 and response.status_code == 206  # else the server sends all of it
        with part.open("ab" if goes_on else "wb") as output:
            for piece in response.iter_bytes(_PIECE_BYTES):
                output.write(piece)
                report(output.tell())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _metadata(snapshot: Snapshot, file: str) -> Any:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with _asking(snapshot.name, snapshot.commit):
        return get_hf_file_metadata(hf_hub_url(snapshot.name, file, revision=snapshot.commit))


def _vendor_failures() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.HTTPError,)


@contextmanager
def _asking(name: str, revision: str | None) -> Iterator[None]:
    """What the hub raises, as a sentence: its own message runs over many lines and repeats its address."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except LocalEntryNotFoundError as error:
        cure = "connect to the internet once, or name a local folder"
        raise ModelError(f"Model {name} is not in the cache and the hub can't be reached: {cure}.") from error
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        cure = "check the id, the revision, and your access to it"
        raise UnknownModel(f"The hub has no model {name} at revision {revision or 'main'}: {cure}.") from error
    except (HfHubHTTPError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise ModelError(f"Model {name} can't be had from the hub ({why}): check your access to it.") from error
    except _vendor_failures() as error:
        raise ModelError(f"The hub can't be reached for {name} ({error}): check the connection.") from error
