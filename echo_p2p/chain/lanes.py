"""The lanes of a stage: which rows each still has and where they stand. Knows no engine: a cache is whatever it keeps.

Bounded: `most` lanes of `longest` positions, and `kv_positions` in all, each lane counted as its rows times its longest
row, since that is what a cache of one lane holds. A lane lives until it is closed; what would pass a bound is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import ChainError

Cache = TypeVar("Cache")
Integers = NDArray[np.int32]

MAX_ROWS = 4096
"""Rows of a lane, and a bound above their numbers."""


@dataclass(slots=True)
class Lane(Generic[Cache]):
    """One lane: its KV cache, the rows that the cache holds (in its order), and the length of each."""

    cache: Cache
    rows: Integers  # (rows,)
    lengths: Integers  # (rows,)

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return int(self.lengths.max(initial=0))

    @property
    def ragged(self) -> bool:
        """Whether rows stand at different positions."""
        return bool((self.lengths != self.longest).any())

    @property
    def kv_positions(self) -> int:
        """What the lane is counted as."""
        return len(self.rows) * self.longest


@dataclass(frozen=True, slots=True)
class Entered(Generic[Cache]):
    """What a stage has to do to a lane for one call; then it adds the call's length to `lane.lengths`."""

    lane: Lane[Cache]
    kept: list[int] | None
    """Where the rows that stay were in the cache (None: all stay). Row i is at i, or among those that are cut off."""
    order: NDArray[np.intp] | None
    """(rows,) which of the call's rows each row of the cache is (None: the same order)."""

    def in_cache_order(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """The call's inputs (rows, …) as the cache has the rows."""
        return inputs if self.order is None else inputs[self.order]

    def in_call_order(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """What came of them, as the call named the rows."""
        if self.order is None:
            return outputs
        ordered = np.empty_like(outputs)
        ordered[self.order] = outputs
        return ordered


class Lanes(Generic[Cache]):
    """All lanes of one stage, by number."""

    def __init__(
        self,
        new_cache: Callable[[], Cache],
        *,
        most: int,
        longest: int,
        kv_positions: int | None = None,
        ragged: bool = False,
    ) -> None:
        self._new_cache = new_cache
        self._most = most
        self._longest = longest
        self._kv_positions = kv_positions or most * longest * MAX_ROWS
        self._ragged = ragged
        self._lanes: dict[int, Lane[Cache]] = {}

    @property
    def numbers(self) -> frozenset[int]:
        """The lanes that are held."""
        return frozenset(self._lanes)

    @property
    def kv_positions(self) -> int:
        """Positions held in all."""
        return sum(lane.kv_positions for lane in self._lanes.values())

    def enter(self, number: int, rows: Integers, positions: Integers, length: int) -> Entered[Cache]:
        """Take a call of `length` tokens a row; rows that it does not name leave, the last of the cache taking their
        place. The caller narrows the cache. Raises ChainError, and then nothing has changed.
        """
        if rows.ndim != 1 or not 0 < len(rows) <= MAX_ROWS or positions.shape != rows.shape or length < 1:
            raise ChainError(f"{rows.shape} rows at {positions.shape} positions do not fit: send 1 to {MAX_ROWS} rows")
        lane = self._lanes.get(number) or self._begin(number, rows)
        places = _places(number, lane.rows, rows)  # (rows,) of the call's rows in the cache
        self._check(number, lane, lane.lengths[places], positions, length)
        kept = _closed_up(places, len(lane.rows)) if len(rows) < len(lane.rows) else None
        if kept is not None:
            lane.rows, lane.lengths = lane.rows[kept], lane.lengths[kept]
        self._lanes[number] = lane
        order = None
        if not np.array_equal(lane.rows, rows):
            order = np.argsort(_places(number, lane.rows, rows))
        return Entered(lane, kept, order)

    def join(self, number: int, rows: Integers, source: int) -> tuple[Lane[Cache], Lane[Cache]]:
        """The lane, whose last rows are now these, and the lane of one row whose KV the caller copies to them.

        Raises ChainError, and then nothing has changed.
        """
        shared = self._lanes.get(source)
        if shared is None or source == number or len(shared.rows) != 1 or shared.longest < 1:
            raise ChainError(f"lane {source} can't be shared with lane {number}: it must hold one row that has begun")
        lane = self._lanes.get(number) or self._new(number)
        names = rows.tolist() if rows.ndim == 1 else []
        taken = set(names) & set(lane.rows.tolist())
        if not names or len(set(names)) != len(names) or taken or not 0 <= min(names) <= max(names) < MAX_ROWS:
            raise ChainError(f"rows {names} can't join lane {number}: send numbers below {MAX_ROWS} that it lacks")
        if not self._ragged and (lane.lengths != shared.longest).any():
            raise ChainError(
                f"rows of lane {number} stand elsewhere than position {shared.longest} of lane {source}, and this "
                f"model needs all at one: join a new lane"
            )
        held = len(lane.rows) + len(names)
        if held > MAX_ROWS:
            raise ChainError(f"lane {number} would hold {held} rows of at most {MAX_ROWS}: join another lane")
        self._check_room(number, lane, held * max(lane.longest, shared.longest))
        lane.rows = np.concatenate([lane.rows, rows.astype(np.int32)])
        lane.lengths = np.concatenate([lane.lengths, np.full(len(names), shared.longest, np.int32)])
        self._lanes[number] = lane
        return lane, shared

    def compute(
        self,
        number: int,
        rows: Integers,
        positions: Integers,
        inputs: NDArray[Any],  # (rows, length, …)
        work: Callable[[Entered[Cache], NDArray[Any]], NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """A call of a stage: what `work` makes of the inputs, which it gets and gives back in the cache's order.

        Raises ChainError; a lane whose computation failed is closed.
        """
        entered = self.enter(number, rows, positions, inputs.shape[1])
        with self._closing(number):
            outputs = work(entered, entered.in_cache_order(inputs))
        entered.lane.lengths += inputs.shape[1]
        return entered.in_call_order(outputs)

    def share(
        self, number: int, rows: Integers, source: int, copy: Callable[[Lane[Cache], Lane[Cache], int], None]
    ) -> None:
        """A join of a stage: `copy(lane, shared, count)` copies the KV to the last `count` rows. Raises likewise."""
        lane, shared = self.join(number, rows, source)
        with self._closing(number):
            copy(lane, shared, len(rows))

    def close(self, number: int) -> None:
        """Forget a lane; unknown ones are no error."""
        self._lanes.pop(number, None)

    @contextmanager
    def _closing(self, number: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # of the vendor
            self.close(number)
            raise ChainError(f"lane {number} failed here ({error}): replay it elsewhere") from error

    def _new(self, number: int) -> Lane[Cache]:
        if len(self._lanes) >= self._most:
            raise ChainError(f"lane {number} is one more than the {self._most} that this stage keeps: close some")
        return Lane(self._new_cache(), np.zeros(0, np.int32), np.zeros(0, np.int32))

    def _begin(self, number: int, rows: Integers) -> Lane[Cache]:
        lane = self._new(number)
        if not np.array_equal(rows, np.arange(len(rows))):
            raise ChainError(f"lane {number} is new here, so its rows must be 0, 1, …: replay it from its start")
        lane.rows, lane.lengths = rows.astype(np.int32), np.zeros(len(rows), np.int32)
        return lane

    def _check(self, number: int, lane: Lane[Cache], lengths: Integers, positions: Integers, length: int) -> None:
        """`lengths` (rows,) are those of the call's rows."""
        if (positions != lengths).any():
            raise ChainError(
                f"rows of lane {number} are sent for positions {positions.tolist()}, but stand at {lengths.tolist()}: "
                f"begin a new lane to replay one"
            )
        longest = int(lengths.max())
        if length > 1 and (lengths != longest).any():
            raise ChainError(
                f"rows of lane {number} stand at positions {lengths.tolist()}, and {length} tokens of each are sent: "
                f"send one, or read prompts in lanes of their own"
            )
        if longest + length > self._longest:
            raise ChainError(f"lane {number} would pass {self._longest} positions: close it, or ask for less")
        self._check_room(number, lane, len(lengths) * (longest + length))

    def _check_room(self, number: int, lane: Lane[Cache], wanted: int) -> None:
        total = self.kv_positions - (lane.kv_positions if number in self._lanes else 0) + wanted
        if wanted > lane.kv_positions and total > self._kv_positions:
            raise ChainError(
                f"lane {number} would bring this stage to {total} KV positions of at most {self._kv_positions}: "
                f"wait until rows have left, or give inference more memory"
            )


def _places(number: int, held: Integers, wanted: Integers) -> NDArray[np.intp]:
    place = {row: i for i, row in enumerate(held.tolist())}
    names = wanted.tolist()
    if len(set(names)) != len(names) or not place.keys() >= set(names):
        raise ChainError(f"rows {names} are not among rows {held.tolist()} of lane {number}: replay it")
    return np.array([place[name] for name in names], np.intp)


def _closed_up(places: NDArray[np.intp], held: int) -> list[int]:
    """Where the rows at these places of `held` come from, once the last ones have filled the gaps."""
    staying = set(places.tolist())
    moving = [place for place in range(held) if place >= len(staying) and place in staying]
    return [place if place in staying else moving.pop() for place in range(len(staying))]
