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
from types import TracebackType
from typing import Self

from echo_p2p.errors import TrainerError
from echo_p2p.rl.seen import SEEN_SCHEMA, SeenCounters
from echo_protocols.values import PolicyVersion

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY, worker TEXT NOT NULL, counter INTEGER NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL,
  body BLOB NOT NULL, reward REAL NOT NULL, size_bytes INTEGER NOT NULL, accepted_at REAL NOT NULL, taken_for INTEGER
);
CREATE INDEX rollouts_fresh ON rollouts (taken_for, epoch, step, id, size_bytes);
CREATE TABLE counts (reason TEXT PRIMARY KEY, groups INTEGER NOT NULL) WITHOUT ROWID;
"""

ADDED, DUPLICATE, EVICTED = "added", "duplicate", "evicted"
TOO_STALE, ABANDONED_BRANCH, FUTURE_VERSION = "too-stale", "abandoned-branch", "future-version"


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One accepted group. `(worker, counter)` names it; `version` is the oldest that any of its tokens came from."""

    worker: str
    counter: int
    version: PolicyVersion
    body: bytes
    reward: float
    accepted_at: float


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
            self._open_schema()
        except BaseException:
            self._db.close()
            raise

    def _open_schema(self) -> None:
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            found = self._number("PRAGMA user_version")
            if found == 0:
                self._db.executescript(
                    f"BEGIN; {_SCHEMA} {SEEN_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
                )
        except sqlite3.Error as error:
            raise self._failure(error) from error
        if found not in (0, _SCHEMA_VERSION):
            raise TrainerError(f"{self._path} is a rollout buffer of version {found}, not {_SCHEMA_VERSION}: move it.")

    def add(self, rollout: StoredRollout) -> bool:
        """Keep a rollout; durable when this returns. False if this (worker, counter) was ever here before."""
        with self._transaction():
            if not self._seen.remember(self._db, rollout.worker, rollout.counter):
                self._count(DUPLICATE, 1)
                return False
            self._db.execute(
                "INSERT INTO rollouts (worker, counter, epoch, step, body, reward, size_bytes, accepted_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    rollout.worker, rollout.counter, rollout.version.epoch, rollout.version.step,
                    rollout.body, rollout.reward, len(rollout.body), rollout.accepted_at,
                ),
            )  # fmt: skip
            self._count(ADDED, 1)
            self._evict()
        return True

    def take(
        self, count: int, *, step: int, lag: Callable[[PolicyVersion], int | None], max_lag: int
    ) -> tuple[TakenRollout, ...]:
        """Exactly `count` groups for the training step `step`, freshest first; none if fewer are fresh enough.

        `lag` says how many steps behind a version is, None if it is of a branch that the run has left. Whatever isn't
        within 0…`max_lag` now is dropped and counted by reason: lag only grows.
        """
        with self._transaction():
            lags = self._drop_unusable(lag, max_lag)
            if sum(groups for _, groups in lags.values()) < count:
                return ()
            taken: list[TakenRollout] = []
            ids: list[tuple[int, int]] = []
            for version in sorted(lags, key=lambda version: (lags[version][0], -version.epoch, -version.step)):
                rows = self._db.execute(
                    "SELECT id, worker, counter, body, reward, accepted_at FROM rollouts"
                    " WHERE taken_for IS NULL AND epoch = ? AND step = ? ORDER BY id LIMIT ?",
                    (version.epoch, version.step, count - len(taken)),
                )
                for number, worker, counter, body, reward, accepted_at in rows:
                    rollout = StoredRollout(worker, counter, version, body, reward, accepted_at)
                    taken.append(TakenRollout(rollout, lags[version][0]))
                    ids.append((step, number))
                if len(taken) == count:
                    break
            self._db.executemany("UPDATE rollouts SET taken_for = ? WHERE id = ?", ids)
        return tuple(taken)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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

    def _drop_unusable(
        self, lag: Callable[[PolicyVersion], int | None], max_lag: int
    ) -> dict[PolicyVersion, tuple[int, int]]:
        """Drops and counts what is out of bounds; returns (lag, groups) by version of what waits and is not."""
        usable: dict[PolicyVersion, tuple[int, int]] = {}
        waiting = self._db.execute(
            "SELECT epoch, step, COUNT(*) FROM rollouts WHERE taken_for IS NULL GROUP BY epoch, step"
        ).fetchall()
        for epoch, step, groups in waiting:
            version = PolicyVersion(epoch=epoch, step=step)
            steps = lag(version)
            if steps is not None and 0 <= steps <= max_lag:
                usable[version] = (steps, groups)
                continue
            reason = ABANDONED_BRANCH if steps is None else FUTURE_VERSION if steps < 0 else TOO_STALE
            self._db.execute("DELETE FROM rollouts WHERE taken_for IS NULL AND epoch = ? AND step = ?", (epoch, step))
            self._count(reason, groups)
        return usable

    def _count(self, reason: str, groups: int) -> None:
        self._db.execute(
            "INSERT INTO counts VALUES (?, ?) ON CONFLICT (reason) DO UPDATE SET groups = groups + excluded.groups",
            (reason, groups),
        )

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the block or nothing, one at a time; SQLite's failures become ours."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise self._failure(error) from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        try:
            in_transaction = self._db.in_transaction
        except sqlite3.ProgrammingError:  # closed
            return
        if in_transaction:
            self._db.execute("ROLLBACK")

    def _failure(self, error: sqlite3.Error) -> TrainerError:
        return TrainerError(f"The rollout buffer {self._path} can't be used ({error}): free space, or move it away.")
