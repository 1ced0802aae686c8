"""Peers that did not answer lately. Pure: `now` is passed in. Knows no stream and not what they were asked for."""

from collections import OrderedDict
from typing import Final

AVOIDED_S: Final = 30.0
"""For how long: a wait for one that is dead costs most of that, and who is back is asked again soon."""

_REMEMBERED = 1024


class Absentees:
    """Who could not be reached is not asked for `AVOIDED_S`, so that of many questions few wait for it.

    Remembers the 1,024 that failed last.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def failed(self, peer: str, now: float) -> None:
        """A peer was not reached."""
        self._until[peer] = now + AVOIDED_S
        self._until.move_to_end(peer)
        while len(self._until) > _REMEMBERED:
            self._until.popitem(last=False)

    def answered(self, peer: str) -> None:
        """A peer is there, whatever it said."""
        self._until.pop(peer, None)

    def avoided(self, peer: str, now: float) -> bool:
        """Whether not to ask a peer now."""
        return now < self._until.get(peer, now)
