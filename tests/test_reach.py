"""Whether others can dial a node: what is concluded, who may ask for what, and slots at relays that come back."""

import contextlib
import functools
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import trio
import trio.testing

from echo_p2p.errors import NetError, Unreachable
from echo_p2p.identity import Identity, generate
from echo_p2p.net.dialing import split_address
from echo_p2p.net.gossip import open_gossip
from echo_p2p.net.hive import HiveSettings, open_hive
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.noise import answers_as
from echo_p2p.net.reach import (
    AGAIN_S,
    AGAIN_UNANSWERED_S,
    Allowance,
    DialBackAnswer,
    DialBackRequest,
    Finding,
    Lookout,
    ask_dial_back,
    conclude,
    first_reached,
    hosts_of,
    ports_of,
    said_reach,
    serve_dial_back,
)
from echo_p2p.net.relay import RelaySlots
from echo_protocols import names

HERE = "/ip4/127.0.0.1/tcp/4001"
THROUGH = "/ip4/9.9.9.9/tcp/4001/p2p/12D3/p2p-circuit"


def said(reached: str | None = None, refusal: str | None = None) -> DialBackAnswer:
    return DialBackAnswer(0.0, reached, refusal)


def test_public_is_what_most_of_those_who_can_say_have_dialled() -> None:
    assert conclude([], relayed=False) == Finding("unknown", (), 0)
    assert conclude([], relayed=True).reach == "relayed"
    assert conclude([said(refusal="busy")], relayed=False).reach == "unknown"
    assert conclude([said()], relayed=False) == Finding("none", (), 1)
    assert conclude([said()], relayed=True).reach == "relayed"
    assert conclude([said(HERE), said(HERE), said()], relayed=True) == Finding("public", (HERE,), 3)
    assert conclude([said(HERE), said()], relayed=True).reach == "relayed"
    assert conclude([said(HERE), said(refusal="relayed")], relayed=True).reach == "public"


@pytest.mark.parametrize(
    ("reach", "addresses", "said"),
    [
        ("public", ("/ip4/127.0.0.1/tcp/1/p2p/x",), "this machine only"),
        ("public", ("/ip6/::1/tcp/1", "/ip4/9.9.9.9/tcp/1/p2p/r/p2p-circuit"), "this machine only"),
        ("public", ("/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1"), "this network only"),
        ("public", ("/ip4/192.168.1.7/tcp/1", "/ip4/9.9.9.9/tcp/1"), "public"),
        ("public", ("/ip4/127.0.0.1/tcp/1", "/dns/node.example/tcp/1"), "public"),
        ("public", ("/ip4/strange/tcp/1",), "public"),
        ("public", (), "public"),
        ("relayed", ("/ip4/127.0.0.1/tcp/1",), "relayed"),
        ("unknown", ("/ip4/127.0.0.1/tcp/1",), "unknown"),
    ],
)
def test_reach_is_said_no_wider_than_its_addresses(reach: str, addresses: tuple[str, ...], said: str) -> None:
    assert said_reach(reach, addresses) == said


def test_only_addresses_of_direct_connections_are_a_peers_own() -> None:
    seen = [
        "/ip4/1.2.3.4/tcp/5",
        "/ip4/9.9.9.9/tcp/1/p2p/12D3/p2p-circuit",
        "/ip4/1.2.3.4/udp/7/quic-v1",
        "/dns4/x/tcp/1",
    ]
    assert hosts_of([*seen, "/ip6/::1/tcp/5", "/ip4/nonsense/tcp/1", ""]) == ("ip4/1.2.3.4", "ip6/::1")
    ours = [f"{HERE}/p2p/12D3", "/ip4/192.168.1.2/tcp/4001", "/ip4/9.9.9.9/tcp/7/p2p/12D3/p2p-circuit/p2p/12D3"]
    assert ports_of(ours) == (4001,)


def test_an_allowance_is_by_the_minute_and_forgets_the_oldest() -> None:
    allowance = Allowance(2, keys_max=2)
    assert [allowance.take("a", now) for now in (0.0, 1.0, 2.0, 60.5, 60.6)] == [True, True, False, True, False]
    assert allowance.take("b", 61.0)
    assert allowance.take("c", 61.0)
    assert allowance.take("a", 61.0), "forgotten for b and c"


@contextlib.asynccontextmanager
async def listening(greeting: bytes) -> AsyncIterator[str]:
    """The address of a TCP port that says `greeting` to whoever connects."""

    async def greet(connection: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await connection.send_all(greeting)
            while await connection.receive_some():
                pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(functools.partial(trio.serve_tcp, greet, 0, host="127.0.0.1"))
        yield f"/ip4/127.0.0.1/tcp/{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def test_a_peer_proves_where_it_answers_and_nobody_else_does() -> None:
    async def main() -> None:
        identity, stranger = generate(), generate().peer_id
        async with open_gossip(identity) as node:
            address, _ = split_address(node.listen_addresses()[0])
            assert await answers_as(identity.peer_id, address)
            assert not await answers_as(stranger, address)
            async with listening(b"SSH-2.0-somebody else") as other:
                assert await first_reached(identity.peer_id, [other, address]) == address
                assert await first_reached(stranger, [other, address]) is None
        assert not await answers_as(stranger, "/ip4/127.0.0.1/tcp/1")
        assert not await answers_as(stranger, "/unix/x")

    trio.run(main)


HELLO = b"\x13/multistream/1.0.0\n\x07/noise\n"


@pytest.mark.parametrize(
    "garbage", [b"", HELLO, HELLO + b"\0\0", HELLO + b"\0\x60" + bytes(96), HELLO + b"\0\x05" + b"x" * 5]
)
def test_whoever_answers_with_garbage_or_not_at_all_is_not_the_peer(garbage: bytes) -> None:
    async def main() -> None:
        async with listening(garbage) as address:
            began_at = trio.current_time()
            assert not await answers_as(generate().peer_id, address, timeout_s=0.1)
            assert trio.current_time() - began_at < 1

    trio.run(main)


@contextlib.asynccontextmanager
async def asker_and_witness(seen: list[str], identity: Identity | None = None) -> AsyncIterator[tuple]:
    network = MemoryNetwork()
    asker, witness = network.node((identity or generate()).peer_id), network.node(generate().peer_id)

    async def seen_at(peer: str) -> list[str]:
        assert peer == asker.peer_id
        return seen

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_dial_back, witness, seen_at)
        yield asker, witness
        nursery.cancel_scope.cancel()


def test_a_witness_dials_the_asker_and_says_what_came_of_it_and_what_time_it_is() -> None:
    async def main() -> None:
        identity, seen = generate(), ["/ip4/127.0.0.1/tcp/50000"]
        async with open_gossip(identity) as node, asker_and_witness(seen, identity) as (asker, witness):
            address, _ = split_address(node.listen_addresses()[0])
            heard = await ask_dial_back(asker, witness.peer_id, [1, *ports_of([address])])
            assert heard.answer.reached == address
            assert abs(heard.clock_ahead_s) < 1
            assert abs(heard.answer.now - time.time()) < 5
            not_there = (await ask_dial_back(asker, witness.peer_id, [1])).answer
            assert (not_there.reached, not_there.refusal) == (None, None)

    trio.run(main)


def test_nobody_is_dialled_who_comes_through_a_relay_or_asks_too_often() -> None:
    async def main() -> None:
        async with asker_and_witness(["/ip4/127.0.0.1/tcp/1/p2p/12D3/p2p-circuit"]) as (asker, witness):
            assert (await ask_dial_back(asker, witness.peer_id, [1])).answer.refusal == "relayed"
        async with asker_and_witness([HERE]) as (asker, witness):
            refusals = [(await ask_dial_back(asker, witness.peer_id, [1])).answer.refusal for _ in range(32)]
            assert refusals == [None] * 30 + ["busy"] * 2

    trio.run(main)


@pytest.mark.parametrize("content", [b"", b"\xff", b"\x91\x90", msgspec.msgpack.encode([[0]]), b"\x91\x95\1\1\1\1\1"])
def test_what_is_no_request_is_answered_and_ends_nothing(content: bytes) -> None:
    async def main() -> None:
        async with asker_and_witness([HERE]) as (asker, witness):
            async with asker.open(witness.peer_id, names.DIAL_BACK) as stream:
                await stream.send(content)
                answer = msgspec.msgpack.decode(await stream.receive(), type=DialBackAnswer)
                assert answer.refusal == "malformed"
            assert (await ask_dial_back(asker, witness.peer_id, [1])).answer.refusal is None

    trio.run(main)


@pytest.mark.parametrize(
    "content",
    [
        b"\xc1",
        msgspec.msgpack.encode(DialBackAnswer(0.0, "/ip4/8.8.8.8/tcp/53")),  # a port that we did not name
        msgspec.msgpack.encode(DialBackAnswer(0.0, "/dns4/victim.example/tcp/4001")),
        msgspec.msgpack.encode(DialBackAnswer(0.0, "nonsense")),
    ],
)
def test_a_lying_witness_is_no_witness(content: bytes) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        asker, witness = network.node("asker"), network.node("witness")

        async def lie(stream) -> None:
            msgspec.msgpack.decode(await stream.receive(), type=DialBackRequest)
            await stream.send(content)

        async with trio.open_nursery() as nursery:
            await nursery.start(witness.serve, names.DIAL_BACK, lie)
            with pytest.raises(Unreachable, match="peer witness"):
                await ask_dial_back(asker, "witness", [4001])
            assert (await Lookout(asker).look([THROUGH, HERE], ["witness"])).reach == "relayed"
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_lookout_asks_again_when_something_changes_and_after_a_while() -> None:
    async def main() -> None:
        network = MemoryNetwork(now=trio.current_time)
        asker, witness = network.node("asker"), network.node("witness")
        asked = 0

        async def answer(stream) -> None:
            nonlocal asked
            asked += 1
            await stream.receive()
            await stream.send(msgspec.msgpack.encode(DialBackAnswer(0.0, HERE)))

        ours = [f"{HERE}/p2p/asker"]
        lookout = Lookout(asker)
        assert (await lookout.look(ours, ["witness"])).reach == "unknown"
        await trio.sleep(AGAIN_UNANSWERED_S)
        async with trio.open_nursery() as nursery:
            await nursery.start(witness.serve, names.DIAL_BACK, answer)
            for _ in range(3):
                assert (await lookout.look(ours, ["witness"])) == Finding("public", (HERE,), 1)
            assert asked <= 2, "once more when what is proved is no news"
            before = asked
            moved = [*ours, "/ip4/10.0.0.7/tcp/4001/p2p/asker"]
            await lookout.look(moved, ["witness"])
            assert asked == before + 1
            await trio.sleep(AGAIN_S + 1)
            await lookout.look(moved, ["witness"])
            assert asked == before + 2
            assert (await lookout.look(moved, [])).reach == "unknown"
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Relay:
    """A relay that comes and goes, and forgets whoever had a slot."""

    def __init__(self) -> None:
        self.up = True
        self.connected = True
        self.reservations = 0

    async def peers(self) -> list[str]:
        return ["12D3"] if self.up and self.connected else []

    async def connect(self, peer: str, transports: list[str]) -> None:
        assert (peer, transports) == ("12D3", ["/unix/relay"])
        self.connected = self.up

    async def reserve(self, peer: str) -> int | None:
        if not (self.up and self.connected):
            raise NetError("it is away")
        self.reservations += 1
        return None


def test_a_slot_is_held_renewed_and_taken_again_from_a_relay_that_was_away() -> None:
    async def main() -> None:
        relay = Relay()
        slots = RelaySlots(
            ["/unix/relay/p2p/12D3"], connected=relay.peers, connect=relay.connect, reserve=relay.reserve
        )
        assert slots.addresses == ()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slots.keep)
            await trio.sleep(1)
            assert slots.addresses == ("/unix/relay/p2p/12D3/p2p-circuit",)
            assert slots.limits == {"12D3": None}
            assert relay.reservations == 1
            await trio.sleep(60)
            assert 3 <= relay.reservations <= 5
            relay.up = relay.connected = False
            await trio.sleep(30)
            assert slots.addresses, "it may only be restarting"
            await trio.sleep(30)
            assert slots.addresses == ()
            before, relay.up = relay.reservations, True
            await trio.sleep(5)
            assert slots.addresses
            assert relay.reservations == before + 1
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_real_node_is_dialled_back_where_its_bootstrap_sees_it() -> None:
    async def main() -> None:
        async with open_hive(generate(), HiveSettings(role="bootstrap")) as bootstrap:
            settings = HiveSettings(role="volunteer", initial_peers=tuple(await bootstrap.visible_addresses()))
            async with open_hive(generate(), settings) as node, trio.open_nursery() as nursery:
                with trio.fail_after(20):
                    await node.wait_joined()
                    await nursery.start(serve_dial_back, bootstrap, bootstrap.seen_at)
                    addresses = await node.visible_addresses()
                    found = await Lookout(node).look(addresses, [bootstrap.peer_id])
                assert found.reach == "public"
                assert found.addresses == (addresses[0].removesuffix(f"/p2p/{node.peer_id}"),)
                node.prove(["/ip4/1.2.3.4/tcp/5"])
                assert f"/ip4/1.2.3.4/tcp/5/p2p/{node.peer_id}" in await node.visible_addresses()
                nursery.cancel_scope.cancel()

    trio.run(main)
