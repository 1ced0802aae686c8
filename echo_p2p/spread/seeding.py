"""How a trainer's one upload becomes a copy for everybody: whom to tell of which blob, and when. Pure; knows no stream.

Each blob is told to one follower at first, few at a time, so that the first of them are soon with somebody who passes
them on. Nobody else is told while it is on its way, which it is until that follower no longer wants it, and for some
time after. If then somebody still wants it, so nobody passed it on, one more is told, then two, then four: with
followers that pass nothing on the spread takes logarithmically long, and whoever keeps a blob from going out loses it
to another after a while, and comes last from then on, until it is seen to pass something on.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

Announcements = list[tuple[str, bytes]]
"""Pairs of a follower and a hash that it is to be told of."""

_BLOBS_MAX = 8192
_SLOWER_THAN_USUAL = 4.0
_RATE_OF_NEWS = 0.3
_UNKNOWN_S = 150.0
_LONG_S = 0.25
_QUEUE_S = 10.0  # a request may wait for its turn to be sent
_ARRIVE_S = 30.0  # what was sent may lie in buffers


@dataclass(frozen=True, slots=True)
class SeedingBounds:
    """`patience_s`: how long a follower may take to begin, and a blob to be passed on, before others are told."""

    patience_s: float = 5.0
    deals: int = 8  # told, but not yet served
    deals_when_slow: int = 3  # when they take long
    deals_of_a_follower: int = 2


@dataclass(slots=True)
class _Deal:
    expires_at: float
    began_at: float | None = None
    size_bytes: int = 0


@dataclass(slots=True)
class _Blob:
    deals: set[str] = field(default_factory=set)  # followers that were told, and not served yet
    served: int = 0
    served_to: set[str] = field(default_factory=set)  # of followers
    more: int = 1  # followers to tell the next time
    more_at: float = 0.0


@dataclass(slots=True)
class _Standing:
    deals: int = 0  # under way
    strikes: int = 0  # deals that came to nothing, and blobs that it kept to itself
    served: int = 0


class Seeding:
    """Deals out blobs to followers. Remembers the last 8192 blobs."""

    def __init__(self, bounds: SeedingBounds | None = None) -> None:
        self.bounds = bounds or SeedingBounds()
        self._blobs: OrderedDict[bytes, _Blob] = OrderedDict()
        self._followers: dict[str, _Standing] = {}
        self._deals: dict[tuple[str, bytes], _Deal] = {}
        self._sent: dict[tuple[str, bytes], _Deal] = {}  # and perhaps not arrived
        self._took_s = _LONG_S  # to send a blob, as of late
        self._arrived = (0.0, 0.0)  # bytes of a blob, and seconds that they took to arrive, as of late

    def deal(
        self, wanted: Mapping[bytes, Collection[str]], holds: Callable[[bytes], bool], now: float
    ) -> Announcements:
        """Whom to tell of what now, given who wants what: first what nobody was given yet."""
        self._expire(now)
        told: Announcements = []
        later: list[bytes] = []
        for hash, followers in wanted.items():
            blob = self._blob(hash)
            if blob.deals or (blob.served and now < blob.more_at):
                continue
            if blob.served:
                later.append(hash)
            elif holds(hash):
                told += self._tell(hash, followers, 1, now)
        for hash in later:
            if holds(hash) and (more := self._tell(hash, wanted[hash], self._blobs[hash].more, now)):
                self._blobs[hash].more *= 2
                told += more
                for peer in self._blobs[hash].served_to & self._followers.keys():
                    self._followers[peer].strikes += 1
        return told

    def wanted(self, hash: bytes, now: float) -> None:
        """Somebody wants a blob that nobody did: if others have it, they come first."""
        blob = self._blob(hash)
        blob.more, blob.more_at = 1, max(blob.more_at, now + self.bounds.patience_s)

    def asked(self, peer: str, hash: bytes, now: float) -> None:
        """A follower has come for its blob."""
        deal = self._deals.get((peer, hash))
        if deal is not None:
            deal.expires_at = now + _QUEUE_S + self.bounds.patience_s

    def began(self, peer: str, hash: bytes, size_bytes: int, now: float) -> None:
        """A blob goes out; it may take four times as long as is usual."""
        deal = self._deals.get((peer, hash))
        if deal is not None:
            deal.began_at, deal.size_bytes = now, size_bytes

    def ended(self, peer: str, hash: bytes, whole: bool, now: float) -> None:
        """It went out, or was cut short: then the follower may soon come back."""
        deal = self._deals.get((peer, hash))
        if not whole:
            if deal is not None:
                deal.began_at, deal.expires_at = None, now + self.bounds.patience_s
            return
        blob = self._blob(hash)
        blob.served += 1
        blob.more_at = max(blob.more_at, now + self.bounds.patience_s)
        if standing := self._followers.get(peer):
            standing.served += 1
            blob.served_to.add(peer)
        if deal is not None:
            self._close(peer, hash)
            if deal.began_at is not None:
                self._took_s += (now - deal.began_at - self._took_s) * _RATE_OF_NEWS
                self._sent[peer, hash] = deal
                blob.more_at = now + _ARRIVE_S

    def dropped(self, peer: str, hash: bytes, now: float) -> None:
        """A follower no longer wants it: it has arrived, from here or from elsewhere."""
        if (peer, hash) in self._deals:
            self._close(peer, hash)
        served_to = self._blob(hash).served_to
        if len(served_to) == 1 and peer not in served_to:  # so this is who passed it on
            for source in served_to & self._followers.keys():
                self._followers[source].strikes = 0
        sent = self._sent.pop((peer, hash), None)
        if sent is not None and sent.began_at is not None:
            took_s = now - sent.began_at
            size_bytes, seconds = self._arrived
            weight = _RATE_OF_NEWS if seconds else 1.0
            self._arrived = (
                size_bytes + (sent.size_bytes - size_bytes) * weight, seconds + (took_s - seconds) * weight
            )  # fmt: skip
            self._blob(hash).more_at = now + self.bounds.patience_s + _SLOWER_THAN_USUAL * took_s

    def left(self, peer: str, now: float) -> None:
        """A follower is gone."""
        for hash in [hash for other, hash in self._deals if other == peer]:
            self._close(peer, hash)
        for hash in [hash for other, hash in self._sent if other == peer]:
            del self._sent[peer, hash]
            self._blob(hash).more_at = now + self.bounds.patience_s
        self._followers.pop(peer, None)

    def _expire(self, now: float) -> None:
        for peer, hash in [key for key, deal in self._deals.items() if self._expires_at(deal) <= now]:
            self._followers[peer].strikes += 1
            self._close(peer, hash)

    def _expires_at(self, deal: _Deal) -> float:
        if deal.began_at is None:
            return deal.expires_at
        size_bytes, seconds = self._arrived
        usual_s = deal.size_bytes * seconds / size_bytes if size_bytes else _UNKNOWN_S
        return deal.began_at + self.bounds.patience_s + _SLOWER_THAN_USUAL * usual_s

    def _tell(self, hash: bytes, followers: Collection[str], count: int, now: float) -> Announcements:
        """Deal a blob to the `count` followers who have earned it most, as far as they and we have room."""
        bound = self.bounds.deals if self._took_s < _LONG_S else self.bounds.deals_when_slow
        count = min(count, bound - len(self._deals))
        if count <= 0:
            return []
        standings = {peer: self._followers.setdefault(peer, _Standing()) for peer in followers}
        free = [peer for peer, each in standings.items() if each.deals < self.bounds.deals_of_a_follower]
        free.sort(key=lambda peer: (standings[peer].strikes, standings[peer].deals, standings[peer].served))
        for peer in free[:count]:
            self._blobs[hash].deals.add(peer)
            self._deals[peer, hash] = _Deal(now + self.bounds.patience_s)
            standings[peer].deals += 1
        return [(peer, hash) for peer in free[:count]]

    def _blob(self, hash: bytes) -> _Blob:
        blob = self._blobs.get(hash)
        if blob is None:
            blob = self._blobs[hash] = _Blob()
            if len(self._blobs) > _BLOBS_MAX:
                oldest = next(iter(self._blobs))
                for peer in list(self._blobs[oldest].deals):
                    self._close(peer, oldest)
                del self._blobs[oldest]
        return blob

    def _close(self, peer: str, hash: bytes) -> None:
        del self._deals[peer, hash]
        self._blobs[hash].deals.discard(peer)
        self._followers[peer].deals -= 1
