"""How much slower a device has become than it was measured, from what its stage has done since. Pure: reads no clock.

A machine that is shared gets slower, and one that was busy when it was measured gets faster.
"""

from collections import deque
from statistics import median
from typing import Final

from echo_p2p.chain.host import HostStatistics
from echo_p2p.chain.speed import Speed
from echo_protocols.values import Span

NOTABLE: Final = 0.1
"""By how much it must differ from what was said last, in the median of the windows, before that is said anew."""

WINDOW_S: Final = 10.0
_WINDOWS = 5
_STEPS_MIN = 8  # in a window: few say little
_FACTOR_MIN, _FACTOR_MAX = 0.05, 100.0


class Drift:
    """Of one device and model, over all the spans that it serves. `factor` 2.0: steps take twice what was measured.

    Changes when five windows have something to say, of `WINDOW_S` or more each.
    """

    def __init__(self, speed: Speed) -> None:
        self.factor = 1.0
        self._speed = speed
        self._span: Span | None = None
        self._before: HostStatistics | None = None
        self._looked_at = 0.0
        self._ratios: deque[float] = deque(maxlen=_WINDOWS)

    def note(self, span: Span, statistics: HostStatistics, now: float) -> bool:
        """Take in what the stage of `span` has done in all, at `now` in seconds; whether `factor` has changed."""
        before = self._before
        if before is None or span != self._span or statistics.steps < before.steps:  # another stage
            self._ratios.clear()
            self._span, self._before, self._looked_at = span, statistics, now
            return False
        steps = statistics.steps - before.steps
        if now - self._looked_at < WINDOW_S or steps < _STEPS_MIN:
            return False
        self._before, self._looked_at = statistics, now
        expected_s = self._speed.expected_s(
            span, steps=steps, rows=statistics.rows - before.rows, tokens=statistics.tokens - before.tokens
        )
        ratio = (statistics.busy_s - before.busy_s) / expected_s
        self._ratios.append(min(_FACTOR_MAX, max(_FACTOR_MIN, ratio)))
        found = median(self._ratios)
        if len(self._ratios) < _WINDOWS or abs(found / self.factor - 1.0) <= NOTABLE:
            return False
        self.factor = found
        self._ratios.clear()  # a while has to pass until it changes again
        return True
