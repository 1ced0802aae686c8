"""The replay buffer: order, bounds, lag at consume time, duplicates, and what survives a crash."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_p2p.errors import TrainerError
from echo_p2p.rl.buffer import ReplayBuffer, StoredRollout, TakenRollout
from echo_protocols.sync import Lineage
from echo_protocols.values import PolicyVersion

Lag = Callable[[PolicyVersion], int | None]


def rollout(counter: int, step: int, *, worker: str = "w", epoch: int = 1, body: bytes = b"body") -> StoredRollout:
    version = PolicyVersion(epoch=epoch, step=step)
    return StoredRollout(worker, counter, version, body, reward=0.5, accepted_at=100.0 + counter)


def open_buffer(path: Path | str = ":memory:", *, max_groups: int = 100, max_bytes: int = 10_000) -> ReplayBuffer:
    return ReplayBuffer(path, max_groups=max_groups, max_bytes=max_bytes, window=8, max_workers=4)


def at(step: int) -> Lag:
    return lambda version: step - version.step


def counters(taken: tuple[TakenRollout, ...]) -> list[int]:
    return [item.rollout.counter for item in taken]


def test_what_comes_out_is_what_went_in_with_its_lag() -> None:
    with open_buffer() as buffer:
        stored = rollout(7, step=3, body=b"\x00\xff")
        assert buffer.add(stored)
        assert buffer.take(1, step=5, lag=at(5), max_lag=4) == (TakenRollout(stored, lag=2),)


def test_the_freshest_come_first_and_the_earlier_of_equals() -> None:
    with open_buffer() as buffer:
        for counter, step in enumerate((3, 5, 4, 5)):
            buffer.add(rollout(counter, step))
        assert counters(buffer.take(3, step=6, lag=at(5), max_lag=9)) == [1, 3, 2]
        assert counters(buffer.take(1, step=7, lag=at(5), max_lag=9)) == [0]


def test_a_batch_that_is_not_full_takes_nothing() -> None:
    with open_buffer() as buffer:
        buffer.add(rollout(0, 5))
        assert buffer.take(2, step=6, lag=at(5), max_lag=9) == ()
        buffer.add(rollout(1, 5))
        assert len(buffer.take(2, step=6, lag=at(5), max_lag=9)) == 2


def dull(counter: int, step: int) -> StoredRollout:
    return replace(rollout(counter, step), varies=False)


def test_groups_of_equal_rewards_are_passed_over_until_enough_vary() -> None:
    with open_buffer() as buffer:
        for stored in (dull(0, 5), rollout(1, 5), dull(2, 5), rollout(3, 4), rollout(4, 3)):
            buffer.add(stored)
        taken = buffer.take(2, step=6, lag=at(5), max_lag=9, bound=8)
        assert counters(taken) == [0, 1, 2, 3]
        assert [item.rollout.varies for item in taken] == [False, True, False, True]
        assert buffer.statistics().counts == {"added": 5, "equal-rewards": 2}
        assert buffer.rewind(5) == 4  # a lost step looks at the same groups again
        assert buffer.take(2, step=6, lag=at(5), max_lag=9, bound=8) == taken


def test_a_step_waits_for_groups_that_vary_but_not_beyond_its_bound() -> None:
    with open_buffer() as buffer:
        for counter in range(5):
            buffer.add(dull(counter, 5))
        assert buffer.take(2, step=6, lag=at(5), max_lag=9, bound=6) == ()
        buffer.add(dull(5, 5))
        assert counters(buffer.take(2, step=6, lag=at(5), max_lag=9, bound=6)) == [0, 1, 2, 3, 4, 5]
        assert buffer.statistics().counts["equal-rewards"] == 4
    with open_buffer(max_groups=3) as buffer:  # can't hold as many as the bound
        for counter in range(4):
            buffer.add(dull(counter, 5))
        assert len(buffer.take(2, step=6, lag=at(5), max_lag=9, bound=6)) == 3


def test_a_file_of_the_version_before_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with open_buffer(path) as buffer:
        buffer.add(rollout(0, 5))
    with closing(sqlite3.connect(path)) as db:
        db.executescript("ALTER TABLE rollouts DROP COLUMN varies; PRAGMA user_version = 1;")
    with open_buffer(path) as buffer:
        buffer.add(dull(1, 5))
        taken = buffer.take(2, step=6, lag=at(5), max_lag=9)
        assert [item.rollout.varies for item in taken] == [True, False]


def test_nothing_beyond_the_bound_comes_out_and_every_drop_has_its_reason() -> None:
    with open_buffer() as buffer:
        for counter, step in enumerate((1, 2, 3, 9)):
            buffer.add(rollout(counter, step))
        buffer.add(rollout(4, 3, epoch=0))

        def lag(version: PolicyVersion) -> int | None:
            return None if version.epoch == 0 else 4 - version.step

        assert counters(buffer.take(2, step=5, lag=lag, max_lag=2)) == [2, 1]
        statistics = buffer.statistics()
        assert statistics.counts == {"added": 5, "abandoned-branch": 1, "future-version": 1, "too-stale": 1}
        assert (statistics.waiting_groups, statistics.taken_groups) == (0, 2)


def test_a_group_that_ends_on_an_abandoned_branch_is_dropped() -> None:
    lineage = Lineage({2: PolicyVersion(epoch=1, step=8)})
    now = PolicyVersion(epoch=2, step=9)
    with open_buffer() as buffer:
        for counter, end in enumerate((8, 9)):
            buffer.add(replace(rollout(counter, 7), newest=PolicyVersion(epoch=1, step=end)))
        buffer.add(rollout(2, 1, epoch=3))
        (taken,) = buffer.take(1, step=10, lag=lambda version: lineage.lag(version, now), max_lag=4)
        assert (taken.rollout.counter, taken.lag, taken.rollout.newest) == (0, 2, PolicyVersion(epoch=1, step=8))
        assert buffer.statistics().counts == {"added": 3, "abandoned-branch": 1, "unknown-epoch": 1}


def test_the_stalest_is_evicted_when_groups_or_bytes_overflow() -> None:
    with open_buffer(max_groups=2) as buffer:
        for counter, step in enumerate((2, 1, 3)):
            buffer.add(rollout(counter, step))
        assert counters(buffer.take(2, step=4, lag=at(3), max_lag=9)) == [2, 0]
        assert buffer.statistics().counts["evicted"] == 1
    with open_buffer(max_bytes=10) as buffer:
        for counter, step in enumerate((1, 2, 3)):
            buffer.add(rollout(counter, step, body=b"12345"))
        assert buffer.statistics().size_bytes == 10
        assert counters(buffer.take(2, step=4, lag=at(3), max_lag=9)) == [2, 1]


def test_taken_groups_are_not_evicted() -> None:
    with open_buffer(max_groups=1) as buffer:
        buffer.add(rollout(0, 1))
        buffer.take(1, step=2, lag=at(1), max_lag=9)
        buffer.add(rollout(1, 5))
        buffer.add(rollout(2, 5))
        assert buffer.rewind(1) == 1
        assert buffer.statistics().waiting_groups == 1


def test_a_duplicate_is_refused_even_after_training_and_restart(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    with open_buffer(path) as buffer:
        assert buffer.add(rollout(0, 1))
        assert not buffer.add(rollout(0, 2))
        assert buffer.add(rollout(0, 1, worker="v"))
        buffer.take(2, step=2, lag=at(1), max_lag=9)
        buffer.commit(2)
        assert not buffer.add(rollout(0, 1))
    with open_buffer(path) as buffer:
        assert not buffer.add(rollout(0, 1))
        assert buffer.add(rollout(1, 1))
        assert buffer.statistics().counts["duplicate"] == 3


def test_the_memory_of_duplicates_is_bounded_a_worker_and_in_workers() -> None:
    with open_buffer() as buffer:
        for counter in range(1, 40, 2):  # gaps everywhere: the floor can't follow
            assert buffer.add(rollout(counter, 1))
        assert not buffer.add(rollout(2, 1))  # below the window: counts as seen
        assert buffer.add(rollout(38, 1))  # a gap inside the window is open
        assert not buffer.add(rollout(39, 1))
        for worker in "abcd":
            assert buffer.add(rollout(0, 1, worker=worker))
        assert buffer.add(rollout(39, 1))  # forgotten: four others were heard since
        assert not buffer.add(rollout(0, 1, worker="d"))


def test_what_a_lost_step_had_taken_waits_again(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    with open_buffer(path) as buffer:
        for counter in range(6):
            buffer.add(rollout(counter, 5))
        for step in (6, 7, 8):
            buffer.take(2, step=step, lag=at(step - 1), max_lag=9)
        buffer.commit(6)
    with open_buffer(path) as buffer:
        assert buffer.rewind(7) == 2  # the checkpoint of step 7 was durable, its commit was not
        assert counters(buffer.take(2, step=8, lag=at(7), max_lag=9)) == [4, 5]
        assert buffer.take(1, step=9, lag=at(8), max_lag=9) == ()


def test_a_rewind_keeps_the_bounds() -> None:
    with open_buffer(max_groups=2) as buffer:
        for step in range(4):
            buffer.add(rollout(step, step))
            buffer.take(1, step=step + 1, lag=at(step), max_lag=9)
        assert buffer.rewind(0) == 4
        assert buffer.statistics().waiting_groups == 2


WRITER = """
import sys
from echo_p2p.rl.buffer import ReplayBuffer, StoredRollout
from echo_protocols.values import PolicyVersion
buffer = ReplayBuffer(sys.argv[1], max_groups=10_000, max_bytes=10**9)
for counter in range(10_000):
    buffer.add(StoredRollout("w", counter, PolicyVersion(epoch=1, step=3), b"x" * 2000, 1.0, 0.0))
    if counter % 10 == 9:
        buffer.take(4, step=3 + counter // 10, lag=lambda version: 0, max_lag=0)
    sys.stdout.write(f"{counter}\\n")
    sys.stdout.flush()
"""


def test_a_killed_writer_loses_nothing_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        added = -1
        for line in writer.stdout:
            added = int(line)
            if added == 57:
                writer.send_signal(signal.SIGKILL)
    with open_buffer(path, max_groups=10_000, max_bytes=10**9) as buffer:
        statistics = buffer.statistics()
        assert statistics.taken_groups >= 20
        buffer.rewind(0)
        assert not buffer.add(rollout(added, 3))
        total = buffer.statistics().waiting_groups
        assert total in (added + 1, added + 2)  # the last one may not have been told to us
        assert len(buffer.take(total, step=4, lag=at(3), max_lag=0)) == total


def test_a_file_that_is_no_buffer_or_of_another_version_is_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at as one" * 20)
    with pytest.raises(TrainerError, match="text"):
        open_buffer(tmp_path / "text")
    with pytest.raises(TrainerError, match="nowhere"):
        open_buffer(tmp_path / "nowhere" / "rollouts.sqlite")
    with closing(sqlite3.connect(tmp_path / "newer")) as newer:
        newer.execute("PRAGMA user_version = 9")
    with pytest.raises(TrainerError, match="version 9"):
        open_buffer(tmp_path / "newer")


def test_an_error_of_the_lag_rule_changes_nothing() -> None:
    with open_buffer() as buffer:
        buffer.add(rollout(0, 1))

        def broken(version: PolicyVersion) -> int:
            raise KeyError(version.epoch)

        with pytest.raises(KeyError):
            buffer.take(1, step=2, lag=broken, max_lag=9)
        assert buffer.statistics().waiting_groups == 1
    with pytest.raises(TrainerError, match="memory"):
        buffer.add(rollout(1, 1))  # closed


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 12), st.integers(0, 40)), max_size=40),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 12),
)
def test_order_bounds_and_books_hold_for_any_arrivals(
    arrivals: list[tuple[int, int, int, int]], count: int, max_lag: int, now: int
) -> None:
    with ReplayBuffer(":memory:", max_groups=10, max_bytes=200, window=4, max_workers=8) as buffer:
        added = 0
        for worker, counter, step, size in arrivals:
            added += buffer.add(rollout(counter, step, worker=f"w{worker}", body=b"x" * size))
            statistics = buffer.statistics()
            assert statistics.waiting_groups <= 10
            assert statistics.size_bytes <= 200
        taken = buffer.take(count, step=now, lag=at(now), max_lag=max_lag)
        assert len(taken) in (0, count)
        lags = [item.lag for item in taken]
        assert lags == sorted(lags)
        assert all(
            0 <= lag <= max_lag and lag == now - item.rollout.version.step
            for lag, item in zip(lags, taken, strict=True)
        )
        pairs = [(item.rollout.worker, item.rollout.counter) for item in taken]
        assert len(set(pairs)) == len(pairs)
        statistics = buffer.statistics()
        gone = sum(statistics.counts.get(reason, 0) for reason in ("evicted", "too-stale", "future-version"))
        assert statistics.waiting_groups + statistics.taken_groups + gone == added == statistics.counts.get("added", 0)
        assert added + statistics.counts.get("duplicate", 0) == len(arrivals)
