"""The lanes of a stage: which rows each still has and where they stand. Knows no engine: a cache is whatever it keeps.

Bounded: `most` lanes of `longest` positions; a lane lives until it is closed, and one too many is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import ChainError

Cache = TypeVar("Cache")

_MAX_ROWS = 4096


@dataclass(slots=True)
class Lane(Generic[Cache]):
    """One lane: its KV cache, the rows that the cache holds (in this order), and their common length."""

    cache: Cache
    rows: NDArray[np.int32]
    length: int = 0


class Lanes(Generic[Cache]):
    """All lanes of one stage, by number."""

    def __init__(self, new_cache: Callable[[], Cache], *, most: int, longest: int) -> None:
        self._new_cache = new_cache
        self._most = most
        self._longest = longest
        self._lanes: dict[int, Lane[Cache]] = {}

    def enter(
        self, number: int, rows: NDArray[np.int32], positions: NDArray[np.int32], length: int
    ) -> tuple[Lane[Cache], list[int] | None]:
        """The lane that a call of `length` tokens a row is for, and which of its cached rows to keep (None: all).

        The caller narrows the cache. Raises ChainError, and then nothing has changed.
        """
        if rows.ndim != 1 or not 0 < len(rows) <= _MAX_ROWS or positions.shape != rows.shape or length < 1:
            raise ChainError(f"{rows.shape} rows at {positions.shape} positions do not fit: send 1 to {_MAX_ROWS} rows")
        lane = self._lanes.get(number) or self._begin(number, rows)
        if (positions != lane.length).any():
            raise ChainError(
                f"rows of lane {number} are sent for positions {sorted(set(positions.tolist()))}, but all stand at "
                f"{lane.length}: send the rows of a lane together, and begin a new lane to replay one"
            )
        if lane.length + length > self._longest:
            raise ChainError(f"lane {number} would pass {self._longest} positions: close it, or ask for less")
        kept = None if np.array_equal(rows, lane.rows) else _places(number, lane.rows, rows)
        self._lanes[number] = lane
        lane.rows = rows.copy()
        return lane, kept

    def close(self, number: int) -> None:
        """Forget a lane; unknown ones are no error."""
        self._lanes.pop(number, None)

    def _begin(self, number: int, rows: NDArray[np.int32]) -> Lane[Cache]:
        if len(self._lanes) >= self._most:
            raise ChainError(f"lane {number} is one more than the {self._most} that this stage keeps: close some")
        if not np.array_equal(rows, np.arange(len(rows))):
            raise ChainError(f"lane {number} is new here, so its rows must be 0, 1, …: replay it from its start")
        return Lane(self._new_cache(), rows)


def _places(number: int, held: NDArray[Any], wanted: NDArray[Any]) -> list[int]:
    place = {row: i for i, row in enumerate(held.tolist())}
    names = wanted.tolist()
    if len(set(names)) != len(names) or not place.keys() >= set(names):
        raise ChainError(f"rows {names} are not among rows {held.tolist()} of lane {number}: replay it")
    return [place[name] for name in names]
