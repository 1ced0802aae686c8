"""One blob on its way here: what is known of it, and how long it is waited for. Knows no stream."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import trio

from echo_p2p.net.blob_wire import BLOB_FRAME_BYTES
from echo_p2p.spread.blame import Part, Suspect
from echo_p2p.spread.picker import FetchBounds, Wish

_RATES_KNOWN = 2
_FAR_SLOWER = 8.0
_USUAL_AT_FIRST_BYTES_S = 200_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """How long to wait.

    `deadline_s`: for a blob that nobody new announces, while nothing comes of any, and `promised_s` if a trainer says
    that it has it for later; `last_s` while others come. `stall_s`: for a source that sends nothing while another
    could; `frame_s`: while none could. `judged_s`: after so long each time it is seen whether a source trickles.
    """

    deadline_s: float = 30.0
    promised_s: float = 60.0
    last_s: float = 600.0
    stall_s: float = 3.0
    frame_s: float = 20.0
    judged_s: float = 3.0
    bounds: FetchBounds = field(default_factory=FetchBounds)


@dataclass(slots=True, eq=False)
class Arrival:
    """A wish, what has come of it, who sent that, and who waits for it.

    `generation` tells it from an earlier wish for the same blob. One that was wrong comes from one source `alone`.
    """

    wish: Wish
    generation: int
    moved_at: float
    received: bytearray = field(default_factory=bytearray)
    parts: list[Part] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    promised_by: set[str] = field(default_factory=set)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    seen_bytes: int = 0
    silent_since: float = 0.0
    judged_bytes: int = 0
    judged_at: float = 0.0
    trickles: bool = False
    tainted: bool = False  # some of it is of a peer that was banned
    waiting: int = 0
    blob: bytes | None = None
    here: trio.Event = field(default_factory=trio.Event)

    @property
    def senders(self) -> set[str]:
        """Who sent something of what has come."""
        return {part.sender for part in self.parts}

    def begin(self, source: str, now: float) -> None:
        """A transfer begins. What others sent is given up if something was wrong before."""
        if self.tainted or (self.suspects and self.senders - {source}):
            self.clear()
        self.scope, self.trickles = trio.CancelScope(), False
        self.silent_since = self.judged_at = now
        self.seen_bytes = self.judged_bytes = len(self.received)

    def look(self, now: float, judged_s: float, rates: "Rates") -> bool:
        """Whether anything has come since the last look. Each `judged_s` it is seen whether it trickles."""
        size_bytes, since_s = len(self.received), now - self.judged_at
        if since_s >= judged_s:
            self.trickles = rates.is_trickle(size_bytes - self.judged_bytes, since_s)
            self.judged_at, self.judged_bytes = now, size_bytes
        moved = size_bytes != self.seen_bytes
        if moved:
            self.seen_bytes = size_bytes
            self.moved_at = self.silent_since = now
        return moved

    def came_from(self, source: str, start: int) -> None:
        """All from `start` on is from one source."""
        if len(self.received) > start:
            self.parts.append(Part(source, start, len(self.received)))

    def clear(self) -> None:
        """Begin anew."""
        self.tainted = False
        self.received.clear()
        self.parts.clear()


@dataclass(slots=True)
class ExchangeStatistics:
    """What happened since the start. `from_trainers` counts blobs, `failures` and `corrupt` transfers."""

    blobs: int = 0
    from_trainers: int = 0
    bytes: int = 0
    failures: int = 0
    corrupt: int = 0

    def count(self, size_bytes: int, *, from_trainer: bool) -> None:
        """A blob has come."""
        self.blobs += 1
        self.bytes += size_bytes
        self.from_trainers += from_trainer


class Rates:
    """How fast the last 32 blobs came that took more than a moment."""

    def __init__(self) -> None:
        self._bytes_s: deque[float] = deque(maxlen=32)

    def took(self, size_bytes: int, seconds: float) -> None:
        """So much came in so long; of less than two frames that says little."""
        if seconds > 0 and size_bytes > BLOB_FRAME_BYTES:
            self._bytes_s.append(size_bytes / seconds)

    def is_trickle(self, size_bytes: int, seconds: float) -> bool:
        """Whether so much in so long is far less than is usual. Nothing is no trickle: it may wait for its turn."""
        usual = median(self._bytes_s) if len(self._bytes_s) >= _RATES_KNOWN else _USUAL_AT_FIRST_BYTES_S
        return 0 < size_bytes * _FAR_SLOWER < usual * seconds


def deadline_of(arrival: Arrival, settings: ExchangeSettings, anything_moved_at: float) -> float:
    """When a blob is given up, if nothing happens until then; `anything_moved_at`: when something of any came."""
    patience_s = settings.promised_s if arrival.promised_by else settings.deadline_s
    return min(arrival.moved_at + settings.last_s, max(arrival.moved_at, anything_moved_at) + patience_s)
