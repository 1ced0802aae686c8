"""Nodes as processes of this machine: started as a user would, drained, and every last process found and ended.

Knows no run and no screen. Each node leads its own session, so that a terminal's Ctrl-C reaches only us and a node's
daemons fall with its process group. On Linux a node also dies with us (see `echo_p2p.net.leash`), even by SIGKILL.
"""

import atexit
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import trio

from echo_node.charts import plain
from echo_p2p.errors import EchoError

LAUNCH_VARIABLE = "ECHO_LAUNCH_ID"
NODE_COMMAND = (sys.executable, "-m", "echo_node")
_POLL_S = 0.05
_KILL_S = 2.0
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ending:
    """How a fleet ended. `orphans` outlived their node, or resisted us; all are gone by now unless they can't be."""

    drained: tuple[str, ...]
    killed: tuple[str, ...]
    orphans: int


@dataclass(slots=True, eq=False)
class NodeProcess:
    """One node: its process, its home, and the file that takes its stdout and stderr."""

    name: str
    home: Path
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def ended(self) -> int | None:
        """Its exit status, None while it runs. Negative: the signal that killed it."""
        return self.process.poll()

    def output(self) -> str:
        """All it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """The last line it has written, harmless for a terminal."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
        return next((plain(line.strip(), 300) for line in reversed(lines) if line.strip()), "")


class Fleet:
    """Owns processes: whatever ends the context, none of them and none of their children is left behind.

    `command` is what stands before a node's arguments. `root` holds a folder for each node.
    """

    def __init__(self, root: Path, *, command: Sequence[str] = NODE_COMMAND, drain_s: float = 12.0) -> None:
        self.root = root
        self.nodes: list[NodeProcess] = []
        self._command = tuple(command)
        self._drain_s = drain_s
        self._launch_id = secrets.token_hex(8)
        self._draining = trio.CancelScope()
        self._ending: Ending | None = None

    async def __aenter__(self) -> Self:
        atexit.register(self._kill_everything)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with trio.CancelScope(shield=True):
            await self.end()

    def launch(self, name: str, arguments: Sequence[str]) -> NodeProcess:
        """Start one node, with `root/name` as its home. Returns at once. Raises EchoError."""
        home = self.root / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "node.json").unlink(missing_ok=True)
        log = home / "output.log"
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    [*_leash(), *self._command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment(home),
                    start_new_session=True,
                )
            except OSError as failure:
                raise EchoError(f"can't start {self._command[0]}: {failure.strerror}") from failure
        node = NodeProcess(name, home, log, process)
        self.nodes.append(node)
        return node

    async def end(self) -> Ending:
        """SIGTERM to each node, a deadline, SIGKILL to the rest; then find and kill what outlived its node."""
        if self._ending is not None:
            return self._ending
        running = [node for node in self.nodes if node.ended is None]
        for node in running:
            node.process.terminate()
        self._draining.deadline = trio.current_time() + self._drain_s
        with self._draining:
            await _all_ended(running)
        stuck = [node for node in running if node.ended is None]
        for node in stuck:
            _kill_group(node.process.pid)
        with trio.move_on_after(_KILL_S):
            await _all_ended(stuck)
        orphans = await self._gone_within(_KILL_S, kill=False)
        left = await self._gone_within(_KILL_S, kill=True) if orphans else 0
        if not left:
            atexit.unregister(self._kill_everything)
        drained = tuple(node.name for node in running if node not in stuck)
        self._ending = Ending(drained, tuple(node.name for node in stuck), orphans)
        return self._ending

    def hurry(self) -> None:
        """Stop waiting for nodes to drain."""
        self._draining.cancel()

    def processes(self) -> list[psutil.Process]:
        """Every live process that descends from this fleet, whatever became of its parents."""
        sessions = {node.process.pid for node in self.nodes}
        return [process for process in psutil.process_iter() if self._is_ours(process, sessions)]

    async def _gone_within(self, timeout_s: float, *, kill: bool) -> int:
        """Wait until no process is left; how many are."""
        with trio.move_on_after(timeout_s):
            while left := self._living():
                for process in left if kill else ():
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                await trio.sleep(_POLL_S * 2)
            return 0
        return len(self._living())

    def _living(self) -> list[psutil.Process]:
        for node in self.nodes:
            node.process.poll()  # reaps it
        return self.processes()

    def _is_ours(self, process: psutil.Process, sessions: set[int]) -> bool:
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            if os.getsid(process.pid) in sessions:
                return True
            return bool(process.environ().get(LAUNCH_VARIABLE) == self._launch_id)
        except (psutil.Error, OSError):  # it is gone, or another user's
            return False

    def _environment(self, home: Path) -> dict[str, str]:
        """Ours without any ECHO_ setting: what a user exports must not change what the fleet does."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
        ours = {"ECHO_HOME": str(home), LAUNCH_VARIABLE: self._launch_id}
        return inherited | ours | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def _kill_everything(self) -> None:
        for node in self.nodes:
            _kill_group(node.process.pid)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


async def _all_ended(nodes: Sequence[NodeProcess]) -> None:
    while any(node.ended is None for node in nodes):  # noqa: ASYNC110  a Popen has no event
        await trio.sleep(_POLL_S)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _leash() -> list[str]:
    """The start of a command line whose process dies with this one; nothing where the system has no such thing."""
    leash = importlib.util.find_spec("echo_p2p.net.leash")
    if not sys.platform.startswith("linux") or leash is None or leash.origin is None:
        return []
    return [sys.executable, "-I", leash.origin, str(os.getpid()), "--"]
