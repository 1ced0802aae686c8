"""How a trainer's one upload becomes a copy for everybody: whom to tell of which blob, and when. Pure; knows no stream.

Each blob is told to one follower at first, few at a time, so that the first of them are soon with somebody who passes
them on. Nobody else is told while it is on its way, which it is until that follower no longer wants it, and for some
time after. If then somebody still wants it, so nobody passed it on, one more is told, then two, then four: with
followers that pass nothing on the spread takes logarithmically long. Whoever keeps a blob from going out loses it to
twice as many others after a while, and comes last from then on, even if it leaves in between, until it is seen to pass
something on; those who were seen to come first, and for the first moments nobody else may have a blob.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from echo_p2p.spread.pace import Pace
from echo_p2p.spread.standing import Standings

Announcements = list[tuple[str, bytes]]
"""Pairs of a follower and a hash that it is to be told of."""

_BLOBS_MAX = 8192
_MORE_MAX = 64
_SLOWER_THAN_USUAL = 4.0
_RATE_OF_NEWS = 0.3
_LONG_S = 0.25
_SHORT_S = 0.05
_QUEUE_S = 10.0  # a request may wait for its turn to be sent
_ARRIVE_MAX_S = 30.0  # what was sent may lie in buffers
_COMES_S = 1.0  # a follower that is told usually comes in less
_HEAD_START_S = 0.3  # who wants a blob before anybody could know of it is not dealt it for that
_PROVEN = 3  # followers that pass on what they get are enough to deal to none but them


@dataclass(frozen=True, slots=True)
class SeedingBounds:
    """`patience_s`: how long a follower may take to begin, and a blob to be passed on, before others are told."""

    patience_s: float = 5.0
    deals: int = 8  # told, but not yet served
    deals_when_slow: int = 3  # when they take long
    deals_when_quick: int = 24  # when they take next to no time
    deals_of_a_follower: int = 2
    deals_of_a_follower_when_quick: int = 8


@dataclass(slots=True)
class _Deal:
    """`expires_at` moves, up to `last_at`, or up to what is usual for its size once it began."""

    dealt_at: float
    expires_at: float
    last_at: float
    under_way: bool = False
    began_at: float | None = None
    size_bytes: int = 0


@dataclass(slots=True)
class _Blob:
    deals: set[str] = field(default_factory=set)  # followers that were told, and not served yet
    served: int = 0
    served_to: set[str] = field(default_factory=set)  # of followers
    failed: set[str] = field(default_factory=set)  # followers that were told, and didn't take it
    more: int = 1  # followers to tell the next time
    more_at: float = 0.0
    wanted_at: float | None = None  # since when, without a break


class Seeding:
    """Deals out blobs to followers. Remembers those that are wanted and here, and others up to 8192, the last ones."""

    def __init__(self, bounds: SeedingBounds | None = None) -> None:
        self.bounds = bounds or SeedingBounds()
        self._blobs: dict[bytes, _Blob] = {}  # those that were spoken of last are last
        self._standings = Standings()
        self._deals: dict[tuple[str, bytes], _Deal] = {}
        self._sent: dict[tuple[str, bytes], _Deal] = {}  # and perhaps not arrived
        self._took_s = _LONG_S  # to send a blob, as of late
        self._pace = Pace()

    def deal(
        self,
        wanted: Mapping[bytes, Collection[str]],
        hashes: Iterable[bytes],
        holds: Callable[[bytes], bool],
        now: float,
    ) -> Announcements:
        """Whom to tell of which of `hashes` now, given who wants what of what is here: first what nobody was given yet.

        What `holds` no longer holds is passed over.
        """
        self._expire(now)
        told: Announcements = []
        later: list[bytes] = []
        for hash in hashes:
            if self._room(now) <= 0:
                return told
            blob = self._blobs.get(hash)
            if blob is not None and (blob.deals or (blob.served and now < blob.more_at)):
                continue
            if blob is not None and blob.served:
                later.append(hash)
            elif holds(hash):
                told += self._tell(hash, wanted[hash], now)
        for hash in later:
            blob = self._blobs[hash]
            if holds(hash) and (more := self._tell(hash, wanted[hash], now)):
                blob.more = min(_MORE_MAX, 2 * blob.more)
                told += more
                for peer in blob.served_to:
                    self._standings.strike(peer)
        return told

    def wanted(self, hash: bytes, now: float) -> None:
        """Somebody wants a blob that is here, and nobody did: if others have it, they come first."""
        blob = self._blob(hash)
        blob.more, blob.more_at, blob.wanted_at = 1, max(blob.more_at, now + self.bounds.patience_s), now

    def unwanted(self, hash: bytes) -> None:
        """Nobody wants it any more."""
        blob = self._blobs.get(hash)
        if blob is not None:
            blob.wanted_at = None

    def asked(self, peer: str, hash: bytes, now: float) -> None:
        """A follower has come for its blob."""
        deal = self._deals.get((peer, hash))
        if deal is not None:
            deal.under_way, deal.expires_at = True, float("inf")

    def began(self, peer: str, hash: bytes, size_bytes: int, now: float) -> None:
        """A blob goes out; it may take four times as long as is usual."""
        deal = self._deals.get((peer, hash))
        if deal is not None and deal.began_at is None:
            deal.began_at, deal.size_bytes = now, size_bytes

    def ended(self, peer: str, hash: bytes, whole: bool, now: float) -> None:
        """It went out, or was cut short: then the follower may soon come back."""
        deal = self._deals.get((peer, hash))
        if not whole:
            if deal is not None:
                deal.under_way, deal.expires_at = False, now + self.bounds.patience_s
            return
        blob = self._blob(hash)
        blob.served += 1
        blob.more_at = max(blob.more_at, now + self.bounds.patience_s)
        if self._standings.served(peer):
            blob.served_to.add(peer)
        if deal is not None:
            self._close(peer, hash)
            if deal.began_at is not None:
                self._took_s += (now - deal.began_at - self._took_s) * _RATE_OF_NEWS
                self._sent[peer, hash] = deal
                blob.more_at = now + min(_ARRIVE_MAX_S, self._usual_at_most_s(deal.size_bytes))

    def dropped(self, peer: str, hash: bytes, now: float) -> None:
        """A follower no longer wants it: it has arrived, from here or from elsewhere."""
        if (peer, hash) in self._deals:
            self._close(peer, hash)
        blob = self._blobs.get(hash)
        if blob is None:
            return
        if len(blob.served_to) == 1 and peer not in blob.served_to:  # so this is who passed it on
            for source in blob.served_to:
                self._standings.passed_on(source)
        sent = self._sent.pop((peer, hash), None)
        if sent is not None and sent.began_at is not None:
            took_s = now - sent.began_at
            self._pace.took(sent.size_bytes, took_s)
            blob.more_at = now + self.bounds.patience_s + _SLOWER_THAN_USUAL * took_s

    def joined(self, peer: str) -> None:
        """There is a follower."""
        self._standings.joined(peer)

    def left(self, peer: str, now: float) -> None:
        """A follower is gone; if it was to have a blob, that comes to nothing."""
        for hash in [hash for other, hash in self._deals if other == peer]:
            self._standings.strike(peer)
            self._close(peer, hash)
        for hash in [hash for other, hash in self._sent if other == peer]:
            del self._sent[peer, hash]
            self._blob(hash).more_at = now + self.bounds.patience_s
        self._standings.left(peer)

    def _expire(self, now: float) -> None:
        for peer, hash in [key for key, deal in self._deals.items() if self._expires_at(deal) <= now]:
            self._standings.strike(peer)
            self._close(peer, hash)
            blob = self._blob(hash)
            blob.failed.add(peer)
            blob.more = min(_MORE_MAX, 2 * blob.more)

    def _expires_at(self, deal: _Deal) -> float:
        last_at = deal.last_at
        if deal.began_at is not None:
            last_at = deal.began_at + self._usual_at_most_s(deal.size_bytes)
        return min(deal.expires_at, last_at)

    def _usual_at_most_s(self, size_bytes: int) -> float:
        return self.bounds.patience_s + _SLOWER_THAN_USUAL * self._pace.usual_s(size_bytes)

    def _room(self, now: float) -> int:
        """How many more may be told. Whoever is told, and doesn't come, takes none of it for long."""
        bounds = self.bounds
        bound = bounds.deals_when_quick if self._is_quick() else bounds.deals
        bound = bounds.deals_when_slow if self._took_s >= _LONG_S else bound
        return bound - sum(each.under_way or now < each.dealt_at + _COMES_S for each in self._deals.values())

    def _is_quick(self) -> bool:
        return self._took_s < _SHORT_S

    def _tell(self, hash: bytes, followers: Collection[str], now: float) -> Announcements:
        """Deal a blob to those followers who have earned it most, as far as they and we have room."""
        blob, bounds = self._blob(hash), self.bounds
        most = bounds.deals_of_a_follower_when_quick if self._is_quick() else bounds.deals_of_a_follower
        count = min(blob.more, self._room(now))
        others = [peer for peer in followers if peer not in blob.failed] or followers
        early = blob.wanted_at is not None and now < blob.wanted_at + _HEAD_START_S
        early = early and self._standings.proven >= _PROVEN
        chosen = self._standings.best(others, count, deals_max=most, proven=0 if early else _PROVEN)
        for peer in chosen:
            blob.deals.add(peer)
            last_at = now + _QUEUE_S + bounds.patience_s
            self._deals[peer, hash] = _Deal(now, now + bounds.patience_s, last_at)
            self._standings.dealt(peer, 1)
        return [(peer, hash) for peer in chosen]

    def _blob(self, hash: bytes) -> _Blob:
        if hash not in self._blobs and len(self._blobs) >= _BLOBS_MAX:
            idle = (other for other, each in self._blobs.items() if each.wanted_at is None and not each.deals)
            if (oldest := next(idle, None)) is not None:
                del self._blobs[oldest]
        blob = self._blobs.pop(hash, None) or _Blob()
        self._blobs[hash] = blob
        return blob

    def _close(self, peer: str, hash: bytes) -> None:
        del self._deals[peer, hash]
        self._blob(hash).deals.discard(peer)
        self._standings.dealt(peer, -1)
