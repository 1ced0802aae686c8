"""One blob on its way here: what is known of it, and how long it is waited for. Knows no stream."""

from dataclasses import dataclass, field

import trio

from echo_p2p.spread.picker import FetchBounds, Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """How long to wait.

    `deadline_s`: for a blob that nobody new announces, while nothing comes; up to `promised_s` if other blobs do, or if
    a trainer says that it has it for later. `stall_s`: for a source that sends nothing while another could; `frame_s`:
    while none could.
    """

    deadline_s: float = 30.0
    promised_s: float = 600.0
    stall_s: float = 3.0
    frame_s: float = 20.0
    bounds: FetchBounds = field(default_factory=FetchBounds)


@dataclass(slots=True, eq=False)
class Arrival:
    """A wish, what has come of it, who sent that, and who waits for it."""

    wish: Wish
    moved_at: float
    received: bytearray = field(default_factory=bytearray)
    senders: set[str] = field(default_factory=set)
    promised_by: set[str] = field(default_factory=set)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    seen_bytes: int = 0
    silent_since: float = 0.0
    waiting: int = 0
    blob: bytes | None = None
    here: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class ExchangeStatistics:
    """What happened since the start. `from_trainers` counts blobs, `failures` and `corrupt` transfers."""

    blobs: int = 0
    from_trainers: int = 0
    bytes: int = 0
    failures: int = 0
    corrupt: int = 0


def deadline_of(arrival: Arrival, settings: ExchangeSettings, anything_moved_at: float) -> float:
    """When a blob is given up, if nothing happens until then; `anything_moved_at`: when something of any came."""
    last = arrival.moved_at + settings.promised_s
    if arrival.promised_by:
        return last
    return min(last, max(arrival.moved_at, anything_moved_at) + settings.deadline_s)
