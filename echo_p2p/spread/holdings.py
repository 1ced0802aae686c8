"""Who wants what of us, and whom to tell what we have. Pure; knows no stream and no blob.

`Holdings` tells everybody of everything at once; with a `Seeding` it deals, once more than two follow. What is wanted
and not here costs no more than its place in a dictionary.
"""

from collections.abc import Callable, Iterable

from echo_p2p.spread.seeding import Announcements, Seeding
from echo_p2p.spread.wire import WANTED_MAX

_FEW = 2


class Holdings:
    """The followers of one peer and what they want of it. Each change returns who is to be told of what, once."""

    def __init__(self, holds: Callable[[bytes], bool], seeding: Seeding | None = None) -> None:
        self._holds = holds
        self._seeding = seeding
        self._wants: dict[str, set[bytes]] = {}  # by follower; those that it was told of are not in it when we are open
        self._wanted: dict[bytes, dict[str, None]] = {}  # by hash: its followers, first come first
        self._here: dict[bytes, dict[str, None]] = {}  # those of them that we have; of a seeder

    @property
    def followers(self) -> int:
        """How many there are."""
        return len(self._wants)

    @property
    def waiting(self) -> bool:
        """Whether time alone may bring somebody news."""
        return bool(self._here)

    def joined(self, peer: str, now: float) -> None:
        """There is a follower, who wants nothing yet, whatever it wanted before."""
        self._forget(peer, now)
        self._wants[peer] = set()
        if self._seeding is not None:
            self._seeding.joined(peer)

    def left(self, peer: str, now: float) -> Announcements:
        """A follower is gone."""
        self._forget(peer, now)
        return self._deal(self._here, now)

    def changed(self, peer: str, added: Iterable[bytes], dropped: Iterable[bytes], now: float) -> Announcements:
        """A follower says what more it wants, and what no longer. It may want 2048 hashes at a time."""
        wants, changed = self._wants[peer], False
        for hash in dropped:
            if self._seeding is not None and hash in self._here and hash in wants:
                self._seeding.dropped(peer, hash, now)
                changed = True
            self._drop(peer, hash)
        new = []
        for hash in added:
            if len(wants) < WANTED_MAX and hash not in wants:
                wants.add(hash)
                self._wanted.setdefault(hash, {})[peer] = None
                if self._holds(hash):
                    new.append(hash)
                    self._find(hash, now)
        return self._deal(self._here if changed else new, now)

    def gained(self, hash: bytes, now: float) -> Announcements:
        """We have another blob."""
        if hash not in self._wanted:
            return []
        self._find(hash, now)
        return self._deal((hash,), now)

    def later(self, peer: str, hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Which of these a follower wants, and will be told of in its turn, though not now."""
        if self._seeding is None:
            return ()
        return tuple(hash for hash in hashes if hash in self._here and hash in self._wants[peer])

    def asked(self, peer: str, hash: bytes, now: float) -> None:
        """A peer, which may be no follower, asks for a blob."""
        if self._seeding is not None:
            self._seeding.asked(peer, hash, now)

    def began(self, peer: str, hash: bytes, size_bytes: int, now: float) -> None:
        """A blob goes out to a peer, which may be no follower."""
        if self._seeding is not None:
            self._seeding.began(peer, hash, size_bytes, now)

    def ended(self, peer: str, hash: bytes, whole: bool, now: float) -> Announcements:
        """It went out to the last byte, or was cut short."""
        if self._seeding is None:
            return []
        self._seeding.ended(peer, hash, whole, now)
        return self._deal(self._here, now)

    def passed(self, now: float) -> Announcements:
        """Time has passed."""
        return self._deal(self._here, now)

    def _deal(self, hashes: Iterable[bytes], now: float) -> Announcements:
        if self._seeding is not None and len(self._wants) > _FEW:
            return self._seeding.deal(self._here, hashes, self._holds, now)
        if self._seeding is not None:
            hashes = self._here  # some may have waited while there were more followers
        told = []
        for hash in list(hashes):
            if hash in self._wanted and self._holds(hash):
                followers = self._wanted[hash]
                self._unwant(hash)
                told += [(peer, hash) for peer in followers]
                for peer in followers:
                    self._wants[peer].discard(hash)
        return told

    def _find(self, hash: bytes, now: float) -> None:
        """Somebody wants it, and we have it."""
        if self._seeding is not None and hash not in self._here:
            self._seeding.wanted(hash, now)
            self._here[hash] = self._wanted[hash]

    def _forget(self, peer: str, now: float) -> None:
        if self._seeding is not None:
            self._seeding.left(peer, now)
        for hash in list(self._wants.get(peer, ())):
            self._drop(peer, hash)
        self._wants.pop(peer, None)

    def _drop(self, peer: str, hash: bytes) -> None:
        self._wants[peer].discard(hash)
        followers = self._wanted.get(hash, {})
        followers.pop(peer, None)
        if not followers:
            self._unwant(hash)

    def _unwant(self, hash: bytes) -> None:
        self._wanted.pop(hash, None)
        if self._here.pop(hash, None) is not None and self._seeding is not None:
            self._seeding.unwanted(hash)
