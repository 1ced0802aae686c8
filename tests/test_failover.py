"""Who is left out of a plan and who is kept apart, whatever liars say; groups that outlive the ring they began in."""

import time
from contextlib import AsyncExitStack
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from echo_node.accuse import Trouble, blame
from echo_node.complaints import AGREEING_S, COMPLAINTS_A_MINUTE, PARTED_S, Complaints
from echo_node.leader import _Leader, lead
from echo_node.plans import PEERS_MAX
from echo_node.produce import Counter, GroupDropped, Head, bring_together
from echo_node.pulls import Pulls
from echo_node.pulse import MISSES, STEADY, STUCK_S, Pulse, check
from echo_node.push import Pusher
from echo_node.standing import Standing
from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.memory_ring import MemoryRing, memory_ring
from echo_p2p.chain.memory_stage import MemoryStage
from echo_p2p.chain.pricing import Workload
from echo_p2p.config import NetworkConfig
from echo_p2p.errors import ChainError
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.base import Stream
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.net.ping import Pong, Reply, Request, serve_ping
from echo_p2p.presence import Presence
from echo_p2p.swarm import Member, Run, Swarm
from echo_p2p.tensors import TensorUpdate
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import COMPLAINT, ROLLOUT, Border, Opened, Sealer
from echo_protocols.hop import Failure
from echo_protocols.peer import Capacity, Complaint, Plan, RoleRecord, Stop
from echo_protocols.rollout import RolloutGroup, Slot
from echo_protocols.run import RunManifest, Sampling
from echo_protocols.values import PolicyVersion, Span, decode, encode

TRAINER = from_seed(b"t" * 32)
PEERS = {letter: from_seed(letter.encode() * 32) for letter in "ABCDE"}
A, B, C, D, E = (identity.peer_id for identity in PEERS.values())


def chain_of(*peers: str, layers: int = 6) -> tuple[Stop, ...]:
    share = layers // len(peers)
    return tuple(
        Stop(peer=peer, span=Span(start=place * share, end=(place + 1) * share, layers=layers))
        for place, peer in enumerate(peers)
    )


def pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


# -- pings ------------------------------------------------------------------------------------------------------------


def test_a_peer_is_lost_after_missing_twice_in_a_row_until_it_answers() -> None:
    pulse = Pulse()
    for _ in range(5):
        pulse.missed(A)
        assert not pulse.lost(A)
        assert pulse.answered(A, 0.0)
    for _ in range(MISSES):
        pulse.missed(A)
    assert pulse.missing() == {A}
    assert pulse.answered(A, 0.0)
    assert not pulse.lost(A)


def test_a_step_far_older_than_usual_is_as_bad_as_no_answer() -> None:
    pulse = Pulse()
    assert pulse.answered(A, STUCK_S)
    for _ in range(MISSES):
        assert not pulse.answered(A, 10 * STUCK_S)
    assert pulse.lost(A)
    for _ in range(5):
        assert pulse.answered(B, STUCK_S / 2)  # slow, as usual
    assert pulse.answered(B, 3 * STUCK_S)


def test_who_answers_for_long_is_steady_and_who_is_not_asked_any_more_is_forgotten() -> None:
    pulse = Pulse()
    for _ in range(STEADY):
        assert not pulse.steady(A)
        pulse.answered(A, 0.0)
    assert pulse.steady(A)
    pulse.missed(B)
    pulse.missed(B)
    pulse.keep({A})
    assert pulse.missing() == frozenset()
    assert pulse.steady(A)


# -- complaints -------------------------------------------------------------------------------------------------------


def test_checks_at_the_same_time_count_one_silence_once() -> None:
    """As when both neighbours complain of a peer that was busy for a moment: it is asked a second time."""

    async def main() -> None:
        network, pulse, asked = MemoryNetwork(), Pulse(), 0
        lost: list[bool] = []

        async def checked() -> None:
            await check(network.node(B), pulse, A)
            lost.append(pulse.lost(A))

        async def handle(stream: Stream) -> None:
            nonlocal asked
            asked += 1
            if asked <= 3:
                await trio.sleep_forever()
            while True:
                await stream.send(encode(Reply(decode(await stream.receive(), Request).token)))

        async with trio.open_nursery() as nursery:
            await nursery.start(network.node(A).serve, names.PING, handle)
            async with trio.open_nursery() as checking:
                for _ in range(3):
                    checking.start_soon(checked)
            assert lost == [False] * 3
            assert asked == 6
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def complaints(*chains: tuple[Stop, ...], number: int = 1) -> Complaints:
    heard = Complaints()
    heard.planned(Plan(number=number, layers=6, chains=chains))
    return heard


def of(accused: str, plan: int = 1) -> Complaint:
    return Complaint(plan=plan, accused=accused, reason="silent")


def test_only_stops_of_a_chain_of_the_plan_can_complain_of_stops_of_that_chain() -> None:
    heard = complaints(chain_of(A, B), chain_of(C, D))
    assert heard.hear(E, of(B), 0.0) == "complaint-stranger"
    assert heard.hear(C, of(B), 0.0) == "complaint-stranger"
    assert heard.hear(A, of(A), 0.0) == "complaint-stranger"
    assert heard.hear(A, of(B, plan=0), 0.0) == "complaint-stale"
    assert heard.hear(A, of(B, plan=2), 0.0) == "complaint-stale"
    assert heard.parted(0.0) == frozenset()
    assert heard.hear(A, of(B), 0.0) is None
    assert heard.parted(0.0) == {pair(A, B)}


def test_who_complains_of_the_plan_before_is_heard_and_not_of_older_ones() -> None:
    heard = complaints(chain_of(A, B, C))
    heard.planned(Plan(number=2, layers=6, chains=(chain_of(A, C),)))
    assert heard.hear(C, of(B), 0.0) is None
    heard.planned(Plan(number=3, layers=6, chains=(chain_of(A, C),)))
    assert heard.hear(A, of(B), 0.0) == "complaint-stale"


def test_a_liar_parts_itself_from_others_and_moves_nobody_else() -> None:
    heard = complaints(chain_of(A, B, C))
    for innocent in (B, C, B, C):
        assert heard.hear(A, of(innocent), 0.0) is None
    assert heard.parted(0.0) == {pair(A, B), pair(A, C)}
    assert not heard.agreed(B, 0.0)
    assert not heard.agreed(C, 0.0)


def test_two_accusers_agree_within_a_minute() -> None:
    heard = complaints(chain_of(A, B, C))
    heard.hear(A, of(B), 0.0)
    heard.hear(C, of(B), AGREEING_S - 1.0)
    assert heard.agreed(B, AGREEING_S - 1.0)
    assert not heard.agreed(B, AGREEING_S + 1.0)


def test_two_are_parted_for_longer_each_time_but_the_same_trouble_counts_once() -> None:
    heard = complaints(chain_of(A, B))
    for at in (0.0, 1.0):
        assert heard.hear(A if at else B, of(B if at else A), at) is None
    assert heard.parted(PARTED_S - 1.0) == {pair(A, B)}
    assert heard.parted(PARTED_S) == frozenset()
    heard.hear(A, of(B), 100.0)
    assert heard.parted(100.0 + 2 * PARTED_S - 1.0) == {pair(A, B)}
    assert heard.parted(100.0 + 2 * PARTED_S) == frozenset()


def test_a_flood_of_complaints_is_refused() -> None:
    heard = complaints(chain_of(A, B, C))
    said = [heard.hear(A, of(B), float(second)) for second in range(20)]
    assert said == [None] * COMPLAINTS_A_MINUTE + ["complaint-flood"] * (20 - COMPLAINTS_A_MINUTE)
    assert heard.hear(C, of(B), 20.0) is None
    assert heard.hear(A, of(B), 70.0) is None


# -- whom a stop blames -----------------------------------------------------------------------------------------------

WELL = Pong(0.001)


def trouble(reason: str, named: str | None = None, told_by: str | None = None, **changes: object) -> Trouble:
    given = {"plan": 1, "failure": Failure(reason=reason, peer=named), "told_by": told_by}
    return Trouble(chain_of(A, B, C), **(given | changes))  # type: ignore[arg-type]


def test_who_does_not_answer_is_to_blame_whatever_was_told() -> None:
    assert blame(A, trouble("lost", B, told_by=B), {B: WELL, C: None}) == (C, "no-answer")
    assert blame(A, trouble("silent"), {B: None, C: WELL}) == (B, "no-answer")


def test_a_step_that_hangs_is_to_blame_for_silence_only() -> None:
    hung = {B: WELL, C: Pong(0.001, busy_s=9.0)}
    assert blame(A, trouble("silent"), hung) == (C, "stuck")
    assert blame(A, trouble("stalled", C, told_by=C), hung) == (C, "stuck")
    assert blame(A, trouble("lost", B), hung) is None


def test_an_accident_has_to_come_twice_and_garbage_only_once() -> None:
    well = {B: WELL, C: WELL}
    assert blame(A, trouble("lost", B), well) is None
    assert blame(A, trouble("lost", B, times=2), well) == (B, "lost")
    assert blame(A, trouble("bad-frame", C), well) == (C, "bad-frame")
    assert blame(A, trouble("engine", C, told_by=C, times=2), well) == (C, "engine")
    assert blame(A, trouble("garbage"), well) == (B, "garbage")  # one of them: it shows in other company


def test_what_is_heard_of_a_third_peer_is_not_believed() -> None:
    well = {B: WELL, C: WELL}
    for reason in ("garbage", "engine", "lost"):
        assert blame(A, trouble(reason, C, told_by=B, times=3), well) is None
        assert blame(A, trouble(reason, C, told_by=B, times=4), well) == (B, reason)  # whoever says it all the time
    assert blame(A, trouble("lost", E, told_by=B), well) is None
    assert blame(A, trouble("garbage", A, told_by=C), well) is None
    assert blame(A, trouble("garbage", A, told_by=C, times=2), well) == (C, "garbage")


def test_nobody_is_to_blame_for_a_plan_that_changed_or_a_peer_that_loads() -> None:
    for reason in ("closed", "superseded", "not-allowed", "left"):
        assert blame(A, trouble(reason, B, times=9), {B: None, C: WELL}) is None
    late = trouble("unreachable", B, times=9)
    assert blame(A, late, {B: WELL, C: WELL}) is None
    assert blame(A, trouble("unreachable", B, times=9, ready=frozenset({B})), {B: WELL}) == (B, "unreachable")
    assert blame(A, trouble("loading", C, told_by=B, times=9, ready=frozenset({B})), {B: WELL, C: WELL}) is None
    assert blame(A, trouble("loading", B, times=9, ready=frozenset({B})), {B: WELL}) == (B, "loading")
    assert blame(A, trouble("stalled", A), {B: WELL, C: WELL}) is None  # it was us


# -- the leader -------------------------------------------------------------------------------------------------------


def presence_of(identity: Identity, network: MemoryNetwork) -> Presence:
    node, border = network.node(identity.peer_id), Border()
    sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
    record = RoleRecord(role="inference", software="test")
    swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=lambda: record)
    return Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, record)  # type: ignore[arg-type]


def manifest(**changes: object) -> RunManifest:
    given = {
        "swarm": "s", "model": "no such model", "tokenizer_hash": bytes(32), "layers": 6, "vocabulary": 32,
        "trainers": (TRAINER.peer_id,), "group_size": 4, "sampling": Sampling(max_new_tokens=24),
    }  # fmt: skip
    return RunManifest(**(given | changes))  # type: ignore[arg-type]


class Led:
    """A leader, and peers that answer its pings while they are `well`."""

    def __init__(self, *peers: str, holds: int = 1) -> None:
        made = manifest(layers=2)
        self.run = Run(made, made.run_id(), TRAINER.peer_id, 0.0)
        self.network = MemoryNetwork()
        self.presence = presence_of(TRAINER, self.network)
        self.presence.swarm.join(self.run)
        self.holds = holds
        self.well: dict[str, trio.CancelScope] = {}
        self.peers = peers

    def record(self) -> RoleRecord:
        capacity = Capacity(max_layers=self.holds)
        return RoleRecord(role="inference", software="x", run_id=self.run.run_id, capacity=capacity)

    async def answer(self, peer: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.CancelScope() as self.well[peer]:
            await serve_ping(self.network.node(peer), float, task_status=task_status)

    async def start(self, nursery: trio.Nursery) -> None:
        swarm = self.presence.swarm
        swarm.members = {peer: Member(peer, self.record(), 0.0) for peer in self.peers}
        for peer in self.peers:
            await nursery.start(self.answer, peer)
        nursery.start_soon(lead, self.presence, self.run, Standing())

    async def until(self, condition) -> Plan:  # type: ignore[no-untyped-def]
        swarm = self.presence.swarm
        with trio.fail_after(600):
            while swarm.plan is None or not condition(swarm.plan):
                await swarm.changed()
        return swarm.plan

    async def complain(self, accuser: Identity, accused: str, plan: int | None = None) -> None:
        assert self.presence.swarm.plan is not None
        said = Complaint(plan=plan or self.presence.swarm.plan.number, accused=accused, reason="silent")
        sealer = Sealer(accuser.public_key, accuser.sign, time.time_ns() // 1000)
        async with self.network.node(accuser.peer_id).open(TRAINER.peer_id, names.COMPLAIN) as stream:
            await stream.send(sealer.seal(COMPLAINT, self.run.run_id, said, time.time()))


def identity_of(peer: str) -> Identity:
    return next(identity for identity in PEERS.values() if identity.peer_id == peer)


def placed(plan: Plan) -> set[str]:
    return {stop.peer for chain in plan.chains for stop in chain}


def test_who_stops_answering_is_replaced_by_who_stands_by_and_planned_in_again_later() -> None:
    async def main() -> None:
        led = Led(A, B, C)
        async with trio.open_nursery() as nursery:
            await led.start(nursery)
            first = await led.until(lambda plan: bool(plan.chains) and len(plan.standby) == 1)
            (ready,) = first.standby
            lost = next(stop.peer for stop in first.chains[0] if stop.span == ready.span)
            led.well[lost].cancel()
            second = await led.until(lambda plan: plan.chain_of(ready.peer) is not None)
            assert lost not in placed(second)
            assert [stop.span for stop in second.chains[0]] == [stop.span for stop in first.chains[0]]
            await nursery.start(led.answer, lost)
            third = await led.until(lambda plan: plan.span_of(lost) is not None)
            assert third.chains == second.chains
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_complaint_parts_two_at_once_and_the_accused_stays_if_it_answers() -> None:
    async def main() -> None:
        led = Led(A, B, C)
        async with trio.open_nursery() as nursery:
            await led.start(nursery)
            first = await led.until(lambda plan: bool(plan.chains) and len(plan.standby) == 1)
            one, other = (stop.peer for stop in first.chains[0])
            await led.complain(identity_of(one), other)
            second = await led.until(lambda plan: plan.number > first.number)
            assert len(placed(second) & {one, other}) == 1
            assert placed(second) | {stop.peer for stop in second.standby} <= {A, B, C}
            assert len(second.chains) == 1
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_two_that_complain_stay_together_where_nobody_else_could_make_a_chain() -> None:
    async def main() -> None:
        led = Led(A, B)
        async with trio.open_nursery() as nursery:
            await led.start(nursery)
            first = await led.until(lambda plan: bool(plan.chains))
            one, other = (stop.peer for stop in first.chains[0])
            await led.complain(identity_of(one), other)
            await trio.sleep(20.0)
            assert led.presence.swarm.plan == first
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_crowd_of_peers_that_wait_costs_the_leader_no_links() -> None:
    """Anybody may announce as many as records are looked at; each look would price each pair of them, both ways."""

    async def main() -> None:
        led = Led()
        crowd = [from_seed(number.to_bytes(32, "big")).peer_id for number in range(PEERS_MAX + 40)]
        record = msgspec.structs.replace(led.record(), reach="relayed")
        led.presence.swarm.members = {peer: Member(peer, record, 0.0) for peer in crowd}
        leader = _Leader(led.presence, led.run, Standing())
        seen, waiting = leader._look(Workload(layers=2, rows=4), 0.0)
        assert waiting == 40
        assert {peer for pair in seen.links.known for peer in pair} == seen.devices.keys()

    trio.run(main)


def test_complaints_of_strangers_are_counted_and_change_nothing() -> None:
    async def main() -> None:
        led = Led(A, B, C)
        async with trio.open_nursery() as nursery:
            await led.start(nursery)
            first = await led.until(lambda plan: bool(plan.chains) and len(plan.standby) == 1)
            inside, standby = first.chains[0][0].peer, first.standby[0].peer
            await led.complain(identity_of(standby), inside)
            await led.complain(identity_of(E), inside)
            await led.complain(identity_of(inside), standby)
            await led.complain(identity_of(inside), first.chains[0][1].peer, plan=1)
            for data in (b"", b"\xff" * 64, bytes(5000)):
                async with led.network.node(E).open(TRAINER.peer_id, names.COMPLAIN) as stream:
                    await stream.send(data)
            async with led.network.node(E).open(TRAINER.peer_id, names.COMPLAIN):
                await trio.sleep(30.0)
            assert led.presence.swarm.plan == first
            assert dict(led.presence.border.refused) == {
                "complaint-stranger": 3, "complaint-stale": 1, "malformed": 2, "oversized": 1, "no-request": 1,
            }  # fmt: skip
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_strangers_that_hold_streams_keep_no_complaint_out() -> None:
    async def main() -> None:
        led = Led(A, B, C)
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            await led.start(nursery)
            first = await led.until(lambda plan: bool(plan.chains) and len(plan.standby) == 1)
            one, other = (stop.peer for stop in first.chains[0])
            for number in range(12):
                idle = led.network.node(str(number)).open(TRAINER.peer_id, names.COMPLAIN)
                await stack.enter_async_context(idle)
            await led.complain(identity_of(one), other)
            await led.until(lambda plan: plan.number > first.number)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# -- groups that outlive their ring -----------------------------------------------------------------------------------

V0, V1, V9 = (PolicyVersion(epoch=0, step=step) for step in (0, 1, 9))
LIMITS = ChainLimits(lanes=8, rows=16, positions=256, hop_timeout_s=10.0, open_timeout_s=10.0)


class Dying(MemoryStage):
    """A stage that fails for good at its step number `at`."""

    def __init__(self, span: Span, at: int) -> None:
        super().__init__(span)
        self.left = at

    def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("out of memory")
        return super().forward(lane, rows, positions, inputs)


def whole() -> list[MemoryStage]:
    return [MemoryStage(Span(start=0, end=6, layers=6))]


def dying(at: int) -> list[MemoryStage]:
    return [MemoryStage(Span(start=0, end=2, layers=6)), Dying(Span(start=2, end=6, layers=6), at)]


class Making:
    """A peer that makes groups with the rings that a test opens for it."""

    def __init__(self, folder, **changes: object) -> None:  # type: ignore[no-untyped-def]
        made = manifest(**changes)
        self.run = Run(made, made.run_id(), TRAINER.peer_id, 0.0)
        self.network = MemoryNetwork()
        self.presence = presence_of(PEERS["A"], self.network)
        prompts = SimpleNamespace(ids=lambda index: (1 + index % 7, 2))
        self.head = Head(self.presence, self.run, prompts, Counter(folder / "counter"))  # type: ignore[arg-type]
        self.latest = V0
        self.store = Store(folder / "blobs", 1 << 20)

    def driver(self, ring: MemoryRing, *, exclusive: bool = False) -> ChainDriver:
        return open_chain(ring.ring(lanes=2, exclusive=exclusive), ring.hosts[0], ring.servers[0], canary=False)

    async def make(self) -> RolloutGroup:
        with trio.fail_after(30):
            return await self.head.make(lambda: self.latest)


def test_a_group_goes_on_in_the_next_ring_with_its_counter_and_the_very_same_tokens(tmp_path) -> None:
    async def undisturbed() -> RolloutGroup:
        making = Making(tmp_path / "one")
        async with memory_ring(whole(), version=V0, limits=LIMITS) as ring, making.driver(ring) as driver:
            with making.head.using(driver):
                return await making.make()

    async def disturbed() -> RolloutGroup:
        making, made, finished = Making(tmp_path / "other"), [], trio.Event()
        async with trio.open_nursery() as nursery:

            async def make() -> None:
                made.append(await making.make())
                finished.set()

            nursery.start_soon(make)
            for at in (6, 9):  # two rings that fail, one after the other
                async with memory_ring(dying(at), version=V0, limits=LIMITS) as ring, making.driver(ring) as driver:
                    with making.head.using(driver):
                        await driver.failed.wait()
            assert made == []
            async with memory_ring(whole(), version=V0, limits=LIMITS) as ring, making.driver(ring) as driver:
                with making.head.using(driver):
                    await finished.wait()
        assert (making.head.made, making.head.resumed, making.head.dropped) == (1, 2, 0)
        return made[0]

    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    one, other = trio.run(undisturbed), trio.run(disturbed)
    assert (one.counter, one.prompt_index) == (other.counter, other.prompt_index)
    assert [(each.tokens, each.logprobs, each.finish, each.segments) for each in one.samples] == [
        (each.tokens, each.logprobs, each.finish, each.segments) for each in other.samples
    ]


def test_what_is_too_old_when_the_next_ring_opens_is_dropped_whole_and_counted(tmp_path) -> None:
    async def main() -> None:
        making = Making(tmp_path, max_lag=4)
        async with trio.open_nursery() as nursery:

            async def make() -> None:
                with pytest.raises(GroupDropped, match="older than the run allows"):
                    await making.make()
                dropped.set()

            nursery.start_soon(make)
            async with memory_ring(dying(6), version=V0, limits=LIMITS) as ring, making.driver(ring) as driver:
                with making.head.using(driver):
                    await driver.failed.wait()
            making.latest = V9
            async with memory_ring(whole(), version=V9, limits=LIMITS) as ring, making.driver(ring) as driver:
                with making.head.using(driver):
                    await dropped.wait()
                    assert (making.head.made, making.head.dropped) == (0, 1)
                    assert (await making.make()).counter == 1  # and work goes on

    dropped = trio.Event()
    trio.run(main)


@pytest.mark.parametrize("version", [V0, V1])
def test_a_slot_is_answered_by_one_version_whichever_rings_it_takes(tmp_path, version: PolicyVersion) -> None:
    async def main() -> None:
        making, made, finished = Making(tmp_path, protocol="sequential"), [], trio.Event()
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                with trio.fail_after(30):
                    made.append(await making.head.answer(Slot(step=1, slot=0), version))
                finished.set()

            nursery.start_soon(answer)
            for stages in (dying(6), whole()):
                async with (
                    memory_ring(stages, version=version, limits=LIMITS) as ring,
                    making.driver(ring, exclusive=True) as driver,
                ):
                    with making.head.using(driver):
                        await (driver.failed if isinstance(stages[-1], Dying) else finished).wait()
        assert {segment.version for sample in made[0].samples for segment in sample.segments} == {version}

    trio.run(main)


def test_the_groups_of_a_ring_that_failed_are_finished_first_and_each_number_is_delivered_once(tmp_path) -> None:
    async def main() -> None:
        making = Making(tmp_path, max_lag=4)
        feed = SimpleNamespace(version=V0)
        pusher = Pusher(making.presence, making.run, making.head, feed, making.store)  # type: ignore[arg-type]
        trainer = presence_of(TRAINER, making.network)
        counters: list[int] = []
        async with trio.open_nursery() as nursery, trainer.gossip.subscribe(names.rollout_topic("s")) as messages:
            nursery.start_soon(pusher.run)
            async with memory_ring(dying(12), version=V0, limits=LIMITS) as ring, making.driver(ring) as driver:
                with making.head.using(driver):
                    await driver.failed.wait()
            async with memory_ring(whole(), version=V0, limits=LIMITS) as ring, making.driver(ring) as driver:
                with making.head.using(driver), trio.fail_after(30):
                    while len(counters) < 40:
                        data = (await messages.receive()).data
                        opened = trainer.border.open(data, ROLLOUT, making.run.run_id, time.time())
                        assert isinstance(opened, Opened)
                        counters.append(opened.payload.counter)
            nursery.cancel_scope.cancel()
        assert making.head.resumed > 0
        assert making.head.dropped == 0
        assert len(set(counters)) == len(counters)
        assert set(range(20)) <= set(counters)

    trio.run(main)


def test_a_call_without_any_ring_is_told_so_in_the_end(tmp_path) -> None:
    async def main() -> None:
        making = Making(tmp_path, protocol="sequential")
        pulls = Pulls(making.presence, making.run, making.head)
        request = SimpleNamespace(version=V0, slots=(Slot(step=1, slot=0),))
        with pytest.raises(ChainError, match="no chain was open"):
            await pulls._answer(SimpleNamespace(), request)  # type: ignore[arg-type]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.2))


def test_strangers_that_hold_streams_keep_no_trainer_from_calling(tmp_path) -> None:
    async def main() -> None:
        making = Making(tmp_path, protocol="sequential")
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            nursery.start_soon(Pulls(making.presence, making.run, making.head).run)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(12):
                idle = making.network.node(str(number)).open(A, names.PULL)
                await stack.enter_async_context(idle)
            async with making.network.node(TRAINER.peer_id).open(A, names.PULL) as call:
                await call.send(b"no envelope")
                assert b"malformed" in await call.receive()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_stops_at_different_versions_are_brought_together_before_anything_is_made(tmp_path) -> None:
    async def main() -> None:
        other = MemoryStage(Span(start=0, end=6, layers=6), seed=2)
        change = {name: TensorUpdate(index=None, values=bits) for name, bits in other.tensors().items()}
        stages = [MemoryStage(Span(start=0, end=2, layers=6)), MemoryStage(Span(start=2, end=6, layers=6))]
        making = Making(tmp_path)
        async with memory_ring(stages, version=V0, releases={V1: change}, limits=LIMITS) as ring:
            async with ring.hosts[1].turns.alone() as turn:  # as one that stood by
                await ring.hosts[1].switch(turn, V1)
            async with making.driver(ring) as driver:
                assert driver.versions == (V0, V1)
                with trio.fail_after(10):
                    await bring_together(driver, SimpleNamespace())  # type: ignore[arg-type]
                assert driver.version == V1
                with making.head.using(driver):
                    making.latest = V1
                    assert len((await making.make()).samples) == 4

    trio.run(main)
