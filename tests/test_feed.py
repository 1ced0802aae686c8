"""How an inference peer hears of releases: only from trainers, only forwards, and from few who say they hold them."""

import random
import time
from functools import partial
from pathlib import Path

import trio
import trio.testing

from echo_node.feed import Feed
from echo_p2p.config import NetworkConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.base import Stream
from echo_p2p.net.blobs import blob_hash, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.presence import Presence
from echo_p2p.spread.announce import Announcer
from echo_p2p.spread.holdings import Holdings
from echo_p2p.spread.seeding import Seeding
from echo_p2p.swarm import Member, Run, Swarm
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import RELEASE, Border, Sealer
from echo_protocols.peer import RoleRecord
from echo_protocols.release import Chunk, Release
from echo_protocols.run import RunManifest
from echo_protocols.sync import LatestRelease
from echo_protocols.values import PolicyVersion, Span

TRAINER, WORKER, HOSTILE = from_seed(b"t" * 32), from_seed(b"w" * 32), from_seed(b"h" * 32)
MANIFEST = RunManifest(
    swarm="s", model="tiny", tokenizer_hash=bytes(32), layers=4, vocabulary=64, trainers=(TRAINER.peer_id,)
)
RUN = Run(MANIFEST, MANIFEST.run_id(), TRAINER.peer_id, 0.0)


def presence_of(identity: Identity, network: MemoryNetwork) -> Presence:
    node, border = network.node(identity.peer_id), Border()
    sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
    record = RoleRecord(role="inference", software="test")
    swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=lambda: record)
    swarm.join(RUN)
    return Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, record)  # type: ignore[arg-type]


def release(epoch: int, step: int, *, figure: float = 0.0) -> Release:
    chunk = Chunk(part="embed", hash=bytes(32), size_bytes=1, base=None, result=bytes(32))
    return Release(
        version=PolicyVersion(epoch=epoch, step=step), parent=None, parent_release=None, snapshot_release=None,
        policy_hash=bytes(32), snapshot=(chunk,), model_bytes=1, figures={"loss": figure},
    )  # fmt: skip


def sealed(by: Presence, made: Release, run_id: bytes = RUN.run_id) -> bytes:
    return by.sealer.seal(RELEASE, run_id, made, time.time())


def test_releases_come_from_trainers_alone_and_versions_only_grow(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        worker, trainer, hostile = (presence_of(each, network) for each in (WORKER, TRAINER, HOSTILE))
        feed = Feed(worker, RUN, Store(tmp_path, 1 << 20))
        topic = names.release_topic("s")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed._hear)
            await trio.testing.wait_all_tasks_blocked()

            async def say(data: bytes) -> str | None:
                await hostile.gossip.publish(topic, data)
                await trio.testing.wait_all_tasks_blocked(0.02)
                return str(feed.version) if feed.version else None

            assert await say(sealed(hostile, release(9, 9))) is None
            first = sealed(trainer, release(0, 5))
            assert await say(first) == "0.5"
            assert await say(first) == "0.5"
            assert await say(sealed(trainer, release(0, 4))) == "0.5"
            assert await say(sealed(trainer, release(0, 7), bytes(32))) == "0.5"
            assert await say(b"\x91" * 60_000) == "0.5"
            assert await say(sealed(trainer, release(1, 5))) == "1.5"
            assert dict(worker.border.refused) == {
                "not-a-trainer": 1, "replayed": 1, "regressed-version": 1, "wrong-run": 1, "malformed": 1,
            }  # fmt: skip
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_release_that_the_records_name_is_fetched_from_whoever_has_it(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        worker, trainer, other = (presence_of(each, network) for each in (WORKER, TRAINER, HOSTILE))
        data = sealed(trainer, release(0, 3))
        record = RoleRecord(role="inference", software="x", run_id=RUN.run_id)
        worker.swarm.members = {HOSTILE.peer_id: Member(HOSTILE.peer_id, record, 0.0)}
        latest = LatestRelease(version=PolicyVersion(epoch=0, step=3), release=blob_hash(data), size_bytes=len(data))
        worker.swarm.latest = latest
        feed = Feed(worker, RUN, Store(tmp_path, 1 << 20))
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_blobs, other.hive, lambda hash: data if hash == blob_hash(data) else None)
            nursery.start_soon(feed._look)
            with trio.fail_after(5):
                while feed.version is None:  # noqa: ASYNC110  the feed's news are its own
                    await trio.sleep(0.01)
            assert feed.version == latest.version
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_few_of_those_who_say_that_they_take_part_are_asked_and_trainers_first(tmp_path: Path) -> None:
    worker = presence_of(WORKER, MemoryNetwork())
    feed = Feed(worker, RUN, Store(tmp_path, 1 << 20))
    crowd = [from_seed(bytes([n]) * 32).peer_id for n in range(100)]
    record = RoleRecord(role="inference", software="x", run_id=RUN.run_id)
    trainer = RoleRecord(role="trainer", software="x", run_id=RUN.run_id)
    worker.swarm.members = {peer: Member(peer, record, 0.0) for peer in crowd}
    worker.swarm.members[TRAINER.peer_id] = Member(TRAINER.peer_id, trainer, 0.0)
    holders = feed._holders()
    assert holders[0] == TRAINER.peer_id
    assert 1 < len(holders) <= 8
    assert len(set(holders)) == len(holders)


def chunk_of(blob: bytes) -> Chunk:
    return Chunk(part="embed", hash=blob_hash(blob), size_bytes=len(blob), base=None, result=bytes(32))


def meet(peers: list[Presence]) -> None:
    """Let everybody be a member of the run, in everybody's eyes."""
    for peer in peers:
        peer.swarm.members = {
            other.identity.peer_id: Member(
                other.identity.peer_id,
                RoleRecord(role="trainer" if other is peers[0] else "inference", software="x", run_id=RUN.run_id),
                0.0,
            )
            for other in peers
        }


def test_chunks_spread_from_feed_to_feed_and_the_trainer_uploads_them_once(tmp_path: Path) -> None:
    source = random.Random(1)
    blobs = [source.randbytes(size) for size in (100_000, 50_000, 20_000, 20_001, 20_002)]

    async def main() -> None:
        network = MemoryNetwork()
        workers = [presence_of(from_seed(bytes([n]) * 32), network) for n in range(5)]
        trainer = presence_of(TRAINER, network)
        meet([trainer, *workers])
        store = Store(tmp_path / "trainer", 1 << 20)
        announcer = Announcer(trainer.hive, Holdings(store.__contains__, Seeding()))
        feeds, stores = [], []
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_blobs, trainer.hive, store.get, watcher=announcer))
            await nursery.start(announcer.serve)
            for index, worker in enumerate(workers):
                stores.append(Store(tmp_path / str(index), 1 << 20))
                feeds.append(Feed(worker, RUN, stores[-1]))
                nursery.start_soon(feeds[-1].run)
                watcher = feeds[-1].announcer
                await nursery.start(partial(serve_blobs, worker.hive, stores[-1].get, watcher=watcher))
            await trio.sleep(1.5)  # some were looked for before they were there
            for blob in blobs:
                store.put(blob)
            before = network.sent_bytes[TRAINER.peer_id]
            with trio.fail_after(20):
                async with trio.open_nursery() as fetching:
                    for feed in feeds:
                        for blob in blobs:
                            fetching.start_soon(feed.fetch, chunk_of(blob))
                while any(len(each) < len(blobs) for each in stores):  # noqa: ASYNC110  kept a moment after they came
                    await trio.sleep(0.01)
            assert network.sent_bytes[TRAINER.peer_id] - before < 1.3 * sum(map(len, blobs))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_chunk_that_nobody_announces_is_asked_for_in_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        network, blob = MemoryNetwork(), b"old software"
        worker, trainer = presence_of(WORKER, network), presence_of(TRAINER, network)
        meet([trainer, worker])
        feed = Feed(worker, RUN, Store(tmp_path, 1 << 20))
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_blobs, trainer.hive, {blob_hash(blob): blob}.get, in_thread=False))
            nursery.start_soon(feed.run)
            began_at = trio.current_time()
            assert await feed.fetch(chunk_of(blob)) == blob
            assert 29 < trio.current_time() - began_at < 40
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_a_dead_trainer_is_waited_for_once_and_not_for_each_chunk(tmp_path: Path) -> None:
    blobs = [bytes([number]) * 50 for number in range(20)]
    held = {blob_hash(blob): blob for blob in blobs}

    async def main() -> None:
        network = MemoryNetwork()
        worker, trainer, other = (presence_of(each, network) for each in (WORKER, TRAINER, HOSTILE))
        meet([trainer, worker, other])
        feed = Feed(worker, RUN, Store(tmp_path, 1 << 20))
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_blobs, other.hive, held.get, in_thread=False))  # it announces nothing
            await nursery.start(trainer.hive.serve, names.BLOB, never)
            nursery.start_soon(feed.run)
            began_at = trio.current_time()
            async with trio.open_nursery() as fetching:
                for blob in blobs:
                    fetching.start_soon(feed.fetch, chunk_of(blob))
            assert trio.current_time() - began_at < 60  # and not 30 s, and 20 s for each two of them
            nursery.cancel_scope.cancel()

    async def never(stream: Stream) -> None:
        await trio.sleep_forever()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_neighbours_of_the_same_layers_are_preferred_in_an_order_of_ones_own(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    for identity in (WORKER, HOSTILE):
        worker = presence_of(identity, MemoryNetwork())
        worker.record = RoleRecord(role="inference", software="x", span=Span(start=1, end=3, layers=4))
        crowd = [from_seed(bytes([n]) * 32).peer_id for n in range(20)]
        worker.swarm.members = {
            peer: Member(
                peer,
                RoleRecord(
                    role="inference", software="x", run_id=RUN.run_id,
                    span=Span(start=index % 4, end=index % 4 + 1, layers=4),
                ),
                0.0,
            )
            for index, peer in enumerate(crowd)
        }  # fmt: skip
        feed = Feed(worker, RUN, Store(tmp_path / identity.peer_id, 1 << 20))
        ordered = feed.neighbours()
        assert {crowd.index(peer) % 4 for peer in ordered[:10]} == {1, 2}
        asked.append(list(ordered))
    assert asked[0] != asked[1]
    assert sorted(asked[0]) == sorted(asked[1])
