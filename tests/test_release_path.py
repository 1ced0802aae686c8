from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from echo_p2p.chain.stage import Weights
from echo_p2p.errors import BaseMismatch, CorruptChunk, Unreachable, WeightsError
from echo_p2p.net.blobs import fetch_from_any, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.tensors import Bits, TensorUpdate, by_part, updated
from echo_p2p.weights.codec import content_hash, encode_patch
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.route import Atlas
from echo_p2p.weights.shards import ShardChange, ShardDiff, joined
from echo_p2p.weights.staged import MAX_STAGED
from echo_p2p.weights.store import Store
from echo_protocols.release import Chunk, Release, Skip, part_of, parts_of, policy_hash
from echo_protocols.values import PolicyVersion, Span

LAYERS = 4
WHOLE, LOW, HIGH = (Span(start=a, end=b, layers=LAYERS) for a, b in ((0, 4), (0, 2), (2, 4)))
RELEASE_MAX_BYTES = 2**20


def v(step: int, epoch: int = 0) -> PolicyVersion:
    return PolicyVersion(epoch=epoch, step=step)


def make_tensors(seed: int = 0) -> dict[str, Bits]:
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (50, 8), "model.norm.weight": (8,), "lm_head.weight": (50, 8)}
    for layer in range(LAYERS):
        shapes[f"model.layers.{layer}.mlp.weight"] = (40, 50)
        shapes[f"model.layers.{layer}.norm.weight"] = (8,)
    return {name: random.integers(0, 0xFFFF, shape, dtype=np.uint16) for name, shape in shapes.items()}


def nudged(tensors: Mapping[str, Bits], seed: int, share: float = 0.02) -> dict[str, Bits]:
    random = np.random.default_rng(seed)
    return {name: bits + (random.random(bits.shape) < share).astype(np.uint16) for name, bits in tensors.items()}


def of_span(tensors: Mapping[str, Bits], span: Span) -> dict[str, Bits]:
    parts = parts_of(span, tied=False)
    return {name: bits.copy() for name, bits in tensors.items() if part_of(name) in parts}


class ArrayStage:
    """The weights of a stage, and nothing else."""

    def __init__(self, tensors: Mapping[str, Bits]) -> None:
        self.tensors = dict(tensors)
        self.applications = 0

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        self.applications += 1
        for name, update in updates.items():
            self.tensors[name] = updated(self.tensors[name], update)


class Trainer:
    """Publishes into a store and keeps what every version looked like."""

    def __init__(self, store: Store, publisher: Publisher | None = None) -> None:
        self.store = store
        self.publisher = publisher or Publisher(store, snapshot_every=8, keep=32)
        self.history: dict[PolicyVersion, dict[str, Bits]] = {}
        self.releases: list[Release] = []

    def publish(self, version: PolicyVersion, tensors: dict[str, Bits], **more: PolicyVersion) -> Release:
        release = self.publisher.publish(version, tensors, continues=more.get("continues"))
        self.publisher.sealed(self.store.put(msgspec.msgpack.encode(release)))
        self.history[version] = tensors
        self.releases.append(release)
        return release

    def train(self, steps: int) -> Release:
        for _ in range(steps):
            last = self.releases[-1].version
            step = last.step + 1
            self.publish(v(step, last.epoch), nudged(self.history[last], seed=step))
        return self.releases[-1]

    async def lookup(self, hash: bytes) -> Release:
        blob = self.store.get(hash)
        if blob is None:
            raise WeightsError("the sealed release is gone")
        return msgspec.msgpack.decode(blob, type=Release)

    async def fetch(self, chunk: Chunk) -> bytes:
        blob = self.store.get(chunk.hash)
        if blob is None:
            raise WeightsError("the chunk is gone")
        return blob


def start(folder: Path, **settings: int) -> Trainer:
    """A trainer whose version 0.0 is the initial model."""
    store = Store(folder / "trainer", 2**26)
    publisher = Publisher(store, **settings) if settings else None
    trainer = Trainer(store, publisher)
    trainer.publish(v(0), make_tensors())
    return trainer


def make_replica(folder: Path, span: Span = WHOLE, tensors: Mapping[str, Bits] | None = None) -> Replica:
    store = Store(folder / f"peer-{span.start}-{span.end}", 2**26)
    return Replica(of_span(tensors or make_tensors(), span), store)


async def follow(replica: Replica, trainer: Trainer, stage: ArrayStage, release: Release | None = None) -> None:
    release = release or trainer.releases[-1]
    await replica.stage(release, trainer.lookup, trainer.fetch)
    replica.switch(release.version, stage)


def agrees(stage: ArrayStage, trainer: Trainer, span: Span = WHOLE) -> bool:
    wanted = of_span(trainer.history[trainer.releases[-1].version], span)
    return content_hash(stage.tensors) == content_hash(wanted)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            await body()

    trio.run(main)


class Peer:
    """A replica on a network: asks the other peers, then the trainer, and serves what it has."""

    def __init__(self, network: MemoryNetwork, name: str, folder: Path, span: Span, holders: list[str]) -> None:
        self.name, self.span = name, span
        self.store = Store(folder / name, 2**26)
        self.streams = network.node(name)
        self.replica = Replica(of_span(make_tensors(), span), self.store)
        self.stage = ArrayStage(of_span(make_tensors(), span))
        self.holders = holders

    async def lookup(self, hash: bytes) -> Release:
        blob = await fetch_from_any(self.streams, self.holders, hash, RELEASE_MAX_BYTES)
        return msgspec.msgpack.decode(blob, type=Release)

    async def fetch(self, chunk: Chunk) -> bytes:
        return await fetch_from_any(self.streams, self.holders, chunk.hash, chunk.size_bytes)

    async def follow(self, trainer: Trainer) -> None:
        release = trainer.releases[-1]
        await self.replica.stage(release, self.lookup, self.fetch)
        await self.replica.prepare(release.version)
        self.replica.switch(release.version, self.stage)
        assert agrees(self.stage, trainer, self.span)


def test_three_peers_follow_thirty_versions_through_absence_corruption_and_a_new_epoch(tmp_path: Path) -> None:
    corrupt_served: list[bytes] = []

    async def body() -> None:
        network = MemoryNetwork()
        trainer = start(tmp_path)

        def corrupt_once(hash: bytes) -> bytes | None:
            blob = trainer.store.get(hash)
            if trainer.releases[-1].version.step == 15 and not corrupt_served and blob:
                corrupt_served.append(hash)
                return blob[:-1] + bytes([blob[-1] ^ 1])
            return blob

        peers = [
            Peer(network, "whole", tmp_path, WHOLE, ["trainer"]),
            Peer(network, "low", tmp_path, LOW, ["whole", "trainer"]),
            Peer(network, "high", tmp_path, HIGH, ["whole", "low", "trainer"]),
        ]
        joins_at, away = {"whole": 0, "low": 4, "high": 11}, {"whole": range(16, 28)}
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_blobs, network.node("trainer"), corrupt_once)
            for peer in peers:
                await nursery.start(serve_blobs, peer.streams, peer.store.get)
            for step in range(31):
                if step:
                    trainer.train(1)
                for peer in peers:
                    if step >= joins_at[peer.name] and step not in away.get(peer.name, ()):
                        await _retried(peer, trainer)
            trainer.publish(v(27, epoch=1), trainer.history[v(27)], continues=v(27))
            trainer.train(2)
            for peer in peers:
                await peer.follow(trainer)
            nursery.cancel_scope.cancel()
        whole, low, _ = (peer.replica.statistics() for peer in peers)
        assert corrupt_served
        assert whole.mismatches == low.mismatches == 0
        assert whole.staged == 31 - 12 + 1
        assert whole.chunks_fetched > 0

    run(body)


async def _retried(peer: Peer, trainer: Trainer) -> None:
    """As a node does it: a release that could not be had is tried again."""
    try:
        await peer.follow(trainer)
    except Unreachable:
        await peer.follow(trainer)


def test_the_initial_weights_cost_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        await follow(replica, trainer, stage)
        assert replica.statistics().chunks_fetched == 0
        assert stage.applications == 0
        assert replica.applied == v(0)

    run(body)


def test_a_late_peer_takes_patches_when_they_are_cheaper_and_the_snapshot_when_that_is(tmp_path: Path) -> None:
    async def body() -> None:
        trainer = start(tmp_path)
        trainer.train(3)
        replica, stage = make_replica(tmp_path), ArrayStage(make_tensors())
        await follow(replica, trainer, stage)
        assert agrees(stage, trainer)
        assert replica.statistics().snapshots == 0
        assert replica.statistics().bytes_fetched == sum(release.patch_bytes for release in trainer.releases)
        stranger = make_replica(tmp_path / "stranger", tensors=make_tensors(seed=9))
        stage = ArrayStage(make_tensors(seed=9))
        await follow(stranger, trainer, stage)
        assert agrees(stage, trainer)
        assert stranger.statistics().snapshots == LAYERS + 2

    run(body)


def test_a_span_fetches_only_its_parts(tmp_path: Path) -> None:
    async def body() -> None:
        trainer = start(tmp_path)
        release = trainer.train(1)
        replica, stage = make_replica(tmp_path, LOW), ArrayStage(of_span(make_tensors(), LOW))
        await follow(replica, trainer, stage)
        mine = [chunk for chunk in release.patch if chunk.part in parts_of(LOW, tied=False)]
        assert replica.statistics().bytes_fetched == sum(chunk.size_bytes for chunk in mine)
        assert agrees(stage, trainer, LOW)

    run(body)


def test_tied_embeddings_are_a_part_of_both_ends(tmp_path: Path) -> None:
    async def body() -> None:
        initial = make_tensors()
        del initial["lm_head.weight"]
        trainer = Trainer(Store(tmp_path / "trainer", 2**26))
        trainer.publish(v(0), initial)
        trainer.train(1)
        ends = {name: bits for name, bits in initial.items() if part_of(name) in parts_of(HIGH, tied=True)}
        replica = Replica(ends, Store(tmp_path / "peer", 2**26))
        stage = ArrayStage(ends)
        await follow(replica, trainer, stage)
        assert np.array_equal(
            stage.tensors["model.embed_tokens.weight"], trainer.history[v(1)]["model.embed_tokens.weight"]
        )

    run(body)


def test_regressed_and_double_versions_are_refused_and_a_new_epoch_is_not(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        trainer.train(2)
        await follow(replica, trainer, stage)
        with pytest.raises(WeightsError, match="regressed"):
            await follow(replica, trainer, stage, trainer.releases[1])
        await follow(replica, trainer, stage)  # once more is no error
        rival = start(tmp_path / "rival")
        rival.train(1)
        rival.publish(v(2), make_tensors(seed=5))
        with pytest.raises(WeightsError, match="two releases"):
            await follow(replica, rival, stage)
        assert replica.statistics().refused == 2
        trainer.publish(v(1, epoch=1), trainer.history[v(1)], continues=v(1))
        await follow(replica, trainer, stage)
        assert agrees(stage, trainer)
        assert replica.version == v(1, epoch=1)

    run(body)


def with_patch(trainer: Trainer, release: Release, part: str, blob: bytes) -> Release:
    """The release with another patch for one part, that claims to lead to the same content."""
    hash = trainer.store.put(blob)
    patch = tuple(
        msgspec.structs.replace(chunk, hash=hash, size_bytes=len(blob)) if chunk.part == part else chunk
        for chunk in release.patch
    )
    return msgspec.structs.replace(release, patch=patch)


def wrong_patch(trainer: Trainer) -> bytes:
    base = of_span(trainer.history[trainer.releases[-2].version], Span(start=1, end=2, layers=LAYERS))
    return encode_patch(base, nudged(base, seed=1234))


@pytest.mark.parametrize("blob", [b"no patch at all", None])
def test_a_patch_that_leads_elsewhere_is_replaced_by_the_snapshot_and_counted(
    tmp_path: Path, blob: bytes | None
) -> None:
    async def body() -> None:
        trainer = start(tmp_path, snapshot_every=2, keep=4)
        replica, stage = make_replica(tmp_path), ArrayStage(make_tensors())
        release = trainer.train(2)
        bad = with_patch(trainer, release, "layer.1", blob or wrong_patch(trainer))
        await follow(replica, trainer, stage, trainer.releases[1])
        await follow(replica, trainer, stage, bad)
        assert agrees(stage, trainer)
        assert (replica.statistics().mismatches, replica.statistics().snapshots) == (1, 1)

    run(body)


def test_without_a_way_to_the_promised_content_nothing_changes(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica = start(tmp_path), make_replica(tmp_path)
        stage = ArrayStage(make_tensors())
        trainer.train(1)
        await follow(replica, trainer, stage)
        release = trainer.train(1)
        forged = {chunk.part: bytes(32) for chunk in release.patch}
        chunks = tuple(msgspec.structs.replace(chunk, result=forged[chunk.part]) for chunk in release.patch)
        bad = msgspec.structs.replace(release, patch=chunks, snapshot=(), policy_hash=policy_hash(forged))
        with pytest.raises(WeightsError):
            await follow(replica, trainer, stage, bad)
        assert replica.version == v(1)
        assert replica.available() == ()
        await follow(replica, trainer, stage)
        assert agrees(stage, trainer)

    run(body)


def test_a_snapshot_that_leads_elsewhere_is_refused_for_good(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica = start(tmp_path), make_replica(tmp_path, tensors=make_tensors(seed=9))
        release = trainer.releases[0]
        swapped = (release.snapshot[1], release.snapshot[0], *release.snapshot[2:])
        lies = tuple(
            msgspec.structs.replace(other, part=own.part, result=own.result)
            for own, other in zip(release.snapshot, swapped, strict=True)
        )
        with pytest.raises(BaseMismatch, match="promises"):
            await replica.stage(msgspec.structs.replace(release, snapshot=lies), trainer.lookup, trainer.fetch)
        assert replica.version is None
        assert (replica.statistics().mismatches, replica.statistics().refused) == (2, 1)

    run(body)


def test_a_chunk_that_arrives_corrupt_is_asked_for_again_but_not_for_ever(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica = start(tmp_path), make_replica(tmp_path)
        release = trainer.train(1)
        asked: Counter[str] = Counter()

        async def always_corrupt(chunk: Chunk) -> bytes:
            asked[chunk.part] += 1
            return bytes(chunk.size_bytes)

        async def corrupt_at_first(chunk: Chunk) -> bytes:
            asked[chunk.part] += 1
            return await trainer.fetch(chunk) if asked[chunk.part] > 1 else bytes(chunk.size_bytes)

        with pytest.raises(CorruptChunk, match="2 times"):
            await replica.stage(release, trainer.lookup, always_corrupt)
        assert max(asked.values()) == 2
        assert replica.statistics().staged == 0
        assert replica.available() == ()
        asked.clear()
        before = replica.statistics().corrupt_chunks
        await replica.stage(release, trainer.lookup, corrupt_at_first)
        assert replica.version == v(1)
        assert replica.statistics().corrupt_chunks == before + len(release.patch)

    run(body)


def test_releases_that_contradict_themselves_are_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica = start(tmp_path, snapshot_every=1, keep=4), make_replica(tmp_path)
        release = trainer.train(1)
        change = msgspec.structs.replace
        for bad in (
            change(release, policy_hash=bytes(32)),
            change(release, patch=(*release.patch, release.patch[0])),
            change(release, snapshot=release.snapshot[1:]),
            change(release, patch=release.patch[1:], snapshot=()),
        ):
            with pytest.raises(WeightsError):
                await replica.stage(bad, trainer.lookup, trainer.fetch)
        assert replica.statistics().chunks_fetched == 0

    run(body)


def test_a_peer_without_a_way_back_says_why(tmp_path: Path) -> None:
    async def body() -> None:
        trainer = start(tmp_path)
        trainer.train(2)
        replica = make_replica(tmp_path, tensors=make_tensors(seed=9))

        async def lost(hash: bytes) -> Release:
            raise WeightsError("the sealed release is gone")

        with pytest.raises(WeightsError, match=r"no way leads to embed of 0\.2: the sealed release is gone"):
            await replica.stage(trainer.releases[-1], lost, trainer.fetch)

    run(body)


def test_a_switch_applies_all_that_is_staged_up_to_it_and_staging_is_bounded(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        for _ in range(2 * MAX_STAGED):
            release = trainer.train(1)
            await replica.stage(release, trainer.lookup, trainer.fetch)
        assert len(replica.available()) == MAX_STAGED
        with pytest.raises(WeightsError, match="not staged"):
            replica.switch(v(1), stage)
        earlier = replica.available()[1]
        replica.switch(earlier, stage)
        assert content_hash(stage.tensors) == content_hash(trainer.history[earlier])
        replica.switch(release.version, stage)
        assert agrees(stage, trainer)
        assert replica.available() == ()
        applications = stage.applications
        replica.switch(release.version, stage)
        assert stage.applications == applications

    run(body)


def test_prepare_waits_for_the_version_and_no_longer_than_its_deadline(tmp_path: Path) -> None:
    async def body() -> None:
        trainer = start(tmp_path)
        first, second = trainer.train(1), trainer.train(1)
        replica = Replica(make_tensors(), Store(tmp_path / "peer", 2**26), prepare_timeout_s=0.05)
        weights: Weights = replica
        with pytest.raises(WeightsError, match="within"):
            await weights.prepare(v(2))
        patient = make_replica(tmp_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patient.prepare, v(2))
            await trio.testing.wait_all_tasks_blocked()
            await patient.stage(second, trainer.lookup, trainer.fetch)
        with pytest.raises(WeightsError, match="any more"):
            await patient.prepare(first.version)

    run(body)


def test_news_are_versions_that_wait_for_a_switch(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        await follow(replica, trainer, stage)
        seen: list[PolicyVersion] = []

        async def watch(version: PolicyVersion | None) -> None:
            seen.append(await replica.newer_than(version))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, None)
            nursery.start_soon(watch, v(0))
            nursery.start_soon(watch, v(1))
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2):
                await replica.stage(trainer.train(1), trainer.lookup, trainer.fetch)
        assert sorted(seen) == [v(1), v(1), v(2)]

    run(body)


def test_the_publisher_pins_what_peers_may_still_need(tmp_path: Path) -> None:
    trainer = start(tmp_path, snapshot_every=3, keep=4)
    trainer.train(13)
    trainer.store.max_bytes = trainer.store.size_bytes
    trainer.store.put(bytes(60_000))  # takes the place of what is oldest and not pinned
    kept = trainer.releases[-4:]
    assert all(chunk.hash in trainer.store for release in kept for chunk in release.patch)
    snapshots = [release for release in trainer.releases if release.snapshot]
    assert [release.version.step for release in snapshots] == [0, 3, 6, 9, 12]
    assert all(chunk.hash in trainer.store for release in snapshots[-2:] for chunk in release.snapshot)
    assert not any(chunk.hash in trainer.store for chunk in trainer.releases[1].patch)
    assert {kept[-1].parent_release, kept[-1].snapshot_release} <= trainer.store.hashes()


def test_the_publisher_wants_versions_in_order_and_sealed(tmp_path: Path) -> None:
    trainer = start(tmp_path)
    with pytest.raises(WeightsError, match="does not follow"):
        trainer.publisher.publish(v(0), make_tensors())
    trainer.publisher.publish(v(1), make_tensors())
    with pytest.raises(WeightsError, match="never sealed"):
        trainer.publisher.publish(v(2), make_tensors())
    with pytest.raises(WeightsError, match="publish one first"):
        Publisher(trainer.store).sealed(bytes(32))
    with pytest.raises(WeightsError, match="reach back"):
        Publisher(trainer.store, snapshot_every=9, keep=8)


def test_a_restarted_publisher_begins_with_a_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        trainer.train(3)
        await follow(replica, trainer, stage)
        again = Trainer(Store(tmp_path / "trainer", 2**26))
        release = again.publish(v(3, epoch=1), trainer.history[v(3)], continues=v(3))
        assert release.snapshot
        assert not release.patch
        fetched = replica.statistics().bytes_fetched
        await follow(replica, again, stage)
        assert replica.statistics().bytes_fetched == fetched
        assert agrees(stage, again)

    run(body)


def test_of_all_ways_that_are_known_the_one_of_fewest_bytes_is_taken(tmp_path: Path) -> None:
    trainer = start(tmp_path, snapshot_every=3, keep=8)
    trainer.train(4)
    atlas, older = Atlas(trainer.releases[4]), trainer.releases[:4]

    def size(chunk: Chunk) -> int:
        return chunk.size_bytes

    def bases(have: bytes) -> list[bytes | None]:
        route = atlas.cheapest("layer.0", have, size)
        assert route is not None
        assert route.cost == sum(map(size, route.chunks))
        return [chunk.base for chunk in route.chunks]

    assert atlas.cheapest("layer.0", bytes(32), size) is None
    assert [way.base.step for way in atlas.further_back(v(2), size)] == [3]
    results = [atlas.add(release).results["layer.0"] for release in reversed(older)][::-1]
    assert [way.base.step for way in atlas.wanted.ways] == [0, 3]  # a skip over four versions, and the patch
    assert atlas.further_back(v(2), size) == ()
    assert bases(bytes(32)) == [None, results[3]]
    assert bases(results[2]) == [results[2], results[3]]
    assert bases(results[0]) == [results[0]]
    assert bases(atlas.wanted.results["layer.0"]) == []


def one_layer() -> dict[str, Bits]:
    """A model of one part: hundreds of releases take seconds."""
    return {name: bits for name, bits in make_tensors().items() if part_of(name) == "layer.0"}


def test_a_peer_that_was_away_for_500_versions_is_back_in_few_fetches(tmp_path: Path) -> None:
    store = Store(tmp_path / "trainer", 2**26)
    trainer = Trainer(store, Publisher(store, snapshot_every=20, keep=40))
    trainer.publish(v(0), one_layer())
    replica, stage, lookups = Replica(one_layer(), Store(tmp_path / "peer", 2**26)), ArrayStage(one_layer()), 0

    async def lookup(hash: bytes) -> Release:
        nonlocal lookups
        lookups += 1
        return await trainer.lookup(hash)

    trainer.train(2)
    run(partial(follow, replica, trainer, stage))
    before = replica.statistics()
    trainer.train(500)
    run(partial(replica.stage, trainer.releases[-1], lookup, trainer.fetch))
    replica.switch(v(502), stage)
    assert content_hash(stage.tensors) == content_hash(trainer.history[v(502)])
    assert replica.statistics().chunks_fetched - before.chunks_fetched <= 8  # a snapshot, and on by 16, 4 and 1
    assert lookups <= 2 * 8


def test_skips_lead_a_peer_back_over_a_long_gap_without_a_snapshot(tmp_path: Path) -> None:
    store = Store(tmp_path / "trainer", 2**26)
    trainer = Trainer(store, Publisher(store, snapshot_every=300, keep=300, skips=(4, 16, 64)))
    trainer.publish(v(0), one_layer())
    replica, stage = Replica(one_layer(), Store(tmp_path / "peer", 2**26)), ArrayStage(one_layer())
    trainer.train(3)
    run(partial(follow, replica, trainer, stage))
    before = replica.statistics()
    for step in range(4, 204):
        trainer.publish(v(step), nudged(trainer.history[v(step - 1)], seed=step, share=0.001))
    run(partial(follow, replica, trainer, stage))
    assert content_hash(stage.tensors) == content_hash(trainer.history[v(203)])
    after = replica.statistics()
    assert after.snapshots == before.snapshots == 0
    assert after.chunks_fetched - before.chunks_fetched <= 2 * 3 * 3  # 3 of each length, on the way up and down
    walked = sum(release.patch_bytes for release in trainer.releases[4:])
    assert after.bytes_fetched - before.bytes_fetched < 0.75 * walked


def test_what_shards_say_is_published_as_the_whole_is(tmp_path: Path) -> None:
    whole, sharded = (start(tmp_path / name, snapshot_every=8, keep=8) for name in ("whole", "sharded"))
    tensors = make_tensors()

    def shards(tensors: Mapping[str, Bits], rank: int) -> dict[str, tuple[int, Bits]]:
        """Of three ranks, as FSDP2 cuts: rows, as even as can be; some have none of a small tensor."""
        cut = {}
        for name, bits in tensors.items():
            rows = -(-len(bits) // 3)
            mine = bits[rank * rows : (rank + 1) * rows]
            if mine.size:
                cut[name] = (rank * rows * bits[:1].size, mine)
        return cut

    ranks = [ShardDiff(shards(tensors, rank)) for rank in range(3)]
    for step in range(1, 6):
        tensors = nudged(tensors, seed=step)
        one = whole.publish(v(step), tensors)
        said = [diff.changes({n: bits for n, (_, bits) in shards(tensors, r).items()}) for r, diff in enumerate(ranks)]
        other = sharded.publisher.publish_shards(v(step), said)
        sharded.publisher.sealed(sharded.store.put(msgspec.msgpack.encode(other)))
        assert other == one
    with pytest.raises(BaseMismatch, match="other names or sizes"):
        ranks[0].changes({})
    late = [{"lm_head.weight": ShardChange(399, np.array([1]), np.array([1], np.uint16))}]
    with pytest.raises(BaseMismatch, match="outside"):
        sharded.publisher.publish_shards(v(6), late)
    with pytest.raises(WeightsError, match="whole model first"):
        Publisher(sharded.store).publish_shards(v(6), said)


def test_after_a_release_that_failed_the_next_one_is_a_snapshot(tmp_path: Path) -> None:
    trainer = start(tmp_path)
    trainer.train(2)
    room, trainer.store.max_bytes = trainer.store.max_bytes, 1
    with pytest.raises(WeightsError, match="does not fit"):
        trainer.train(1)
    trainer.store.max_bytes = room
    release = trainer.publish(v(3), make_tensors(seed=3))
    assert release.snapshot
    assert not release.patch
    assert trainer.train(1).patch


def test_a_skip_that_the_store_has_no_room_for_is_left_out(tmp_path: Path) -> None:
    roomy, tight = (start(tmp_path / name, snapshot_every=64, keep=64) for name in ("roomy", "tight"))
    for trainer in (roomy, tight):
        trainer.train(3)
    release = roomy.train(1)
    tight.store.max_bytes = roomy.store.size_bytes - len(msgspec.msgpack.encode(release)) - 1
    assert not tight.train(1).skips
    tight.store.max_bytes = 2**26
    assert [skip.base for skip in tight.train(4).skips] == [v(4)]


def with_skip_blob(trainer: Trainer, release: Release, part: str, blob: bytes) -> Release:
    """The release with another blob for a part of its skip, sealed in place of the one that went out."""
    (skip,) = release.skips
    hash = trainer.store.put(blob)
    chunks = tuple(
        msgspec.structs.replace(chunk, hash=hash, size_bytes=len(blob)) if chunk.part == part else chunk
        for chunk in skip.chunks
    )
    return msgspec.structs.replace(release, skips=(msgspec.structs.replace(skip, chunks=chunks),))


def test_a_skip_that_leads_elsewhere_is_passed_over_for_the_patches_it_stands_for(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        trainer.publisher = Publisher(trainer.store, snapshot_every=64, keep=64)
        trainer.publish(v(0, epoch=1), make_tensors(), continues=v(0))
        await follow(replica, trainer, stage)
        release = trainer.train(4)
        own = of_span(trainer.history[v(0, epoch=1)], Span(start=1, end=2, layers=LAYERS))
        lying = with_skip_blob(trainer, release, "layer.1", encode_patch(own, nudged(own, seed=1234, share=0.001)))
        await follow(replica, trainer, stage, lying)
        assert agrees(stage, trainer)
        assert (replica.statistics().mismatches, replica.statistics().snapshots) == (1, 0)
        # who was behind takes that skip for all other parts, and is not taken in again
        trainer.publisher.sealed(trainer.store.put(msgspec.msgpack.encode(lying)))
        trainer.train(2)
        late = make_replica(tmp_path / "late")
        stage = ArrayStage(make_tensors())
        await follow(late, trainer, stage)
        assert agrees(stage, trainer)
        assert (late.statistics().mismatches, late.statistics().snapshots) == (1, 0)

    run(body)


def test_a_skip_from_other_content_than_its_base_has_is_passed_over(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica, stage = start(tmp_path), make_replica(tmp_path), ArrayStage(make_tensors())
        await follow(replica, trainer, stage)
        release = trainer.train(4)
        (skip,) = release.skips
        chunks = tuple(msgspec.structs.replace(chunk, base=bytes(32)) for chunk in skip.chunks)
        lying = msgspec.structs.replace(release, skips=(msgspec.structs.replace(skip, chunks=chunks),))
        await follow(replica, trainer, stage, lying)
        assert agrees(stage, trainer)
        assert replica.statistics().mismatches == 0

    run(body)


def test_no_release_leads_from_one_that_is_not_before_it() -> None:
    chunk = Chunk(part="embed", hash=bytes(32), size_bytes=1, base=None, result=bytes(32))
    more: dict[str, Any] = {"policy_hash": policy_hash({"embed": bytes(32)}), "model_bytes": 1, "snapshot": (chunk,)}
    skip = Skip(base=v(10), base_release=bytes(32), chunks=(msgspec.structs.replace(chunk, base=bytes(32)),))
    for parent, skips in ((v(11), (skip,)), (v(5), ())):
        with pytest.raises(ValueError, match="older"):
            Release(version=v(5), parent=parent, parent_release=None, snapshot_release=None, skips=skips, **more)


def test_arrays_in_any_order_of_memory_are_published_as_what_they_hold(tmp_path: Path) -> None:
    trainer = Trainer(Store(tmp_path / "trainer", 2**26))
    tensors = {name: np.asfortranarray(bits) for name, bits in make_tensors().items()}
    trainer.publish(v(0), tensors)
    tensors = {name: np.asfortranarray(bits) for name, bits in nudged(tensors, seed=1).items()}
    release = trainer.publish(v(1), tensors)
    whole = {chunk.part: chunk.result for chunk in release.patch}
    assert whole == {part: content_hash(named) for part, named in by_part(tensors).items()}


def test_other_widths_of_the_same_shapes_are_a_snapshot_and_of_no_use_to_who_has_the_old_ones(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, replica = start(tmp_path), make_replica(tmp_path)
        await replica.stage(trainer.releases[0], trainer.lookup, trainer.fetch)
        wide = {name: bits.astype(np.uint32) for name, bits in make_tensors().items()}
        release = trainer.publish(v(1), wide)
        assert release.snapshot
        assert not release.patch
        with pytest.raises(BaseMismatch, match="promises"):
            await replica.stage(release, trainer.lookup, trainer.fetch)
        assert replica.version == v(0)

    run(body)


def test_shards_that_do_not_fit_are_refused_and_what_did_not_change_is_no_change() -> None:
    base = {"a": np.arange(8, dtype=np.uint16), "b": np.zeros(4, np.uint16)}

    def said(start: int = 0, index: tuple[int, ...] = (1,), after: object = np.array([9], np.uint16)) -> ShardChange:
        return ShardChange(start, np.array(index, np.int64), after)  # type: ignore[arg-type]

    for bad in (
        {"c": said()},
        {"a": said(start=-2)},
        {"a": said(after=np.array([9], np.uint32))},
        {"a": said(after=np.array([9, 9], np.uint16))},
        {"b": said(start=3)},
    ):
        with pytest.raises(BaseMismatch):
            joined(base, [bad])
    with pytest.raises(BaseMismatch, match="overlap"):
        joined(base, [{"a": said()}, {"a": said(start=1, index=(0,))}])
    assert joined(base, [{"a": said(after=np.array([1], np.uint16))}])["a"].index.size == 0
    diff = ShardDiff({"a": (0, base["a"]), "b": (0, base["b"])})
    moved = {"a": base["a"] + np.uint16(1), "b": base["b"].astype(np.uint32)}
    with pytest.raises(BaseMismatch):
        diff.changes(moved)
    assert diff.changes({**moved, "b": base["b"]})["a"].index.size == 8  # nothing was lost
