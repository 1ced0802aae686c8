"""Who failed lately, and for how long it is left alone. Pure: `now` is passed in. Knows no reason and no protocol."""

from collections import OrderedDict
from dataclasses import dataclass

_BENCH_MAX_S = 600.0
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Fault:
    in_a_row: int
    until: float


class Standing:
    """A peer that fails is left alone for as long as its failure cost, doubled with each one that follows.

    At most ten minutes, so that everybody gets another chance. Remembers the 4,096 that failed last.
    """

    def __init__(self) -> None:
        self._faults: OrderedDict[str, _Fault] = OrderedDict()

    def fail(self, peer: str, now: float, *, cost_s: float) -> None:
        """Note a failure, and the seconds that were lost by it."""
        before = self._faults.pop(peer, _Fault(0, 0.0))
        bench_s = min(_BENCH_MAX_S, max(1.0, cost_s) * 2.0 ** min(before.in_a_row, 32))
        self._faults[peer] = _Fault(before.in_a_row + 1, now + bench_s)
        while len(self._faults) > _REMEMBERED:
            self._faults.popitem(last=False)

    def clear(self, peer: str) -> None:
        """Note a success: all is forgiven."""
        self._faults.pop(peer, None)

    def benched(self, peer: str, now: float) -> bool:
        """Whether to leave the peer alone now."""
        fault = self._faults.get(peer)
        return fault is not None and now < fault.until
