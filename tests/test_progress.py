"""How far a download is: tenths in the log, a bar on a terminal."""

import logging
from io import StringIO

import pytest
import trio
from rich.console import Console

from echo_node.progress import cancellable, showing


def test_without_a_terminal_each_tenth_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "echo_node.progress"), showing("model", Console(file=StringIO())) as report:
        for done in range(0, 1001, 7):
            report(done, 1000)
        report(1000, 1000)
    report(10_000, 10_000)
    assert [record.getMessage() for record in caplog.records] == [
        f"model: {tenth * 10} % of 1 kB" for tenth in range(1, 11)
    ]


def test_a_total_that_is_not_known_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "echo_node.progress"), showing("model", Console(file=StringIO())) as report:
        report(5, 0)
    assert not caplog.records


def test_on_a_terminal_there_is_a_bar_from_the_first_report_on(caplog: pytest.LogCaptureFixture) -> None:
    screen = StringIO()
    with caplog.at_level(logging.INFO, "echo_node.progress"):
        with showing("nothing", Console(file=screen, force_terminal=True)):
            pass
        assert screen.getvalue() == ""
        with showing("model", Console(file=screen, force_terminal=True, width=100)) as report:
            report(10, 1000)
    assert "model" in screen.getvalue()
    assert not caplog.records


def test_a_download_ends_with_the_task_that_waits_for_it() -> None:
    reported: list[int] = []

    def download() -> None:
        report = cancellable(lambda done, total: reported.append(done))
        while True:
            report(len(reported), 0)
            if len(reported) == 3:
                trio.from_thread.run_sync(scope.cancel)

    scope = trio.CancelScope()

    async def main() -> None:
        with trio.fail_after(60), scope:
            await trio.to_thread.run_sync(download)

    trio.run(main)
    assert scope.cancelled_caught
    assert len(reported) == 3
