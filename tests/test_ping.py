"""Pings: what they measure, over both networks, and that nobody can misuse them or be misled by them."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
import trio.testing

from echo_p2p.identity import generate
from echo_p2p.net.base import Stream
from echo_p2p.net.hive import HiveSettings, open_hive
from echo_p2p.net.memory import MemoryNetwork, MemoryNode
from echo_p2p.net.ping import (
    BUSY_MAX_S,
    PADDED_A_MINUTE,
    PADDING_MAX_BYTES,
    REQUESTS_OF_A_STREAM,
    STREAMS_A_MINUTE,
    STREAMS_MAX,
    Reply,
    Request,
    ping,
    serve_ping,
)
from echo_protocols import names
from echo_protocols.values import decode, encode

TOKEN = bytes(8)


@contextlib.asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple]:
    network = MemoryNetwork()
    yield network.node(generate().peer_id), network.node(generate().peer_id)


@contextlib.asynccontextmanager
async def hive_pair() -> AsyncIterator[tuple]:
    async with open_hive(generate(), HiveSettings(role="bootstrap")) as one:
        addresses = tuple(await one.visible_addresses())
        async with open_hive(generate(), HiveSettings(role="volunteer", initial_peers=addresses)) as other:
            with trio.fail_after(20):
                await other.wait_joined()
            yield one, other


@pytest.mark.parametrize("pair", [memory_pair, hive_pair])
def test_a_ping_says_how_far_a_peer_is_and_how_long_it_has_computed(pair):
    async def main() -> None:
        with trio.fail_after(60):
            async with pair() as (one, other), trio.open_nursery() as nursery:
                assert await ping(other, one.peer_id, 5.0) is None
                age_s = [12.5]
                await nursery.start(serve_ping, one, lambda: age_s[0])
                pong = await ping(other, one.peer_id, 20.0)
                assert pong is not None
                assert 0.0 <= pong.latency_s < 10.0
                assert (pong.busy_s, pong.bytes_s) == (12.5, 0.0)
                age_s[0] = float("inf")
                pong = await ping(other, one.peer_id, 20.0, padded=True)
                assert pong is not None
                assert pong.busy_s == BUSY_MAX_S
                assert pong.bytes_s > 1e4
                nursery.cancel_scope.cancel()

    trio.run(main)


Body = Callable[[MemoryNetwork, Counter[str]], Awaitable[None]]


def in_virtual_time(body: Body) -> None:
    """Run `body` with a peer `far` that answers pings."""

    async def main() -> None:
        network = MemoryNetwork(now=trio.current_time)
        refused = Counter[str]()
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: serve_ping(
                network.node("far"), lambda: 0.0, refused=refused, task_status=task_status
            ))  # fmt: skip
            await body(network, refused)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_latency_and_rate_are_those_of_the_way_there():
    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        network.delay_s = 0.04
        network.uplink_bytes_s = {"me": 1e6, "far": 1e9}
        pong = await ping(network.node("me"), "far", 5.0, padded=True)
        assert pong is not None
        assert pong.latency_s == pytest.approx(0.04, rel=0.02)
        assert pong.bytes_s == pytest.approx(1e6, rel=0.05)
        assert not refused

    in_virtual_time(body)


def test_a_slow_link_is_not_filled_for_long():
    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        network.uplink_bytes_s = {"me": 2e4}
        began_at = trio.current_time()
        pong = await ping(network.node("me"), "far", 5.0, padded=True)
        assert pong is not None
        assert pong.bytes_s == pytest.approx(2e4, rel=0.05)
        assert trio.current_time() - began_at < 3.0
        network.uplink_bytes_s = {"me": 100.0}
        pong = await ping(network.node("me"), "far", 5.0, padded=True)
        assert pong is not None
        assert pong.bytes_s == 0.0
        assert not refused

    in_virtual_time(body)


def test_a_peer_that_is_too_far_or_gone_has_no_answer():
    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        network.delay_s = 2.0
        assert await ping(network.node("me"), "far", 5.0) is None
        network.delay_s = 0.0
        network.split(["far"])
        assert await ping(network.node("me"), "far", 5.0) is None

    in_virtual_time(body)


async def ask(me: MemoryNode, *frames: bytes) -> list[bytes]:
    """The answers to frames on one stream, until it ends."""
    answers: list[bytes] = []
    with contextlib.suppress(Exception):
        async with me.open("far", names.PING) as stream:
            for frame in frames:
                await stream.send(frame)
                answers.append(await stream.receive())
    return answers


def test_what_is_no_ping_is_counted_by_reason_and_ends_the_stream():
    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        me = network.node("me")
        good = encode(Request(TOKEN))
        for bad in (b"", b"\xc1", encode([b"short"]), encode([TOKEN, 1]), b"\x91" * 5000):
            assert await ask(me, good, bad, good) == [encode(Reply(TOKEN))]
        assert refused == {"malformed": 5}
        assert await ask(me, bytes(PADDING_MAX_BYTES + 65), good) == []
        async with me.open("far", names.PING):
            await trio.sleep(60.0)
        assert refused == {"malformed": 5, "oversized": 1, "too-slow": 1}

    in_virtual_time(body)


def test_a_peer_gets_few_answers_a_minute_and_nobody_else_suffers():
    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        greedy, modest = network.node("greedy"), network.node("modest")
        good, padded = encode(Request(TOKEN)), encode(Request(TOKEN, bytes(PADDING_MAX_BYTES)))
        assert len(await ask(greedy, *[good] * 99)) == REQUESTS_OF_A_STREAM
        assert len(await ask(greedy, *[padded] * 9)) == PADDED_A_MINUTE
        assert sum([len(await ask(greedy, good)) for _ in range(200)]) == STREAMS_A_MINUTE - 2
        assert refused == {"too-many": 2 + 200 - (STREAMS_A_MINUTE - 2)}
        assert await ping(modest, "far", 5.0, padded=True)
        await trio.sleep(60.0)
        assert await ping(greedy, "far", 5.0, padded=True)

    in_virtual_time(body)


def test_who_holds_all_streams_keeps_nobody_else_out():
    """Anybody may have many identities; and whoever does not answer the plan's leader is planned without."""

    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(STREAMS_MAX + 4):
                await stack.enter_async_context(network.node(f"idle {number}").open("far", names.PING))
            assert await ping(network.node("modest"), "far", 5.0)
            assert refused["too-many"] == 5

    in_virtual_time(body)


def test_nobody_is_nearer_than_he_is_by_answering_early_or_by_nonsense():
    async def body(network: MemoryNetwork, refused: Counter[str]) -> None:
        replies: list[bytes] = []

        async def lie(stream: Stream) -> None:
            for reply in replies:
                await stream.send(reply)
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(network.node("liar").serve, names.PING, lie)
            for busy_s in (0.0, float("nan"), float("inf"), -1.0):
                replies[:] = [encode([TOKEN, busy_s])] * 8
                assert await ping(network.node("me"), "liar", 5.0) is None
            nursery.cancel_scope.cancel()

    in_virtual_time(body)


def test_a_reply_that_is_out_of_bounds_is_none():
    for busy_s in (float("nan"), float("inf"), -1.0, 2 * BUSY_MAX_S):
        with pytest.raises(Exception, match=r"Expected `float`"):
            decode(encode([TOKEN, busy_s]), Reply)
