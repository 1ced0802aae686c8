"""How long steps usually take, and when one that does not come is given up. Pure: reads no clock.

The usual is the upper quartile of the newest times of steps of about the same size (tokens that are computed, within a
factor of two); it holds against a few slow ones. Sizes not seen often are judged by the next smaller one, as if time
grew with size. While nothing is known, as when kernels are built in the first steps, a step has the longest time.
"""

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_KEPT = 31
"""Newest times of a size that are looked at."""

_KNOWN = 8
"""Times that make a size known."""


class Pace:
    """Of one stage, or of one ring. A step is given `times` the usual, at least `floor_s` and at most `ceiling_s`."""

    def __init__(self, floor_s: float, ceiling_s: float, times: float) -> None:
        self.ceiling_s = ceiling_s
        self._floor_s = min(floor_s, ceiling_s)
        self._times = times
        self._taken: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}

    def learn(self, size: int, taken_s: float) -> None:
        """A step of `size` tokens has taken so long."""
        bucket = size.bit_length()
        taken = self._taken.setdefault(bucket, deque(maxlen=_KEPT))
        taken.append(taken_s)
        if len(taken) >= _KNOWN:
            self._usual[bucket] = sorted(taken)[3 * len(taken) // 4]

    def usual_s(self, size: int) -> float | None:
        """What a step of `size` tokens usually takes; None while nothing is known."""
        bucket = size.bit_length()
        if (known := self._usual.get(bucket)) is not None or not self._usual:
            return known
        nearest = max((other for other in self._usual if other < bucket), default=None)
        if nearest is None:
            return self._usual[min(self._usual)]
        return float(self._usual[nearest] * 2 ** (bucket - nearest))

    def bound_s(self, size: int) -> float:
        """How long to wait for a step of `size` tokens."""
        usual = self.usual_s(size)
        return self.ceiling_s if usual is None else min(max(self._floor_s, self._times * usual), self.ceiling_s)


@dataclass(frozen=True, slots=True)
class _Step:
    size: int
    sent_at: float
    unusual: bool


class Rounds(Generic[Key]):
    """Steps that are under way in a ring, which come around in the order in which they were sent."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._steps: dict[Key, _Step] = {}
        self._came_at = 0.0
        self._unusual = False

    def sent(self, step: Key, size: int, now: float) -> None:
        """A step of `size` tokens has been sent."""
        self._steps[step] = _Step(size, now, self._unusual)

    def came(self, step: Key, now: float) -> None:
        """It has come around; others than those that were sent are no news."""
        if (sent := self._steps.pop(step, None)) is None:
            return
        self._came_at = now
        if sent.unusual:
            self._unusual = False
        else:
            self._pace.learn(sent.size, now - sent.sent_at)

    def switched(self) -> None:
        """What is sent from now on waits until all stages have changed their weights: until then nothing is usual."""
        self._unusual = True

    @property
    def deadline(self) -> float:
        """When the oldest is given up; infinity if nothing is under way.

        Its time runs from when the one before it came: it is not blamed for the queue that it stood in.
        """
        oldest = next(iter(self._steps.values()), None)
        if oldest is None:
            return math.inf
        allowed_s = self._pace.ceiling_s if oldest.unusual else self._pace.bound_s(oldest.size)
        return max(self._came_at, oldest.sent_at) + allowed_s
