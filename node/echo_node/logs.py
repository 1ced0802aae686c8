"""Logging of the application: lines on stderr, and a short journal of what a person should know of. Nothing else."""

import json
import logging
import sys
from collections import deque

from echo_node.state import Event

OURS = ("echo_p2p", "echo_bootstrap", "echo_node")


class Journal(logging.Handler):
    """The last 50 records at INFO or above of our own loggers, for the state document; the oldest goes first."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[Event] = deque(maxlen=50)

    def emit(self, record: logging.LogRecord) -> None:
        self._events.append(Event(at=record.created, text=record.getMessage()))

    @property
    def events(self) -> tuple[Event, ...]:
        """Oldest first."""
        return tuple(self._events)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname, "logger": record.name, "text": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(*, verbosity: int, as_json: bool) -> Journal:
    """-1 quiet, 0 what a person wants to know, 1 more of ours, 2 the vendors too. Returns the journal."""
    root = logging.getLogger()
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(_JsonLines() if as_json else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    root.handlers[:] = [lines]
    root.setLevel(logging.INFO if verbosity >= 2 else logging.ERROR)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(root.level)  # what vendors use that take their loggers out of the tree
    journal = Journal()
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    for name in OURS:
        ours = logging.getLogger(name)
        ours.setLevel(level if verbosity >= 0 else logging.INFO)
        ours.handlers[:] = [journal]
    if verbosity < 0:
        lines.setLevel(logging.WARNING)
    return journal
