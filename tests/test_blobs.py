import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
import pytest
import trio
import trio.testing

from echo_p2p.errors import CorruptChunk, NetError, RemoteError, Unreachable
from echo_p2p.net.absentees import AVOIDED_S, Absentees
from echo_p2p.net.base import Stream
from echo_p2p.net.blob_server import MAX_STREAMS
from echo_p2p.net.blobs import BLOB_FRAME_BYTES, blob_hash, fetch_blob, fetch_from_any, receive_blob, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.uplink import Uplink
from echo_protocols import names

BLOB = random.Random(1).randbytes(2 * BLOB_FRAME_BYTES + 5)
HASH = blob_hash(BLOB)
Body = Callable[[MemoryNetwork, trio.Nursery], Awaitable[None]]


def on_a_network(body: Body) -> None:
    """Run `body` on a network where `holder` has BLOB and `other` has nothing."""

    async def main() -> None:
        network = MemoryNetwork()
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_blobs, network.node("holder"), {HASH: BLOB, blob_hash(b""): b""}.get)
                await nursery.start(serve_blobs, network.node("other"), {}.get)
                await body(network, nursery)
                nursery.cancel_scope.cancel()

    trio.run(main)


def reply(size_bytes: int, refusal: str | None = None) -> bytes:
    return msgspec.msgpack.encode((size_bytes, refusal))


def sends(*frames: bytes, then_wait: bool = False) -> Callable[[Stream], Awaitable[None]]:
    async def handler(stream: Stream) -> None:
        await stream.receive()
        for frame in frames:
            await stream.send(frame)
        if then_wait:
            await trio.sleep_forever()

    return handler


def test_a_blob_of_several_frames_arrives_whole() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB)) == BLOB
        assert await fetch_blob(network.node("me"), "holder", blob_hash(b""), 0) == b""

    on_a_network(body)


def test_an_absent_blob_is_a_typed_refusal() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        with pytest.raises(RemoteError) as caught:
            await fetch_blob(network.node("me"), "other", HASH, len(BLOB))
        assert caught.value.reason == "absent"
        with pytest.raises(RemoteError, match="none of 2"):
            await fetch_from_any(network.node("me"), ["other", "other"], HASH, len(BLOB))

    on_a_network(body)


def test_a_blob_larger_than_asked_for_is_not_received() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        with pytest.raises(CorruptChunk, match="offers"):
            await fetch_blob(network.node("me"), "holder", HASH, len(BLOB) - 1)

    on_a_network(body)


@pytest.mark.parametrize(
    "frames",
    [
        (reply(3), b"bad"),
        (reply(3), b"ba"),
        (reply(3), b"baad"),
        (reply(3), b""),
        (b"\xc1",),
        (reply(2**50),),
        (reply(0, "because"),),
        (msgspec.msgpack.encode({"size": 3}),),
    ],
)
def test_wrong_answers_are_corrupt_and_the_next_holder_is_asked(frames: tuple[bytes, ...]) -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        await nursery.start(network.node("liar").serve, names.BLOB, sends(*frames))
        with pytest.raises(CorruptChunk):
            await fetch_blob(network.node("me"), "liar", HASH, len(BLOB))
        assert await fetch_from_any(network.node("me"), ["liar", "holder"], HASH, len(BLOB)) == BLOB

    on_a_network(body)


def test_a_transfer_cut_short_goes_on_with_the_next_holder() -> None:
    offsets: list[int] = []

    async def keeps_count(stream: Stream) -> None:
        _, offset, _ = msgspec.msgpack.decode(await stream.receive())
        offsets.append(offset)
        await stream.send(reply(len(BLOB)))
        await stream.send(BLOB[offset:])

    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        cut = sends(reply(len(BLOB)), BLOB[:BLOB_FRAME_BYTES], BLOB[BLOB_FRAME_BYTES : 2 * BLOB_FRAME_BYTES])
        await nursery.start(network.node("cut").serve, names.BLOB, cut)
        await nursery.start(network.node("second").serve, names.BLOB, keeps_count)
        assert await fetch_from_any(network.node("me"), ["cut", "second"], HASH, len(BLOB)) == BLOB
        assert offsets == [2 * BLOB_FRAME_BYTES]

    on_a_network(body)


@pytest.mark.parametrize("frames", [1, 3])
def test_a_poisoned_beginning_does_not_spoil_the_next_holder(frames: int) -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        poison = sends(reply(9 * BLOB_FRAME_BYTES), *[bytes(BLOB_FRAME_BYTES)] * frames)
        await nursery.start(network.node("poison").serve, names.BLOB, poison)
        fetched = await fetch_from_any(network.node("me"), ["poison", "holder"], HASH, 9 * BLOB_FRAME_BYTES)
        assert fetched == BLOB

    on_a_network(body)


def test_a_silent_peer_costs_its_deadline_only() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        await nursery.start(network.node("silent").serve, names.BLOB, sends(reply(len(BLOB)), then_wait=True))
        with pytest.raises(Unreachable, match="sent nothing"):
            await fetch_blob(network.node("me"), "silent", HASH, len(BLOB), timeout_s=0.05)
        peers = ["silent", "nobody", "holder"]
        assert await fetch_from_any(network.node("me"), peers, HASH, len(BLOB), timeout_s=0.05) == BLOB

    on_a_network(body)


def test_without_holders_it_is_unreachable() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        for peers in ([], ["nobody"], ["nobody", "other"]):
            with pytest.raises(Unreachable):
                await fetch_from_any(network.node("me"), peers, HASH, len(BLOB))

    on_a_network(body)


@pytest.mark.parametrize("request_frame", [b"", b"\xc1" * 9, msgspec.msgpack.encode((b"short", 0)), b"x" * 5000])
def test_hostile_requests_are_refused_and_the_server_goes_on(request_frame: bytes) -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        async with network.node("me").open("holder", names.BLOB) as stream:
            await stream.send(request_frame)
            if len(request_frame) < 1000:
                assert msgspec.msgpack.decode(await stream.receive()) == [0, "malformed"]
        async with network.node("me").open("holder", names.BLOB) as stream:
            await stream.send(msgspec.msgpack.encode((HASH, len(BLOB) + 1)))
            assert msgspec.msgpack.decode(await stream.receive()) == [len(BLOB), "offset"]
            await stream.send(msgspec.msgpack.encode((HASH, len(BLOB) - 2)))
            assert msgspec.msgpack.decode(await stream.receive()) == [len(BLOB), None]
            assert await stream.receive() == BLOB[-2:]
        assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB)) == BLOB

    on_a_network(body)


def test_a_peer_that_leaves_in_mid_transfer_ends_nothing_else() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        async with network.node("me").open("holder", names.BLOB) as stream:
            await stream.send(msgspec.msgpack.encode((HASH, 0)))
            await stream.receive()
        assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB)) == BLOB

    on_a_network(body)


def test_who_would_wait_for_too_long_is_told_that_the_holder_is_busy() -> None:
    async def main() -> None:
        network, uplink = MemoryNetwork(), Uplink(slots=1)
        serve = partial(serve_blobs, network.node("holder"), {HASH: BLOB}.get, uplink=uplink, in_thread=False)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            async with uplink.transfer("somebody", 1):
                with pytest.raises(RemoteError) as caught:
                    await fetch_blob(network.node("me"), "holder", HASH, len(BLOB))
            assert caught.value.reason == "busy"
            assert trio.current_time() == pytest.approx(10)
            assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB)) == BLOB
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_who_says_that_a_large_blob_is_small_waits_behind_the_small_ones_all_the_same() -> None:
    large, small = random.Random(2).randbytes(2**21), b"small"
    blobs = {blob_hash(blob): blob for blob in (large, small)}
    finished: list[str] = []

    async def main() -> None:
        network, uplink = MemoryNetwork(), Uplink(2**20, slots=1)
        serve = partial(serve_blobs, network.node("holder"), blobs.get, uplink=uplink, in_thread=False)

        async def fetch(peer: str, blob: bytes, said_bytes: int) -> None:
            async with network.node(peer).open("holder", names.BLOB) as stream:
                await stream.send(msgspec.msgpack.encode((blob_hash(blob), 0, said_bytes)))
                received = -1
                while received < len(blob):
                    frame = await stream.receive()
                    received = 0 if received < 0 else received + len(frame)
            finished.append(peer)

        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            async with trio.open_nursery() as fetching, uplink.transfer("first", 2**30):
                fetching.start_soon(fetch, "honest", large, len(large))
                await trio.testing.wait_all_tasks_blocked()
                fetching.start_soon(fetch, "liar", large, 1)
                await trio.testing.wait_all_tasks_blocked()
                fetching.start_soon(fetch, "quick", small, len(small))
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert finished == ["quick", "honest", "liar"]


def test_silent_streams_keep_nobody_out() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        async def sit(peer: str) -> None:
            with contextlib.suppress(NetError):
                async with network.node(peer).open("holder", names.BLOB) as stream:
                    await stream.receive()

        for index in range(3 * MAX_STREAMS):
            nursery.start_soon(sit, f"sitter-{index}")
            nursery.start_soon(sit, "sitter")
            await trio.testing.wait_all_tasks_blocked()
        assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB)) == BLOB

    on_a_network(body)


def test_an_exact_size_is_checked_and_another_is_not_what_was_asked_for() -> None:
    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB) + 1) == BLOB
        assert await fetch_blob(network.node("me"), "holder", HASH, len(BLOB), exact=True) == BLOB
        with pytest.raises(CorruptChunk, match="offers"):
            await fetch_blob(network.node("me"), "holder", HASH, len(BLOB) + 1, exact=True)

    on_a_network(body)


def test_what_goes_out_is_told_to_the_watcher() -> None:
    seen: list[tuple[object, ...]] = []

    class Notes:
        def asked(self, peer: str, hash: bytes) -> None:
            seen.append(("asked", peer, hash))

        def began(self, peer: str, hash: bytes, size_bytes: int) -> None:
            seen.append(("began", peer, hash, size_bytes))

        def ended(self, peer: str, hash: bytes, *, whole: bool) -> None:
            seen.append(("ended", peer, hash, whole))

    async def body(network: MemoryNetwork, nursery: trio.Nursery) -> None:
        await nursery.start(partial(serve_blobs, network.node("watched"), {HASH: BLOB}.get, watcher=Notes()))
        assert await fetch_blob(network.node("me"), "watched", HASH, len(BLOB)) == BLOB
        received = bytearray(BLOB[:100])
        await receive_blob(network.node("me"), "watched", HASH, len(BLOB), received)
        assert seen == [
            ("asked", "me", HASH), ("began", "me", HASH, len(BLOB)), ("ended", "me", HASH, True),
            ("asked", "me", HASH), ("began", "me", HASH, len(BLOB) - 100), ("ended", "me", HASH, True),
        ]  # fmt: skip
        seen.clear()
        network.uplink_bytes_s["watched"] = 1e6
        async with network.node("me").open("watched", names.BLOB) as stream:
            await stream.send(msgspec.msgpack.encode((HASH, 0)))
            await stream.receive()
        with trio.fail_after(1):
            while len(seen) < 3:  # noqa: ASYNC110  the other side finds out by itself
                await trio.sleep(0.01)
        assert seen[2] == ("ended", "me", HASH, False)

    on_a_network(body)


def test_the_network_carries_at_the_rate_of_an_uplink_and_its_streams_in_turn() -> None:
    async def main() -> None:
        network = MemoryNetwork(delay_s=0.5, uplink_bytes_s={"slow": 10_000.0})
        arrived: dict[str, float] = {}

        async def sink(stream: Stream) -> None:
            async for frame in frames(stream):
                arrived[frame[:1].decode()] = trio.current_time()

        async def frames(stream: Stream) -> AsyncIterator[bytes]:
            while True:
                yield await stream.receive()

        async def send(frame: bytes) -> None:
            async with network.node("slow").open("sink", names.BLOB) as stream:
                await stream.send(frame)
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            await nursery.start(network.node("sink").serve, names.BLOB, sink)
            async with trio.open_nursery() as sending:
                sending.start_soon(send, b"a" * 50_000)
                sending.start_soon(send, b"b" * 50_000)
                await trio.sleep(1)
                sending.start_soon(send, b"c" * 100)
            nursery.cancel_scope.cancel()
        assert arrived["a"] == pytest.approx(11, abs=0.5)
        assert arrived["b"] == pytest.approx(11, abs=0.5)
        assert arrived["c"] < 4
        assert network.sent_bytes == {"slow": 100_100}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_peer_that_is_dead_for_one_blob_is_not_waited_for_with_the_others() -> None:
    blobs = {blob_hash(blob): blob for blob in (bytes([number]) * 100 for number in range(10))}

    async def never(stream: Stream) -> None:
        asked.append(trio.current_time())
        await trio.sleep_forever()

    async def main() -> None:
        network, absentees = MemoryNetwork(), Absentees()
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_blobs, network.node("holder"), blobs.get, in_thread=False))
            await nursery.start(network.node("dead").serve, names.BLOB, never)

            async def fetch_all(peers: list[str]) -> None:
                for hash, blob in blobs.items():
                    got = await fetch_from_any(network.node("me"), peers, hash, 100, exact=True, absentees=absentees)
                    assert got == blob

            await fetch_all(["dead", "holder"])
            assert len(asked) == 1
            with pytest.raises(Unreachable, match="a moment ago"):
                await fetch_from_any(network.node("me"), ["dead"], next(iter(blobs)), 100, absentees=absentees)
            await trio.sleep(AVOIDED_S)
            await fetch_all(["dead", "holder"])
            assert len(asked) == 2  # perhaps it is back
            nursery.cancel_scope.cancel()

    asked: list[float] = []
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_who_answers_is_asked_again_at_once_and_few_are_remembered() -> None:
    absentees = Absentees()
    absentees.failed("a", 0.0)
    assert absentees.avoided("a", AVOIDED_S - 1)
    absentees.answered("a")
    assert not absentees.avoided("a", 1.0)
    absentees.failed("a", 0.0)
    for number in range(1024):
        absentees.failed(f"b{number}", 0.0)
    assert not absentees.avoided("a", 1.0)
    assert absentees.avoided("b1023", 1.0)
    assert not absentees.avoided("b1023", AVOIDED_S)
