"""Which followers of a trainer have earned the next blob: who passes on what it gets. Pure; knows no blob."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

_LEFT_MAX = 4096


@dataclass(slots=True)
class _Standing:
    deals: int = 0  # under way
    strikes: int = 0  # deals that came to nothing, and blobs that it kept to itself
    served: int = 0
    passed_on: bool = False  # it was seen to

    @property
    def is_proven(self) -> bool:
        return self.passed_on and not self.strikes


class Standings:
    """Followers and how they did. Remembers the last 4096 that left, of those that did anything."""

    def __init__(self) -> None:
        self._present: dict[str, _Standing] = {}
        self._left: OrderedDict[str, _Standing] = OrderedDict()

    @property
    def proven(self) -> int:
        """How many followers were seen to pass something on."""
        return sum(each.is_proven for each in self._present.values())

    def joined(self, peer: str) -> None:
        """A follower is there, or is back."""
        if peer not in self._present:
            self._present[peer] = self._left.pop(peer) if peer in self._left else _Standing()

    def left(self, peer: str) -> None:
        """A follower is gone, with no deal."""
        standing = self._present.pop(peer, None)
        if standing is not None and (standing.strikes or standing.passed_on):
            self._left[peer] = standing
            if len(self._left) > _LEFT_MAX:
                self._left.popitem(last=False)

    def strike(self, peer: str) -> None:
        """It kept a blob from going out; so it did too if it left since."""
        standing = self._present.get(peer) or self._left.get(peer)
        if standing is not None:
            standing.strikes += 1

    def served(self, peer: str) -> bool:
        """A peer has got a blob; whether it is a follower."""
        standing = self._present.get(peer)
        if standing is not None:
            standing.served += 1
        return standing is not None

    def passed_on(self, peer: str) -> None:
        """Somebody has got from it what it had from us."""
        standing = self._present.get(peer)
        if standing is not None:
            standing.strikes, standing.passed_on = 0, True

    def dealt(self, peer: str, count: int) -> None:
        """So many more deals of it are under way."""
        standing = self._present.get(peer)
        if standing is not None:
            standing.deals += count

    def strikes(self, peer: str) -> int:
        """How often it kept a blob from going out since it last passed one on."""
        standing = self._present.get(peer) or self._left.get(peer)
        return standing.strikes if standing else 0

    def best(self, followers: Collection[str], count: int, *, deals_max: int, proven: int) -> list[str]:
        """The `count` best with less than `deals_max` deals; where `proven` have passed on something, only of those."""
        present = {peer: self._present[peer] for peer in followers if peer in self._present}
        if sum(each.is_proven for each in present.values()) >= proven:
            present = {peer: each for peer, each in present.items() if each.is_proven}
        free = [peer for peer, each in present.items() if each.deals < deals_max]
        free.sort(key=lambda peer: _key(present[peer]))
        return free[: max(0, count)]


def _key(standing: _Standing) -> tuple[int, bool, int, int]:
    return standing.strikes, not standing.passed_on, standing.deals, standing.served
