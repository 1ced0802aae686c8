"""The tables of the replay buffer's file, and how an older file becomes a newer one. Knows no rollout."""

import sqlite3

from echo_p2p.rl.seen import SEEN_SCHEMA

VERSION = 2
_SCHEMA = """
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY, worker TEXT NOT NULL, counter INTEGER NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL,
  newest_epoch INTEGER NOT NULL, newest_step INTEGER NOT NULL,
  body BLOB NOT NULL, reward REAL NOT NULL, size_bytes INTEGER NOT NULL, accepted_at REAL NOT NULL, taken_for INTEGER,
  varies INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX rollouts_fresh ON rollouts (taken_for, epoch, step, id, size_bytes);
CREATE TABLE counts (reason TEXT PRIMARY KEY, groups INTEGER NOT NULL) WITHOUT ROWID;
"""

_FROM_VERSION_1 = "ALTER TABLE rollouts ADD COLUMN varies INTEGER NOT NULL DEFAULT 1;"


def open_schema(db: sqlite3.Connection) -> int:
    """Makes the tables of a new file, and brings those of an older one up to date; the version that the file has then.

    Another version than `VERSION` is of newer software; nothing was done to the file. Raises sqlite3.Error.
    """
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    if found not in (0, 1):
        return found
    made = f"{_SCHEMA} {SEEN_SCHEMA}" if found == 0 else _FROM_VERSION_1
    db.executescript(f"BEGIN; {made} PRAGMA user_version = {VERSION}; COMMIT;")
    return VERSION
