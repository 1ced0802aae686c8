"""What is logged may quote a hostile peer: it reaches no terminal as it is, and fills neither disk nor journal."""

import io
import json
import logging
import subprocess
import sys

from echo_node.logs import Journal, Throttle, _JsonLines, _Lines, _TextLines


def record(text: str = "said %s", *arguments: object, level: int = logging.INFO, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("echo_node.x", level, "x.py", line, text, arguments, None)


def lines(*, as_json: bool = False) -> tuple[_Lines, io.StringIO]:
    stream = io.StringIO()
    handler = _Lines(stream)
    handler.setFormatter(_JsonLines() if as_json else _TextLines("%(message)s"))
    return handler, stream


HOSTILE = "a\x1b[2J\x1b]0;title\x07\r\n12:00:00 a false line\u202e\x85"


def test_control_characters_of_others_reach_neither_terminal_nor_journal() -> None:
    handler, stream = lines()
    journal = Journal()
    for each in (handler, journal):
        each.handle(record("said %s", HOSTILE))
    for text in (stream.getvalue().removesuffix("\n"), journal.events[0].text):
        assert text.isprintable()
        assert "false line" in text


def test_a_traceback_stays_readable_and_harmless() -> None:
    handler, stream = lines()
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    handler.handle(made)
    assert stream.getvalue().startswith("failed\nTraceback")
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_long_message_is_cut() -> None:
    handler, stream = lines(as_json=True)
    handler.handle(record("%s", "x" * 100_000))
    assert len(json.loads(stream.getvalue())["text"]) == 2000


def test_a_warning_that_comes_too_often_is_counted_instead() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    flood = [throttle.admit(record(level=logging.WARNING)) for _ in range(1000)]
    assert flood.count(0) == 20
    assert flood.count(None) == 980
    assert throttle.admit(record(level=logging.WARNING, line=2)) == 0  # another place in the code has its own
    now[0] = 10.0
    assert throttle.admit(record(level=logging.WARNING)) == 980
    now[0] = 20.0
    assert throttle.admit(record(level=logging.WARNING)) == 0


def test_news_at_the_pace_of_a_fast_run_all_pass() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    for step in range(2000):
        now[0] = step / 8
        assert throttle.admit(record("step")) == 0


def test_what_was_held_back_is_said_with_the_next_one() -> None:
    handler, stream = lines()
    handler._throttle = Throttle(now := iter([0.0] * 30 + [100.0]).__next__)
    assert now is not None
    for _ in range(31):
        handler.handle(record("refused", level=logging.WARNING))
    assert stream.getvalue().count("refused") == 21
    assert stream.getvalue().endswith("refused (and 10 more like it)\n")


def test_a_flood_does_not_push_everything_else_out_of_the_journal() -> None:
    journal = Journal()
    journal.handle(record("the one that matters", line=2))
    for _ in range(1000):
        journal.handle(record("refused", level=logging.WARNING))
    assert journal.events[0].text == "the one that matters"


VENDOR = """
import logging
from echo_node.logs import set_up_logging
set_up_logging(verbosity=0, as_json=False)
vendor = logging.getLogger("some.vendor")
vendor.setLevel(logging.INFO)
vendor.info("chatter")
vendor.error("trouble")
logging.getLogger("echo_node.x").info("ours")
"""


def test_vendors_are_heard_from_their_errors_on_only() -> None:
    program = [sys.executable, "-c", VENDOR]  # in a process of its own: it sets up the logging of all
    said = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stderr
    assert [line.split(" ", 1)[1] for line in said.splitlines()] == ["trouble", "ours"]
