"""While its trainer is away a head makes what can still be used, and no more; it goes on at once when it is back."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import trio
import trio.testing

from echo_node.outbox import HELD_MAX_BYTES, SILENT_S, Outbox, usable_groups
from echo_node.produce import Counter, Head
from echo_node.push import Pusher
from echo_p2p.chain.group import GroupRequest
from echo_p2p.config import NetworkConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run, Swarm
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import ROLLOUT, Border, Opened, Sealer
from echo_protocols.peer import RoleRecord
from echo_protocols.rollout import Sample, Segment
from echo_protocols.run import Algorithm, RunManifest, Sampling
from echo_protocols.values import PolicyVersion

TRAINER, WORKER = from_seed(b"t" * 32), from_seed(b"w" * 32)
V3, V4, NEXT_EPOCH = (PolicyVersion(epoch=epoch, step=step) for epoch, step in ((0, 3), (0, 4), (1, 3)))
AT_ONCE = 3


def manifest(**changes: object) -> RunManifest:
    given = {
        "swarm": "s", "model": "tiny", "tokenizer_hash": bytes(32), "layers": 4, "vocabulary": 64, "group_size": 2,
        "groups_per_step": 2, "max_lag": 3, "trainers": (TRAINER.peer_id,), "sampling": Sampling(max_new_tokens=8),
    }  # fmt: skip
    return RunManifest(**(given | changes))


# -- the rule ----------------------------------------------------------------------------------------------------------


def filled(outbox: Outbox, now: float) -> list[bytes]:
    """Groups are begun and finished, as long as that is allowed; at most 100."""
    made: list[bytes] = []
    while outbox.may_begin(now) and len(made) < 100:
        outbox.begin()
        made.append(bytes([len(made)]))
        outbox.put(made[-1], now)
        outbox.ended()
    return made


def test_what_can_be_used_is_the_groups_of_each_step_within_the_lag_bound() -> None:
    assert usable_groups(manifest()) == 2 * 4
    assert usable_groups(manifest(algorithm=Algorithm(name="dapo"))) == 4 * 2 * 4


def test_a_trainer_that_renews_its_record_is_no_reason_to_wait() -> None:
    outbox = Outbox(8)
    for now in range(0, 200, 20):
        outbox.note({("t", 1.0): float(now)}, V3, now)
        assert len(filled(outbox, now)) == 100
        assert outbox.held <= 8


def test_a_silent_trainer_gets_as_many_groups_as_the_bound_and_the_oldest_stay() -> None:
    outbox = Outbox(8)
    outbox.note({("t", 1.0): 5.0}, V3, 0.0)
    outbox.note({("t", 1.0): 5.0}, V3, SILENT_S + 1)  # the record is there, but it is the same one
    made = filled(outbox, SILENT_S + 1)
    assert len(made) == 8
    is_sign, again = outbox.note({("t", 2.0): 60.0}, V3, 100.0)  # a new process, which may not listen yet
    assert not is_sign
    assert not outbox.may_begin(100.0)
    is_sign, again = outbox.note({("t", 2.0): 60.0}, NEXT_EPOCH, 101.0)
    assert is_sign
    assert list(again) == made
    assert outbox.may_begin(101.0)


def test_what_is_under_way_counts_as_held() -> None:
    outbox = Outbox(2)
    outbox.note({}, V3, 0.0)
    outbox.begin()
    assert outbox.may_begin(0.0)
    outbox.begin()
    assert not outbox.may_begin(0.0)
    outbox.ended()  # dropped
    assert outbox.may_begin(0.0)


def test_what_is_held_is_bounded_in_bytes_too() -> None:
    outbox = Outbox(1000)
    outbox.note({}, V3, 0.0)
    large = bytes(HELD_MAX_BYTES // 4 + 1)
    for _ in range(4):
        assert outbox.may_begin(0.0)
        outbox.put(large, 0.0)
    assert not outbox.may_begin(0.0)
    outbox.note({("t", 1.0): 1.0}, V4, 1.0)
    for _ in range(9):
        outbox.put(large, 1.0)
    assert outbox.held == 3


def test_nothing_is_sent_twice_to_a_trainer_that_was_there_all_the_time() -> None:
    outbox = Outbox(8)
    outbox.note({("t", 1.0): 5.0}, V3, 0.0)
    filled(outbox, 1.0)
    assert outbox.note({("t", 1.0): 25.0}, V3, 20.0) == (True, ())
    assert outbox.held == 0
    filled(outbox, 21.0)
    assert outbox.note({("t", 1.0): 25.0}, V4, 22.0) == (True, ())
    assert outbox.held == 0


def test_a_trainer_that_could_not_be_seen_for_a_while_gets_all_again() -> None:
    outbox = Outbox(8)
    outbox.note({("t", 1.0): 5.0}, V3, 0.0)
    outbox.note({}, V3, 1.0)
    made = filled(outbox, 1.0)
    assert len(made) == 8
    assert outbox.note({("t", 1.0): 25.0}, V3, 20.0) == (True, tuple(made))


def test_a_new_process_that_releases_nothing_is_believed_after_a_while() -> None:
    outbox = Outbox(8)
    outbox.note({("t", 1.0): 5.0}, V3, 0.0)
    outbox.note({("t", 2.0): 9.0}, V3, 9.0)
    made = filled(outbox, 60.0)
    assert outbox.note({("t", 2.0): 11.0}, V3, 61.0) == (False, ())  # it only has more to say
    assert outbox.note({("t", 2.0): 29.0}, V3, 62.0) == (True, tuple(made))


# -- the head ----------------------------------------------------------------------------------------------------------


class Quick:
    """A ring that makes groups of any version, several at once."""

    def __init__(self) -> None:
        self.version, self.engine, self.failed, self.asked = V3, "test", trio.Event(), 0

    def groups_at_once(self, group_size: int) -> int:
        return AT_ONCE

    async def generate(self, request: GroupRequest, on_token=None, so_far=None) -> tuple[Sample, ...]:
        self.asked += 1
        await trio.sleep(5.0)
        segments = (Segment(start=0, version=self.version),)
        one = Sample(tokens=(1,) * 8, logprobs=(-1.0,) * 8, finish="length", segments=segments)
        return (one,) * request.samples


class Member:
    """A node on the memory network that renews its records like any other."""

    def __init__(self, network: MemoryNetwork, identity: Identity, run: Run, role: str, started_at: float) -> None:
        node, border = network.node(identity.peer_id), Border()
        sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
        self.record = RoleRecord(role=role, software="test", run_id=run.run_id, started_at=started_at)
        describe = lambda: msgspec.structs.replace(self.record)  # noqa: E731
        swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=describe)
        swarm.join(run)
        self.presence = Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, self.record)  # type: ignore[arg-type]


class Scene:
    """A head with a ring, and a trainer that comes and goes."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        made = manifest()
        self.run = Run(made, made.run_id(), TRAINER.peer_id, 0.0)
        self.network = MemoryNetwork(now=lambda: 1e9 + trio.current_time())
        self.worker = Member(self.network, WORKER, self.run, "inference", 0.0)
        self.driver, self.feed = Quick(), SimpleNamespace(version=V3)
        prompts = SimpleNamespace(ids=lambda index: (1, 2))
        head = Head(self.worker.presence, self.run, prompts, Counter(folder / "counter"))  # type: ignore[arg-type]
        store = Store(folder / "blobs", 1 << 20)
        self.pusher = Pusher(self.worker.presence, self.run, head, self.feed, store)  # type: ignore[arg-type]
        self.head, self._nursery = head, nursery

    @asynccontextmanager
    async def trainer(self, started_at: float) -> AsyncIterator[set[int]]:
        """A process of the trainer; the numbers of the groups that it hears of."""
        heard: set[int] = set()
        trainer = Member(self.network, TRAINER, self.run, "trainer", started_at)

        async def listen(*, task_status: trio.TaskStatus[None]) -> None:
            async with trainer.presence.gossip.subscribe(names.rollout_topic("s")) as messages:
                task_status.started()
                async for message in messages:
                    opened = trainer.presence.border.open(message.data, ROLLOUT, self.run.run_id, time.time())
                    assert isinstance(opened, Opened)
                    heard.add(opened.payload.counter)

        async with trio.open_nursery() as nursery:
            await nursery.start(listen)
            nursery.start_soon(trainer.presence.swarm.run)
            yield heard
            nursery.cancel_scope.cancel()

    async def until(self, trainers: int) -> None:
        while len(self.worker.presence.swarm.trainers()) != trainers:
            await self.worker.presence.swarm.changed()

    def release(self, version: PolicyVersion) -> None:
        self.feed.version = self.driver.version = version
        self.worker.presence.swarm.wake()


def test_a_head_whose_trainer_left_stops_and_delivers_when_a_new_process_releases(tmp_path: Path) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            scene = Scene(tmp_path, nursery)
            nursery.start_soon(scene.worker.presence.swarm.run)
            with trio.fail_after(1e6), scene.head.using(scene.driver):  # type: ignore[arg-type]
                async with scene.trainer(1.0) as heard:
                    await scene.until(trainers=1)
                    nursery.start_soon(scene.pusher.run)
                    await trio.sleep(80)
                    assert len(heard) > 2 * usable_groups(scene.run.manifest)
                await scene.until(trainers=0)
                await trio.sleep(80)
                asked = scene.driver.asked
                await trio.sleep(40)
                assert scene.driver.asked == asked  # it waits
                assert len(heard) <= asked <= len(heard) + usable_groups(scene.run.manifest) + AT_ONCE
                assert scene.pusher.stalled

                async with scene.trainer(2.0) as heard_now:
                    await scene.until(trainers=1)
                    scene.release(NEXT_EPOCH)
                    await trio.sleep(30)
                    assert set(range(asked - usable_groups(scene.run.manifest), asked)) <= heard_now
                    assert scene.driver.asked > asked
                    assert not scene.pusher.stalled
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))
