"""How far a download is, for a person: a bar on a terminal, else a line in the log at each tenth. Knows no download."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from echo_node.charts import bytes_text
from echo_p2p.models.hub import Report

log = logging.getLogger(__name__)


@contextmanager
def showing(what: str, console: Console | None = None) -> Iterator[Report]:
    """Show how far `what` is while the context is open; what is said after that is ignored. Safe from any thread."""
    console = console or Console(stderr=True)
    shown = _Bar(what, console) if console.is_terminal and log.isEnabledFor(logging.INFO) else _Tenths(what)
    try:
        yield shown
    finally:
        shown.end()


def cancellable(report: Report) -> Report:
    """For a worker thread of trio: ends with the task that waits for it, at the next report."""

    def checked(done: int, total: int) -> None:
        trio.from_thread.check_cancelled()
        report(done, total)

    return checked


class _Bar:
    """Stands on the screen from the first report to the end."""

    def __init__(self, what: str, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(what, total=None)
        self._ended = False

    def __call__(self, done: int, total: int) -> None:
        if not self._ended:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total)

    def end(self) -> None:
        """Leave the screen."""
        self._ended = True
        self._bar.stop()


class _Tenths:
    """Writes a line each time another tenth has come."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = 0
        self._ended = False

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total > 0 else 0
        if tenth > self._said and not self._ended:
            self._said = tenth
            log.info("%s: %d %% of %s", self._what, 10 * tenth, bytes_text(total))

    def end(self) -> None:
        """Write no more."""
        self._ended = True
