"""Which chunks lead from the weights at hand to the weights wanted, at the fewest bytes. Pure; knows no I/O.

Releases are walked back, newest first. A part's way to the wanted version begins at a snapshot, or at what the peer
has already, and goes on by patches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echo_p2p.errors import WeightsError
from echo_protocols.release import Chunk, Chunks, Release, policy_hash

NO_FURTHER = 2**63
"""Cost of going where no way leads."""


@dataclass(frozen=True, slots=True)
class Route:
    """Chunks to apply in order: none if the part is as wanted already, else a snapshot or patch, and patches."""

    chunks: tuple[Chunk, ...]
    cost: int  # bytes to be fetched

    @property
    def from_snapshot(self) -> bool:
        """Whether nothing of what is at hand is used."""
        return bool(self.chunks) and self.chunks[0].base is None


@dataclass(frozen=True, slots=True)
class Step:
    """A release by part: its patch and snapshot chunks, and the content that both arrive at."""

    release: Release
    patch: Mapping[str, Chunk]
    snapshot: Mapping[str, Chunk]
    results: Mapping[str, bytes]

    def follows(self, parent: "Step") -> bool:
        """Whether the patches start from what `parent` arrives at."""
        return self.release.parent == parent.release.version and all(
            parent.results.get(part) == chunk.base for part, chunk in self.patch.items()
        )


def step_of(release: Release) -> Step:
    """The release by part. Raises WeightsError if it contradicts itself."""
    patch, snapshot = _by_part(release.patch), _by_part(release.snapshot)
    patched, whole = _results(patch), _results(snapshot)
    if len(patch) != len(release.patch) or len(snapshot) != len(release.snapshot):
        raise WeightsError(f"release {release.version} lists a part twice")
    if patched and whole and patched != whole:
        raise WeightsError(f"patch and snapshot of release {release.version} arrive at different weights")
    results = patched or whole
    if policy_hash(results) != release.policy_hash:
        raise WeightsError(f"the parts of release {release.version} do not add up to its policy hash")
    return Step(release=release, patch=patch, snapshot=snapshot, results=results)


def cheapest(
    walked: Sequence[Step], part: str, have: bytes | None, cost_of: Callable[[Chunk], int]
) -> tuple[Route | None, int]:
    """The cheapest route over the releases walked so far (newest first, each the parent of the one before it).

    `have` is the content at hand, None to use none of it. Also returns the least that any route from further back
    would cost: once that is no less than the route's cost, walking on is pointless.
    """
    tail: tuple[Chunk, ...] = ()  # patches from the release under consideration to the newest
    tail_cost = 0
    best: Route | None = None
    for step in walked:
        if have is not None and step.results.get(part) == have:
            return _cheaper(best, Route(tail, tail_cost)), NO_FURTHER
        snapshot = step.snapshot.get(part)
        if snapshot is not None:
            best = _cheaper(best, Route((snapshot, *tail), tail_cost + cost_of(snapshot)))
        patch = step.patch.get(part)
        if patch is None:
            return best, NO_FURTHER
        tail, tail_cost = (patch, *tail), tail_cost + cost_of(patch)
        if have is not None and patch.base == have:
            return _cheaper(best, Route(tail, tail_cost)), NO_FURTHER
    return best, tail_cost


def _cheaper(left: Route | None, right: Route) -> Route:
    return left if left is not None and left.cost <= right.cost else right


def _by_part(chunks: Chunks) -> dict[str, Chunk]:
    return {chunk.part: chunk for chunk in chunks}


def _results(chunks: Mapping[str, Chunk]) -> dict[str, bytes]:
    return {part: chunk.result for part, chunk in chunks.items()}
