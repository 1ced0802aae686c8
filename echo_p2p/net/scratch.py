"""Folders of ours among the system's temporary files, and those that dead processes of ours left. Knows no content.

A folder is somebody's while a lock in it is held, or one in a folder in it, as homes of nodes have: locks fall with
their processes, however these end. What has no lock was never ours. Without fcntl(2) nothing is ever swept.
"""

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

PREFIX: Final = "echo-"
_LOCK = "lock"
_LOCKING = fcntl is not None


class Scratch:
    """A folder that vanishes with its context, unless it is to be kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = False

    def keep(self) -> None:
        """Leave the folder to the user: nobody will sweep it."""
        self.kept = True
        (self.path / _LOCK).unlink(missing_ok=True)


@contextmanager
def scratch_folder(prefix: str = PREFIX, root: Path | None = None) -> Iterator[Scratch]:
    """A new folder, with a short path, mode 0700, that is known as ours for as long as this process lives."""
    scratch = Scratch(Path(tempfile.mkdtemp(prefix=prefix, dir=root)))
    try:
        with _hold_lock(scratch.path):
            yield scratch
    finally:
        if not scratch.kept:
            shutil.rmtree(scratch.path, ignore_errors=True)


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    draft = folder / f".{_LOCK}"
    with draft.open("wb") as lock:
        if _LOCKING:
            fcntl.flock(lock, fcntl.LOCK_EX)
            draft.rename(folder / _LOCK)  # whoever sees it finds it held
        yield


def sweep(root: Path | None = None) -> int:
    """Remove what dead processes of this user left; how many folders. Blocks. Never raises for what it can't remove."""
    swept = 0
    if not _LOCKING:
        return swept
    for folder in (root or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with suppress(OSError), ExitStack() as stack:
            if _is_left(folder, stack):
                shutil.rmtree(folder)
                swept += 1
    if swept:
        log.debug("removed %d folders that nodes had left", swept)
    return swept


def _is_left(folder: Path, stack: ExitStack) -> bool:
    """Whether a folder is ours, and its process is dead; its locks are ours in `stack` then."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or not (folder / _LOCK).exists():
        return False
    return all(_taken(stack.enter_context(_opened(lock))) for lock in (folder / _LOCK, *folder.glob(f"*/{_LOCK}")))


@contextmanager
def _opened(lock: Path) -> Iterator[BinaryIO]:
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        yield file


def _taken(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
