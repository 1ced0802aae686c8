"""The trainer's side of weights: turns each new policy into chunks in the store and a release that names them.

Knows no network, no envelope and no training engine. The caller seals the release, keeps the sealed bytes and says
what they hash to (`sealed`); the next release points there. Made to run beside the next training step: it works on a
bf16 copy of its own.
"""

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from echo_p2p.errors import WeightsError
from echo_p2p.net.blobs import blob_hash
from echo_p2p.tensors import Bits, Layout, by_part, layout
from echo_p2p.weights.changes import Change
from echo_p2p.weights.codec import content_hash, encode_changes, encode_snapshot, find_changes
from echo_p2p.weights.rewind import Windows
from echo_p2p.weights.shards import ShardChange, joined
from echo_p2p.weights.store import Store
from echo_protocols.release import Chunk, Release, Skip, policy_hash, total_bytes
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

PINS = "publisher"
_FRESH_PINS = "publisher.fresh"
SNAPSHOTS_KEPT = 2


@dataclass(slots=True)
class _Published:
    """What went out for one version; `sealed` is the hash of the sealed release, once the caller has said it."""

    version: PolicyVersion
    results: Mapping[str, bytes]
    patch: tuple[Chunk, ...]
    skips: tuple[Skip, ...]
    snapshot: tuple[Chunk, ...]
    sealed: bytes | None = None

    @property
    def patches(self) -> list[Chunk]:
        """Chunks of the patch and of the skips."""
        return [*self.patch, *(chunk for skip in self.skips for chunk in skip.chunks)]

    def hashes(self, chunks: Iterable[Chunk]) -> set[bytes]:
        return {chunk.hash for chunk in chunks} | ({self.sealed} if self.sealed else set())


class Publisher:
    """Publishes one run's versions, one after the other.

    Holds a bf16 copy of the model, and what has changed in it over the last releases. Every `snapshot_every`-th
    release, the first of all and the first of an epoch carry a snapshot; each n-th release after one without a
    parent, for each n of `skips`, carries a patch over n versions too, if that is smaller than those it stands for.
    Pinned in the store: the patches of the last `keep` releases and the last two snapshots, with their sealed
    releases; what came before is left to the store's eviction. After a restart nothing is retained, so the first
    release is a snapshot.
    """

    def __init__(
        self, store: Store, *, snapshot_every: int = 16, keep: int = 64, skips: Sequence[int] = (4, 16)
    ) -> None:
        if not 1 <= snapshot_every <= keep:
            raise WeightsError(f"keep={keep} releases must reach back to a snapshot, made each {snapshot_every}")
        self._store = store
        self._snapshot_every = snapshot_every
        self._windows = Windows[_Published](skips)
        self._retained: dict[str, dict[str, Bits]] = {}  # by part
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

        Takes seconds for a large model: call it in a worker thread. Raises WeightsError if the version doesn't follow
        the last one, or the store has no room; then the next release is a snapshot.
        """
        parts = by_part(tensors)
        parent = self._parent_of(version)
        with self._all_or_snapshot():
            if parent is None or _layout(parts) != _layout(self._retained):
                self._retained = {part: _copied(named) for part, named in parts.items()}
                return self._release(version, None, {}, continues, figures)
            changes = {part: find_changes(self._retained[part], named) for part, named in parts.items()}
            return self._release(version, parent, changes, continues, figures)

    def publish_shards(
        self,
        version: PolicyVersion,
        ranks: Sequence[Mapping[str, ShardChange]],
        *,
        figures: Mapping[str, float] | None = None,
    ) -> Release:
        """As `publish`, from what each rank says has changed in its shards since the last release.

        Also raises WeightsError if there was none in this epoch, and BaseMismatch if the shards don't fit the model.
        """
        parent = self._parent_of(version)
        if parent is None:
            raise WeightsError(f"version {version} has nothing to be a change of; publish the whole model first")
        with self._all_or_snapshot():
            found = joined({name: bits for named in self._retained.values() for name, bits in named.items()}, ranks)
            changes = {part: [found[name] for name in sorted(named)] for part, named in self._retained.items()}
            return self._release(version, parent, changes, None, figures)

    def sealed(self, hash: bytes) -> None:
        """Say what the newest release's sealed bytes hash to (and put them into the store before)."""
        if not self._recent:
            raise WeightsError("there is no release to be sealed; publish one first")
        self._recent[-1].sealed = hash
        self._pin()

    def _parent_of(self, version: PolicyVersion) -> _Published | None:
        """What a patch can be made against; None if this release has to be a snapshot alone."""
        last = self._recent[-1] if self._recent else None
        if last is None:
            return None
        if version <= last.version:
            raise WeightsError(f"version {version} does not follow {last.version}; a restart opens a new epoch")
        if last.sealed is None:
            raise WeightsError(f"release {last.version} was never sealed; seal it before {version} is published")
        return last if version.epoch == last.version.epoch and self._retained else None

    @contextmanager
    def _all_or_snapshot(self) -> Iterator[None]:
        """What is retained after an error is of no version."""
        self._fresh = set()
        try:
            yield
        except BaseException:
            self._retained = {}
            raise
        finally:
            self._store.unpin(_FRESH_PINS)

    def _release(
        self,
        version: PolicyVersion,
        parent: _Published | None,
        changes: Mapping[str, Sequence[Change]],
        continues: PolicyVersion | None,
        figures: Mapping[str, float] | None,
    ) -> Release:
        patches = {part: self._put(encode_changes(self._retained[part], each)) for part, each in changes.items()}
        self._advance(changes)
        results = {part: content_hash(named) for part, named in self._retained.items()}
        patch = tuple(_chunk(part, patches[part], parent.results, results) for part in patches if parent)
        skips = tuple(self._skips(total_bytes(patch), results)) if parent else ()
        snapshot: tuple[Chunk, ...] = ()
        if parent is None or self._since_snapshot + 1 >= self._snapshot_every:
            snapshots = {part: self._put(encode_snapshot(named)) for part, named in self._retained.items()}
            snapshot = tuple(_chunk(part, blob, {}, results) for part, blob in snapshots.items())
        release = Release(
            version=version,
            parent=parent.version if parent else None,
            parent_release=parent.sealed if parent else None,
            snapshot_release=self._snapshots[-1].sealed if self._snapshots else None,
            continues=continues,
            policy_hash=policy_hash(results),
            patch=patch,
            skips=skips,
            snapshot=snapshot,
            model_bytes=sum(bits.nbytes for named in self._retained.values() for bits in named.values()),
            figures=dict(figures or {}),
        )
        self._remember(_Published(version, results, patch, skips, snapshot))
        return release

    def _advance(self, changes: Mapping[str, Sequence[Change]]) -> None:
        """Bring the retained copy to the new version, in place."""
        for part, each in changes.items():
            by_name = dict(zip(sorted(self._retained[part]), each, strict=True))
            self._windows.changed(by_name)
            for name, change in by_name.items():
                self._retained[part][name].reshape(-1)[change.index] = change.after

    def _skips(self, patch_bytes: int, results: Mapping[str, bytes]) -> Iterator[Skip]:
        tensors = {name: bits for named in self._retained.values() for name, bits in named.items()}
        for window in self._windows.ending(patch_bytes, tensors):
            base = window.start
            if base is None or base.sealed is None:
                continue
            blobs = {part: encode_changes(*window.rewind.changes(named)) for part, named in self._retained.items()}
            size_bytes = sum(map(len, blobs.values()))
            if size_bytes >= window.size_bytes:
                continue
            window.size_bytes = size_bytes
            try:
                sized = {part: self._put(blob) for part, blob in blobs.items()}
            except WeightsError as error:
                log.warning("release without a patch from %s: %s", base.version, error)
                continue
            chunks = tuple(_chunk(part, put, base.results, results) for part, put in sized.items())
            yield Skip(base=base.version, base_release=base.sealed, chunks=chunks)

    def _put(self, blob: bytes) -> tuple[bytes, int]:
        """Into the store, safe from the eviction that the release's other chunks cause; its hash and size."""
        self._fresh.add(blob_hash(blob))
        self._store.pin(_FRESH_PINS, self._fresh)
        return self._store.put(blob), len(blob)

    def _remember(self, published: _Published) -> None:
        if not published.patch:
            self._windows.restart()
        self._windows.reached(published)
        self._recent.append(published)
        self._since_snapshot += 1
        if published.snapshot:
            self._snapshots.append(published)
            self._since_snapshot = 0
        self._pin()

    def _pin(self) -> None:
        patches = [published.hashes(published.patches) for published in self._recent]
        snapshots = [published.hashes(published.snapshot) for published in self._snapshots]
        self._store.pin(PINS, itertools.chain.from_iterable(patches + snapshots))


def _chunk(part: str, put: tuple[bytes, int], bases: Mapping[str, bytes], results: Mapping[str, bytes]) -> Chunk:
    hash, size_bytes = put
    return Chunk(part=part, hash=hash, size_bytes=size_bytes, base=bases.get(part), result=results[part])


def _copied(tensors: Mapping[str, Bits]) -> dict[str, Bits]:
    return {name: np.array(bits, order="C") for name, bits in tensors.items()}


def _layout(parts: Mapping[str, Mapping[str, Bits]]) -> dict[str, Layout]:
    return {part: layout(named) for part, named in parts.items()}
