"""What the trainer takes from the network: nothing that a peer sends is trained on unchecked, or stops the others."""

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from echo_node.buffer_gather import BufferGather
from echo_node.gather import enough, largest_group_bytes
from echo_node.learning import Graded, grade
from echo_node.pull_gather import PullGather
from echo_p2p.config import NetworkConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.base import Stream
from echo_p2p.net.blobs import blob_hash, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.presence import Presence
from echo_p2p.rl.algorithms import step_size
from echo_p2p.rl.buffer import ReplayBuffer
from echo_p2p.swarm import Member, Run, Swarm
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, PULL, ROLLOUT, Border, Sealer
from echo_protocols.peer import Plan, RoleRecord, Stop
from echo_protocols.rollout import LargeRollout, RolloutGroup, Sample, Segment, Slot
from echo_protocols.run import Admission, Algorithm, RunManifest, Sampling
from echo_protocols.sync import Lineage, PullReply
from echo_protocols.uniform import prompt_index
from echo_protocols.values import PolicyVersion, Span, decode

TRAINER, WORKER, OTHER = from_seed(b"t" * 32), from_seed(b"w" * 32), from_seed(b"o" * 32)
NOW_VERSION = PolicyVersion(epoch=1, step=5)


def manifest(**changes: object) -> RunManifest:
    given = {
        "swarm": "s", "model": "tiny", "tokenizer_hash": bytes(32), "layers": 4, "vocabulary": 64,
        "stop_tokens": (3,), "group_size": 2,
        "groups_per_step": 2, "max_lag": 2, "trainers": (TRAINER.peer_id,), "sampling": Sampling(max_new_tokens=8),
    }  # fmt: skip
    return RunManifest(**(given | changes))


class ALength:
    """A task that scores an answer by its length; `!` is more than it can bear."""

    name = "a-length"

    def score(self, index: int, text: str) -> float:
        if "!" in text:
            raise RecursionError("too deep")
        return len(text) / 8


class OneLetter:
    """Prompts of a task whose tokens are letters."""

    task = ALength()

    def text(self, tokens: tuple[int, ...]) -> str:
        return "".join("!" if token == 33 else "x" for token in tokens)


def presence_of(identity: Identity, network: MemoryNetwork) -> Presence:
    node, border = network.node(identity.peer_id), Border()
    sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
    record = RoleRecord(role="trainer", software="test")
    swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=lambda: record)
    return Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, record)  # type: ignore[arg-type]


def sample(version: PolicyVersion = NOW_VERSION, **changes: object) -> Sample:
    given = {
        "tokens": (1, 2, 3), "logprobs": (-1.0, -0.5, 0.0), "finish": "stop",
        "segments": (Segment(start=0, version=version),),
    }  # fmt: skip
    return Sample(**(given | changes))


def group(
    run: RunManifest, worker: str, counter: int = 0, *, slot: Slot | None = None, **changes: object
) -> RolloutGroup:
    place = ("slot", slot.step, slot.slot) if slot else (worker, counter)
    given = {
        "counter": counter, "slot": slot, "samples": (sample(), sample()), "sampling_hash": run.sampling.hash(),
        "engine": "test", "prompt_index": prompt_index(run.randomness(), place, run.prompts),
    }  # fmt: skip
    return RolloutGroup(**(given | changes))


class Scene:
    """A trainer that gathers, and a worker on the same network."""

    def __init__(self, run: RunManifest) -> None:
        self.network = MemoryNetwork()
        self.trainer, self.worker = presence_of(TRAINER, self.network), presence_of(WORKER, self.network)
        self.run = Run(run, run.run_id(), TRAINER.peer_id, 0.0)
        lineage = Lineage({1: PolicyVersion(epoch=0, step=4)})
        self.learner = SimpleNamespace(version=NOW_VERSION, lineage=lineage, prompts=OneLetter())
        self.buffer = ReplayBuffer(":memory:", max_groups=64, max_bytes=1 << 20)
        self.gather = BufferGather(self.trainer, self.run, self.learner, self.buffer)  # type: ignore[arg-type]

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.trainer.border.refused)

    def sealed(self, made: RolloutGroup, by: Presence | None = None, run_id: bytes | None = None) -> bytes:
        return (by or self.worker).sealer.seal(ROLLOUT, run_id or self.run.run_id, made, time.time())

    async def publish(self, data: bytes, topic: Callable[[str], str] = names.rollout_topic) -> None:
        await self.worker.gossip.publish(topic("s"), data)

    async def point_to(self, data: bytes, by: Presence | None = None) -> None:
        sender = by or self.worker
        pointer = LargeRollout(blob=blob_hash(data), size_bytes=len(data))
        sealed = sender.sealer.seal(LARGE_ROLLOUT, self.run.run_id, pointer, time.time())
        await sender.gossip.publish(names.large_rollout_topic("s"), sealed)

    async def waiting(self, count: int) -> None:
        with trio.fail_after(5):
            while self.gather.statistics.waiting_groups < count:  # noqa: ASYNC110  a thread's result has no event
                await trio.sleep(0.01)

    async def counted(self, reason: str, times: int = 1) -> None:
        with trio.fail_after(5):
            while self.refused.get(reason, 0) < times:  # noqa: ASYNC110  a counter has no event
                await trio.sleep(0.01)


@asynccontextmanager
async def gathering(run: RunManifest | None = None) -> AsyncIterator[Scene]:
    scene = Scene(run or manifest())
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.gather.run)
            await trio.testing.wait_all_tasks_blocked()
            yield scene
            nursery.cancel_scope.cancel()


async def say_nothing(stream: Stream) -> None:
    await trio.sleep_forever()


def both(**changes: object) -> dict[str, object]:
    return {"samples": (sample(**changes), sample())}


BAD = {
    "group-size": {"samples": (sample(),)},
    "sampling": {"sampling_hash": bytes(32)},
    "wrong-protocol": {"slot": Slot(step=1, slot=0)},
    "prompt-index": {"prompt_index": 7},
    "length": both(logprobs=(-1.0,)),
    "token-range": both(tokens=(1, 2, 64)),
    "logprob": both(logprobs=(-1.0, math.nan, -1.0)),
    "logprob ": both(logprobs=(-1.0, 0.1, -1.0)),
    "logprob  ": both(logprobs=(-1.0, -math.inf, -1.0)),
    "logprob   ": both(logprobs=(-1.0, -1e300, -1.0)),
    "finish": both(tokens=(1, 2, 4)),
    "segments": both(segments=(Segment(start=1, version=NOW_VERSION),)),
    "future-version": both(version=PolicyVersion(epoch=1, step=6)),
    "unknown-epoch": both(version=PolicyVersion(epoch=2, step=5)),
    "abandoned-branch": both(version=PolicyVersion(epoch=0, step=5)),
    "stale": both(version=PolicyVersion(epoch=1, step=2)),
}


def test_each_bad_rollout_is_refused_with_its_reason_and_good_ones_go_on() -> None:
    async def main() -> None:
        async with gathering() as scene:
            run, peer = scene.run.manifest, WORKER.peer_id
            for number, (reason, changes) in enumerate(BAD.items(), start=100):
                before = scene.refused.get(reason.strip(), 0)
                await scene.publish(scene.sealed(group(run, peer, number, **changes)))
                await scene.counted(reason.strip(), before + 1)
            await scene.publish(scene.sealed(group(run, peer), run_id=bytes(32)))
            await scene.counted("wrong-run")
            await scene.publish(b"\x98" + b"\x91" * 60_000)
            await scene.counted("malformed")
            assert scene.buffer.statistics().counts == {}

            good = scene.sealed(group(run, peer))
            await scene.publish(good)
            await scene.waiting(1)
            await scene.publish(good)
            await scene.counted("replayed")
            await scene.publish(scene.sealed(group(run, peer)))
            await scene.counted("duplicate")
            await scene.publish(scene.sealed(group(run, peer, 1)))
            batch = await scene.gather.next_batch()
            assert [each.group.counter for each in batch] == [0, 1]

    trio.run(main)


def dull_or_not(varies: bool) -> tuple[Sample, ...]:
    """Two samples that `ALength` rewards alike, or not."""
    return sample(), sample(tokens=(1, 3), logprobs=(-1.0, -1.0)) if varies else sample()


def test_groups_of_equal_rewards_are_looked_at_and_counted_but_not_waited_for_in_vain() -> None:
    async def main() -> None:
        run = manifest(algorithm=Algorithm(name="dapo"))
        async with gathering(run) as scene:
            for counter, varies in enumerate((False, True, False, True)):
                await scene.publish(scene.sealed(group(run, WORKER.peer_id, counter, samples=dull_or_not(varies))))
                await scene.waiting(counter + 1)
            batch = await scene.gather.next_batch()
            assert [each.varies for each in batch] == [False, True, False, True]
            assert scene.gather.refused() == {"equal-rewards": 2}
            for counter in range(4, 12):
                await scene.publish(scene.sealed(group(run, WORKER.peer_id, counter)))
            batch = await scene.gather.next_batch()
            assert [each.varies for each in batch] == [False] * 8
            assert scene.gather.refused() == {"equal-rewards": 8}

    trio.run(main)


def test_a_worker_that_the_run_does_not_admit_is_refused() -> None:
    async def main() -> None:
        async with gathering(manifest(admission=Admission(banned=(WORKER.peer_id,)))) as scene:
            await scene.publish(scene.sealed(group(scene.run.manifest, WORKER.peer_id)))
            await scene.counted("not-admitted")
            await scene.point_to(b"x")
            await scene.counted("not-admitted", 2)

    trio.run(main)


def test_what_a_scorer_can_not_bear_is_worth_nothing() -> None:
    async def main() -> None:
        async with gathering() as scene:
            for counter in range(2):
                made = group(scene.run.manifest, WORKER.peer_id, counter, **both(tokens=(33, 1, 3)))
                await scene.publish(scene.sealed(made))
            batch = await scene.gather.next_batch()
            assert [each.rewards for each in batch] == [(0.0, 3 / 8)] * 2

    trio.run(main)


def test_a_buffer_that_fails_loses_the_group_but_not_the_trainer() -> None:
    async def main() -> None:
        async with gathering() as scene:
            scene.buffer.close()
            await scene.publish(scene.sealed(group(scene.run.manifest, WORKER.peer_id)))
            await scene.counted("not-stored")
            await scene.publish(b"")
            await scene.counted("malformed")

    trio.run(main)


def test_a_large_group_comes_by_its_hash_past_workers_that_send_nothing() -> None:
    async def main() -> None:
        run = manifest(group_size=4, sampling=Sampling(max_new_tokens=4096))
        async with gathering(run) as scene, trio.open_nursery() as nursery:
            long = sample(tokens=(1,) * 4096, logprobs=(-1.0,) * 4096, finish="length")
            data = scene.sealed(group(run, WORKER.peer_id, samples=(long,) * 4))
            assert 64 << 10 < len(data) < largest_group_bytes(run)
            silent = presence_of(OTHER, scene.network)
            await nursery.start(silent.hive.serve, names.BLOB, say_nothing)
            for number in range(6):
                await scene.point_to(bytes([number]) * 100, by=silent)
            await scene.counted("too-many-large", 2)

            await nursery.start(serve_blobs, scene.worker.hive, lambda hash: data if hash == blob_hash(data) else None)
            await scene.point_to(data)
            await scene.waiting(1)
            await scene.point_to(b"not there")
            await scene.counted("unfetchable")
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_large_group_of_a_worker_that_is_busy_is_asked_for_again() -> None:
    async def main() -> None:
        run = manifest(group_size=4, sampling=Sampling(max_new_tokens=4096))
        async with gathering(run) as scene, trio.open_nursery() as nursery:
            long = sample(tokens=(1,) * 4096, logprobs=(-1.0,) * 4096, finish="length")
            data = scene.sealed(group(run, WORKER.peer_id, samples=(long,) * 4))
            asked: list[int] = []

            async def is_busy_at_first(stream: Stream) -> None:
                await stream.receive()
                asked.append(1)
                await stream.send(msgspec.msgpack.encode((0 if len(asked) == 1 else len(data), BUSY[len(asked) == 1])))
                for start in range(0, len(data) if len(asked) > 1 else 0, 1 << 16):
                    await stream.send(data[start : start + (1 << 16)])

            await nursery.start(scene.worker.hive.serve, names.BLOB, is_busy_at_first)
            await scene.point_to(data)
            await scene.waiting(1)
            assert len(asked) == 2
            nursery.cancel_scope.cancel()

    trio.run(main)


BUSY = (None, "busy")


def test_a_pointer_to_more_than_any_group_is_not_followed() -> None:
    async def main() -> None:
        async with gathering() as scene:
            pointer = LargeRollout(blob=bytes(32), size_bytes=16 << 20)
            sealed = scene.worker.sealer.seal(LARGE_ROLLOUT, scene.run.run_id, pointer, time.time())
            await scene.publish(sealed, names.large_rollout_topic)
            await scene.counted("oversized")

    trio.run(main)


NESTED = b"\x83\xa5other" + b"\x91" * 5000 + b"\xc0"


@pytest.mark.parametrize("answer", [NESTED, b"", b"\xff", msgspec.msgpack.encode(PullReply(group=b"no group")), None])
def test_a_step_is_completed_by_the_others_when_a_head_answers_nonsense(answer: bytes | None) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer = presence_of(TRAINER, network)
        honest, hostile = presence_of(WORKER, network), presence_of(OTHER, network)
        run = manifest(protocol="sequential", max_lag=0, groups_per_step=4)
        span = Span(start=0, end=4, layers=4)
        trainer.swarm.plan = Plan(
            number=1, layers=4, chains=tuple((Stop(peer=peer, span=span),) for peer in (OTHER.peer_id, WORKER.peer_id))
        )
        record = RoleRecord(role="inference", software="test")
        trainer.swarm.members = {peer: Member(peer, record, 0.0) for peer in (OTHER.peer_id, WORKER.peer_id)}
        learner = SimpleNamespace(version=NOW_VERSION, lineage=Lineage(), prompts=OneLetter())
        asked: list[int] = []

        async def answer_well(stream) -> None:
            slots = decode(decode(await stream.receive(), list)[6], PULL.type).slots
            for slot in slots:
                made = group(run, WORKER.peer_id, slot=slot)
                sealed = honest.sealer.seal(ROLLOUT, run.run_id(), made, time.time())
                await stream.send(msgspec.msgpack.encode(PullReply(group=sealed)))

        async def answer_badly(stream) -> None:
            asked.append(1)
            await stream.receive()
            if answer is None:
                await trio.sleep_forever()
            await stream.send(answer)
            await trio.sleep_forever()

        gather = PullGather(trainer, Run(run, run.run_id(), "", 0.0), learner, deadline_s=5.0)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            await nursery.start(honest.hive.serve, names.PULL, answer_well)
            await nursery.start(hostile.hive.serve, names.PULL, answer_badly)
            for _ in range(3):
                with trio.fail_after(60):
                    batch = await gather.next_batch()
                assert [each.group.slot.slot for each in batch] == [0, 1, 2, 3]
                assert {each.worker for each in batch} == {WORKER.peer_id}
            nursery.cancel_scope.cancel()
        assert len(asked) <= 3

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


VARYING_SLOTS = [{0, 3, 4, 6}, {1, 2, 3, 5, 8}, set(range(16)), set[int](), {15}]


@pytest.mark.parametrize("varying", VARYING_SLOTS)
@pytest.mark.parametrize("hurry", [0, 1])
def test_chains_give_the_step_that_the_co_located_run_would(varying: set[int], hurry: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        trainer = presence_of(TRAINER, network)
        heads = [presence_of(identity, network) for identity in (WORKER, OTHER)]
        run = manifest(protocol="sequential", max_lag=0, groups_per_step=4, algorithm=Algorithm(name="dapo"))
        span = Span(start=0, end=4, layers=4)
        names_of_heads = [head.identity.peer_id for head in heads]
        trainer.swarm.plan = Plan(number=1, layers=4, chains=tuple((Stop(peer=p, span=span),) for p in names_of_heads))
        record = RoleRecord(role="inference", software="test")
        trainer.swarm.members = {peer: Member(peer, record, 0.0) for peer in names_of_heads}
        learner = SimpleNamespace(version=NOW_VERSION, lineage=Lineage(), prompts=OneLetter())

        def answer(slot: Slot, worker: str) -> RolloutGroup:
            return group(run, worker, slot=slot, samples=dull_or_not(slot.slot in varying))

        def answering(head: Presence, delay_s: float):  # type: ignore[no-untyped-def]
            async def serve(stream: Stream) -> None:
                for slot in decode(decode(await stream.receive(), list)[6], PULL.type).slots:
                    await trio.sleep(delay_s)
                    made = answer(slot, head.identity.peer_id)
                    sealed = head.sealer.seal(ROLLOUT, run.run_id(), made, time.time())
                    await stream.send(msgspec.msgpack.encode(PullReply(group=sealed)))

            return serve

        async def ask(first: int, count: int) -> list[Graded]:
            slots = [Slot(step=6, slot=slot) for slot in range(first, first + count)]
            return [grade(learner.prompts, "here", answer(slot, "here")) for slot in slots]

        gather = PullGather(trainer, Run(run, run.run_id(), "", 0.0), learner, deadline_s=60.0)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            for number, head in enumerate(heads):
                await nursery.start(head.hive.serve, names.PULL, answering(head, 0.1 + 1.7 * (number == hurry)))
            batch = await gather.next_batch()
            nursery.cancel_scope.cancel()
        baseline = await enough(step_size(run.algorithm, 4), ask)
        assert [(each.group.slot, each.rewards) for each in batch] == [(b.group.slot, b.rewards) for b in baseline]
        assert gather.refused() == ({"equal-rewards": len(batch) - 4} if len(batch) > 4 else {})

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))
