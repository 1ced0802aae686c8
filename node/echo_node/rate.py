"""Tokens a second, lately. Knows not of what."""

import time
from collections import deque

_WINDOW_S = 10.0


class Rate:
    """Tokens a second over ten seconds or more, from totals noted now and then."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, int]] = deque(maxlen=100)

    def note(self, total: int) -> None:
        now = time.monotonic()
        while len(self._notes) > 1 and now - self._notes[1][0] > _WINDOW_S:
            self._notes.popleft()
        self._notes.append((now, total))

    @property
    def per_s(self) -> float:
        (first_at, first), (last_at, last) = self._notes[0], self._notes[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0
