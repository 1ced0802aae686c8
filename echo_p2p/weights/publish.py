"""The trainer's side of weights: turns each new policy into chunks in the store and a release that names them.

Knows no network, no envelope and no training engine. The caller seals the release, keeps the sealed bytes and says
what they hash to (`sealed`); the next release points there.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from echo_p2p.errors import WeightsError
from echo_p2p.net.blobs import blob_hash
from echo_p2p.tensors import Bits, by_part
from echo_p2p.weights.codec import content_hash, encode_patch, encode_snapshot
from echo_p2p.weights.store import Store
from echo_protocols.release import Chunk, Release, policy_hash
from echo_protocols.values import PolicyVersion

PINS = "publisher"
_FRESH_PINS = "publisher.fresh"
SNAPSHOTS_KEPT = 2


@dataclass(slots=True)
class _Published:
    """What went out for one version; `sealed` is the hash of the sealed release, once the caller has said it."""

    version: PolicyVersion
    patch: tuple[Chunk, ...]
    snapshot: tuple[Chunk, ...]
    sealed: bytes | None = None

    def hashes(self, chunks: Iterable[Chunk]) -> set[bytes]:
        return {chunk.hash for chunk in chunks} | ({self.sealed} if self.sealed else set())


@dataclass(slots=True)
class _Retained:
    """A bf16 copy of the newest policy, which the next patch is made against."""

    tensors: dict[str, dict[str, Bits]] = field(default_factory=dict)  # by part
    results: dict[str, bytes] = field(default_factory=dict)

    def keep(self, parts: Mapping[str, Mapping[str, Bits]], results: dict[str, bytes]) -> None:
        self.tensors = {part: {name: np.array(bits) for name, bits in named.items()} for part, named in parts.items()}
        self.results = results


class Publisher:
    """Publishes one run's versions, one after the other.

    Holds a bf16 copy of the model. Every `snapshot_every`-th release, the first of all and the first of an epoch carry
    a snapshot. Pinned in the store: the patches of the last `keep` releases and the last two snapshots, with their
    sealed releases; what came before is left to the store's eviction. After a restart nothing is retained, so the
    first release is a snapshot.
    """

    def __init__(self, store: Store, *, snapshot_every: int = 16, keep: int = 64) -> None:
        if not 1 <= snapshot_every <= keep:
            raise WeightsError(f"keep={keep} releases must reach back to a snapshot, made each {snapshot_every}")
        self._store = store
        self._snapshot_every = snapshot_every
        self._retained = _Retained()
        self._recent: deque[_Published] = deque(maxlen=keep)
        self._snapshots: deque[_Published] = deque(maxlen=SNAPSHOTS_KEPT)
        self._since_snapshot = 0
        self._fresh: set[bytes] = set()

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version that went out."""
        return self._recent[-1].version if self._recent else None

    def publish(
        self,
        version: PolicyVersion,
        tensors: Mapping[str, Bits],
        *,
        continues: PolicyVersion | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> Release:
        """Put the chunks of a new version into the store; returns its release, still to be sealed.

        Takes seconds for a large model: call it in a worker thread. Nothing is retained of a call that raises.
        Raises WeightsError if the version doesn't follow the last one, or the store has no room.
        """
        parts = by_part(tensors)
        parent = self._parent_of(version, parts)
        self._fresh = set()
        results = {part: content_hash(named) for part, named in parts.items()}
        patch = tuple(self._patch_chunk(part, parts[part], results[part]) for part in parts) if parent else ()
        snapshot: tuple[Chunk, ...] = ()
        if parent is None or self._since_snapshot + 1 >= self._snapshot_every:
            snapshot = tuple(self._snapshot_chunk(part, parts[part], results[part]) for part in parts)
        release = Release(
            version=version,
            parent=parent.version if parent else None,
            parent_release=parent.sealed if parent else None,
            snapshot_release=self._snapshots[-1].sealed if self._snapshots else None,
            continues=continues,
            policy_hash=policy_hash(results),
            patch=patch,
            snapshot=snapshot,
            model_bytes=sum(bits.nbytes for bits in tensors.values()),
            figures=dict(figures or {}),
        )
        self._remember(_Published(version, patch, snapshot))
        self._retained.keep(parts, results)
        return release

    def sealed(self, hash: bytes) -> None:
        """Say what the newest release's sealed bytes hash to (and put them into the store before)."""
        if not self._recent:
            raise WeightsError("there is no release to be sealed; publish one first")
        self._recent[-1].sealed = hash
        self._pin()

    def _parent_of(self, version: PolicyVersion, parts: Mapping[str, Mapping[str, Bits]]) -> _Published | None:
        """What a patch can be made against; None if this release has to be a snapshot alone."""
        last = self._recent[-1] if self._recent else None
        if last is None:
            return None
        if version <= last.version:
            raise WeightsError(f"version {version} does not follow {last.version}; a restart opens a new epoch")
        if last.sealed is None:
            raise WeightsError(f"release {last.version} was never sealed; seal it before {version} is published")
        same_layout = _layout(parts) == _layout(self._retained.tensors)
        return last if version.epoch == last.version.epoch and same_layout else None

    def _patch_chunk(self, part: str, named: Mapping[str, Bits], result: bytes) -> Chunk:
        blob = encode_patch(self._retained.tensors[part], named)
        return Chunk(
            part=part,
            hash=self._put(blob),
            size_bytes=len(blob),
            base=self._retained.results[part],
            result=result,
        )

    def _snapshot_chunk(self, part: str, named: Mapping[str, Bits], result: bytes) -> Chunk:
        blob = encode_snapshot(named)
        return Chunk(part=part, hash=self._put(blob), size_bytes=len(blob), base=None, result=result)

    def _put(self, blob: bytes) -> bytes:
        """Into the store, safe from the eviction that the release's other chunks cause."""
        self._fresh.add(blob_hash(blob))
        self._store.pin(_FRESH_PINS, self._fresh)
        return self._store.put(blob)

    def _remember(self, published: _Published) -> None:
        self._recent.append(published)
        self._since_snapshot += 1
        if published.snapshot:
            self._snapshots.append(published)
            self._since_snapshot = 0
        self._pin()

    def _pin(self) -> None:
        patches = [published.hashes(published.patch) for published in self._recent]
        snapshots = [published.hashes(published.snapshot) for published in self._snapshots]
        self._store.pin(PINS, itertools.chain.from_iterable(patches + snapshots))
        self._store.unpin(_FRESH_PINS)


def _layout(parts: Mapping[str, Mapping[str, Bits]]) -> dict[str, dict[str, tuple[int, ...]]]:
    return {part: {name: bits.shape for name, bits in named.items()} for part, named in parts.items()}
