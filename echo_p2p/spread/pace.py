"""How long blobs take that go out, as of late: what is usual for a size. Pure."""

from collections import deque
from statistics import median

_KNOWN = 16
_LATENCY_BYTES = 2**14  # what a round trip is worth
_FIRST_BYTES_S = 20_000.0
_USUAL_MAX_S = 150.0


class Pace:
    """Of the last 16 blobs, the one in the middle counts, so that few can't make it slow. Slow is assumed at first."""

    def __init__(self) -> None:
        self._seconds_a_byte: deque[float] = deque(maxlen=_KNOWN)

    def took(self, size_bytes: int, seconds: float) -> None:
        """A blob has arrived."""
        self._seconds_a_byte.append(seconds / (size_bytes + _LATENCY_BYTES))

    def usual_s(self, size_bytes: int) -> float:
        """What a blob of that size takes, 150 s at most."""
        seconds_a_byte = median(self._seconds_a_byte) if self._seconds_a_byte else 1 / _FIRST_BYTES_S
        return min(_USUAL_MAX_S, seconds_a_byte * (size_bytes + _LATENCY_BYTES))
