"""One contract for the three seams, over the in-memory network and over the real stacks (two nodes in this process)."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

from echo_p2p import protobuf
from echo_p2p.errors import FrameTooLarge, NetError, NotServed, StreamClosed, Unreachable
from echo_p2p.identity import Identity, generate
from echo_p2p.net.base import GOSSIP_MAX_BYTES, RECORD_MAX_BYTES, Message, Stream
from echo_p2p.net.dialing import answers, backoff_s, split_address, tcp_endpoint
from echo_p2p.net.frames import FrameStream
from echo_p2p.net.gossip import GossipSettings, open_gossip
from echo_p2p.net.hive import HiveNode, HiveSettings, open_hive
from echo_p2p.net.joining import wait_for_any
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.portal import open_portal
from echo_p2p.net.relay import limit_in, relay_limit_bytes
from echo_p2p.net.signed import OwnedRecords

ECHO = "/echo-test/1"


@contextlib.asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple]:
    network = MemoryNetwork()
    one, other = network.node(generate().peer_id), network.node(generate().peer_id)
    await other.connect(one.listen_addresses()[0])
    yield one, other


@contextlib.asynccontextmanager
async def hive_pair() -> AsyncIterator[tuple]:
    async with open_hive(generate(), HiveSettings(role="bootstrap")) as one:
        addresses = tuple(await one.visible_addresses())
        async with open_hive(generate(), HiveSettings(role="volunteer", initial_peers=addresses)) as other:
            with trio.fail_after(20):
                await other.wait_joined()
            yield one, other


@contextlib.asynccontextmanager
async def gossip_pair() -> AsyncIterator[tuple]:
    async with open_gossip(generate()) as one, open_gossip(generate()) as other:
        await other.connect(one.listen_addresses()[0])
        yield one, other


records_and_streams = pytest.mark.parametrize("pair", [memory_pair, hive_pair])
gossip = pytest.mark.parametrize("pair", [memory_pair, gossip_pair])


def run(pair: Callable, check: Callable[..., Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with pair() as (one, other):
                await check(one, other)

    trio.run(main)


async def eventually(predicate: Callable[[], object], deadline_s: float = 10.0) -> None:
    with trio.fail_after(deadline_s):
        while not predicate():  # noqa: ASYNC110 (what is waited for is a vendor's state)
            await trio.sleep(0.01)


async def heard_by(publisher, topic: str) -> None:
    """Wait until the publisher knows a subscriber (the in-memory network needs no such time)."""
    if hasattr(publisher, "subscribers"):
        await eventually(lambda: publisher.subscribers(topic))


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


# Gossip


@gossip
def test_a_message_reaches_subscribers_with_its_publisher(pair):
    async def check(one, other):
        async with one.subscribe("topic") as first, one.subscribe("topic") as second:
            await heard_by(other, "topic")
            await other.publish("topic", b"hello")
            await other.publish("other topic", b"not for us")
            await other.publish("topic", b"x" * GOSSIP_MAX_BYTES)
            assert await first.receive() == Message("topic", other.peer_id, b"hello")
            assert len((await first.receive()).data) == GOSSIP_MAX_BYTES
            assert await second.receive() == Message("topic", other.peer_id, b"hello")

    run(pair, check)


@gossip
def test_publishing_to_nobody_is_fine_and_too_much_is_not(pair):
    async def check(one, other):
        await one.publish("nobody", b"hello")
        with pytest.raises(FrameTooLarge, match=str(GOSSIP_MAX_BYTES)):
            await one.publish("nobody", b"x" * (GOSSIP_MAX_BYTES + 1))

    run(pair, check)


@gossip
def test_a_slow_subscriber_loses_the_newest_and_that_is_counted(pair):
    async def check(one, other):
        async with one.subscribe("topic") as receive:
            await heard_by(other, "topic")
            for number in range(300):
                await other.publish("topic", str(number).encode())
            await eventually(lambda: one.dropped["queue full"] == 300 - 256)
            assert (await receive.receive()).data == b"0"

    run(pair, check)


@gossip
def test_connecting_twice_is_once_and_to_nobody_is_unreachable(pair):
    async def check(one, other):
        await other.connect(one.listen_addresses()[0])
        nobody = one.listen_addresses()[0].replace(one.peer_id, generate().peer_id)
        nobody = nobody.replace("/tcp/", "/tcp/1") if "/tcp/" not in nobody else _with_closed_port(nobody)
        with pytest.raises(Unreachable):
            await other.connect(nobody)

    run(pair, check)


def _with_closed_port(address: str) -> str:
    parts = address.split("/")
    parts[parts.index("tcp") + 1] = "1"
    return "/".join(parts)


@gossip
def test_after_unsubscribing_nothing_is_heard(pair):
    async def check(one, other):
        async with one.subscribe("topic"):
            await heard_by(other, "topic")
        async with one.subscribe("second") as receive:
            await heard_by(other, "second")
            await other.publish("topic", b"1")
            await other.publish("second", b"2")
            assert (await receive.receive()).data == b"2"

    run(pair, check)


def test_a_gossip_peer_that_comes_back_is_dialled_again():
    async def main():
        identity = generate()
        async with open_gossip(generate()) as one:
            async with open_gossip(identity) as other:
                address = other.listen_addresses()[0]
                await one.connect(address)
                assert one.peers() == [other.peer_id]
            await eventually(lambda: not one.peers())
            listen, _ = split_address(address)
            async with open_gossip(identity, GossipSettings(listen=(listen,))) as other:
                await eventually(lambda: one.peers() == [other.peer_id])

    trio.run(main)


def test_malformed_gossip_is_counted_and_kills_nothing():
    async def check(one, other):
        async with one.subscribe("topic") as receive, _garbage_sent_to(one):
            await eventually(lambda: one.dropped["malformed"] >= 3)
            await heard_by(other, "topic")
            await other.publish("topic", b"still here")
            assert (await receive.receive()).data == b"still here"

    run(gossip_pair, check)


@contextlib.asynccontextmanager
async def _garbage_sent_to(victim) -> AsyncIterator[None]:
    """A bare libp2p host that writes nonsense on gossip streams: not protobuf, no topic, a key that is none."""
    host = new_host(key_pair=create_new_key_pair(os.urandom(32)))
    info = info_from_p2p_addr(Multiaddr(victim.listen_addresses()[0]))
    no_topic = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"x", from_id=b"y", seqno=b"1")])
    bad_key = rpc_pb2.Message(data=b"x", from_id=b"\x12\x20" + bytes(32), seqno=b"1", topicIDs=["topic"])
    bad_key.signature, bad_key.key = b"s", b"\xff\xff"
    garbage = [
        b"\xff" * 100,
        no_topic.SerializeToString(),
        rpc_pb2.RPC(publish=[bad_key]).SerializeToString(),
        no_topic.SerializeToString() + b"\xff\xff",
        b"",
    ]
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        await host.connect(info)
        for payload in garbage:
            stream = await host.new_stream(info.peer_id, [PROTOCOL_ID_V11])
            await stream.write(encode_varint_prefixed(payload))
        yield
        await host.close()


# Records


@records_and_streams
def test_records_of_all_owners_are_found_until_they_expire(pair):
    async def check(one, other):
        await one.put("key", b"of one", 60)
        await other.put("key", b"of other", 1.5)
        for node in (one, other):
            found = await node.get("key")
            assert {owner: record.value for owner, record in found.items()} == {
                one.peer_id: b"of one",
                other.peer_id: b"of other",
            }
            assert found[one.peer_id].owner == one.peer_id
            assert found[one.peer_id].expires_at == pytest.approx(time.time() + 60, abs=5)
            assert await node.get("another key") == {}
        await trio.sleep(1.6)
        assert set(await one.get("key")) == set(await other.get("key")) == {one.peer_id}

    run(pair, check)


@records_and_streams
def test_an_owner_replaces_its_record(pair):
    async def check(one, other):
        await other.put("key", b"old", 30)
        await other.put("key", b"new", 31)
        assert (await one.get("key"))[other.peer_id].value == b"new"
        with pytest.raises(Unreachable, match="lives longer"):
            await other.put("key", b"shorter", 3)

    run(pair, check)


@records_and_streams
def test_a_record_over_its_bound_is_refused(pair):
    async def check(one, other):
        await other.put("key", b"x" * RECORD_MAX_BYTES, 30)
        assert len((await one.get("key"))[other.peer_id].value) == RECORD_MAX_BYTES
        with pytest.raises(FrameTooLarge, match=str(RECORD_MAX_BYTES)):
            await other.put("key", b"x" * (RECORD_MAX_BYTES + 1), 30)

    run(pair, check)


def test_what_a_node_has_put_outlives_it():
    async def main() -> None:
        with trio.fail_after(60):
            async with open_hive(generate(), HiveSettings(role="bootstrap")) as bootstrap:
                addresses = tuple(await bootstrap.visible_addresses())
                async with open_hive(generate(), HiveSettings(role="trainer", initial_peers=addresses)) as trainer:
                    await trainer.wait_joined()
                    await trainer.put("key", b"stands", 600.0)
                async with open_hive(generate(), HiveSettings(role="volunteer", initial_peers=addresses)) as newcomer:
                    await newcomer.wait_joined()
                    found = await newcomer.get("key")
        assert {owner: record.value for owner, record in found.items()} == {trainer.peer_id: b"stands"}

    trio.run(main)


def test_a_forged_record_is_refused_by_the_dht():
    async def check(one, other):
        await one.put("key", b"mine", 30)
        vendor, portal = other._table.node, other._portal

        async def forge(subkey):
            return await vendor.store("key", b"forged", time.time() + 60, subkey=subkey)

        assert not await portal.call(forge, one.peer_id)
        assert not await portal.call(forge, "nobody")
        assert not await portal.call(forge, None)
        for node in (one, other):
            assert {record.value for record in (await node.get("key")).values()} == {b"mine"}

    run(hive_pair, check)


class _Record:
    def __init__(self, owner: str, value: bytes, expiration_time: float) -> None:
        self.key = b"k" * 20
        self.subkey = bytes([0xA0 | 31]) + owner.encode() if len(owner) < 32 else b"\xd9\x34" + owner.encode()
        self.value = value
        self.expiration_time = expiration_time


def test_the_rule_of_owned_records():
    ours, other = generate(), generate()
    rule = OwnedRecords(ours, now=lambda: 1000.0)

    def signed(owner: Identity, value: bytes = b"value", expiration_time: float = 1030.0) -> _Record:
        record = _Record(owner.peer_id, value, expiration_time)
        record.value = OwnedRecords(ours).sign_value(record)
        return record

    good = signed(ours)
    assert rule.validate(good)
    assert rule.strip_value(good) == b"value"
    assert not rule.validate(signed(other))
    assert not rule.validate(signed(ours, expiration_time=1000.0 + 10**6))
    assert not rule.validate(signed(ours, expiration_time=float("nan")))
    assert not rule.validate(signed(ours, value=b"x" * (RECORD_MAX_BYTES + 100)))
    for change in ({"expiration_time": 1031.0}, {"value": b""}, {"value": good.value[1:]}, {"key": b"K" * 20}):
        changed = signed(ours)
        for name, value in change.items():
            setattr(changed, name, value)
        assert not rule.validate(changed)
    for subkey in (b"", b"\xff", b"\xc1", b"\x01", os.urandom(40)):
        good.subkey = subkey
        assert not rule.validate(good)


# Streams


@records_and_streams
def test_frames_of_any_size_come_back_in_order_from_a_known_peer(pair):
    async def check(one, other):
        seen = []

        async def handler(stream):
            seen.append(stream.peer)
            await echo(stream)

        async with trio.open_nursery() as nursery:
            await nursery.start(one.serve, ECHO, handler)
            async with other.open(one.peer_id, ECHO) as stream:
                assert stream.peer == one.peer_id
                for size in (0, 1, 8192, 65_532, 65_536, 131_072, 131_073, 5_000_000):
                    body = os.urandom(size)
                    await stream.send(body[: size // 2], memoryview(body)[size // 2 :])
                    assert await stream.receive() == body
            assert seen == [other.peer_id]
            nursery.cancel_scope.cancel()

    run(pair, check)


@records_and_streams
def test_the_served_node_may_open_streams_too(pair):
    async def check(one, other):
        async with trio.open_nursery() as nursery:
            await nursery.start(other.serve, ECHO, echo)
            async with one.open(other.peer_id, ECHO) as stream:
                await stream.send(b"to a volunteer")
                assert await stream.receive() == b"to a volunteer"
            nursery.cancel_scope.cancel()

    run(pair, check)


@records_and_streams
def test_a_stream_ends_for_both_when_one_side_leaves(pair):
    async def check(one, other):
        ended = trio.Event()

        async def say_goodbye(stream):
            await stream.send(b"goodbye")

        async def wait_for_end(stream):
            with pytest.raises(StreamClosed):
                await stream.receive()
            ended.set()

        async with trio.open_nursery() as nursery:
            await nursery.start(one.serve, "/goodbye/1", say_goodbye)
            await nursery.start(one.serve, "/wait/1", wait_for_end)
            async with other.open(one.peer_id, "/goodbye/1") as stream:
                assert await stream.receive() == b"goodbye"
                with pytest.raises(StreamClosed):
                    await stream.receive()
            async with other.open(one.peer_id, "/wait/1"):
                pass
            await ended.wait()
            nursery.cancel_scope.cancel()

    run(pair, check)


@records_and_streams
def test_oversized_frames_and_failing_handlers_cost_only_their_stream(pair, caplog):
    async def check(one, other):
        async def fragile(stream):
            if await stream.receive() == b"fail":
                raise RuntimeError("handler failed")
            await stream.send(b"fine")

        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: one.serve("/f/1", fragile, max_frame_bytes=10, task_status=task_status)
            )
            for _ in range(10):
                for body in (b"fail", b"x" * 11, b"x" * 300_000):
                    async with other.open(one.peer_id, "/f/1") as stream:
                        with contextlib.suppress(StreamClosed):
                            await stream.send(body)
                        with pytest.raises(StreamClosed):
                            await stream.receive()
            async with other.open(one.peer_id, "/f/1") as stream:
                await stream.send(b"x" * 10)
                assert await stream.receive() == b"fine"
            nursery.cancel_scope.cancel()

    run(pair, check)
    assert "handler failed" in caplog.text
    assert "12D3KooW" in caplog.text


@records_and_streams
def test_streams_over_the_limit_are_refused(pair):
    async def check(one, other):
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: one.serve(ECHO, echo, max_streams=1, task_status=task_status))
            async with other.open(one.peer_id, ECHO) as stream:
                await stream.send(b"first")
                await stream.receive()
                with pytest.raises(Unreachable, match="as many streams as it will"):
                    async with other.open(one.peer_id, ECHO):
                        pass
            nursery.cancel_scope.cancel()

    run(pair, check)


@records_and_streams
def test_opening_to_nobody_is_unreachable_before_the_deadline(pair):
    async def check(one, other):
        async def try_to_open(peer, kind):
            started = trio.current_time()
            with pytest.raises(Unreachable) as raised:
                async with other.open(peer, ECHO, timeout_s=2):
                    pass
            assert type(raised.value) is kind
            assert trio.current_time() - started < 3

        await try_to_open(generate().peer_id, Unreachable)
        await try_to_open(one.peer_id, NotServed)

    run(pair, check)


@records_and_streams
def test_a_protocol_is_withdrawn_when_its_server_is_cancelled(pair):
    async def check(one, other):
        for _ in range(2):  # and may be served again
            async with trio.open_nursery() as nursery:
                await nursery.start(one.serve, ECHO, echo)
                async with other.open(one.peer_id, ECHO) as stream:
                    await stream.send(b"x")
                    await stream.receive()
                nursery.cancel_scope.cancel()
            with pytest.raises(NotServed):
                async with other.open(one.peer_id, ECHO, timeout_s=2):
                    pass

    run(pair, check)


@records_and_streams
def test_receiving_may_be_cancelled_and_resumed(pair):
    async def check(one, other):
        async def late(stream):
            await stream.receive()
            await stream.send(b"late")
            await stream.receive()

        async with trio.open_nursery() as nursery:
            await nursery.start(one.serve, ECHO, late)
            async with other.open(one.peer_id, ECHO) as stream:
                with trio.move_on_after(0.05) as scope:
                    await stream.receive()
                assert scope.cancelled_caught
                await stream.send(b"go on")
                assert await stream.receive() == b"late"
            nursery.cancel_scope.cancel()

    run(pair, check)


def _socket_streams() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = trio.socket.socketpair()
    return trio.SocketStream(ours), trio.SocketStream(theirs)


def test_a_frame_in_pieces_survives_cancellation_and_a_truncated_one_is_an_end():
    async def main():
        raw, connection = _socket_streams()
        stream = FrameStream(connection, "peer", max_frame_bytes=300_000)
        body = os.urandom(200_000)
        await raw.send_all(len(body).to_bytes(4, "big") + body[:70_000])
        with trio.move_on_after(0.05) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.send_all, body[70_000:] + b"\0\0\0\x05abc")
            assert await stream.receive() == body
        await raw.aclose()
        with pytest.raises(StreamClosed, match="inside a frame"):
            await stream.receive()
        await stream.aclose()

    trio.run(main)


def test_an_announced_size_over_the_bound_is_refused_unread():
    async def main():
        raw, connection = _socket_streams()
        await raw.send_all(b"\xff\xff\xff\xff")
        stream = FrameStream(connection, "peer", max_frame_bytes=1000)
        with pytest.raises(FrameTooLarge, match="4294967295"):
            await stream.receive()
        with pytest.raises(StreamClosed):
            await stream.send(b"x")
        await raw.aclose()

    trio.run(main)


def test_a_send_cancelled_in_the_middle_closes_the_stream():
    async def main():
        raw, connection = _socket_streams()
        stream = FrameStream(connection, "peer")
        with trio.move_on_after(0.05) as scope:
            await stream.send(bytes(20_000_000))
        assert scope.cancelled_caught
        with pytest.raises(StreamClosed):
            await stream.send(b"x")
        await raw.aclose()

    trio.run(main)


# What only the real stacks do


def test_two_bootstraps_of_which_one_is_dead(caplog):
    async def main():
        async with open_hive(generate(), HiveSettings(role="bootstrap")) as bootstrap:
            alive = (await bootstrap.visible_addresses())[0]
            dead = f"/ip4/127.0.0.1/tcp/1/p2p/{generate().peer_id}"
            async with open_hive(generate(), HiveSettings(role="trainer", initial_peers=(dead, alive))) as trainer:
                with trio.fail_after(10):
                    await trainer.wait_joined()
                assert trainer.bootstraps == {bootstrap.peer_id}
                await trainer.put("key", b"x", 30)
                assert set(await bootstrap.get("key")) == {trainer.peer_id}

    trio.run(main)


async def bootstrap_until_cancelled(identity: Identity, listen: str, task_status=trio.TASK_STATUS_IGNORED) -> None:
    with trio.CancelScope() as scope:
        async with open_hive(identity, HiveSettings(role="bootstrap", listen=(listen,))) as bootstrap:
            task_status.started(((await bootstrap.visible_addresses())[0], scope))
            await trio.sleep_forever()


def test_a_bootstrap_that_dies_is_survived_and_joined_again(caplog):
    caplog.set_level(logging.INFO, logger="echo_p2p")

    async def main():
        identity = generate()
        async with trio.open_nursery() as nursery:
            address, first = await nursery.start(bootstrap_until_cancelled, identity, "/ip4/127.0.0.1/tcp/0")
            joining = HiveSettings(role="trainer", initial_peers=(address,), join_check_s=0.2)
            async with open_hive(generate(), joining) as one, open_hive(generate(), joining) as other:
                with trio.fail_after(10):
                    await one.wait_joined()
                    await other.wait_joined()
                await one.put("key", b"before", 30)
                assert (await other.get("key"))[one.peer_id].value == b"before"
                first.cancel()
                await eventually(lambda: not one.bootstraps)
                await one.put("key", b"without", 31)
                assert (await other.get("key"))[one.peer_id].value == b"without"
                listen, _ = split_address(address)
                await nursery.start(bootstrap_until_cancelled, identity, listen)
                await eventually(lambda: one.bootstraps and other.bootstraps, deadline_s=20)
                await one.put("key", b"after", 32)
                assert (await other.get("key"))[one.peer_id].value == b"after"
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert "lost bootstrap" in caplog.text
    assert "no bootstrap reachable at /ip4/127.0.0.1/tcp/" in caplog.text
    assert "trying again in 1 s" in caplog.text


def test_two_volunteers_find_each_other_and_learnt_addresses_help():
    async def main():
        async with open_hive(generate(), HiveSettings(role="bootstrap")) as bootstrap:
            settings = HiveSettings(role="volunteer", initial_peers=tuple(await bootstrap.visible_addresses()))
            async with open_hive(generate(), settings) as one, open_hive(generate(), settings) as other:
                with trio.fail_after(10):
                    await one.wait_joined()
                    await other.wait_joined()
                one.learn(other.peer_id, await other.visible_addresses())
                async with trio.open_nursery() as nursery:
                    await nursery.start(other.serve, ECHO, echo)
                    async with one.open(other.peer_id, ECHO) as stream:
                        await stream.send(b"x")
                        assert await stream.receive() == b"x"
                    nursery.cancel_scope.cancel()
                assert other.peer_id in await one.peers_connected()

    trio.run(main)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_daemon_is_left_when_the_node_ends_and_its_death_is_said():
    async def main():
        async with open_hive(generate(), HiveSettings(role="bootstrap")) as node:
            pid = node.daemon_pid
            assert _alive(pid)
            assert os.getpgid(pid) != os.getpgid(0)  # so that Ctrl-C does not reach it before the node
        assert not _alive(pid)

        async def lose_daemon():
            async with open_hive(generate(), HiveSettings(role="bootstrap")) as node:
                os.kill(node.daemon_pid, signal.SIGKILL)
                await trio.sleep_forever()

        with pytest.raises(ExceptionGroup) as caught, trio.fail_after(3):
            await lose_daemon()
        assert caught.group_contains(NetError, match="ended unexpectedly")

    trio.run(main)


def test_a_daemon_dies_with_its_killed_node():
    program = (
        "import trio\n"
        "from echo_p2p.identity import generate\n"
        "from echo_p2p.net.hive import HiveSettings, open_hive\n"
        "async def main():\n"
        "    async with open_hive(generate(), HiveSettings(role='bootstrap')) as node:\n"
        "        print(node.daemon_pid, flush=True)\n"
        "        await trio.sleep(60)\n"
        "trio.run(main)\n"
    )
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    try:
        pid = int(child.stdout.readline())
        assert _alive(pid)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    deadline = time.monotonic() + 2
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


# Parts


def test_memory_network_delays_loses_and_splits_in_virtual_time():
    async def main():
        network = MemoryNetwork(delay_s=100.0, now=trio.current_time)
        one, other = network.node("one"), network.node("other")
        async with other.subscribe("topic") as receive, trio.open_nursery() as nursery:
            started = trio.current_time()
            await one.publish("topic", b"slow")
            assert (await receive.receive()).data == b"slow"
            assert trio.current_time() - started == pytest.approx(100)
            await nursery.start(one.serve, ECHO, echo)
            async with other.open("one", ECHO, timeout_s=1000) as stream:
                started = trio.current_time()
                await stream.send(b"x")
                await stream.receive()
                assert trio.current_time() - started == pytest.approx(200)
                await one.put("key", b"x", 500)
                network.split(["one"])
                with pytest.raises(StreamClosed):
                    await stream.receive()
            assert await other.get("key") == {}
            network.heal()
            assert set(await other.get("key")) == {"one"}
            network.loss = 1.0
            await one.publish("topic", b"lost")
            await trio.sleep(1000)
            assert await other.get("key") == {}
            with pytest.raises(trio.WouldBlock):
                receive.receive_nowait()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_portal_returns_raises_and_cancels():
    import asyncio

    async def main():
        cancelled = trio.Event()
        async with open_portal() as portal:
            token = trio.lowlevel.current_trio_token()

            async def divide(a: int, b: int) -> float:
                return a / b

            async def sleep_long() -> None:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    token.run_sync_soon(cancelled.set)
                    raise

            assert await portal.call(divide, 6, 2) == 3
            with pytest.raises(ZeroDivisionError):
                await portal.call(divide, 1, 0)
            with trio.move_on_after(0.05) as scope:
                await portal.call(sleep_long)
            assert scope.cancelled_caught
            await cancelled.wait()
        with pytest.raises(NetError):
            await portal.call(divide, 1, 1)

    trio.run(main)


def test_addresses_and_backoff():
    assert split_address("/ip4/1.2.3.4/tcp/5/p2p/12D3") == ("/ip4/1.2.3.4/tcp/5", "12D3")
    for wrong in ("", "/ip4/1.2.3.4/tcp/5", "1.2.3.4:5", "/p2p/12D3/x", "/ip4/1.2.3.4/tcp/5/p2p/"):
        with pytest.raises(Exception, match="must look like"):
            split_address(wrong)
    assert tcp_endpoint("/dns4/host/tcp/5") == ("host", 5)
    assert tcp_endpoint("/ip4/1.2.3.4/udp/5/quic-v1") is None
    delays = backoff_s()
    assert [next(delays) for _ in range(6)] == [1, 2, 4, 8, 15, 15]
    assert not trio.run(answers, "/ip4/127.0.0.1/tcp/1")


def test_waiting_for_any_bootstrap_says_so_and_ends_when_one_answers(caplog):
    async def main():
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{generate().peer_id}"
        with trio.fail_after(5):
            await wait_for_any((dead, f"/ip4/127.0.0.1/tcp/{port}/p2p/{generate().peer_id}"))
        with trio.move_on_after(0.3) as scope:
            await wait_for_any((dead,))
        assert scope.cancelled_caught
        await listeners[0].aclose()

    trio.run(main)
    assert "no bootstrap reachable at /ip4/127.0.0.1/tcp/1/" in caplog.text


def test_the_limit_in_a_relays_answer():
    ok, refused = (5, 100), (5, 200)
    assert limit_in(protobuf.encode((1, 2), (4, protobuf.encode((1, 120), (2, 131072))), ok)) == 131072
    assert limit_in(protobuf.encode((1, 2), ok)) is None
    with pytest.raises(NetError, match="200"):
        limit_in(protobuf.encode((1, 2), refused))
    with pytest.raises(ValueError, match="lacks field 5"):
        limit_in(b"")


def test_a_bootstrap_relays():
    async def check(one, other):
        # On loopback it isn't insisted on that our own limit won over the daemon's default.
        assert await relay_limit_bytes(other._daemon, one.peer_id) in (131072, 1099511627776)

    run(hive_pair, check)


def test_the_address_book_is_bounded():
    async def main():
        async with open_hive(generate(), HiveSettings(role="bootstrap")) as node:
            assert isinstance(node, HiveNode)
            for number in range(2000):
                node.learn(f"peer {number}", ["/ip4/127.0.0.1/tcp/1"])
            assert len(node._addresses) == 1024

    trio.run(main)
