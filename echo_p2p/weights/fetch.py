"""The peer's side of weights: fetches what its span needs of a release, checks it, and stages it for the switch.

All or nothing, and checked: the base of a patch is the content at hand, the result must hash to what the release
says; if it doesn't, the snapshot path is taken and counted. Knows no network (releases and chunks come through the
callables given), no signature (releases come checked) and no engine but `apply`.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from echo_p2p.errors import BaseMismatch, CorruptChunk, EchoError, WeightsError
from echo_p2p.net.blobs import blob_hash
from echo_p2p.tensors import Bits, by_part
from echo_p2p.weights.advance import Brought, advance
from echo_p2p.weights.codec import content_hash
from echo_p2p.weights.route import Route, Step, cheapest, step_of
from echo_p2p.weights.staged import Changeable, StagedUpdates
from echo_p2p.weights.store import Store
from echo_protocols.release import Chunk, Release, parts_of
from echo_protocols.values import PolicyVersion, Span

log = logging.getLogger(__name__)

MAX_WALK = 256
"""Releases that are looked at on the way back to something known."""

PARTS_AT_ONCE = 4
_FETCH_ATTEMPTS = 2

LookupRelease = Callable[[bytes], Awaitable[Release]]
"""The release whose sealed bytes hash to this; checked by the caller's border. Raises EchoError."""

FetchChunk = Callable[[Chunk], Awaitable[bytes]]
"""The chunk's blob, from whoever has it. Raises EchoError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatistics:
    """What happened since the start. `mismatches`: patches that did not lead where their release says."""

    staged: int = 0
    chunks_fetched: int = 0
    bytes_fetched: int = 0
    chunks_at_hand: int = 0
    snapshots: int = 0
    mismatches: int = 0
    corrupt_chunks: int = 0
    refused: int = 0


class Replica:
    """One span's weights at the newest staged version, and the updates that the live stage hasn't applied yet.

    Takes over the arrays of `initial` (the stage's tensors) and replaces, never changes them. `version` names what
    they are, if that is known.
    """

    def __init__(
        self,
        span: Span,
        *,
        tied: bool,
        initial: Mapping[str, Bits],
        store: Store,
        version: PolicyVersion | None = None,
        prepare_timeout_s: float = 60.0,
    ) -> None:
        self._parts = parts_of(span, tied=tied)
        self._shadow: dict[str, Mapping[str, Bits]] = {**by_part(initial)}
        if set(self._shadow) != set(self._parts):
            raise WeightsError(f"span {span} needs parts {self._parts}, the stage gave {tuple(self._shadow)}")
        self._store = store
        self._content: dict[str, bytes] = {}  # by part; empty until first needed
        self._version = version
        self._policy_hash: bytes | None = None
        self._staged = StagedUpdates(version, prepare_timeout_s)
        self._staging = trio.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def version(self) -> PolicyVersion | None:
        """The newest staged version."""
        return self._version

    @property
    def applied(self) -> PolicyVersion | None:
        """The version of the live stage."""
        return self._staged.applied

    def available(self) -> tuple[PolicyVersion, ...]:
        """Versions that can be switched to, oldest first."""
        return self._staged.available()

    def statistics(self) -> ReplicaStatistics:
        return ReplicaStatistics(**self._counts)

    # -- the network's side ---------------------------------------------------------------------------------------

    async def stage(self, release: Release, lookup_release: LookupRelease, fetch: FetchChunk) -> None:
        """Bring the span to the release's version and stage it. One at a time; a version that is staged is no error.

        Raises WeightsError for a version that regressed or a release that contradicts itself, BaseMismatch if no way
        leads to the content it promises, CorruptChunk, or what the callables raise. Then nothing has changed.
        """
        async with self._staging:
            if not self._is_news(release):
                return
            walked = [step_of(release)]
            wanted = walked[0].results
            if missing := [part for part in self._parts if part not in wanted]:
                raise WeightsError(f"release {release.version} lacks {missing[0]}, which this span needs")
            if not self._content:
                self._content = await trio.to_thread.run_sync(_content_of, self._shadow)
            routes = await self._plan(walked, lookup_release, {part: self._content[part] for part in self._parts})
            brought = await self._bring_all(routes, wanted, fetch)
            if failed := [part for part in self._parts if part not in brought]:
                self._refuse_hopeless(release, [routes[part] for part in failed])
                again = await self._plan(walked, lookup_release, dict.fromkeys(failed))
                brought |= await self._bring_all(again, wanted, fetch)
                self._refuse_hopeless(release, [again[part] for part in failed if part not in brought])
            await self._commit(release, brought, wanted)

    def _is_news(self, release: Release) -> bool:
        if self._version is None or release.version > self._version:
            return True
        if release.version < self._version:
            self._counts["refused"] += 1
            raise WeightsError(f"release {release.version} regressed: {self._version} is staged already")
        if self._policy_hash not in (None, release.policy_hash):
            self._counts["refused"] += 1
            raise WeightsError(f"there are two releases of version {release.version}; the first one stays")
        return False

    async def _plan(
        self, walked: list[Step], lookup_release: LookupRelease, have: Mapping[str, bytes | None]
    ) -> dict[str, Route]:
        """A route for each part of `have`; walks back (and adds to `walked`) as long as that may be cheaper."""
        routes: dict[str, Route] = {}
        failure: EchoError | None = None
        while True:
            open_parts = []
            for part, content in have.items():
                route, further = cheapest(walked, part, content, self._cost_of)
                if route is not None:
                    routes[part] = route
                if further < (route.cost if route else 2**62):
                    open_parts.append(part)
            parent_release = walked[-1].release.parent_release
            if not open_parts or parent_release is None or len(walked) >= MAX_WALK or failure:
                break
            try:
                parent = step_of(await lookup_release(parent_release))
                if not walked[-1].follows(parent):
                    raise WeightsError(f"release {walked[-1].release.version} names a parent that it does not follow")
                walked.append(parent)
            except EchoError as error:
                failure = error
        if missing := [part for part in have if part not in routes]:
            reason = failure or f"{len(walked)} releases were walked back"
            raise WeightsError(f"no way leads to {missing[0]} of {walked[0].release.version}: {reason}") from failure
        return routes

    def _cost_of(self, chunk: Chunk) -> int:
        return 0 if chunk.hash in self._store else chunk.size_bytes

    async def _bring_all(
        self, routes: Mapping[str, Route], wanted: Mapping[str, bytes], fetch: FetchChunk
    ) -> dict[str, Brought]:
        """Each part at its new version, but those whose chunks lead elsewhere."""
        brought: dict[str, Brought] = {}
        failures: list[EchoError] = []
        slots = trio.CapacityLimiter(PARTS_AT_ONCE)

        async def bring(part: str, route: Route) -> None:
            async with slots:
                try:
                    blobs = [await self._blob(chunk, fetch) for chunk in route.chunks]
                except EchoError as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()
                    return
                try:
                    old, result = self._shadow[part], wanted[part]
                    brought[part] = await trio.to_thread.run_sync(advance, old, route.chunks, blobs, result)
                    self._counts["snapshots"] += route.from_snapshot
                except WeightsError as error:
                    self._counts["mismatches"] += 1
                    log.warning("%s: %s; the snapshot is taken", part, error)

        async with trio.open_nursery() as nursery:
            for part, route in routes.items():
                nursery.start_soon(bring, part, route)
        if failures:
            raise failures[0]
        return brought

    async def _blob(self, chunk: Chunk, fetch: FetchChunk) -> bytes:
        held = await trio.to_thread.run_sync(self._store.get, chunk.hash)
        if held is not None:
            self._counts["chunks_at_hand"] += 1
            return held
        for _ in range(_FETCH_ATTEMPTS):
            try:
                blob = await fetch(chunk)
                if len(blob) == chunk.size_bytes and await trio.to_thread.run_sync(blob_hash, blob) == chunk.hash:
                    break
            except CorruptChunk as error:
                log.warning("%s: %s", chunk.part, error)
            self._counts["corrupt_chunks"] += 1
        else:
            raise CorruptChunk(f"chunk {chunk.hash.hex()[:12]} of {chunk.part} arrived corrupt {_FETCH_ATTEMPTS} times")
        self._counts["chunks_fetched"] += 1
        self._counts["bytes_fetched"] += len(blob)
        try:
            await trio.to_thread.run_sync(self._store.put, blob)
        except WeightsError as error:
            log.warning("a chunk is used but not kept: %s", error)
        return blob

    def _refuse_hopeless(self, release: Release, routes: Sequence[Route]) -> None:
        """Raise if one of the routes that failed was a snapshot's: there is no better one."""
        if any(route.from_snapshot or not route.chunks for route in routes):
            self._counts["refused"] += 1
            raise BaseMismatch(f"the chunks of release {release.version} do not lead to the content it promises")

    async def _commit(self, release: Release, brought: Mapping[str, Brought], wanted: Mapping[str, bytes]) -> None:
        updates = {name: update for part in brought.values() for name, update in part.updates.items()}
        await self._staged.add(release.version, updates)
        self._shadow |= {part: new.tensors for part, new in brought.items()}
        self._content = {part: wanted[part] for part in self._parts}
        self._version, self._policy_hash = release.version, release.policy_hash
        self._counts["staged"] += 1

    # -- the chain's side: `Weights` of its seam ----------------------------------------------------------------------

    async def prepare(self, version: PolicyVersion) -> None:
        """Return once `version` can be switched to. Raises WeightsError if it is superseded, or late."""
        await self._staged.wait_for(version)

    async def newer_than(self, version: PolicyVersion | None) -> PolicyVersion:
        """The newest staged version, once it is newer than `version`."""
        return await self._staged.newer_than(version)

    def switch(self, version: PolicyVersion, stage: Changeable) -> None:
        """Apply all staged versions up to `version` to the live stage, in order. Raises WeightsError."""
        self._staged.switch(version, stage)


def _content_of(parts: Mapping[str, Mapping[str, Bits]]) -> dict[str, bytes]:
    return {part: content_hash(tensors) for part, tensors in parts.items()}
