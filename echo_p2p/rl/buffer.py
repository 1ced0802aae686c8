"""The trainer's replay buffer: accepted rollouts, durable and bounded, in one SQLite file. Knows no network or engine.

Freshest first out, stalest first evicted. A batch is taken for a step, and deleted only when the checkpoint that holds
this step is durable: after a crash, whatever was taken for a lost step is there again.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from echo_p2p.errors import TrainerError
from echo_p2p.rl.buffer_schema import VERSION, open_schema
from echo_p2p.rl.seen import SeenCounters
from echo_protocols.values import PolicyVersion

ADDED, DUPLICATE, EVICTED = "added", "duplicate", "evicted"
TOO_STALE, ABANDONED_BRANCH, FUTURE_VERSION = "too-stale", "abandoned-branch", "future-version"
EQUAL_REWARDS = "equal-rewards"

_GROUP = (
    "SELECT worker, counter, epoch, step, newest_epoch, newest_step, body, reward, accepted_at, varies"
    " FROM rollouts WHERE id = ?"
)

LagRule = Callable[[PolicyVersion], int | str | None]
"""How many steps behind a version is; or why it has no lag (None: it is of a branch that the run has left)."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One accepted group, named by `(worker, counter)`. `version` is the oldest that any of its tokens came from.

    `varies` says whether its samples differ in their rewards, of which `reward` is the mean.
    `newest` is the newest one, the same unless given: after a restart it may lie on a branch that the run has left.
    """

    worker: str
    counter: int
    version: PolicyVersion
    body: bytes
    reward: float
    accepted_at: float
    newest: PolicyVersion | None = None
    varies: bool = True


@dataclass(frozen=True, slots=True)
class TakenRollout:
    """A group to train on now, with its lag at this moment."""

    rollout: StoredRollout
    lag: int


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """What is in the buffer now, and what happened to groups since the file was made, by reason."""

    waiting_groups: int
    taken_groups: int
    size_bytes: int
    counts: Mapping[str, int]


class ReplayBuffer:
    """Rollouts on disk. Synchronous, for worker threads; calls from several take turns.

    Bounds: `max_groups` and `max_bytes` of waiting groups; the stalest, then the oldest go first. `window` and
    `max_workers` bound the memory of what was here before: see `SeenCounters`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        max_groups: int,
        max_bytes: int,
        window: int = 1024,
        max_workers: int = 65_536,
    ) -> None:
        """Opens the file or makes it; `":memory:"` keeps nothing. Raises TrainerError if it can't be used."""
        self._path = path
        self._max_groups, self._max_bytes = max_groups, max_bytes
        self._seen = SeenCounters(window=window, max_workers=max_workers)
        self._lock = threading.Lock()
        try:
            # Transactions are ours to begin: isolation_level None.
            self._db = sqlite3.connect(str(path), isolation_level=None, check_same_thread=False, timeout=10.0)
        except sqlite3.Error as error:
            raise self._failure(error) from error
        try:
            found = open_schema(self._db)
        except sqlite3.Error as error:
            self._db.close()
            raise self._failure(error) from error
        if found != VERSION:
            self._db.close()
            raise TrainerError(f"{path} is a rollout buffer of version {found}, not {VERSION}: move it.")

    def add(self, rollout: StoredRollout) -> bool:
        """Keep a rollout; durable when this returns. False if this (worker, counter) was ever here before."""
        newest = rollout.newest or rollout.version
        with self._transaction():
            if not self._seen.remember(self._db, rollout.worker, rollout.counter):
                self._count(DUPLICATE, 1)
                return False
            self._db.execute(
                "INSERT INTO rollouts (worker, counter, epoch, step, newest_epoch, newest_step,"
                " body, reward, size_bytes, accepted_at, varies) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    rollout.worker, rollout.counter, rollout.version.epoch, rollout.version.step,
                    newest.epoch, newest.step, rollout.body, rollout.reward, len(rollout.body), rollout.accepted_at,
                    rollout.varies,
                ),
            )  # fmt: skip
            self._count(ADDED, 1)
            self._evict()
        return True

    def take(
        self, count: int, *, step: int, lag: LagRule, max_lag: int, bound: int | None = None
    ) -> tuple[TakenRollout, ...]:
        """Exactly `count` groups for the training step `step`, freshest first; none if fewer are fresh enough.

        With a `bound` above `count`, as many more as it needs until `count` of them vary in their rewards; `bound` of
        them if fewer do, or all if the buffer can't hold so many. Those that don't vary count as passed over: all but
        the ones that fill up `count`.

        Whatever isn't within 0…`max_lag` now, or of a branch that the run has left, is dropped and counted by reason:
        lag only grows.
        """
        with self._transaction():
            lags = self._drop_unusable(lag, max_lag)
            places = self._enough(count, min(bound or count, max(count, self._max_groups)))
            rows = [self._db.execute(_GROUP, (place,)).fetchone() for place in places]
            self._db.executemany("UPDATE rollouts SET taken_for = ? WHERE id = ?", [(step, place) for place in places])
            if len(rows) > count:
                self._count(EQUAL_REWARDS, len(rows) - count)
        rollouts = [_decode(row) for row in rows]
        return tuple(TakenRollout(rollout, lags[rollout.version]) for rollout in rollouts)

    def _enough(self, count: int, bound: int) -> list[int]:
        """Ids of the freshest groups until `count` of them vary, or `bound` of them; none if there are fewer."""
        waiting = self._db.execute(
            "SELECT id, varies FROM rollouts WHERE taken_for IS NULL ORDER BY epoch DESC, step DESC, id LIMIT ?",
            (bound,),
        ).fetchall()
        varying = 0
        for number, (_, varies) in enumerate(waiting, start=1):
            varying += varies
            if varying == count or number == bound:
                return [place for place, _ in waiting[:number]]
        return []

    def commit(self, step: int) -> None:
        """Delete what was taken for steps up to `step`: a checkpoint that holds them is durable."""
        with self._transaction():
            self._db.execute("DELETE FROM rollouts WHERE taken_for <= ?", (step,))

    def rewind(self, step: int) -> int:
        """After resuming from the checkpoint of `step`: what later steps had taken waits again. Returns how many."""
        with self._transaction():
            self._db.execute("DELETE FROM rollouts WHERE taken_for <= ?", (step,))
            returned = self._db.execute("UPDATE rollouts SET taken_for = NULL WHERE taken_for > ?", (step,)).rowcount
            self._evict()
        return returned

    def statistics(self) -> BufferStatistics:
        """What is in the buffer, and what happened to groups so far."""
        with self._transaction():
            waiting, taken, size = self._db.execute(
                "SELECT COUNT(*) - COUNT(taken_for), COUNT(taken_for), COALESCE(SUM(size_bytes), 0) FROM rollouts"
            ).fetchone()
            counts = dict(self._db.execute("SELECT reason, groups FROM counts ORDER BY reason"))
        return BufferStatistics(waiting_groups=waiting, taken_groups=taken, size_bytes=size, counts=counts)

    def close(self) -> None:
        """Close the file; nothing is lost by not calling it."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _evict(self) -> None:
        while True:
            groups, size = self._db.execute(
                "SELECT COUNT(*), COALESCE(SUM(size_bytes), 0) FROM rollouts WHERE taken_for IS NULL"
            ).fetchone()
            if groups <= self._max_groups and size <= self._max_bytes:
                return
            self._db.execute(
                "DELETE FROM rollouts WHERE id ="
                " (SELECT id FROM rollouts WHERE taken_for IS NULL ORDER BY epoch, step, id LIMIT 1)"
            )
            self._count(EVICTED, 1)

    def _drop_unusable(self, lag: LagRule, max_lag: int) -> dict[PolicyVersion, int]:
        """Drops and counts what may not be trained on now; returns the lag by version of what is left."""
        usable: dict[PolicyVersion, int] = {}
        waiting = self._db.execute(
            "SELECT epoch, step, newest_epoch, newest_step, COUNT(*) FROM rollouts WHERE taken_for IS NULL"
            " GROUP BY epoch, step, newest_epoch, newest_step"
        ).fetchall()
        for epoch, step, newest_epoch, newest_step, groups in waiting:
            oldest, newest = PolicyVersion(epoch=epoch, step=step), PolicyVersion(epoch=newest_epoch, step=newest_step)
            steps, fault = _judge(lag(oldest), lag(newest), max_lag)
            if fault is None:
                usable[oldest] = steps
                continue
            self._db.execute(
                "DELETE FROM rollouts WHERE taken_for IS NULL"
                " AND epoch = ? AND step = ? AND newest_epoch = ? AND newest_step = ?",
                (epoch, step, newest_epoch, newest_step),
            )
            self._count(fault, groups)
        return usable

    def _count(self, reason: str, groups: int) -> None:
        self._db.execute(
            "INSERT INTO counts VALUES (?, ?) ON CONFLICT (reason) DO UPDATE SET groups = groups + excluded.groups",
            (reason, groups),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the block or nothing, one at a time; SQLite's failures become ours."""
        with self._lock:
            try:
                with self._db:  # commits, or rolls back on an error
                    self._db.execute("BEGIN IMMEDIATE")
                    yield
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> TrainerError:
        return TrainerError(f"The rollout buffer {self._path} can't be used ({error}): free space, or move it away.")


def _judge(oldest: int | str | None, newest: int | str | None, max_lag: int) -> tuple[int, str | None]:
    """The lag of a group, and why it may not be trained on, from what the rule says of its two ends."""
    for end in (oldest, newest):
        if not isinstance(end, int):
            return 0, end or ABANDONED_BRANCH
        if end < 0:
            return 0, FUTURE_VERSION
    assert isinstance(oldest, int)
    return oldest, TOO_STALE if oldest > max_lag else None


def _decode(row: tuple[Any, ...]) -> StoredRollout:
    worker, counter, epoch, step, newest_epoch, newest_step, body, reward, accepted_at, varies = row
    oldest, newest = PolicyVersion(epoch=epoch, step=step), PolicyVersion(epoch=newest_epoch, step=newest_step)
    newer = None if newest == oldest else newest
    return StoredRollout(worker, counter, oldest, body, reward, accepted_at, newer, bool(varies))
