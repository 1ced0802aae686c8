"""What had come of blobs that were given up, for the next time that they are wanted. Knows no stream."""

from collections import OrderedDict
from dataclasses import dataclass

from echo_p2p.spread.arrival import Arrival
from echo_p2p.spread.blame import Part, Suspect

_BYTES_MAX = 2**28
_BLOBS_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Leftover:
    received: bytearray
    parts: list[Part]
    suspects: list[Suspect]


class Leftovers:
    """At most 256 MiB, of 4096 blobs; the oldest goes first."""

    def __init__(self) -> None:
        self._leftovers: OrderedDict[bytes, _Leftover] = OrderedDict()

    def keep(self, arrival: Arrival) -> None:
        """Keep what has come of a blob."""
        if arrival.tainted or not (arrival.received or arrival.suspects):
            return
        self._leftovers[arrival.wish.hash] = _Leftover(arrival.received, arrival.parts, arrival.suspects)
        while (
            len(self._leftovers) > _BLOBS_MAX
            or sum(len(each.received) for each in self._leftovers.values()) > _BYTES_MAX
        ):
            self._leftovers.popitem(last=False)

    def give(self, arrival: Arrival) -> None:
        """Let a blob go on where it was given up, if it was."""
        leftover = self._leftovers.pop(arrival.wish.hash, None)
        if leftover is not None:
            arrival.received, arrival.parts, arrival.suspects = leftover.received, leftover.parts, leftover.suspects
