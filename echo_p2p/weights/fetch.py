"""The peer's side of weights: fetches what its span needs of a release, checks it, and stages it for the switch.

All or nothing, and checked: the base of a patch is the content at hand, the result must hash to what the release
says; if it doesn't, the chunk that lies is counted and another way is taken. Knows no network (releases and chunks
come through the callables given), no signature (releases come checked) and no engine but `apply`.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import trio

from echo_p2p.errors import BaseMismatch, WeightsError
from echo_p2p.tensors import Bits, by_part
from echo_p2p.weights.advance import Brought, advance, culprit
from echo_p2p.weights.chunks import Chunks, FetchChunk, all_of
from echo_p2p.weights.codec import content_hash
from echo_p2p.weights.explore import LookupRelease, find_routes
from echo_p2p.weights.route import Atlas, Route
from echo_p2p.weights.staged import Changeable, StagedUpdates
from echo_p2p.weights.store import Store
from echo_protocols.release import Chunk, Release
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

PARTS_AT_ONCE = 4
"""Parts that are brought to a new version at a time; the chunks of all are fetched at once."""

PINS = "replica"
_WAYS_TRIED = 4
_LIES_MAX = 4096


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
    """Some parts' weights at the newest staged version, and the updates that the live stage hasn't applied yet.

    Takes over the arrays of `initial` (the tensors of the stage, or of its adapter) and replaces, never changes them.
    `version` names what they are, if that is known. `report` hears of bytes that have come, and of all that are on
    their way, for each version anew.
    """

    def __init__(
        self,
        initial: Mapping[str, Bits],
        store: Store,
        *,
        version: PolicyVersion | None = None,
        prepare_timeout_s: float = 60.0,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._shadow: dict[str, Mapping[str, Bits]] = {**by_part(initial)}
        self._parts = tuple(self._shadow)
        self._store = store
        self._content: dict[str, bytes] = {}  # by part; empty until first needed
        self._version = version
        self._policy_hash: bytes | None = None
        self._staged = StagedUpdates(version, prepare_timeout_s)
        self._staging = trio.Lock()
        self._lies: OrderedDict[Chunk, None] = OrderedDict()  # whose blobs don't do what they say
        self._counts: Counter[str] = Counter()
        self._chunks = Chunks(store, self._counts, report)

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
        """Bring the parts to the release's version and stage it. One at a time; a version that is staged is no error.

        Raises WeightsError for a version that regressed or a release that contradicts itself, BaseMismatch if no way
        leads to the content it promises, CorruptChunk, or what the callables raise. Then nothing has changed.
        """
        async with self._staging:
            if not self._is_news(release):
                return
            atlas = Atlas(release)
            wanted = atlas.wanted.results
            if missing := [part for part in self._parts if part not in wanted]:
                raise WeightsError(f"release {release.version} lacks {missing[0]}, which this span needs")
            if not self._content:
                self._content = await trio.to_thread.run_sync(_content_of, self._shadow)
            try:
                brought = await self._bring(atlas, lookup_release, fetch)
            finally:
                self._store.unpin(PINS)
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

    async def _bring(self, atlas: Atlas, lookup_release: LookupRelease, fetch: FetchChunk) -> dict[str, Brought]:
        """All parts at the wanted version: those whose chunks lead elsewhere are tried again without these."""
        brought: dict[str, Brought] = {}
        for attempt in range(_WAYS_TRIED):
            have = {part: self._content[part] for part in self._parts if part not in brought}
            try:
                routes = await find_routes(atlas, have, self._version, self._cost_of, lookup_release)
            except WeightsError as error:
                if attempt == 0:
                    raise
                log.warning("%s", error)
                break
            brought |= await self._bring_all(routes, atlas.wanted.results, fetch)
            if len(brought) == len(self._parts):
                return brought
        self._counts["refused"] += 1
        raise BaseMismatch(f"the chunks of release {atlas.wanted.version} do not lead to the content it promises")

    def _cost_of(self, chunk: Chunk) -> int | None:
        if chunk in self._lies:
            return None
        return 0 if chunk.hash in self._store else chunk.size_bytes

    async def _bring_all(
        self, routes: Mapping[str, Route], wanted: Mapping[str, bytes], fetch: FetchChunk
    ) -> dict[str, Brought]:
        """Each part at its new version, but those whose chunks lead elsewhere."""
        chunks = {chunk for route in routes.values() for chunk in route.chunks}
        self._store.pin(PINS, [chunk.hash for chunk in chunks])
        self._chunks.expect(chunks)
        brought: dict[str, Brought] = {}
        slots = trio.CapacityLimiter(PARTS_AT_ONCE)

        async def bring(part: str, route: Route) -> None:
            spare = await self._chunks.bring(route.chunks, fetch)
            async with slots:
                blobs = [spare.get(chunk.hash) or await self._chunks.blob(chunk, fetch) for chunk in route.chunks]
                old, result = self._shadow[part], wanted[part]
                try:
                    brought[part] = await trio.to_thread.run_sync(advance, old, route.chunks, blobs, result)
                    self._counts["snapshots"] += route.from_snapshot
                except WeightsError as error:
                    self._counts["mismatches"] += 1
                    log.warning("%s: %s; another way is looked for", part, error)
                    self._distrust(await trio.to_thread.run_sync(culprit, old, route.chunks, blobs))

        await all_of(partial(bring, part, route) for part, route in routes.items())
        return brought

    def _distrust(self, chunk: Chunk) -> None:
        self._lies[chunk] = None
        while len(self._lies) > _LIES_MAX:
            self._lies.popitem(last=False)

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
