"""What to fetch next, and from whom: the rarest, from the least busy source. Pure; knows no stream and no bytes.

A source that fails is avoided for a while, each time for longer; one that announces what it hasn't loses it, and is
avoided when it does so again and again; one that trickles is asked last; one that sends wrong bytes is banned for good.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

_BANNED_MAX = 4096
_SOURCES_MAX = 4096
_SLOWNESS_MAX = 16


@dataclass(frozen=True, slots=True)
class FetchBounds:
    """Transfers at a time, and how long a source is avoided: first, and at most.

    Of small blobs there may be more transfers, as long as they have so few bytes together, and of a source one more for
    each that took less than `quick_s`, and half as many when one took longer.
    """

    transfers: int = 8
    transfers_of_a_source: int = 2
    small_transfers: int = 32
    small_transfers_of_a_source: int = 8
    small_bytes: int = 2**23
    small_bytes_of_a_source: int = 2**21
    quick_s: float = 0.5
    avoid_s: float = 2.0
    avoid_max_s: float = 60.0
    absences: int = 3  # of announced blobs, until a source is avoided


@dataclass(slots=True)
class Wish:
    """A blob that is wanted, who announced it, and who is sending it; who is doubted is asked last."""

    hash: bytes
    size_bytes: int
    holders: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    source: str | None = None


@dataclass(slots=True)
class _Load:
    """Transfers under way."""

    transfers: int = 0
    bytes: int = 0

    def add(self, count: int, size_bytes: int) -> None:
        self.transfers += count
        self.bytes += count * size_bytes


@dataclass(slots=True)
class _Source:
    load: _Load = field(default_factory=_Load)
    window: int = 0  # transfers at a time, as long as they are small; 0: none was seen
    slowness: int = 0
    failures: int = 0
    absences: int = 0
    avoid_until: float = 0.0


class Picker:
    """Wishes and sources of one peer. Remembers the last 4096 that it banned; past 4096, it forgets idle sources."""

    def __init__(self, bounds: FetchBounds | None = None, seed: int = 0) -> None:
        self.bounds = bounds or FetchBounds()
        self.wishes: dict[bytes, Wish] = {}
        self.last_choice: frozenset[str] = frozenset()
        """Sources to spare: they are asked for what nobody else is known to have."""
        self._sources: dict[str, _Source] = {}
        self._banned: OrderedDict[str, None] = OrderedDict()
        self._load = _Load()
        self._random = random.Random(seed)

    def wish(self, hash: bytes, size_bytes: int) -> Wish:
        """Want a blob, which nobody is known to have yet."""
        wish = self.wishes[hash] = Wish(hash, size_bytes)
        return wish

    def unwish(self, hash: bytes) -> None:
        """It is here, or no longer wanted. A transfer of it is still to be ended."""
        self.wishes.pop(hash, None)

    def announced(self, source: str, hash: bytes) -> bool:
        """A source says that it has a blob; whether that is news of something that we want."""
        wish = self.wishes.get(hash)
        if wish is None or source in wish.holders or source in self._banned:
            return False
        wish.holders.add(source)
        return True

    def gone(self, source: str) -> None:
        """A source can't announce any more, so what it announced is worth nothing."""
        for wish in self.wishes.values():
            wish.holders.discard(source)
        known = self._sources.get(source)
        if known and not known.load.transfers and not known.failures and not known.slowness:
            del self._sources[source]

    def choose(self, now: float) -> Wish | None:
        """Begin the next transfer, from the wish's `source`. None: nothing can begin.

        Of blobs that as few have, the larger ones tend to go first, since they take longer to pass on.
        """
        if self._load.transfers >= self.bounds.small_transfers:
            return None
        best: tuple[tuple[int, float], Wish] | None = None
        for wish in self.wishes.values():
            if wish.source is None and any(self._is_free(source, wish, now) for source in wish.holders):
                key = (len(wish.holders), -wish.size_bytes * self._random.uniform(0.6, 1.0))
                if best is None or key < best[0]:
                    best = (key, wish)
        if best is None:
            return None
        wish = best[1]
        free = sorted(source for source in wish.holders if self._is_free(source, wish, now))
        wish.source = min(free, key=lambda source: self._preference(source, wish))
        self._of(wish.source).load.add(1, wish.size_bytes)
        self._load.add(1, wish.size_bytes)
        return wish

    def _preference(self, source: str, wish: Wish) -> tuple[bool, bool, int, int, float]:
        known = self._of(source)
        doubted, spared = source in wish.doubted, source in self.last_choice
        return doubted, spared, known.slowness, known.load.transfers, self._random.random()

    def has_other(self, wish: Wish, now: float) -> bool:
        """Whether another source than the present one could send it."""
        return any(source != wish.source and self._is_free(source, wish, now) for source in wish.holders)

    def ended(self, wish: Wish) -> None:
        """A transfer has ended, however."""
        if wish.source is not None:
            self._of(wish.source).load.add(-1, wish.size_bytes)
            self._load.add(-1, wish.size_bytes)
            wish.source = None

    def delivered(self, source: str) -> None:
        """A source has kept its word."""
        known = self._of(source)
        known.failures, known.absences, known.avoid_until = 0, 0, 0.0
        known.slowness = max(0, known.slowness - 1)

    def took(self, source: str, seconds: float) -> None:
        """A source has sent all that it was asked for, in so long: whether it could do more at a time."""
        known, bounds = self._of(source), self.bounds
        window = known.window or bounds.small_transfers_of_a_source
        known.window = window + 1 if seconds < bounds.quick_s else window // 2
        known.window = min(bounds.small_transfers_of_a_source, max(bounds.transfers_of_a_source, known.window))

    def slow(self, source: str) -> None:
        """A source sends far more slowly than others: it is asked after them, until it has delivered as often."""
        known = self._of(source)
        known.slowness = min(_SLOWNESS_MAX, known.slowness + 1)

    def failed(self, source: str, now: float) -> None:
        """A source was not reached, broke off, or stalled."""
        known = self._of(source)
        avoid_s = min(self.bounds.avoid_max_s, self.bounds.avoid_s * 2 ** min(known.failures, 16))
        known.failures += 1
        known.avoid_until = now + avoid_s

    def refused(self, source: str, hash: bytes, reason: str, now: float) -> None:
        """A source sends nothing, and says why."""
        match reason:
            case "absent":
                self.absent(source, hash, now)
            case "busy":
                self._of(source).avoid_until = now + self.bounds.avoid_s
            case _:
                self.failed(source, now)

    def absent(self, source: str, hash: bytes, now: float) -> None:
        """A source hasn't what it announced."""
        if hash in self.wishes:
            self.wishes[hash].holders.discard(source)
        known = self._of(source)
        known.absences += 1
        if known.absences >= self.bounds.absences:
            known.absences = 0
            self.failed(source, now)

    def ban(self, source: str) -> None:
        """A source sent wrong bytes."""
        self._banned[source] = None
        if len(self._banned) > _BANNED_MAX:
            self._banned.popitem(last=False)
        self.gone(source)

    def is_banned(self, source: str) -> bool:
        """Whether a source sent wrong bytes."""
        return source in self._banned

    def _of(self, source: str) -> _Source:
        known = self._sources.get(source)
        if known is None:
            if len(self._sources) >= _SOURCES_MAX:
                self._sources = {peer: each for peer, each in self._sources.items() if each.load.transfers}
            known = self._sources[source] = _Source()
        return known

    def _is_free(self, source: str, wish: Wish, now: float) -> bool:
        bounds, known = self.bounds, self._sources.get(source)
        small = bounds.small_transfers, bounds.small_bytes
        if not _has_room(self._load, bounds.transfers, *small, wish.size_bytes):
            return False
        if known is None:
            return True
        small = known.window or bounds.small_transfers_of_a_source, bounds.small_bytes_of_a_source
        return known.avoid_until <= now and _has_room(known.load, bounds.transfers_of_a_source, *small, wish.size_bytes)


def _has_room(load: _Load, transfers: int, small_transfers: int, small_bytes: int, size_bytes: int) -> bool:
    if load.transfers < transfers:
        return True
    return load.transfers < small_transfers and load.bytes + size_bytes <= small_bytes
