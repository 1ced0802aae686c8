"""A peer that joins a swarm whose chains work: it changes the plan once at most, and nothing stands still for it."""

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing
from msgspec import UNSET

from echo_node.handover import HANDOVER_S, preparing, ready_stops, same
from echo_node.holding import Terms, hold
from echo_node.leader import BALANCE_EVERY_S, lead
from echo_node.newcomers import SETTLED_S, Newcomers, has_said_all, works
from echo_node.standing import Standing
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.config import InferenceConfig, NetworkConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.models import resolve_model
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.ping import serve_ping
from echo_p2p.presence import Presence
from echo_p2p.swarm import Member, Run, Swarm
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.envelope import Border, Sealer
from echo_protocols.peer import Capacity, Plan, RoleRecord, Stop, Way
from echo_protocols.release import Chunk
from echo_protocols.run import RunManifest
from echo_protocols.values import PolicyVersion, Span

TRAINER = from_seed(b"t" * 32)
A, B, C, D = (from_seed(letter * 32).peer_id for letter in (b"a", b"b", b"c", b"d"))
LAYERS = 12
V0 = PolicyVersion(epoch=0, step=0)


def span(start: int, end: int, layers: int = LAYERS) -> Span:
    return Span(start=start, end=end, layers=layers)


def stop(peer: str, start: int, end: int) -> Stop:
    return Stop(peer=peer, span=span(start, end))


def ways(*peers: str) -> tuple[Way, ...]:
    return tuple(Way(peer=peer, latency_s=0.0001, bytes_s=1e9) for peer in peers)


def record(*known: str, speed: float = 100.0, reach: str = "public", **changes: object) -> RoleRecord:
    capacity = Capacity(max_layers=6, layers_per_s=speed, ways=ways(*known))
    return RoleRecord(role="inference", software="x", run_id=RUN.run_id, capacity=capacity, reach=reach, **changes)


MANIFEST = RunManifest(
    swarm="s", model="no such model", tokenizer_hash=bytes(32), layers=LAYERS, vocabulary=32,
    trainers=(TRAINER.peer_id,), group_size=4,
)  # fmt: skip
RUN = Run(MANIFEST, MANIFEST.run_id(), TRAINER.peer_id, 0.0)
TWO = (stop(A, 0, 6), stop(B, 6, 12))
THREE = (stop(A, 0, 4), stop(C, 4, 8), stop(B, 8, 12))
PLAN = Plan(number=7, layers=LAYERS, chains=(TWO,))


# -- whom a plan counts on ---------------------------------------------------------------------------------------------


def test_a_newcomer_has_said_all_when_it_is_measured_and_knows_its_reach_and_a_chain() -> None:
    assert has_said_all(record(A, B), PLAN)
    assert not has_said_all(record(A, B, speed=0.0), PLAN)
    assert not has_said_all(record(A, B, reach="unknown"), PLAN)
    assert not has_said_all(record(A, D), PLAN)
    assert not has_said_all(msgspec.structs.replace(record(A, B), capacity=None), PLAN)
    alone = msgspec.structs.replace(record().capacity, max_layers=LAYERS)
    assert has_said_all(msgspec.structs.replace(record(reach="unknown"), capacity=alone), PLAN)


def test_a_newcomer_waits_while_all_chains_work_and_not_for_ever() -> None:
    here = {A: record(), B: record(), C: record(speed=0.0)}
    newcomers = Newcomers()
    assert newcomers.counted(here, PLAN, (), 0.0).keys() == {A, B}
    assert newcomers.counted({**here, C: record(A, B)}, PLAN, (), 1.0).keys() == {A, B, C}
    assert newcomers.counted(here, PLAN, (), SETTLED_S - 1).keys() == {A, B}
    assert newcomers.counted(here, PLAN, (), SETTLED_S).keys() == {A, B, C}


def test_a_newcomer_is_needed_at_once_where_a_chain_does_not_work() -> None:
    here = {A: record(), C: record(speed=0.0)}
    assert Newcomers().counted(here, PLAN, (), 0.0).keys() == {A, C}
    assert Newcomers().counted({**here, B: record()}, PLAN, [(A, B)], 0.0).keys() == {A, B, C}
    assert Newcomers().counted(here, Plan(number=0, layers=LAYERS), (), 0.0).keys() == {A, C}


def test_chains_work_while_their_peers_are_there_and_neighbours_not_parted() -> None:
    assert works(PLAN, {A, B}, ())
    assert works(PLAN, {A, B, C}, [(A, C)])
    assert not works(PLAN, {A, C}, ())
    assert not works(PLAN, {A, B}, [(B, A)])
    assert not works(Plan(number=0, layers=LAYERS), {A}, ())


# -- how a better plan takes over --------------------------------------------------------------------------------------


def test_the_old_chain_goes_on_until_all_stops_of_the_new_one_are_ready() -> None:
    wanted = Plan(number=8, layers=LAYERS, chains=(THREE,))
    step = preparing(PLAN, wanted, ())
    assert step is not None
    assert step.chains == PLAN.chains
    assert step.standby == (THREE[1],)
    assert step.upcoming == (THREE[0], THREE[2])
    assert step.upcoming_of(A) == span(0, 4)
    assert step.upcoming_of(C) is None
    assert preparing(PLAN, wanted, THREE[:2]) == step
    assert preparing(PLAN, wanted, THREE) is None


def test_what_peers_say_makes_stops_ready() -> None:
    records = {
        A: record(span=span(0, 6), version=V0, prepared=span(0, 4)),
        B: record(span=span(6, 12), version=V0),
        C: record(span=span(4, 8)),  # it has not loaded it yet
    }
    assert ready_stops(records) == {TWO[0], THREE[0], TWO[1]}


def test_nothing_is_waited_for_where_no_chain_changes_or_nobody_loads() -> None:
    ready = Plan(number=8, layers=LAYERS, chains=(TWO,), standby=(stop(C, 0, 6),))
    assert preparing(PLAN, ready, ()) is None
    swapped = Plan(number=9, layers=LAYERS, chains=((stop(C, 0, 6), TWO[1]),))
    assert preparing(ready, swapped, {stop(C, 0, 6)}) is None
    step = preparing(ready, swapped, ())
    assert step is not None
    assert same(step, ready)


def test_a_chain_of_others_begins_at_once() -> None:
    own = (stop(D, 0, 12),)
    step = preparing(PLAN, Plan(number=8, layers=LAYERS, chains=(THREE, own)), ())
    assert step is not None
    assert step.chains == (TWO, own)
    assert preparing(PLAN, Plan(number=8, layers=LAYERS, chains=(TWO, own)), ()) is None


def test_a_peer_prepares_for_one_span_of_the_model() -> None:
    for upcoming in ((stop(A, 0, 4), stop(A, 0, 5)), (Stop(peer=A, span=span(0, 4, 5)),)):
        with pytest.raises(ValueError, match="prepares for one span"):
            Plan(number=1, layers=LAYERS, chains=(TWO,), upcoming=upcoming)


# -- the leader --------------------------------------------------------------------------------------------------------


def presence_of(identity: Identity, network: MemoryNetwork) -> Presence:
    node, border = network.node(identity.peer_id), Border()
    sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
    own = RoleRecord(role="inference", software="test")
    swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=lambda: own)
    return Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, own)  # type: ignore[arg-type]


class Led:
    """A leader, and what peers say to it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.presence = presence_of(TRAINER, self.network)
        self.presence.swarm.join(RUN)
        self.plans: list[Plan] = []

    async def start(self, nursery: trio.Nursery) -> None:
        for peer in (A, B, C):
            await nursery.start(serve_ping, self.network.node(peer), float)
        self.say(A, record(B))
        self.say(B, record(A))
        nursery.start_soon(lead, self.presence, RUN, Standing())
        nursery.start_soon(self._watch)
        await trio.sleep(5.0)
        (first,) = self.plans
        assert sorted(len(stop.span) for stop in first.chains[0]) == [6, 6]
        self.say_holding()

    async def _watch(self) -> None:
        swarm = self.presence.swarm
        while True:
            if swarm.plan is not None and swarm.plan not in self.plans:
                self.plans.append(swarm.plan)
            await swarm.changed()

    def say(self, peer: str, said: RoleRecord) -> None:
        swarm = self.presence.swarm
        swarm.members = swarm.members | {peer: Member(peer, said, 0.0)}
        swarm.wake()

    def say_holding(self) -> None:
        """All have loaded what the plan has them hold and load."""
        swarm = self.presence.swarm
        assert swarm.plan is not None
        for peer, member in swarm.members.items():
            coming = swarm.plan.upcoming_of(peer) or UNSET
            held = {"span": swarm.plan.span_of(peer), "version": V0, "prepared": coming}
            self.say(peer, msgspec.structs.replace(member.record, **held))

    async def introduce(self, speed: float) -> None:
        """C says by and by what it is worth, and the others what they find."""
        for said in (record(speed=0.0, reach="unknown"), record(speed=speed, reach="unknown"), record(speed=speed)):
            self.say(C, said)
            await trio.sleep(8.0)
        self.say(C, record(A, B, speed=speed))
        await trio.sleep(8.0)


def led(body) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        scene = Led()
        async with trio.open_nursery() as nursery:
            await scene.start(nursery)
            await body(scene)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("speed", [5.0, 20.0])  # with it in the chain, that makes not three tenths more
def test_a_newcomer_that_gains_little_stands_by_after_one_new_plan(speed: float) -> None:
    async def body(scene: Led) -> None:
        await scene.introduce(speed)
        first, second = scene.plans
        assert second.chains == first.chains
        assert [stop.peer for stop in second.standby] == [C]
        assert second.upcoming is UNSET
        scene.say_holding()
        scene.say(A, record(B, C))
        scene.say(B, record(A, C))
        await trio.sleep(2 * BALANCE_EVERY_S)
        assert scene.plans == [first, second]

    led(body)


def test_a_newcomer_that_gains_much_is_taken_in_when_all_are_ready_and_once() -> None:
    async def body(scene: Led) -> None:
        await scene.introduce(100.0)
        first, loading = scene.plans
        assert loading.chains == first.chains
        assert [stop.peer for stop in loading.standby] == [C]
        assert loading.upcoming
        await trio.sleep(HANDOVER_S - 30)
        assert scene.plans == [first, loading]  # they load; the old chain goes on
        scene.say_holding()
        await trio.sleep(5.0)
        third = scene.plans[-1]
        assert {stop.peer for stop in third.chains[0]} == {A, B, C}
        assert {*loading.standby, *loading.upcoming} <= set(third.chains[0])
        assert third.upcoming is UNSET
        scene.say_holding()
        await trio.sleep(2 * BALANCE_EVERY_S)
        assert scene.plans == [first, loading, third]

    led(body)


def test_who_can_not_load_two_spans_at_once_loads_the_new_one_in_the_end() -> None:
    async def body(scene: Led) -> None:
        await scene.introduce(100.0)
        await trio.sleep(HANDOVER_S + 5)
        assert len(scene.plans) == 3
        assert len(scene.plans[-1].chains[0]) == 3

    led(body)


def test_a_peer_that_is_lost_meanwhile_is_replaced_at_once() -> None:
    async def body(scene: Led) -> None:
        await scene.introduce(100.0)
        swarm = scene.presence.swarm
        swarm.members = {peer: member for peer, member in swarm.members.items() if peer != B}
        swarm.wake()
        await trio.sleep(5.0)
        assert {stop.peer for stop in scene.plans[-1].chains[0]} == {A, C}
        assert scene.plans[-1].upcoming is UNSET

    led(body)


# -- the peer ----------------------------------------------------------------------------------------------------------


class Fed:
    """A feed of one release."""

    def __init__(self, store: Store) -> None:
        folder = resolve_model("tiny")
        self.release = Publisher(store).publish(V0, load_stage(folder, span(0, 4, 4)).tensors())
        self._store = store

    async def keep_staged(self, replica: Replica) -> None:
        async def fetch(chunk: Chunk) -> bytes:
            raise AssertionError("all chunks are here")

        await replica.stage(self.release, self.lookup, fetch)
        await trio.sleep_forever()

    async def lookup(self, hash: bytes):  # type: ignore[no-untyped-def]
        raise AssertionError("one release is enough")


OLD, NEW = span(2, 4, 4), span(3, 4, 4)
BEFORE = (Stop(peer=B, span=span(0, 2, 4)), Stop(peer=A, span=OLD))
AFTER = (Stop(peer=B, span=span(0, 3, 4)), Stop(peer=A, span=NEW))


def terms_of(folder: Path, loads: list[Span]) -> Terms:
    """How A holds spans of the built-in model; `loads` is told of those that it loads."""
    manifest = msgspec.structs.replace(MANIFEST, model="tiny", layers=4)
    run = Run(manifest, manifest.run_id(), TRAINER.peer_id, 0.0)
    presence = presence_of(from_seed(b"a" * 32), MemoryNetwork())
    presence.swarm.join(run)
    store = Store(folder, 1 << 30)
    board = SimpleNamespace(presence=presence, config=SimpleNamespace(inference=InferenceConfig(engine="torch")))
    model = SimpleNamespace(folder=resolve_model("tiny"), bring_weights=lambda span, report: loads.append(span))
    return Terms(
        board=board, run=run, model=model, feed=Fed(store), store=store,  # type: ignore[arg-type]
        allow=lambda peer, opening: None, ended=lambda *ending: None, engaged=lambda: True,
    )  # fmt: skip


def follow(presence: Presence, number: int, chain: tuple[Stop, ...], *upcoming: Stop) -> None:
    presence.swarm.plan = Plan(number=number, layers=4, chains=(chain,), upcoming=upcoming or UNSET)
    presence.swarm.wake()


def test_what_comes_is_loaded_beside_what_is_held_and_not_again_when_it_is_held(tmp_path: Path) -> None:
    loads: list[Span] = []

    async def main() -> None:
        terms = terms_of(tmp_path, loads)
        presence = terms.board.presence
        follow(presence, 1, BEFORE)
        with trio.fail_after(60):
            async with hold(OLD, terms) as holding:
                assert holding.span == OLD
                follow(presence, 2, BEFORE, AFTER[1])
                while presence.record.prepared is UNSET:
                    await presence.swarm.changed(0.05)
                assert presence.record.prepared == NEW
                follow(presence, 3, AFTER)
            async with hold(NEW, terms) as holding:
                assert holding.host.version == V0
                assert holding.replica.applied == V0
                assert presence.record.prepared is UNSET
                follow(presence, 4, AFTER, BEFORE[1])
                while presence.record.prepared is UNSET:
                    await presence.swarm.changed(0.05)
                follow(presence, 5, AFTER)  # it comes to nothing
                while presence.record.prepared is not UNSET:
                    await presence.swarm.changed(0.05)
        assert loads == [OLD, NEW, OLD]
        assert not terms.prepared

    trio.run(main)


def test_a_device_without_room_for_two_spans_goes_on_with_the_one_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loads: list[Span] = []

    async def main() -> None:
        terms = terms_of(tmp_path, loads)
        presence = terms.board.presence
        follow(presence, 1, BEFORE)
        with trio.fail_after(60):
            async with hold(OLD, terms):
                terms.board.config.inference = InferenceConfig(engine="torch", memory_share=1e-6)
                follow(presence, 2, BEFORE, AFTER[1])
                while "can't be prepared" not in caplog.text:
                    await presence.swarm.changed(0.05)
                await presence.swarm.changed(0.05)
        assert presence.record.prepared is UNSET
        assert loads == [OLD]

    trio.run(main)
