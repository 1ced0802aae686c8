"""Looks up releases until the cheapest way to the wanted weights is known. Knows no peer, no blob and no stage."""

from collections.abc import Awaitable, Callable, Mapping

from echo_p2p.errors import EchoError, WeightsError
from echo_p2p.weights.route import Atlas, CostOf, Route
from echo_protocols.release import Release
from echo_protocols.values import PolicyVersion

RELEASES_MAX = 64
"""Releases that are looked at on the way back to something known."""

LookupRelease = Callable[[bytes], Awaitable[Release]]
"""The release whose sealed bytes hash to this; checked by the caller's border. Raises EchoError."""

Content = Mapping[str, bytes]  # content hash by part


async def find_routes(
    atlas: Atlas, have: Content, version: PolicyVersion | None, cost_of: CostOf, lookup: LookupRelease
) -> dict[str, Route]:
    """The cheapest route for each part of `have`, content that is of `version` if that is known.

    Adds to the atlas. Raises WeightsError if no way leads there, with the last failure of `lookup` as its reason.
    """
    failure: EchoError | None = None
    routes = _routes(atlas, have, cost_of)
    if any(part not in routes or len(routes[part].chunks) > 1 for part in have):
        snapshot = atlas.wanted.release.snapshot_release
        try:
            if snapshot is not None:
                await _explore(atlas, have, atlas.add(await lookup(snapshot)).version, cost_of, lookup)
        except EchoError as error:
            failure = error
        try:
            await _explore(atlas, have, version, cost_of, lookup)
        except EchoError as error:
            failure = error
        routes = _routes(atlas, have, cost_of)
    if missing := [part for part in have if part not in routes]:
        reason = failure or f"{len(atlas)} releases were looked at"
        raise WeightsError(f"no way leads to {missing[0]} of {atlas.wanted.version}: {reason}") from failure
    return routes


async def _explore(
    atlas: Atlas, have: Content, floor: PolicyVersion | None, cost_of: CostOf, lookup: LookupRelease
) -> None:
    """Look up releases from the wanted one back to `floor`, as long as a way from there may be the cheapest."""
    while (path := atlas.further_back(floor, cost_of)) and len(atlas) < RELEASES_MAX:
        routes = _routes(atlas, have, cost_of)
        spent = sum(cost_of(way.chunks[part]) or 0 for way in path for part in have if part in way.chunks)
        if len(routes) == len(have) and spent >= sum(route.cost for route in routes.values()):
            return
        atlas.add(await lookup(path[-1].sealed or b""), path[-1].base)


def _routes(atlas: Atlas, have: Content, cost_of: CostOf) -> dict[str, Route]:
    routes = {part: atlas.cheapest(part, content, cost_of) for part, content in have.items()}
    return {part: route for part, route in routes.items() if route is not None}
