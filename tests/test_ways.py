"""Whom a peer measures the way to, what it says of it, and that it reaches the plan."""

import time

import msgspec
import pytest
import trio
import trio.testing

from echo_node.plans import links_of
from echo_node.ways import (
    MISSES,
    NEIGHBOUR_EVERY_S,
    NEIGHBOURS_MAX,
    OTHER_EVERY_S,
    OTHERS_MAX,
    PACE_S,
    PADDED_EVERY_S,
    Ways,
    keep_measuring_ways,
)
from echo_p2p.config import NetworkConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.ping import Pong, serve_ping
from echo_p2p.presence import Presence
from echo_p2p.swarm import Member, Swarm
from echo_protocols.envelope import NO_RUN, ROLE, Border, Opened, Sealer
from echo_protocols.peer import Capacity, Plan, RoleRecord, Stop, Way
from echo_protocols.values import Span, decode, encode

OWN = "own"
RUN_ID = b"r" * 32


def measure(ways: Ways, seconds: int, now: float = 0.0, answer=lambda peer: Pong(0.01)) -> list[tuple[str, bool]]:
    """Whom `ways` wants measured, at its pace."""
    asked = []
    for second in range(0, seconds, int(PACE_S)):
        if (due := ways.due(now + second)) is not None:
            asked.append(due)
            peer, padded = due
            pong = answer(peer)
            if pong is not None and padded:
                pong = Pong(pong.latency_s, 0.0, 1e6)
            ways.note(peer, pong, now + second)
    return asked


def test_neighbours_come_first_then_who_came_last_and_each_again_in_its_time():
    ways = Ways(OWN)
    ways.meet(("next", "before", OWN), {"old": 1.0, "new": 9.0, "next": 99.0, OWN: 5.0})
    assert [peer for peer, _ in measure(ways, 20)] == ["before", "next", "new", "old"]
    asked = measure(ways, int(OTHER_EVERY_S), now=20.0)
    counts = {peer: sum(each == peer for each, _ in asked) for peer in ("next", "before", "new", "old")}
    assert counts["new"] == counts["old"] == 1
    assert counts["next"] == counts["before"] == OTHER_EVERY_S // NEIGHBOUR_EVERY_S


def test_bytes_a_second_are_measured_seldom():
    ways = Ways(OWN)
    ways.meet(("next",), {})
    asked = measure(ways, int(2 * PADDED_EVERY_S))
    assert asked[0] == ("next", True)
    assert sum(padded for _, padded in asked) == 2
    assert len(asked) == 2 * PADDED_EVERY_S // NEIGHBOUR_EVERY_S


def test_who_does_not_answer_is_asked_again_soon_and_unreachable_only_after_a_few_times():
    ways = Ways(OWN)
    ways.meet(("next",), {})
    ways.note("next", Pong(0.03, 0.0, 5.0), 0.0)
    for misses in range(1, MISSES):
        ways.note("next", None, 0.0)
        assert ways.told() == (Way(peer="next", latency_s=0.03, bytes_s=5.0),)
        assert ways.due(NEIGHBOUR_EVERY_S / 2) == ("next", False), misses
    ways.note("next", None, 0.0)
    assert ways.told() == (Way(peer="next", latency_s=None),)
    asked = measure(ways, 3600, answer=lambda peer: None)
    assert 6 < len(asked) < 15
    ways.note("next", Pong(0.04), 3600.0)
    assert ways.told() == (Way(peer="next", latency_s=0.03, bytes_s=5.0),)


def test_what_is_said_is_the_best_of_the_last_three():
    ways = Ways(OWN)
    ways.meet(("next",), {})
    for latency_s, bytes_s in ((0.001, 9e9), (0.05, 2.0), (0.03, 7.0), (0.04, 0.0), (0.09, 3.0)):
        ways.note("next", Pong(latency_s, 0.0, bytes_s), 0.0)
    assert ways.told() == (Way(peer="next", latency_s=0.03, bytes_s=7.0),)


def test_in_a_crowd_a_fixed_sample_is_measured_and_who_leaves_is_forgotten():
    crowd = {f"peer {n}": float(n) for n in range(300)}
    ways = Ways(OWN)
    neighbours = tuple(f"stop {n}" for n in range(20))
    ways.meet(neighbours, crowd)
    sample = {peer for peer, _ in measure(ways, 200)}
    assert len(sample) == len(ways.told()) == OTHERS_MAX + NEIGHBOURS_MAX
    crowd |= {f"sybil {n}": 1e9 for n in range(30)}
    ways.meet(neighbours, crowd)
    kept = {way.peer for way in ways.told()}
    assert len(kept - sample) == 0
    assert len(sample - kept) < 10
    ways.meet((), {"peer 1": 1.0})
    assert {way.peer for way in ways.told()} <= {"peer 1"}
    ways.note("peer 2", Pong(0.1), 0.0)
    assert ways.due(1e6) == ("peer 1", True)
    others = Ways("another")
    others.meet((), crowd)
    assert {peer for peer, _ in measure(others, 200)} != sample


class Here:
    """An inference peer on a memory network, which knows the others."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self.peer = identity.peer_id
        self.node = network.node(self.peer)
        self.sealer, self.border = Sealer(identity.public_key, identity.sign, 1), Border()
        record = RoleRecord(role="inference", software="x", run_id=RUN_ID, capacity=Capacity(max_layers=2))
        swarm = Swarm(
            "s",
            peer=self.peer,
            records=self.node,
            sealer=self.sealer,
            border=self.border,
            describe=lambda: record,
        )
        self.presence = Presence(
            identity, NetworkConfig(), self.node, self.node, self.border, self.sealer, swarm, record
        )  # type: ignore[arg-type]

    @property
    def record(self) -> RoleRecord:
        return self.presence.record


def test_the_ways_that_peers_measure_are_the_links_of_the_plan():
    async def main() -> None:
        network = MemoryNetwork(now=trio.current_time)
        peers = [Here(network, from_seed(bytes([n]) * 32)) for n in range(3)]
        one, two, lost = peers
        network.delay_s = 0.07
        network.uplink_bytes_s = {one.peer: 1e6, two.peer: 4e6}
        chain = (
            Stop(peer=one.peer, span=Span(start=0, end=2, layers=4)),
            Stop(peer=two.peer, span=Span(start=2, end=4, layers=4)),
        )
        for each in peers:
            each.presence.swarm.members = {other.peer: Member(other.peer, other.record, 0.0) for other in peers}
            each.presence.swarm.plan = Plan(number=1, layers=4, chains=(chain,))
        async with trio.open_nursery() as nursery:
            for each in (one, two):
                await nursery.start(serve_ping, each.node, float)
                nursery.start_soon(keep_measuring_ways, each.presence)
            await trio.sleep(600.0)
            nursery.cancel_scope.cancel()
        links = links_of({each.peer: each.record for each in peers}).known
        there, back = links[one.peer, two.peer], links[two.peer, one.peer]
        assert there is not None
        assert back is not None
        assert there.latency_s == pytest.approx(0.07, rel=0.1)
        assert there.bytes_s == pytest.approx(1e6, rel=0.15)
        assert back.bytes_s == pytest.approx(4e6, rel=0.15)
        assert links[one.peer, lost.peer] is None
        assert links[lost.peer, two.peer] is None

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_record_with_all_the_ways_that_it_may_have_is_understood():
    here = Here(MemoryNetwork(), from_seed(b"x" * 32))
    peers = [from_seed(bytes([n]) * 32).peer_id for n in range(32)]
    ways = tuple(Way(peer=peer, latency_s=0.0123, bytes_s=1.23e7) for peer in peers)
    circuit = f"/ip4/203.0.113.250/tcp/40001/p2p/{peers[0]}/p2p-circuit/p2p/{peers[1]}"
    record = msgspec.structs.replace(
        here.record, streams=(circuit,) * 16, gossip=(circuit,) * 16, capacity=Capacity(max_layers=2, ways=ways)
    )
    sealed = here.sealer.seal(ROLE, NO_RUN, record, time.time())
    opened = here.border.open(sealed, ROLE, NO_RUN, time.time())
    assert isinstance(opened, Opened)
    assert opened.payload == record


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1.0, 3601.0])
def test_a_way_that_is_no_way_is_refused_at_the_border(lie: float):
    peer = from_seed(b"x" * 32).peer_id
    for way in ([peer, lie], [peer, 0.1, lie if lie != 3601.0 else 1e13], ["nobody", 0.1]):
        with pytest.raises(msgspec.DecodeError):
            decode(encode({"max_layers": 4, "ways": [way]}), Capacity)
    with pytest.raises(msgspec.DecodeError):
        decode(encode({"max_layers": 4, "ways": [[peer, 0.1]] * 33}), Capacity)
