"""Blobs on disk under their BLAKE2b-256. Knows nothing of what they are and of who else has them.

Bounded: when a new blob takes the store over `max_bytes`, the least recently used ones that are in no pinned set are
removed. Pins are of this process: whoever holds a set pins it again after a restart, when order of use is taken from
the files' times. A blob is visible once it is whole and on disk; one whose file went bad is removed when it is read.
Safe to use from several threads.
"""

import contextlib
import logging
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from echo_p2p.errors import WeightsError
from echo_p2p.net.blobs import blob_hash

log = logging.getLogger(__name__)

_NAME = re.compile("[0-9a-f]{64}")


class Store:
    """A folder of blobs. Opening it removes writes that a crash cut short."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = folder
        self._arriving = folder / "arriving"
        self._writing = threading.Lock()  # of puts, one at a time: else two would count on the same room
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._size_bytes = 0
        self._pins: dict[str, frozenset[bytes]] = {}
        self._arriving.mkdir(parents=True, exist_ok=True)
        for leftover in self._arriving.iterdir():
            leftover.unlink(missing_ok=True)
        self._reopen()

    def _reopen(self) -> None:
        found = [(path.stat(), path) for path in self._folder.glob("??/*") if _NAME.fullmatch(path.name)]
        for status, path in sorted(found, key=lambda pair: pair[0].st_mtime_ns):
            self._sizes[bytes.fromhex(path.name)] = status.st_size
        self._size_bytes = sum(self._sizes.values())

    def __contains__(self, hash: bytes) -> bool:
        with self._lock:
            return hash in self._sizes

    def __len__(self) -> int:
        with self._lock:
            return len(self._sizes)

    def hashes(self) -> set[bytes]:
        """Of all blobs."""
        with self._lock:
            return set(self._sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blobs."""
        return self._size_bytes

    def put(self, data: bytes) -> bytes:
        """Keep a blob; returns its hash once it is on disk. Raises WeightsError if pinned blobs leave no room."""
        hash = blob_hash(data)
        with self._writing:
            path = self._path(hash)
            if self._touch(hash):
                if _holds(path, data):
                    return hash
                log.warning("blob %s went bad on disk and is written again", path.name[:12])
                self._drop(hash)
            self._make_room(len(data))
            path.parent.mkdir(exist_ok=True)
            self._write(path, data)
            with self._lock:
                self._sizes[hash] = len(data)
                self._size_bytes += len(data)
        return hash

    def get(self, hash: bytes) -> bytes | None:
        """The blob, or None. What is returned hashes to `hash`."""
        if not self._touch(hash):
            return None
        path = self._path(hash)
        try:
            data = path.read_bytes()
        except OSError as error:
            log.warning("blob %s can't be read and is dropped: %s", path.name[:12], error)
            self._drop(hash)
            return None
        if blob_hash(data) != hash:
            log.warning("blob %s went bad on disk and is dropped", path.name[:12])
            self._drop(hash)
            return None
        return data

    def pin(self, name: str, hashes: Iterable[bytes]) -> None:
        """Keep these from eviction, in place of what `name` pinned before; they need not be here yet."""
        with self._lock:
            self._pins[name] = frozenset(hashes)

    def unpin(self, name: str) -> None:
        """Give up the set `name`; an unknown one is no error."""
        with self._lock:
            self._pins.pop(name, None)

    def _path(self, hash: bytes) -> Path:
        name = hash.hex()
        return self._folder / name[:2] / name

    def _touch(self, hash: bytes) -> bool:
        with self._lock:
            if hash not in self._sizes:
                return False
            self._sizes.move_to_end(hash)
        with contextlib.suppress(OSError):  # a file that is gone is found out when it is read
            os.utime(self._path(hash))
        return True

    def _drop(self, hash: bytes) -> None:
        with self._lock:
            self._size_bytes -= self._sizes.pop(hash, 0)
        self._path(hash).unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> None:
        """Holding `_writing`. What is chosen is gone at once, so that nobody pins it meanwhile."""
        with self._lock:
            pinned = frozenset().union(*self._pins.values())
            excess = self._size_bytes + size_bytes - self.max_bytes
            evicted: list[bytes] = []
            for hash, size in self._sizes.items():
                if excess <= 0:
                    break
                if hash not in pinned:
                    evicted.append(hash)
                    excess -= size
            if excess > 0:
                raise WeightsError(
                    f"a blob of {size_bytes} bytes does not fit: the store is bounded to {self.max_bytes} bytes, and"
                    " what is left is in use; give the store more room"
                )
            for hash in evicted:
                self._size_bytes -= self._sizes.pop(hash)
        for hash in evicted:
            self._path(hash).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """All of it or nothing, and on disk when this returns."""
        descriptor, temporary = tempfile.mkstemp(dir=self._arriving)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            raise WeightsError(f"a blob can't be written to {self._folder}: {error}; free some disk space") from error
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False
