"""How blobs spread: one upload for everybody, from peer to peer, whatever some of the peers do."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from echo_p2p.errors import NetError, Unreachable
from echo_p2p.net.base import Stream
from echo_p2p.net.blobs import blob_hash, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.uplink import Busy, Uplink
from echo_p2p.spread.announce import MAX_STREAMS, Announcer
from echo_p2p.spread.arrival import ExchangeSettings
from echo_p2p.spread.exchange import Exchange
from echo_p2p.spread.holdings import Holdings
from echo_p2p.spread.picker import FetchBounds, Picker
from echo_p2p.spread.seeding import Seeding, SeedingBounds
from echo_p2p.spread.wire import FRAME_BYTES_MAX, HASHES_MAX, KEEPALIVE_S, WANTED_MAX, Have, Want
from echo_protocols import names
from echo_protocols.values import decode, encode

UPLINK_BYTES_S = 100_000.0
TRAINER = "trainer"


class Peer:
    """A peer with its blobs in memory, on a network."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        blobs: Sequence[bytes] = (),
        *,
        seeds: bool = False,
        settings: ExchangeSettings | None = None,
    ) -> None:
        self.name = name
        self.node = network.node(name)
        self.blobs = {blob_hash(blob): blob for blob in blobs}
        self.refused = Counter[str]()
        self.reported = Counter[tuple[str, str]]()
        holdings = Holdings(self.blobs.__contains__, Seeding() if seeds else None)
        self.announcer = Announcer(self.node, holdings, refused=self.refused)
        self.exchange = Exchange(
            self.node,
            keep=self.keep,
            kept=self.announcer.gained,
            report=lambda reason, peer: self.reported.update([(reason, peer)]),
            settings=settings,
        )

    async def keep(self, blob: bytes) -> bool:
        self.blobs[blob_hash(blob)] = blob
        return True

    async def start(self, nursery: trio.Nursery, uplink: Uplink | None = None) -> None:
        serve = partial(serve_blobs, self.node, self.blobs.get, in_thread=False)
        await nursery.start(partial(serve, watcher=self.announcer, uplink=uplink, refused=self.refused))
        await nursery.start(self.announcer.serve)
        nursery.start_soon(self.exchange.run)

    async def fetch(self, blobs: Sequence[bytes]) -> None:
        async with trio.open_nursery() as nursery:
            for blob in blobs:
                nursery.start_soon(self.exchange.fetch, blob_hash(blob), len(blob))


def blobs_of(*sizes: int) -> list[bytes]:
    source = random.Random(3)
    return [source.randbytes(size) for size in sizes]


def crowd(network: MemoryNetwork, count: int, settings: ExchangeSettings | None = None) -> list[Peer]:
    """Peers that follow the trainer and each other."""
    peers = [Peer(network, f"peer-{index}", settings=settings) for index in range(count)]
    for index, peer in enumerate(peers):
        rest = [each.name for each in peers if each is not peer]
        random.Random(index).shuffle(rest)
        peer.exchange.meet([TRAINER], rest)
    return peers


def in_virtual_time(body: Callable[[trio.Nursery], Awaitable[None]], deadline_s: float = 600.0) -> None:
    async def main() -> None:
        with trio.fail_after(deadline_s):
            async with trio.open_nursery() as nursery:
                await body(nursery)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def all_fetch(peers: Sequence[Peer], blobs: Sequence[bytes]) -> None:
    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(peer.fetch, blobs)


# -- a swarm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 32])
def test_the_trainer_uploads_about_one_copy_however_many_peers_there_are(count: int) -> None:
    blobs = blobs_of(40_000, *[8_000] * 20)
    size = sum(map(len, blobs))

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, count)
        for peer in (Peer(network, TRAINER, blobs, seeds=True), *peers):
            await peer.start(nursery)
        await trio.sleep(5)
        before, began_at = network.sent_bytes[TRAINER], trio.current_time()
        await all_fetch(peers, blobs)
        assert all(set(peer.blobs.values()) == set(blobs) for peer in peers)
        assert network.sent_bytes[TRAINER] - before < (1.2 if count > 2 else 1.2 * count) * size
        assert trio.current_time() - began_at < max(1.5, count if count <= 2 else 0) * 1.5 * size / UPLINK_BYTES_S

    in_virtual_time(body)


def test_peers_pass_on_what_they_have_while_they_fetch_the_rest() -> None:
    blobs = blobs_of(*[20_000] * 10)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, 4)
        for peer in (Peer(network, TRAINER, blobs, seeds=True), *peers):
            await peer.start(nursery)
        await trio.sleep(5)
        nursery.start_soon(all_fetch, peers, blobs)
        await trio.sleep(0.5 * sum(map(len, blobs)) / UPLINK_BYTES_S)
        held = [len(peer.blobs) for peer in peers]
        assert all(3 <= count < 10 for count in held), held
        assert sum(held) > 1.5 * 5  # more than the trainer has sent
        assert sum(network.sent_bytes[peer.name] for peer in peers) > 5 * 20_000

    in_virtual_time(body)


def test_two_spans_with_different_parts_each_spread_among_their_own() -> None:
    low, shared, high = blobs_of(*[20_000] * 4), blobs_of(30_001), blobs_of(*[20_002] * 4)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, 12)
        trainer = Peer(network, TRAINER, [*low, *shared, *high], seeds=True)
        for peer in (trainer, *peers):
            await peer.start(nursery)
        await trio.sleep(5)
        before = network.sent_bytes[TRAINER]
        async with trio.open_nursery() as fetching:
            fetching.start_soon(all_fetch, peers[:6], [*low, *shared])
            fetching.start_soon(all_fetch, peers[6:], [*shared, *high])
        assert set(peers[0].blobs.values()) == {*low, *shared}
        assert set(peers[6].blobs.values()) == {*shared, *high}
        assert network.sent_bytes[TRAINER] - before < 1.2 * sum(map(len, [*low, *shared, *high]))

    in_virtual_time(body)


def test_who_comes_late_gets_it_from_peers() -> None:
    blobs = blobs_of(*[20_000] * 6)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, 6)
        for peer in (Peer(network, TRAINER, blobs, seeds=True), *peers[:5]):
            await peer.start(nursery)
        await trio.sleep(5)
        await all_fetch(peers[:5], blobs)
        await trio.sleep(60)
        before = network.sent_bytes[TRAINER]
        await peers[5].start(nursery)
        await peers[5].fetch(blobs)
        assert network.sent_bytes[TRAINER] - before < 1000

    in_virtual_time(body)


def test_a_follower_that_vanishes_and_those_that_pass_nothing_on_do_not_stop_the_others() -> None:
    blobs = blobs_of(*[20_000] * 12)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, 8)
        for peer in (Peer(network, TRAINER, blobs, seeds=True), *peers[:4]):
            await peer.start(nursery)
        for selfish in peers[4:]:
            nursery.start_soon(selfish.exchange.run)  # it serves nobody, and announces nothing
        await trio.sleep(5)
        async with network.node("silent").open(TRAINER, names.HOLDERS) as stream:
            await stream.send(encode(Want(tuple(map(blob_hash, blobs)))))  # and then fetches nothing
            with trio.move_on_after(0.3):
                await peers[0].fetch(blobs)
            network.split([peers[0].name])
            await all_fetch(peers[1:], blobs)
        assert all(set(peer.blobs.values()) == set(blobs) for peer in peers[1:])
        assert trio.current_time() < 60
        assert network.sent_bytes[TRAINER] < 4 * sum(map(len, blobs))

    in_virtual_time(body)


def test_a_chunk_that_takes_long_is_waited_for_while_the_trainer_says_that_it_will_come() -> None:
    blobs = blobs_of(*[250_000] * 3)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, 5, settings=ExchangeSettings(deadline_s=2.0))
        for peer in (Peer(network, TRAINER, blobs, seeds=True), *peers):
            await peer.start(nursery)
        await trio.sleep(5)
        before, began_at = network.sent_bytes[TRAINER], trio.current_time()
        await all_fetch(peers, blobs)
        assert network.sent_bytes[TRAINER] - before < 1.1 * sum(map(len, blobs))
        assert trio.current_time() - began_at < 1.3 * sum(map(len, blobs)) / UPLINK_BYTES_S

    in_virtual_time(body)


# -- sources that are no good ------------------------------------------------------------------------------------------

BLOB, SMALL = blobs_of(200_000, 5_000)
HASH = blob_hash(BLOB)
Serve = Callable[[Stream], Awaitable[None]]


def reply(size_bytes: int, refusal: str | None = None) -> bytes:
    return msgspec.msgpack.encode((size_bytes, refusal))


async def announces_all(stream: Stream) -> None:
    while True:
        want = decode(await stream.receive(), Want)
        await stream.send(encode(Have(want.added)))


async def corrupts(stream: Stream) -> None:
    await stream.receive()
    await stream.send(reply(len(BLOB)))
    for start in range(0, len(BLOB), 2**16):
        await stream.send(bytes(len(BLOB[start : start + 2**16])))


async def frames_wrongly(stream: Stream) -> None:
    await stream.receive()
    await stream.send(reply(len(BLOB)))
    await stream.send(b"short")


async def promises_more(stream: Stream) -> None:
    await stream.receive()
    await stream.send(reply(2**40))


async def lacks_it(stream: Stream) -> None:
    while True:
        await stream.receive()
        await stream.send(reply(0, "absent"))


async def dies(stream: Stream) -> None:
    _, offset, _ = msgspec.msgpack.decode(await stream.receive())
    await stream.send(reply(len(BLOB)))
    await stream.send(BLOB[offset : offset + 2**16])


async def stalls(stream: Stream) -> None:
    await dies(stream)
    await trio.sleep_forever()


@pytest.mark.parametrize("bad", [corrupts, frames_wrongly, promises_more, lacks_it, stalls, dies])
def test_a_bad_source_is_found_out_and_the_blob_comes_from_another(bad: Serve) -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02)
        me, good = Peer(network, "me"), Peer(network, "good", [BLOB])
        await nursery.start(network.node("bad").serve, names.HOLDERS, announces_all)
        await nursery.start(network.node("bad").serve, names.BLOB, bad)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], ["bad", "good"])
        async with trio.open_nursery() as fetching:
            fetching.start_soon(me.fetch, [BLOB])
            await trio.sleep(1.5)
            await good.start(nursery)
        assert me.blobs == {HASH: BLOB}
        banned = bad in (corrupts, frames_wrongly, promises_more)
        assert me.reported == ({("corrupt-blob", "bad"): 1} if banned else {})
        assert ("bad" in me.exchange._neighbours.met) is not banned
        if bad in (stalls, dies):  # and it went on where it had stopped
            assert network.sent_bytes["good"] < len(BLOB) - 2**16 + 2000

    in_virtual_time(body)


def test_a_poisoned_beginning_is_found_out_and_the_blob_fetched_anew() -> None:
    async def poisons(stream: Stream) -> None:
        await stream.receive()
        await stream.send(reply(len(BLOB)))
        await stream.send(bytes(2**16))

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02)
        me, good = Peer(network, "me"), Peer(network, "good", [BLOB])
        await nursery.start(network.node("bad").serve, names.HOLDERS, announces_all)
        await nursery.start(network.node("bad").serve, names.BLOB, poisons)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], ["bad", "good"])
        async with trio.open_nursery() as fetching:
            fetching.start_soon(me.fetch, [BLOB])
            await trio.sleep(1.5)
            await good.start(nursery)
        assert me.blobs == {HASH: BLOB}
        assert me.reported == {("corrupt-blob", "bad"): 1}  # what it had sent was compared with the right blob
        assert me.exchange.statistics.corrupt >= 1

    in_virtual_time(body)


def test_what_nobody_has_is_unreachable_after_its_deadline_and_what_had_come_is_kept() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02)
        me, good = Peer(network, "me"), Peer(network, "good", [BLOB])
        await nursery.start(network.node("dying").serve, names.HOLDERS, announces_all)
        with trio.CancelScope() as alive:
            async with trio.open_nursery() as serving:
                await serving.start(network.node("dying").serve, names.BLOB, dies)
                nursery.start_soon(me.exchange.run)
                me.exchange.meet([], ["dying", "good"])
                with trio.move_on_after(1.0):
                    await me.exchange.fetch(HASH, len(BLOB))
                alive.cancel()
        began_at = trio.current_time()
        with pytest.raises(Unreachable, match="announced"):
            await me.exchange.fetch(HASH, len(BLOB))
        assert 29 <= trio.current_time() - began_at < 32
        await good.start(nursery)
        assert await me.exchange.fetch(HASH, len(BLOB)) == BLOB
        assert network.sent_bytes["good"] < len(BLOB) - 2**16 + 2000

    in_virtual_time(body)


def test_who_asks_for_the_same_blob_shares_its_transfer_and_who_gives_up_drops_the_wish() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02)
        me, good = Peer(network, "me"), Peer(network, "good", [BLOB])
        await good.start(nursery)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], ["good"])
        await all_fetch([me, me, me], [BLOB])
        assert network.sent_bytes["good"] < 1.1 * len(BLOB)
        with trio.move_on_after(1.0):
            await me.fetch([SMALL])
        await trio.sleep(2.0)
        assert not me.exchange.wanted()
        assert good.announcer._holdings._wanted == {}

    in_virtual_time(body)


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.3])
def test_a_blob_given_up_and_wanted_again_at_once_is_announced_again(pause_s: float) -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.005, uplink_bytes_s={TRAINER: UPLINK_BYTES_S})
        peers = crowd(network, 4)
        for peer in (Peer(network, TRAINER, [BLOB], seeds=True), *peers):
            await peer.start(nursery)
        await trio.sleep(1)
        with trio.move_on_after(0.5):
            await peers[0].fetch([BLOB])
        await trio.sleep(pause_s)
        began_at = trio.current_time()
        await peers[0].fetch([BLOB])
        assert trio.current_time() - began_at < len(BLOB) / UPLINK_BYTES_S + 0.5

    in_virtual_time(body)


def test_who_poisons_what_others_send_is_found_by_comparison_and_only_that_one() -> None:
    async def poisons(stream: Stream) -> None:
        _, offset, size_bytes = msgspec.msgpack.decode(await stream.receive())
        await stream.send(reply(size_bytes))
        await stream.send(bytes(min(2**16, size_bytes - offset)))

    blobs = blobs_of(*[250_000] * 4)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.005)
        me, good = Peer(network, "me"), [Peer(network, name, blobs) for name in ("good", "better")]
        network.uplink_bytes_s.update({peer.name: 1e6 for peer in good})
        bad = ["x", "y"]
        for name in bad:
            await nursery.start(network.node(name).serve, names.HOLDERS, announces_all)
            await nursery.start(network.node(name).serve, names.BLOB, poisons)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], [*bad, *(peer.name for peer in good)])
        async with trio.open_nursery() as fetching:
            fetching.start_soon(me.fetch, blobs)
            await trio.sleep(0.5)
            for peer in good:
                await peer.start(nursery)
        assert set(me.blobs.values()) == set(blobs)
        assert me.reported.keys() <= {("corrupt-blob", name) for name in bad}
        assert me.reported

    in_virtual_time(body)


@pytest.mark.parametrize("answer", [reply(0, "offset"), reply(2**20), reply(len(BLOB) - 1), b"junk"])
def test_what_a_source_says_wrongly_is_not_blamed_on_who_sent_the_beginning(answer: bytes) -> None:
    async def lies(stream: Stream) -> None:
        await stream.receive()
        await stream.send(answer)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02)
        me, good = Peer(network, "me"), Peer(network, "good", [BLOB])
        for name, handler in (("early", dies), ("liar", lies)):
            await nursery.start(network.node(name).serve, names.HOLDERS, announces_all)
            await nursery.start(network.node(name).serve, names.BLOB, handler)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], ["early"])
        async with trio.open_nursery() as fetching:
            fetching.start_soon(me.fetch, [BLOB])
            await trio.sleep(0.5)
            me.exchange.meet([], ["early", "liar", "good"])
            await trio.sleep(0.5)
            await good.start(nursery)
        assert me.reported == {("corrupt-blob", "liar"): 1}
        assert network.sent_bytes["good"] < len(BLOB) - 2**16 + 2000

    in_virtual_time(body)


def test_a_source_that_trickles_is_left_for_another_that_goes_on_from_there() -> None:
    blobs = blobs_of(*[250_000] * 4)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02, uplink_bytes_s={"slow": 20_000.0, "quick": 1e6})
        me, slow, quick = Peer(network, "me"), Peer(network, "slow", blobs), Peer(network, "quick", blobs)
        await slow.start(nursery)
        await quick.start(nursery)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], ["slow"])
        async with trio.open_nursery() as fetching:
            fetching.start_soon(me.fetch, blobs)
            await trio.sleep(5)
            me.exchange.meet([], ["slow", "quick"])
        assert set(me.blobs.values()) == set(blobs)
        assert trio.current_time() < 14
        assert network.sent_bytes["slow"] + network.sent_bytes["quick"] < 1.2 * 1_000_000

    in_virtual_time(body)


def test_a_trainer_that_is_back_is_asked_at_once_when_something_is_wanted() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.01)
        [me] = crowd(network, 1)
        await me.start(nursery)
        await trio.sleep(65)
        await Peer(network, TRAINER, [SMALL], seeds=True).start(nursery)
        began_at = trio.current_time()
        await me.fetch([SMALL])
        assert trio.current_time() - began_at < 1.5

    in_virtual_time(body)


@pytest.mark.parametrize(("count", "size_bytes"), [(6, 15_000), (30, 3_000)])
def test_a_tiny_release_takes_few_round_trips(count: int, size_bytes: int) -> None:
    blobs = blobs_of(*[size_bytes] * count)

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.05)
        [me] = crowd(network, 1)
        for peer in (Peer(network, TRAINER, blobs, seeds=True), me):
            await peer.start(nursery)
        await trio.sleep(2)
        began_at = trio.current_time()
        await me.fetch(blobs)
        assert trio.current_time() - began_at < (0.3 if count == 6 else 0.8)

    in_virtual_time(body)


def test_a_promise_delays_giving_up_for_a_minute_only() -> None:
    async def promises(stream: Stream) -> None:
        while True:
            want = decode(await stream.receive(), Want)
            await stream.send(encode(Have((), tuple(hash[:4] for hash in want.added))))

    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork(delay_s=0.02)
        me = Peer(network, "me")
        await nursery.start(network.node(TRAINER).serve, names.HOLDERS, promises)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([TRAINER], [])
        await trio.sleep(1)
        began_at = trio.current_time()
        with pytest.raises(Unreachable):
            await me.exchange.fetch(HASH, len(BLOB))
        assert 59 < trio.current_time() - began_at < 62

    in_virtual_time(body)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_follower_hears_at_once_of_what_it_wants_and_only_of_that() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        peer = Peer(network, "holder", [BLOB])
        await peer.start(nursery)
        async with network.node("me").open("holder", names.HOLDERS) as stream:
            await stream.send(encode(Want((HASH, blob_hash(SMALL)))))
            assert decode(await stream.receive(), Have).hashes == (HASH,)
            await peer.keep(b"unwanted")
            peer.announcer.gained(blob_hash(b"unwanted"))
            await peer.keep(SMALL)
            peer.announcer.gained(blob_hash(SMALL))
            assert decode(await stream.receive(), Have).hashes == (blob_hash(SMALL),)
            await stream.send(encode(Want((), (HASH,))))
            await stream.send(encode(Want()))
            assert decode(await stream.receive(), Have).hashes == ()
        await trio.sleep(0.01)
        assert peer.announcer._holdings.followers == 0

    in_virtual_time(body)


def test_a_second_stream_of_a_follower_takes_the_place_of_the_first() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        peer = Peer(network, "holder", [BLOB])
        await peer.start(nursery)
        async with network.node("me").open("holder", names.HOLDERS) as first:
            await first.send(encode(Want((blob_hash(SMALL),))))
            await first.send(encode(Want()))
            await first.receive()
            async with network.node("me").open("holder", names.HOLDERS) as second:
                await second.send(encode(Want((HASH,))))
                assert decode(await second.receive(), Have).hashes == (HASH,)
                with pytest.raises(Exception, match="ended the stream"):
                    await first.receive()
                assert peer.announcer._holdings.followers == 1

    in_virtual_time(body)


@given(st.one_of(st.binary(max_size=200), st.recursive(
    st.one_of(st.none(), st.integers(-5, 2**60), st.binary(max_size=40), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=4), max_leaves=8,
).map(msgspec.msgpack.encode)))  # fmt: skip
def test_hostile_frames_end_their_own_stream_and_nothing_else(frame: bytes) -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        peer, me = Peer(network, "holder", [BLOB]), Peer(network, "me")

        async def says_it(stream: Stream) -> None:
            await stream.receive()
            await stream.send(frame)
            await trio.sleep_forever()

        await nursery.start(network.node("hostile").serve, names.HOLDERS, says_it)
        await peer.start(nursery)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet(["hostile"], ["holder"])
        async with network.node("hostile").open("holder", names.HOLDERS) as stream:
            await stream.send(frame)
            await me.fetch([BLOB])
        assert peer.refused.total() <= 1
        assert set(me.reported) <= {("malformed", "hostile")}
        assert bool(me.reported) == (not is_have(frame))

    in_virtual_time(body)


def is_have(frame: bytes) -> bool:
    try:
        decode(frame, Have)
    except msgspec.DecodeError:
        return False
    return True


def test_frames_over_the_bounds_are_refused_and_floods_are_heard_slowly() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        peer = Peer(network, "holder", [BLOB])
        await peer.start(nursery)
        many = [index.to_bytes(32, "big") for index in range(HASHES_MAX + 1)]
        assert len(encode(Want(tuple(many[1:]), tuple(many[1:])))) <= FRAME_BYTES_MAX
        for frame in (encode(Want(tuple(many))), bytes(FRAME_BYTES_MAX + 1)):
            async with network.node("me").open("holder", names.HOLDERS) as stream:
                await stream.send(frame)
                with pytest.raises(Exception, match="ended the stream"):
                    await stream.receive()
        assert peer.refused == {"malformed": 1, "oversized": 1}
        async with network.node("me").open("holder", names.HOLDERS) as stream:
            began_at = trio.current_time()
            for _ in range(1000):  # and they are answered only as they are heard
                await stream.send(encode(Want()))
            assert trio.current_time() - began_at > 10

    in_virtual_time(body)


def test_followers_that_come_for_nothing_keep_nobody_out() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        holder, me = Peer(network, "holder", [BLOB], seeds=True), Peer(network, "me")
        await holder.start(nursery)

        async def sit(peer: str) -> None:
            async with network.node(peer).open("holder", names.HOLDERS) as stream:
                await stream.receive()

        async with trio.open_nursery() as sitting:
            for index in range(2 * MAX_STREAMS):
                sitting.start_soon(ends_quietly, partial(sit, f"sitter-{index}"))
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(me.exchange.run)
            me.exchange.meet([], ["holder"])
            with trio.fail_after(5):
                await me.fetch([BLOB])
            sitting.cancel_scope.cancel()

    in_virtual_time(body)


async def ends_quietly(work: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(NetError):
        await work()


def test_silence_ends_a_stream_and_a_quiet_neighbour_keeps_it() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        peer, me = Peer(network, "holder", [BLOB]), Peer(network, "me")
        await peer.start(nursery)
        nursery.start_soon(me.exchange.run)
        me.exchange.meet([], ["holder"])
        async with network.node("silent").open("holder", names.HOLDERS):
            await trio.sleep(1)
            assert peer.announcer._holdings.followers == 2
            await trio.sleep(5 * KEEPALIVE_S)
            assert list(peer.announcer._followers) == ["me"]

    in_virtual_time(body)


# -- decisions ---------------------------------------------------------------------------------------------------------

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def test_the_rarest_is_fetched_first_from_the_least_busy_source_and_trainers_are_spared() -> None:
    picker = Picker()
    picker.last_choice = frozenset({TRAINER})
    for hash in (A, B, C):
        picker.wish(hash, 10)
    for source, hash in ((TRAINER, A), ("x", A), ("y", A), (TRAINER, B), ("x", B), (TRAINER, C)):
        assert picker.announced(source, hash)
    chosen = [picker.choose(0.0) for _ in range(4)]
    assert [(wish.hash, wish.source) for wish in chosen if wish] == [(C, TRAINER), (B, "x"), (A, "y")]


def test_transfers_are_bounded_in_all_and_of_a_source() -> None:
    picker = Picker(FetchBounds(transfers=3, transfers_of_a_source=2))
    hashes = [bytes([number]) * 32 for number in range(6)]
    for hash in hashes:
        picker.wish(hash, 2**22)
        picker.announced("x", hash)
    first = [picker.choose(0.0) for _ in range(3)]
    assert [wish is not None for wish in first] == [True, True, False]
    for hash in hashes:
        picker.announced("y", hash)
    assert [wish is not None for wish in (picker.choose(0.0), picker.choose(0.0))] == [True, False]


def test_of_small_blobs_there_may_be_more_transfers_as_long_as_they_are_small_together() -> None:
    picker = Picker()
    for number in range(12):
        picker.wish(bytes([number]) * 32, 2**18)
        picker.announced("x", bytes([number]) * 32)
    assert sum(picker.choose(0.0) is not None for _ in range(12)) == 8  # two mebibytes
    for wish in list(picker.wishes.values()):
        picker.ended(wish)
    picker.took("x", 1.0)  # it has enough to do
    assert sum(picker.choose(0.0) is not None for _ in range(12)) == 4


def test_who_trickles_is_asked_after_others_until_it_has_delivered() -> None:
    picker = Picker()
    picker.wish(A, 10)
    picker.announced("x", A)
    picker.announced("y", A)
    picker.slow("x")
    for _ in range(20):
        wish = picker.choose(0.0)
        assert wish is not None
        assert wish.source == "y"
        picker.ended(wish)
    assert picker.has_other(wish, 0.0)


def test_a_source_that_fails_is_avoided_for_longer_each_time_and_a_banned_one_for_good() -> None:
    picker = Picker()
    wish = picker.wish(A, 10)
    picker.announced("x", A)
    times = []
    now = 0.0
    for _ in range(4):
        while picker.choose(now) is None:
            now += 1.0
        times.append(now)
        picker.ended(wish)
        picker.failed("x", now)
    assert times == [0.0, 2.0, 6.0, 14.0]
    picker.ban("x")
    assert picker.choose(1e9) is None
    assert not picker.announced("x", A)


def test_who_lacks_what_it_announced_loses_it_and_is_avoided_the_third_time() -> None:
    picker = Picker()
    for hash in (A, B, C):
        picker.wish(hash, 10)
        picker.announced("x", hash)
    for hash in (A, B):
        picker.absent("x", hash, 0.0)
    wish = picker.choose(0.0)
    assert wish is not None
    assert wish.hash == C
    picker.ended(wish)
    picker.absent("x", C, 0.0)
    picker.announced("x", A)
    assert picker.choose(1.0) is None
    assert picker.choose(2.0) is not None


def seeds(*followers: str, bounds: SeedingBounds | None = None) -> Holdings:
    holdings = Holdings(lambda hash: True, Seeding(bounds))
    for follower in followers:
        holdings.joined(follower, 0.0)
    return holdings


def test_a_seeder_tells_one_follower_of_each_blob_and_each_follower_of_two() -> None:
    holdings = seeds("x", "y", "z")
    told = [pair for peer in "xyz" for pair in holdings.changed(peer, (A, B, C), (), 0.0)]
    assert sorted(hash for _, hash in told) == [A, B, C]
    assert {peer for peer, _ in told} <= {"x", "y", "z"}
    assert max(Counter(peer for peer, _ in told).values()) == 2
    assert holdings.passed(4.9) == []


def test_few_followers_are_told_of_everything() -> None:
    holdings = seeds("x", "y")
    assert [holdings.changed(peer, (A, B), (), 0.0) for peer in "xy"] == [
        [("x", A), ("x", B)],
        [("y", A), ("y", B)],
    ]


def test_a_follower_that_does_not_come_loses_its_turn_and_goes_last() -> None:
    holdings = seeds("x", "y", "z")
    [(first, _)] = holdings.changed("x", (A,), (), 0.0)
    holdings.changed("y", (A,), (), 0.0)
    [(second, _)] = holdings.passed(5.0)
    assert (first, second) == ("x", "y")
    [(third, _)] = holdings.changed("z", (B,), (), 5.0)
    assert third == "z"
    assert holdings.changed("x", (B,), (), 5.0) == []


def test_what_was_served_is_told_on_only_when_nobody_passes_it_on_and_then_to_ever_more() -> None:
    peers = [f"peer-{index}" for index in range(16)]
    holdings = seeds(*peers)
    told = [pair for peer in peers for pair in holdings.changed(peer, (A,), (), 0.0)]
    counts, now = [], 0.0
    while told:
        counts.append(len(told))
        for peer, hash in told:
            holdings.began(peer, hash, 10, now)
            assert holdings.ended(peer, hash, True, now) == []
            assert holdings.changed(peer, (), (hash,), now) == []
        assert holdings.passed(now + 4.9) == []
        now += 5.0
        told = holdings.passed(now)
    assert counts == [1, 1, 2, 4, 8]


def test_who_keeps_a_blob_to_itself_comes_last_until_it_passes_one_on() -> None:
    holdings = seeds("x", "y", "z")

    def serve(peer: str, hash: bytes, now: float) -> None:
        holdings.began(peer, hash, 10, now)
        holdings.ended(peer, hash, True, now)
        holdings.changed(peer, (), (hash,), now)

    assert holdings.changed("x", (A,), (), 0.0) == [("x", A)]
    holdings.changed("y", (A,), (), 0.0)
    serve("x", A, 0.0)
    assert holdings.passed(5.0) == [("y", A)]
    serve("y", A, 5.0)
    assert holdings._seeding is not None
    standings = holdings._seeding._standings
    assert [standings.strikes(peer) for peer in "xyz"] == [1, 0, 0]
    for peer in "yxz":
        holdings.changed(peer, (B,), (), 6.0)
    assert holdings._seeding._deals.keys() == {("y", B)}
    serve("y", B, 6.0)
    assert holdings.changed("x", (C,), (), 6.0) == [("x", C)]
    holdings.changed("z", (C,), (), 6.0)
    serve("x", C, 6.0)
    holdings.changed("z", (), (C,), 7.0)
    assert standings.strikes("x") == 0


def test_what_was_sent_may_take_a_while_to_arrive() -> None:
    holdings = seeds("x", "y", "z")
    for peer in "xyz":
        holdings.changed(peer, (A, B), (), 0.0)
    for hash in (A, B):
        holdings.began("x", hash, 1000, 0.0)
        assert holdings.ended("x", hash, True, 0.1) == []
    assert holdings.changed("x", (), (A,), 4.0) == []
    assert holdings.passed(8.5) == []
    assert [hash for _, hash in holdings.passed(8.7)] == [B]  # which never arrived
    assert A not in {hash for _, hash in holdings.passed(24.9)}
    assert A in {hash for _, hash in holdings.passed(25.0)}  # four times as long as it took to arrive, and five seconds


def test_a_slow_transfer_is_waited_for_and_one_that_is_far_slower_than_usual_is_given_to_another() -> None:
    holdings = seeds("x", "y", "z")
    told = [pair for peer in "xyz" for pair in holdings.changed(peer, (A, B), (), 0.0)]
    assert told == [("x", A), ("x", B)]
    holdings.asked("x", A, 0.0)
    holdings.began("x", A, 100_000, 0.0)
    holdings.ended("x", A, True, 0.5)
    for peer in "xyz":
        holdings.changed(peer, (), (A,), 1.0)  # 100,000 bytes a second, and a little
    holdings.asked("x", B, 1.0)
    holdings.began("x", B, 2_000_000, 1.0)
    assert holdings.passed(74.0) == []
    assert holdings.passed(76.0) == [("y", B), ("z", B)]


def test_of_blobs_that_take_long_few_are_dealt_at_a_time() -> None:
    peers = [f"peer-{index}" for index in range(16)]
    hashes = [bytes([number]) * 32 for number in range(20)]
    for took_s, room in ((1.0, 3), (0.1, 8), (0.01, 12)):
        holdings = seeds(*peers)
        told = [pair for peer in peers for pair in holdings.changed(peer, hashes, (), 0.0)]
        for _ in range(8):
            (peer, hash), *told = told
            holdings.asked(peer, hash, 0.0)
            holdings.began(peer, hash, 1000, 0.0)
            told += holdings.ended(peer, hash, True, took_s)
        assert len(told) == room


def test_who_has_come_for_its_blob_keeps_its_turn_while_it_waits() -> None:
    holdings = seeds("x", "y", "z")
    for peer in "xyz":
        holdings.changed(peer, (A,), (), 0.0)
    holdings.asked("x", A, 4.0)
    holdings.ended("x", A, False, 8.0)  # it was told to come back
    holdings.asked("x", A, 12.0)
    assert holdings.passed(14.9) == []
    assert holdings.passed(15.0) == [("y", A), ("z", A)]


def test_when_a_follower_leaves_its_blobs_are_dealt_again() -> None:
    holdings = seeds("x", "y", "z", "w")
    [(first, _)] = holdings.changed("x", (A,), (), 0.0)
    holdings.changed("y", (A,), (), 0.0)
    assert holdings.left(first, 1.0) == [("y", A)]


def test_wants_of_what_is_not_here_cost_next_to_nothing_and_make_nobody_forget_who_was_served() -> None:
    here = {A}
    holdings = Holdings(here.__contains__, Seeding())
    for peer in ("x", "y", "z", *(f"sybil-{index}" for index in range(20))):
        holdings.joined(peer, 0.0)
    assert holdings.changed("x", (A,), (), 0.0) == [("x", A)]
    holdings.changed("y", (A,), (), 0.0)
    source = random.Random(1)
    for index in range(20):
        for _ in range(10):
            hashes = [source.randbytes(32) for _ in range(HASHES_MAX)]
            assert holdings.changed(f"sybil-{index}", hashes, (), 0.0) == []
    holdings.asked("x", A, 0.0)
    holdings.began("x", A, 10, 0.0)
    assert holdings.ended("x", A, True, 0.1) == []
    assert holdings.changed("x", (), (A,), 0.1) == []
    assert holdings._seeding is not None
    assert len(holdings._seeding._blobs) == 1
    assert sum(map(len, holdings._wants.values())) <= 20 * WANTED_MAX + 1
    began_at = time.perf_counter()
    for _ in range(1000):
        holdings.passed(0.2)
    assert time.perf_counter() - began_at < 0.5


def test_what_was_served_and_is_wanted_no_more_is_forgotten_in_the_end() -> None:
    holdings = seeds("x", "y", "z")
    assert holdings._seeding is not None
    for peer in "xy":
        holdings.changed(peer, (A,), (), 0.0)
    for number in range(9000):
        holdings.ended("nobody", number.to_bytes(32, "big"), True, 1.0)
    assert len(holdings._seeding._blobs) == 8192
    assert A in holdings._seeding._blobs


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_whatever_followers_do_nothing_raises_and_nobody_has_more_deals_than_it_may(
    steps: list[tuple[int, int, int]],
) -> None:
    hashes = [bytes([number]) * 32 for number in range(6)]
    here = set(hashes[:3])
    holdings, now = Holdings(here.__contains__, Seeding()), 0.0
    for step, who, which in steps:
        peer, hash, now = f"peer-{who}", hashes[which], now + 0.7
        if peer not in holdings._wants:
            holdings.joined(peer, now)
        match step:
            case 0 | 1:
                holdings.changed(peer, (hash,), (), now)
            case 2:
                holdings.changed(peer, (), (hash,), now)
            case 3:
                holdings.asked(peer, hash, now)
                holdings.began(peer, hash, 100, now)
            case 4 | 5:
                holdings.ended(peer, hash, step == 4, now)
            case 6:
                holdings.left(peer, now)
            case _:
                here ^= {hash}
                holdings.gained(hash, now) if hash in here else holdings.passed(now)
    assert holdings._seeding is not None
    assert len(holdings._seeding._deals) <= 5 * SeedingBounds().deals_of_a_follower_when_quick
    assert holdings._here.keys() <= holdings._wanted.keys()


def test_who_asks_and_breaks_off_again_and_again_keeps_a_blob_for_seconds_only() -> None:
    holdings = seeds("evil", "x", "y", "z")
    assert holdings.changed("evil", (A,), (), 0.0) == [("evil", A)]
    told = [pair for peer in "xyz" for pair in holdings.changed(peer, (A,), (), 0.0)]
    now = 0.0
    while not told:
        now += 4.0
        holdings.asked("evil", A, now)
        told += holdings.ended("evil", A, False, now + 0.1)
    assert now <= 16.0
    assert len(told) == 2  # twice as many, to be sure
    assert "evil" not in {peer for peer, _ in told}


def test_a_slow_reader_of_the_first_blob_is_not_waited_for_long() -> None:
    holdings = seeds("evil", "x", "y", "z")
    for peer in ("evil", *"xyz"):
        holdings.changed(peer, (A,), (), 0.0)
    for now in (0.0, 4.0, 8.0):  # to begin anew makes it no longer
        holdings.asked("evil", A, now)
        holdings.began("evil", A, 20_000, now)
        told = holdings.ended("evil", A, False, now + 3.0) if now < 8.0 else holdings.passed(13.0)
    assert len(told) == 2


def test_who_leaves_and_comes_back_is_still_known_as_one_that_kept_a_blob() -> None:
    holdings = seeds("x", "y", "z")
    [(first, _)] = holdings.changed("x", (A,), (), 0.0)
    holdings.left("x", 1.0)  # with its blob not fetched
    holdings.joined("x", 1.0)
    holdings.changed("x", (B,), (), 2.0)
    assert first == "x"
    assert holdings._seeding is not None
    assert holdings._seeding._standings.strikes("x") == 1


def test_those_who_were_seen_to_pass_on_come_before_newcomers_that_were_there_first() -> None:
    holdings = seeds("x", "y", "z", "w")
    for peer, hash in zip("xyz", (A, B, C), strict=True):
        assert holdings.changed(peer, (hash,), (), 0.0) == [(peer, hash)]
        holdings.changed("w", (hash,), (), 0.0)
        holdings.asked(peer, hash, 0.0)
        holdings.began(peer, hash, 10, 0.0)
        holdings.ended(peer, hash, True, 0.0)
        holdings.changed(peer, (), (hash,), 0.0)
        holdings.changed("w", (), (hash,), 0.1)  # which got it from them
    holdings.joined("new", 1.0)
    fourth = bytes(32)
    assert holdings.changed("new", (fourth,), (), 1.0) == []
    assert holdings.changed("y", (fourth,), (), 1.1) == [("y", fourth)]
    assert holdings.changed("new", (A,), (), 10.0) == []
    assert ("new", A) in holdings.passed(15.0)  # when nobody else wants it


# -- upload limits -----------------------------------------------------------------------------------------------------


def test_an_upload_limit_holds_for_all_transfers_together() -> None:
    async def body(nursery: trio.Nursery) -> None:
        network = MemoryNetwork()
        holder = Peer(network, "holder", [BLOB])
        await holder.start(nursery, Uplink(50_000))
        peers = [Peer(network, name) for name in "abc"]
        for peer in peers:
            nursery.start_soon(peer.exchange.run)
            peer.exchange.meet([], ["holder"])
        began_at = trio.current_time()
        await all_fetch(peers, [BLOB])
        assert trio.current_time() - began_at == pytest.approx(3 * len(BLOB) / 50_000, rel=0.1)

    in_virtual_time(body)


async def waits_a_second(part: memoryview) -> None:
    await trio.sleep(1)


def test_transfers_take_turns_first_come_first_served_and_no_peer_has_all_slots() -> None:
    order: list[str] = []

    async def body(nursery: trio.Nursery) -> None:
        uplink = Uplink(slots=3)

        async def transfer(peer: str) -> None:
            async with uplink.transfer(peer, 1) as each:
                order.append(peer)
                await each.carry(memoryview(b"x"), waits_a_second)

        async with trio.open_nursery() as transfers:
            for peer in ("a", "a", "a", "b", "c"):
                transfers.start_soon(transfer, peer)
                await trio.testing.wait_all_tasks_blocked()

    in_virtual_time(body)
    assert order == ["a", "b", "c", "a", "a"]


async def at_once(part: memoryview) -> None:
    await trio.lowlevel.checkpoint()


def test_a_peer_that_takes_far_longer_than_usual_loses_its_slot_to_those_who_wait() -> None:
    async def body(nursery: trio.Nursery) -> None:
        uplink = Uplink(slots=1)
        resumed: list[float] = []

        async def slow() -> None:
            async with uplink.transfer("slow", 2) as each:
                await each.carry(memoryview(b"x"), takes_nine_seconds)
                await each.carry(memoryview(b"x"), at_once)
                resumed.append(trio.current_time())

        async def quick() -> None:
            for _ in range(20):
                async with uplink.transfer("quick", 1) as each:
                    await each.carry(memoryview(b"x"), tenth_of_a_second)

        async def takes_nine_seconds(part: memoryview) -> None:
            await trio.sleep(9)

        async def tenth_of_a_second(part: memoryview) -> None:
            await trio.sleep(0.1)

        async with trio.open_nursery() as transfers:
            transfers.start_soon(slow)
            await trio.testing.wait_all_tasks_blocked()
            await quick()
            assert 5 < trio.current_time() < 8
        assert resumed == [9]

    in_virtual_time(body)


def test_of_large_transfers_one_is_finished_before_the_next() -> None:
    async def body(nursery: trio.Nursery) -> None:
        uplink = Uplink(2**20, slots=1)
        finished: list[tuple[str, float]] = []

        async def transfer(peer: str) -> None:
            async with uplink.transfer(peer, 5 << 20) as each:
                for _ in range(5):
                    await each.carry(memoryview(bytes(2**20)), at_once)
            finished.append((peer, round(trio.current_time())))

        async with trio.open_nursery() as transfers:
            for peer in "xy":
                transfers.start_soon(transfer, peer)
                await trio.testing.wait_all_tasks_blocked()
        assert finished == [("x", 5), ("y", 10)]

    in_virtual_time(body)


def test_a_small_transfer_goes_out_soon_however_slow_the_link_and_however_many_large_ones_there_are() -> None:
    async def body(nursery: trio.Nursery) -> None:
        uplink = Uplink(50_000)

        async def large(peer: str) -> None:
            async with uplink.transfer(peer, 900_000) as each:
                while each.left_bytes:
                    await each.carry(memoryview(bytes(min(2**16, each.left_bytes))), at_once)

        for index in range(8):
            nursery.start_soon(large, f"large-{index}")
        await trio.sleep(1)
        began_at = trio.current_time()
        async with uplink.transfer("small", 2**16) as each:
            await each.carry(memoryview(bytes(2**16)), at_once)
        assert trio.current_time() - began_at < 5  # two frames were on their way

    in_virtual_time(body)


def test_a_turn_ends_after_half_a_second_for_one_that_is_smaller() -> None:
    async def body(nursery: trio.Nursery) -> None:
        uplink = Uplink(100_000, slots=1)
        finished: dict[str, float] = {}

        async def transfer(peer: str, frames: int) -> None:
            async with uplink.transfer(peer, frames << 16) as each:
                for _ in range(frames):
                    await each.carry(memoryview(bytes(2**16)), at_once)
            finished[peer] = trio.current_time()

        async with trio.open_nursery() as transfers:
            transfers.start_soon(transfer, "large", 32)
            await trio.testing.wait_all_tasks_blocked()
            transfers.start_soon(transfer, "middle", 5)
            await trio.testing.wait_all_tasks_blocked()
        assert finished["middle"] < 5 < finished["large"]

    in_virtual_time(body)


def test_a_long_transfer_lets_others_go_between_and_who_waits_too_long_is_told_to_come_back() -> None:
    async def body(nursery: trio.Nursery) -> None:
        uplink = Uplink(2**20, slots=1, waiting=4)
        finished: dict[str, float] = {}

        async def transfer(peer: str, mebibytes: int) -> None:
            async with uplink.transfer(peer, mebibytes << 20) as each:
                for _ in range(mebibytes):
                    await each.carry(memoryview(bytes(2**20)), at_once)
            finished[peer] = trio.current_time()

        async with trio.open_nursery() as transfers:
            transfers.start_soon(transfer, "long", 8)
            await trio.testing.wait_all_tasks_blocked()
            transfers.start_soon(transfer, "short", 1)
        assert finished["short"] < 3 < finished["long"]
        async with uplink.transfer("holds", 1):
            began_at = trio.current_time()
            with pytest.raises(Busy):
                async with uplink.transfer("waits", 1):
                    pass
            assert trio.current_time() - began_at == pytest.approx(10)

    in_virtual_time(body)
