"""Which chunks lead from the weights at hand to the weights wanted, at the fewest bytes. Pure; knows no I/O.

A part's way begins at a snapshot, or at what the peer has already, and goes on by patches of one version or of several.
Only what is known of releases counts: `further_back` says which one to look up next.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from echo_p2p.errors import WeightsError
from echo_protocols.release import Chunk, Chunks, Release, policy_hash
from echo_protocols.values import PolicyVersion

CostOf = Callable[[Chunk], int | None]
"""Bytes to be fetched for a chunk; None if it is of no use."""


@dataclass(frozen=True, slots=True)
class Route:
    """Chunks to apply in order: none if the part is as wanted already, else a snapshot or patch, and patches."""

    chunks: tuple[Chunk, ...]
    cost: int  # bytes to be fetched

    @property
    def from_snapshot(self) -> bool:
        """Whether nothing of what is at hand is used."""
        return bool(self.chunks) and self.chunks[0].base is None

    def then(self, chunk: Chunk, cost: int) -> "Route":
        """One chunk further."""
        return Route((*self.chunks, chunk), self.cost + cost)


@dataclass(frozen=True, slots=True)
class Way:
    """Patches to a release from an earlier one, whose sealed release hashes to `sealed`."""

    base: PolicyVersion
    sealed: bytes | None
    chunks: Mapping[str, Chunk]  # by part


@dataclass(frozen=True, slots=True)
class Step:
    """A release by part: the ways that lead to it, longest first, and the content that all arrive at."""

    release: Release
    ways: tuple[Way, ...]
    snapshot: Mapping[str, Chunk]
    results: Mapping[str, bytes]

    @property
    def version(self) -> PolicyVersion:
        """That of the release."""
        return self.release.version


class Atlas:
    """The releases that are known on the way to one of them."""

    def __init__(self, release: Release) -> None:
        """Raises WeightsError if the release contradicts itself."""
        self.wanted = _step_of(release)
        self._steps = {release.version: self.wanted}

    def __contains__(self, version: PolicyVersion) -> bool:
        return version in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, version: PolicyVersion) -> Step:
        return self._steps[version]

    def add(self, release: Release, version: PolicyVersion | None = None) -> Step:
        """Learn of a release, which was looked up as `version`'s. Raises WeightsError if it contradicts itself."""
        step = _step_of(release)
        if release.version != (version or release.version) or release.version > self.wanted.version:
            raise WeightsError(f"release {release.version} stands where {version or 'an older one'} is called for")
        return self._steps.setdefault(step.version, step)

    def cheapest(self, part: str, have: bytes, cost_of: CostOf) -> Route | None:
        """The route of the fewest bytes to the wanted content of a part, from the content at hand or a snapshot."""
        routes: dict[PolicyVersion, Route] = {}
        for version in sorted(self._steps):
            options = list(self._options(self._steps[version], part, have, routes, cost_of))
            if options:
                routes[version] = min(options, key=lambda route: route.cost)
        return routes.get(self.wanted.version)

    def _options(
        self, step: Step, part: str, have: bytes, routes: Mapping[PolicyVersion, Route], cost_of: CostOf
    ) -> Iterator[Route]:
        if step.results.get(part) == have:
            yield Route((), 0)
        if part in step.snapshot and (cost := cost_of(step.snapshot[part])) is not None:
            yield Route((step.snapshot[part],), cost)
        for way in step.ways:
            patch = way.chunks.get(part)
            if patch is None or (cost := cost_of(patch)) is None:
                continue
            if patch.base == have:
                yield Route((patch,), cost)
            elif way.base in routes and self._steps[way.base].results[part] == patch.base:
                yield routes[way.base].then(patch, cost)

    def further_back(self, floor: PolicyVersion | None, cost_of: CostOf) -> tuple[Way, ...]:
        """The longest ways from the wanted release towards `floor` (None: as far as they go), the last one unknown.

        Empty if the ways are known up to where they end. A way that is of no use, or begins at other content than its
        base has, is passed over.
        """
        path: list[Way] = []
        step = self.wanted
        while floor is None or step.version > floor:
            way = next((way for way in step.ways if self._leads_on(way, floor, cost_of)), None)
            if way is None:
                return ()
            path.append(way)
            if way.base not in self._steps:
                return tuple(path)
            step = self._steps[way.base]
        return ()

    def _leads_on(self, way: Way, floor: PolicyVersion | None, cost_of: CostOf) -> bool:
        if way.sealed is None or (floor is not None and way.base < floor):
            return False
        base = self._steps.get(way.base)
        fits = base is None or all(base.results.get(part) == chunk.base for part, chunk in way.chunks.items())
        return fits and all(cost_of(chunk) is not None for chunk in way.chunks.values())


def _step_of(release: Release) -> Step:
    patches: list[tuple[PolicyVersion, bytes | None, Chunks]] = [
        (skip.base, skip.base_release, skip.chunks) for skip in release.skips
    ]
    if release.parent is not None and release.patch:
        patches.append((release.parent, release.parent_release, release.patch))
    patches.sort(key=lambda patch: patch[0])
    if any(base >= release.version for base, _, _ in patches):
        raise WeightsError(f"release {release.version} names a base that is not before it")
    ways = tuple(Way(base, sealed, _by_part(release, chunks)) for base, sealed, chunks in patches)
    snapshot = _by_part(release, release.snapshot)
    results = [_results(chunks) for chunks in (*(way.chunks for way in ways), snapshot) if chunks]
    if any(result != results[0] for result in results):
        raise WeightsError(f"the chunks of release {release.version} arrive at different weights")
    if policy_hash(results[0]) != release.policy_hash:
        raise WeightsError(f"the parts of release {release.version} do not add up to its policy hash")
    return Step(release=release, ways=ways, snapshot=snapshot, results=results[0])


def _by_part(release: Release, chunks: Chunks) -> dict[str, Chunk]:
    named = {chunk.part: chunk for chunk in chunks}
    if len(named) != len(chunks):
        raise WeightsError(f"release {release.version} lists a part twice")
    return named


def _results(chunks: Mapping[str, Chunk]) -> dict[str, bytes]:
    return {part: chunk.result for part, chunk in chunks.items()}
