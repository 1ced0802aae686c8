"""Logging of the application: lines on stderr, and a short journal of what a person should know of. Nothing else.

Messages may quote what other peers sent: control characters are replaced, and a message that comes too often is
counted instead of written, so that nobody can drive our terminal, fill our disk or push out what matters.
"""

import copy
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from echo_node.charts import plain
from echo_node.state import Event

OURS = ("echo_p2p", "echo_bootstrap", "echo_node")


_MESSAGE_CHARACTERS = 2000
_BURST, _STEADY_PER_S = 100.0, 10.0
_LOUD_BURST, _LOUD_STEADY_PER_S = 20.0, 0.2


@dataclass(slots=True)
class _Allowance:
    tokens: float
    at: float
    held_back: int = 0


class Throttle:
    """Says whether a record may pass: by its place in the code, 10 a second at length, of warnings one in 5 s."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._allowances: dict[tuple[str, int, str], _Allowance] = {}  # as many as there are log calls in the code

    def admit(self, record: logging.LogRecord) -> int | None:
        """None to hold the record back; else how many like it were held back since the last one that passed."""
        loud = record.levelno >= logging.WARNING
        burst, per_s = (_LOUD_BURST, _LOUD_STEADY_PER_S) if loud else (_BURST, _STEADY_PER_S)
        now = self._now()
        allowance = self._allowances.setdefault(
            (record.pathname, record.lineno, record.levelname), _Allowance(burst, now)
        )
        allowance.tokens = min(burst, allowance.tokens + (now - allowance.at) * per_s)
        allowance.at = now
        if allowance.tokens < 1.0:
            allowance.held_back += 1
            return None
        allowance.tokens -= 1.0
        held_back, allowance.held_back = allowance.held_back, 0
        return held_back


class Journal(logging.Handler):
    """The last 50 records at INFO or above of our own loggers, for the state document; the oldest goes first."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[Event] = deque(maxlen=50)
        self._throttle = Throttle()

    def emit(self, record: logging.LogRecord) -> None:
        if self._throttle.admit(record) is not None:
            self._events.append(Event(at=record.created, text=plain(record.getMessage(), _MESSAGE_CHARACTERS)))

    @property
    def events(self) -> tuple[Event, ...]:
        """Oldest first."""
        return tuple(self._events)


class _Lines(logging.StreamHandler[TextIO]):
    """Lines on a stream, harmless and not too many."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._throttle = Throttle()

    def emit(self, record: logging.LogRecord) -> None:
        held_back = self._throttle.admit(record)
        if held_back is None:
            return
        harmless = copy.copy(record)
        more = f" (and {held_back} more like it)" if held_back else ""
        harmless.msg, harmless.args = plain(record.getMessage(), _MESSAGE_CHARACTERS) + more, None
        super().emit(harmless)


class _TextLines(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        return "\n".join(plain(line, _MESSAGE_CHARACTERS) for line in super().formatException(ei).split("\n"))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname, "logger": record.name, "text": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(*, verbosity: int, as_json: bool) -> Journal:
    """-1 quiet, 0 what a person wants to know, 1 more of ours, 2 the vendors too. Returns the journal."""
    root = logging.getLogger()
    lines = _Lines(sys.stderr)
    lines.setFormatter(_JsonLines() if as_json else _TextLines("%(asctime)s %(message)s", "%H:%M:%S"))
    # a vendor may set its own logger's level: what is not ours is judged here too
    lines.addFilter(lambda record: record.name.partition(".")[0] in OURS or record.levelno >= root.level)
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
