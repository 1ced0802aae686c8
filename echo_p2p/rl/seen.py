"""Which groups were here before, long after they are gone: a bounded memory in a SQLite file. Knows no rollout."""

import sqlite3
from dataclasses import dataclass

SEEN_SCHEMA = """
CREATE TABLE workers (worker TEXT PRIMARY KEY, floor INTEGER NOT NULL, added INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX workers_silent ON workers (added);
CREATE TABLE seen (worker TEXT NOT NULL, counter INTEGER NOT NULL, PRIMARY KEY (worker, counter)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class SeenCounters:
    """Tells a new (worker, counter) from one seen before. Its state is in the file that is passed to it.

    A worker has a floor, below which all counters count as seen, and its counters above it. The floor follows counters
    without a gap, and is lifted over gaps when more than `window` counters stand above it. Beyond `max_workers` workers
    the one that added nothing for longest is forgotten.
    """

    window: int
    max_workers: int

    def remember(self, db: sqlite3.Connection, worker: str, counter: int) -> bool:
        """Whether the pair is new; it is remembered from now on. To be called inside a transaction."""
        known = db.execute("SELECT floor FROM workers WHERE worker = ?", (worker,)).fetchone()
        floor = known[0] if known else 0
        if counter < floor or not db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (worker, counter)).rowcount:
            return False
        if not known:
            self._make_room(db)
        rows = db.execute("SELECT counter FROM seen WHERE worker = ? ORDER BY counter", (worker,))
        counters = [row[0] for row in rows]
        if len(counters) > self.window:
            floor = counters[-self.window]
        for seen in counters:
            floor += seen == floor
        db.execute("DELETE FROM seen WHERE worker = ? AND counter < ?", (worker, floor))
        (added,) = db.execute("SELECT COALESCE(MAX(added), 0) + 1 FROM workers").fetchone()
        db.execute("INSERT OR REPLACE INTO workers VALUES (?, ?, ?)", (worker, floor, added))
        return True

    def _make_room(self, db: sqlite3.Connection) -> None:
        (workers,) = db.execute("SELECT COUNT(*) FROM workers").fetchone()
        if workers < self.max_workers:
            return
        (silent,) = db.execute("SELECT worker FROM workers ORDER BY added LIMIT 1").fetchone()
        db.execute("DELETE FROM workers WHERE worker = ?", (silent,))
        db.execute("DELETE FROM seen WHERE worker = ?", (silent,))
