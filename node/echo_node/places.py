"""Where a node keeps its things. Knows no content of any file but `node.json`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

from echo_node.state import Whereabouts
from echo_p2p.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of one node. The identity lies in the data folder: never in a cache or the working directory."""

    data: Path
    cache: Path

    @property
    def identity(self) -> Path:
        """The node's Ed25519 key."""
        return self.data / "identity.key"

    @property
    def whereabouts(self) -> Path:
        """Says where the running node answers HTTP."""
        return self.data / "node.json"

    def run(self, run_id: bytes) -> Path:
        """The folder of one run."""
        return self.data / "runs" / run_id.hex()[:16]


def find_places(home: str | None) -> Places:
    """All under `home` (flag or `ECHO_HOME`), else where this platform keeps data and caches."""
    if home:
        root = Path(home).expanduser()
        return Places(root, root / "cache")
    return Places(Path(platformdirs.user_data_dir("echo")), Path(platformdirs.user_cache_dir("echo")))


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees all of it or none; durable on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename too
    finally:
        os.close(folder)


@contextmanager
def only_node(places: Places) -> Iterator[None]:
    """Keep a second node out of this home while the context is open. Raises ConfigError.

    The lock falls with the process, however it ends. Without fcntl(2) there is none.
    """
    try:
        places.data.mkdir(parents=True, exist_ok=True)
        lock = (places.data / "lock").open("a+b")
    except OSError as error:
        raise ConfigError(
            f"{places.data} can't be this node's home: {error.strerror}; set ECHO_HOME to a folder."
        ) from error
    with lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"a node already runs in {places.data}; give this one an ECHO_HOME of its own."
                ) from None
        yield


@contextmanager
def whereabouts(places: Places, value: Whereabouts) -> Iterator[None]:
    """Say where we are while the context is open."""
    write_whole(places.whereabouts, msgspec.json.encode(value))
    try:
        yield
    finally:
        places.whereabouts.unlink(missing_ok=True)
