"""Which chunks lead from the weights at hand to the weights wanted, at the fewest bytes. Pure; knows no I/O.

Releases are walked back, newest first. A part's way to the wanted version begins at a snapshot, or at a release whose
base is what the peer has already, and goes on by patches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echo_p2p.errors import WeightsError
from echo_protocols.release import Chunk, Release, policy_hash


@dataclass(frozen=True, slots=True)
class Route:
    """Chunks to apply in order; none if the part is as wanted already. The first is a snapshot unless it is a patch
    of the content at hand."""

    chunks: tuple[Chunk, ...]
    cost: int  # bytes that are not at hand

    @property
    def from_snapshot(self) -> bool:
        return bool(self.chunks) and self.chunks[0].base is None


def results_of(release: Release) -> dict[str, bytes]:
    """Content hash of each part at the release's version.

    Raises WeightsError if the release contradicts itself: a part twice, patch against snapshot, or another policy hash.
    """
    listings = [
        {chunk.part: chunk.result for chunk in chunks} for chunks in (release.patch, release.snapshot) if chunks
    ]
    lengths = [len(chunks) for chunks in (release.patch, release.snapshot) if chunks]
    results = listings[0]
    if any(listing != results for listing in listings) or any(length != len(results) for length in lengths):
        raise WeightsError(f"release {release.version} lists parts twice, or otherwise in its patch than its snapshot")
    if policy_hash(results) != release.policy_hash:
        raise WeightsError(f"the parts of release {release.version} do not add up to its policy hash")
    return results


def cheapest(
    walked: Sequence[Release], part: str, have: bytes | None, cost_of: Callable[[Chunk], int]
) -> tuple[Route | None, int]:
    """The cheapest route over the releases walked so far (newest first, each the parent of the one before it).

    `have` is the content at hand, None to use none of it. Also returns the least that any route through releases
    further back would cost: when that is no less than the route's cost, walking on is pointless.
    """
    tail: tuple[Chunk, ...] = ()  # patches from the release under consideration to the newest
    tail_cost = 0
    best: Route | None = None
    for release in walked:
        if results_of_part(release, part) == have:
            return _better(best, Route(tail, tail_cost)), tail_cost
        snapshot = _chunk(release.snapshot, part)
        if snapshot is not None:
            best = _better(best, Route((snapshot, *tail), tail_cost + cost_of(snapshot)))
        patch = _chunk(release.patch, part)
        if patch is None:
            return best, 2**63  # nothing further back leads here
        tail, tail_cost = (patch, *tail), tail_cost + cost_of(patch)
        if patch.base == have:
            return _better(best, Route(tail, tail_cost)), tail_cost
    return best, tail_cost


def results_of_part(release: Release, part: str) -> bytes | None:
    """Content hash of one part at the release's version; None if the release has no such part."""
    chunk = _chunk(release.patch, part) or _chunk(release.snapshot, part)
    return chunk.result if chunk else None


def follows(release: Release, parent: Release) -> bool:
    """Whether each patch of `release` starts from what `parent` arrives at."""
    results: Mapping[str, bytes] = results_of(parent)
    return release.parent == parent.version and all(results.get(c.part) == c.base for c in release.patch)


def _chunk(chunks: Sequence[Chunk], part: str) -> Chunk | None:
    return next((chunk for chunk in chunks if chunk.part == part), None)


def _better(left: Route | None, right: Route) -> Route:
    return left if left is not None and left.cost <= right.cost else right
