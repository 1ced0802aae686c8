"""The records of a swarm: who is heard, who may decide what, and what a hostile member can't do with them."""

import logging
import time

import msgspec
import pytest
import trio
import trio.testing

from echo_node.board import join_line, run_view
from echo_node.inference import candidates, successor
from echo_node.leader import lead
from echo_node.plans import PEERS_MAX, bounded
from echo_node.silence import SILENT_S, silence_note
from echo_node.standing import Standing
from echo_node.state import RunView
from echo_p2p.chain.plan import plan
from echo_p2p.chain.pricing import Device, Workload
from echo_p2p.config import NetworkConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.base import RECORD_MAX_BYTES, Record
from echo_p2p.net.memory import MemoryNetwork, MemoryNode
from echo_p2p.net.ping import serve_ping
from echo_p2p.presence import Presence, _hubs, dialable
from echo_p2p.records import RECORDS_MAX, CheckedRecords
from echo_p2p.swarm import Member, Run, Swarm
from echo_protocols import names
from echo_protocols.envelope import LATEST, NO_RUN, PLAN, ROLE, RUN, Border, Sealer
from echo_protocols.peer import Capacity, Plan, RoleRecord, Stop
from echo_protocols.run import RunManifest
from echo_protocols.sync import LatestRelease
from echo_protocols.values import PolicyVersion, Span

TRAINER, PEER, HOSTILE = from_seed(b"t" * 32), from_seed(b"p" * 32), from_seed(b"h" * 32)


def manifest(owner: Identity = TRAINER, **changes: object) -> RunManifest:
    given = {
        "swarm": "s", "model": "tiny", "tokenizer_hash": bytes(32), "layers": 4, "vocabulary": 64,
        "trainers": (owner.peer_id,),
    }  # fmt: skip
    return RunManifest(**(given | changes))


class Peer:
    """A member on a memory network, which says of itself what it likes."""

    def __init__(self, network: MemoryNetwork, identity: Identity, **record: object) -> None:
        self.identity = identity
        self.node: MemoryNode = network.node(identity.peer_id)
        self.border = Border()
        self.sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
        given = {"role": "inference", "software": "test", "started_at": time.time()}
        self.record = RoleRecord(**(given | record))
        self.swarm = Swarm(
            "s",
            peer=identity.peer_id,
            records=self.node,
            sealer=self.sealer,
            border=self.border,
            describe=lambda: self.record,
        )

    async def put(self, key: str, kind, run_id: bytes, value: object) -> None:
        await self.node.put(key, self.sealer.seal(kind, run_id, value, time.time()), 60.0)

    def presence(self, peers: tuple[str, ...] = ()) -> Presence:
        network = NetworkConfig(peers=peers)
        return Presence(self.identity, network, self.node, self.node, self.border, self.sealer, self.swarm, self.record)  # type: ignore[arg-type]


async def look(peer: Peer) -> None:
    with trio.fail_after(2):
        await peer.swarm._look()


def test_only_the_trainers_of_the_run_decide_its_plan_and_its_latest_release() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer, peer, hostile = (Peer(network, each) for each in (TRAINER, PEER, HOSTILE))
        run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, 0.0)
        peer.swarm.join(run)
        span = Span(start=0, end=4, layers=4)
        for number, member in ((7, trainer), (2**53, hostile)):
            made = Plan(number=number, layers=4, chains=((Stop(peer=member.identity.peer_id, span=span),),))
            await member.put(names.plan_key("s"), PLAN, run.run_id, made)
            latest = LatestRelease(version=PolicyVersion(epoch=number % 99, step=1), release=bytes(32), size_bytes=9)
            await member.put(names.release_key("s"), LATEST, run.run_id, latest)
        await look(peer)
        assert peer.swarm.plan is not None
        assert peer.swarm.plan.number == 7
        assert peer.swarm.latest is not None
        assert peer.swarm.latest.version.epoch == 7

    trio.run(main)


def test_another_run_does_not_inherit_the_plan_and_the_release() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer, peer = Peer(network, TRAINER), Peer(network, PEER)
        for number, seed in ((9, 1), (3, 2)):
            run = Run(manifest(seed=seed), manifest(seed=seed).run_id(), TRAINER.peer_id, 0.0)
            peer.swarm.join(run)
            assert peer.swarm.plan is None
            await trainer.put(names.plan_key("s"), PLAN, run.run_id, Plan(number=number, layers=4))
            await look(peer)
            assert peer.swarm.plan == Plan(number=number, layers=4)

    trio.run(main)


def test_a_record_under_a_foreign_name_is_refused_and_counted_once() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        peer, hostile = Peer(network, PEER), Peer(network, HOSTILE)
        forged = hostile.sealer.seal(ROLE, NO_RUN, RoleRecord(role="trainer", software="x"), time.time())
        await network.node(TRAINER.peer_id).put(names.role_key("s"), forged, 60.0)
        await hostile.node.put(names.role_key("s"), b"\xff" * 100, 60.0)
        for _ in range(5):
            await look(peer)
        assert peer.swarm.members == {}
        assert dict(peer.border.refused) == {"wrong-owner": 1, "malformed": 1}

    trio.run(main)


def test_a_flood_of_members_is_bounded_and_does_not_push_out_those_known() -> None:
    class Flooded:
        def __init__(self, records: dict[str, Record]) -> None:
            self.records = records

        async def put(self, key: str, value: bytes, ttl_s: float) -> None: ...

        async def get(self, key: str) -> dict[str, Record]:
            return self.records

    async def main() -> None:
        sealer = Sealer(PEER.public_key, PEER.sign, 1)
        known = Record(PEER.peer_id, sealer.seal(ROLE, NO_RUN, RoleRecord(role="inference", software="x"), 0.0), 1e12)
        border, table = Border(), Flooded({PEER.peer_id: known})
        reader = CheckedRecords(table, border, "key", ROLE, NO_RUN)
        assert len(await reader.read(1.0)) == 1
        table.records = {f"sybil {n}": Record("", b"garbage", 1e12) for n in range(RECORDS_MAX + 50)} | table.records
        assert [each.signer for each in await reader.read(1.0)] == [PEER.peer_id]
        assert border.refused == {"too-many-records": 1, "malformed": RECORDS_MAX - 1}

    trio.run(main)


def test_a_second_node_with_our_key_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        first = Peer(network, PEER, started_at=time.time() - 100.0)
        left = first.sealer.seal(ROLE, NO_RUN, first.record, time.time() - 50.0)
        await first.node.put(names.role_key("s"), left, 60.0)
        second = Peer(network, PEER, started_at=time.time() - 10.0)
        await look(second)
        assert caplog.text == ""  # what a predecessor left behind is no twin

        await first.put(names.role_key("s"), ROLE, NO_RUN, first.record)
        for _ in range(3):
            await look(second)
        assert caplog.text.count("runs with this node's key") == 1
        assert "identity.key" in caplog.text
        await second.put(names.role_key("s"), ROLE, NO_RUN, second.record)
        await look(first)
        assert caplog.text.count("runs with this node's key") == 2

    caplog.set_level(logging.WARNING)
    trio.run(main)


def test_whatever_a_vendor_raises_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        peer = Peer(MemoryNetwork(), PEER)
        get, failures = peer.node.get, [ValueError("a vendor's"), KeyError("another")]

        class Failing(MemoryNode):
            async def get(self, key: str) -> dict[str, Record]:
                if failures:
                    raise failures.pop()
                return await get(key)

        peer.node.__class__ = Failing
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.swarm.run)
            with trio.fail_after(60):
                while not peer.swarm.members:
                    await peer.swarm.changed()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert caplog.text.count("can't be read") == 2


GOOD = f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER.peer_id}"


@pytest.mark.parametrize(
    "address",
    [
        "", "garbage", "/p2p/", "/ip4/1.2.3.4/tcp/4001", f"/ip4/1.2.3.4/tcp/4001/p2p/{HOSTILE.peer_id}",
        GOOD.replace("4001", "99999999"), GOOD.replace("4001", "\N{SUPERSCRIPT TWO}"), GOOD.replace("10.0.0.1", "1.2"),
        GOOD.replace("ip4/10.0.0.1", "dns4/" + "a" * 64), GOOD.replace("ip4/10.0.0.1", "unix/x"),
        GOOD.replace("ip4/10.0.0.1", "dns4/a..b"), GOOD.replace("/tcp", "/tcp/1/tcp"), GOOD + "/p2p-circuit",
    ],
)  # fmt: skip
def test_an_address_that_is_not_the_peers_own_tcp_endpoint_is_not_dialled(address: str) -> None:
    assert not dialable(address, PEER.peer_id)


def test_the_usual_addresses_are_dialled() -> None:
    for host in ("ip4/10.0.0.1", "ip6/::1", "dns4/boot.example.org", "dns/localhost"):
        assert dialable(GOOD.replace("ip4/10.0.0.1", host), PEER.peer_id)


def test_members_that_call_themselves_trainers_do_not_crowd_out_the_real_one() -> None:
    peer = Peer(MemoryNetwork(), PEER)
    run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, 0.0)
    peer.swarm.join(run)
    real = RoleRecord(
        role="trainer", software="x", gossip=(GOOD.replace(PEER.peer_id, TRAINER.peer_id),), started_at=9.0
    )
    false = RoleRecord(role="trainer", software="x", gossip=("garbage", GOOD), started_at=0.0)
    sybils = [from_seed(bytes([n]) * 32).peer_id for n in range(50)]
    peer.swarm.members = {name: Member(name, false, 0.0) for name in sybils}
    peer.swarm.members[TRAINER.peer_id] = Member(TRAINER.peer_id, real, 0.0)
    hubs = _hubs(peer.presence())
    assert len(hubs) == 8
    assert hubs.pop(TRAINER.peer_id) == real.gossip
    assert set(hubs.values()) == {()}


def test_a_run_ends_only_when_its_own_owner_begins_another() -> None:
    ours, next_of_ours, foreign = (
        Run(made, made.run_id(), made.trainers[0], 0.0)
        for made in (manifest(), manifest(seed=2), manifest(HOSTILE, seed=3))
    )
    assert successor(ours, (ours, foreign)) is None
    assert successor(ours, (foreign,)) is None
    assert successor(ours, ()) is None
    assert successor(ours, (foreign, next_of_ours)) == next_of_ours


def test_a_run_of_a_stranger_does_not_go_before_that_of_whom_we_were_told() -> None:
    peer = Peer(MemoryNetwork(), PEER)
    ours, foreign = (Run(made, made.run_id(), made.trainers[0], 0.0) for made in (manifest(), manifest(HOSTILE)))
    peer.swarm.runs = (foreign, ours)  # as old as it says
    trainer, volunteer = (RoleRecord(role=role, software="x") for role in ("trainer", "inference"))
    peer.swarm.members = {each: Member(each, trainer, 0.0) for each in (TRAINER.peer_id, HOSTILE.peer_id)}
    assert candidates(peer.swarm, "", {TRAINER.peer_id}) == [ours, foreign]
    assert candidates(peer.swarm, TRAINER.peer_id, ()) == [ours]
    peer.swarm.members[HOSTILE.peer_id] = Member(HOSTILE.peer_id, volunteer, 0.0)
    assert candidates(peer.swarm, "", ()) == [ours]


def test_who_joins_while_the_trainer_is_away_finds_the_run_the_plan_and_the_release() -> None:
    async def stay(peer: Peer, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await peer.swarm.run()

    async def main() -> None:
        network = MemoryNetwork(now=trio.current_time)
        trainer, worker, newcomer = (Peer(network, each) for each in (TRAINER, PEER, from_seed(b"n" * 32)))
        trainer.record = msgspec.structs.replace(trainer.record, role="trainer")
        run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, 0.0)
        worker.record = msgspec.structs.replace(worker.record, run_id=run.run_id)
        made, release = Plan(number=7, layers=4), PolicyVersion(epoch=0, step=3)
        await trainer.swarm.publish_run(run.manifest)
        await trainer.swarm.publish_plan(run.run_id, made)
        await trainer.swarm.publish_latest(run.run_id, LatestRelease(version=release, release=bytes(32), size_bytes=9))
        await stay(trainer, 100.0)
        async with trio.open_nursery() as nursery:
            await trio.sleep(1800.0)
            await stay(newcomer, 10.0)
            assert TRAINER.peer_id not in newcomer.swarm.members
            assert candidates(newcomer.swarm, "", ()) == []  # nobody is at it
            nursery.start_soon(worker.swarm.run)
            await stay(newcomer, 10.0)
            (found,) = candidates(newcomer.swarm, "", ())
            assert found.run_id == run.run_id
            newcomer.swarm.join(found)
            await stay(newcomer, 10.0)
            assert newcomer.swarm.plan == made
            assert newcomer.swarm.latest is not None
            assert newcomer.swarm.latest.version == release
            await trio.sleep(1800.0)
            late = Peer(network, HOSTILE)
            await stay(late, 10.0)
            assert late.swarm.runs == ()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_trainer_that_is_not_heard_is_said_and_one_that_left_at_once() -> None:
    run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, time.time() - 100.0)

    def shown(peer: Peer) -> RunView:
        return run_view(peer.presence(), time.time())

    async def main() -> None:
        network = MemoryNetwork()
        trainer, peer, hostile = (Peer(network, each) for each in (TRAINER, PEER, HOSTILE))
        peer.swarm.join(run)
        await hostile.put(names.role_key("s"), ROLE, NO_RUN, RoleRecord(role="trainer", software="x"))
        await look(peer)
        assert shown(peer).trainer_note.startswith("Trainer silent for 1 min 40 s: it has stopped")
        await trainer.put(names.plan_key("s"), PLAN, run.run_id, Plan(number=1, layers=4))
        await look(peer)
        assert shown(peer).trainer_note == ""
        assert shown(peer).trainer_age_s == pytest.approx(0.0, abs=30.0)
        await trainer.put(names.role_key("s"), ROLE, NO_RUN, RoleRecord(role="trainer", software="x", leaving=True))
        await look(peer)
        assert shown(peer).trainer_note.startswith("Trainer left 0 s ago")
        trainer.swarm.join(run)
        trainer.record = RoleRecord(role="trainer", software="x")
        assert (shown(trainer).trainer_age_s, shown(trainer).trainer_note) == (None, "")

    trio.run(main)


def test_silence_is_two_renewals_missed_and_an_hour_is_too_long_for_newcomers() -> None:
    assert silence_note(SILENT_S - 0.1, left=False) == ""
    assert "silent for 45 s" in silence_note(SILENT_S, left=False)
    assert "go on with it then" in silence_note(3599.0, left=False)
    assert "has expired for who joins now" in silence_note(3600.0, left=True)


def test_a_run_whose_trainer_is_away_comes_after_those_that_are_led() -> None:
    peer = Peer(MemoryNetwork(), PEER)
    ours, foreign = (Run(made, made.run_id(), made.trainers[0], 0.0) for made in (manifest(), manifest(HOSTILE)))
    peer.swarm.runs = (ours, foreign)
    trainer = RoleRecord(role="trainer", software="x")
    worker = RoleRecord(role="inference", software="x", run_id=ours.run_id)
    peer.swarm.members = {
        HOSTILE.peer_id: Member(HOSTILE.peer_id, trainer, 0.0),
        "worker": Member("worker", worker, 0.0),
    }
    assert candidates(peer.swarm, "", {TRAINER.peer_id}) == [foreign, ours]
    assert candidates(peer.swarm, TRAINER.peer_id, ()) == [ours]


def test_a_plan_of_before_is_worth_nothing_beside_a_newer_one() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer, peer = Peer(network, TRAINER), Peer(network, PEER)
        run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, 0.0)
        peer.swarm.join(run)
        for number, known in ((9, 9), (8, 9), (10, 10)):
            await trainer.put(names.plan_key("s"), PLAN, run.run_id, Plan(number=number, layers=4))
            await look(peer)
            assert peer.swarm.plan == Plan(number=known, layers=4)

    trio.run(main)


def test_a_plan_fits_into_its_record_however_many_announce_themselves() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer = Peer(network, TRAINER, role="trainer")
        run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, 0.0)
        trainer.swarm.join(run)
        absurd = Capacity(max_layers=65536, layers_per_s=1e12, memory_bytes=2**53)
        record = RoleRecord(role="inference", software="x", run_id=run.run_id, capacity=absurd)
        crowd = [from_seed(n.to_bytes(32, "big")).peer_id for n in range(400)]
        trainer.swarm.members = {peer: Member(peer, record, 0.0) for peer in crowd}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead, trainer.presence(), run, Standing())
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert trainer.swarm.plan is not None
        assert len(trainer.swarm.plan.chains) == PEERS_MAX
        (stored,) = (await trainer.node.get(names.plan_key("s"))).values()
        assert len(stored.value) < RECORD_MAX_BYTES
        kept = bounded({peer: absurd for peer in crowd}, trainer.swarm.plan)
        assert set(kept) == {chain[0].peer for chain in trainer.swarm.plan.chains}

    trio.run(main)


def placed(made: Plan) -> set[str]:
    return {stop.peer for chain in made.chains for stop in chain}


def test_the_plan_goes_on_without_a_peer_that_never_answers() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer = Peer(network, TRAINER, role="trainer")
        run = Run(manifest(), manifest().run_id(), TRAINER.peer_id, 0.0)
        trainer.swarm.join(run)
        one, two, ghost = (from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))

        def record(max_layers: int) -> RoleRecord:
            held = Capacity(max_layers=max_layers)
            return RoleRecord(role="inference", software="x", run_id=run.run_id, capacity=held)

        async with trio.open_nursery() as nursery:
            for peer in (one, two):
                await nursery.start(serve_ping, network.node(peer), float)
            # the ghost promises more than the other two, so it is asked first
            promised = {one: 2, two: 2, ghost: 3}
            trainer.swarm.members = {peer: Member(peer, record(layers), 0.0) for peer, layers in promised.items()}
            nursery.start_soon(lead, trainer.presence(), run, Standing())
            with trio.fail_after(120):
                while trainer.swarm.plan is None or placed(trainer.swarm.plan) != {one, two}:
                    await trainer.swarm.changed()
            await trio.sleep(50)  # and it does not come back
            assert placed(trainer.swarm.plan) == {one, two}
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_absurd_capacities_make_a_plan_that_all_can_read() -> None:
    made = plan(
        {
            "a" * 50: Device(max_layers=65536, layers_per_s=1e12),
            "b" * 50: Device(max_layers=2, layers_per_s=5e-324),
            "c" * 50: Device(max_layers=2, layers_per_s=1e12),
        },
        Workload(layers=4),
    )
    assert len(made.chains) == 2


def test_a_failure_costs_longer_each_time_and_is_forgiven_at_once() -> None:
    standing = Standing()
    ends = []
    for _ in range(8):
        standing.fail("peer", 0.0, cost_s=10.0)
        ends.append(next(end for end in range(2000) if not standing.benched("peer", end)))
    assert ends == [10, 20, 40, 80, 160, 320, 600, 600]
    assert not standing.benched("other", 0.0)
    standing.clear("peer")
    assert not standing.benched("peer", 0.0)


def test_who_fails_is_forgotten_in_the_end() -> None:
    standing = Standing()
    for number in range(5000):
        standing.fail(str(number), 0.0, cost_s=10.0)
    assert not standing.benched("0", 1.0)
    assert standing.benched("4999", 1.0)


def test_manifests_of_other_swarms_and_of_those_who_may_not_train_are_no_runs() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        peer, hostile, trainer = (Peer(network, each) for each in (PEER, HOSTILE, TRAINER))
        await hostile.put(names.run_key("s"), RUN, NO_RUN, manifest(TRAINER))
        await trainer.put(names.run_key("s"), RUN, NO_RUN, manifest(TRAINER, swarm="another"))
        await look(peer)
        assert peer.swarm.runs == ()

    trio.run(main)


def test_the_line_for_the_next_machine_names_the_owner_that_we_are_to_serve() -> None:
    alone = Peer(MemoryNetwork(), PEER).presence(peers=(GOOD,))
    assert "--owner" not in join_line(alone)
    assert f"--owner {TRAINER.peer_id} " in join_line(alone, TRAINER.peer_id)
