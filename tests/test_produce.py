"""The head of a chain at work: what it publishes arrives whatever its size, and callers can't harm it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from echo_node.produce import Counter, Head
from echo_node.pulls import Pulls
from echo_node.push import Pusher
from echo_p2p.chain.group import GroupRequest
from echo_p2p.config import NetworkConfig
from echo_p2p.errors import EchoError, WeightsError
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.base import GOSSIP_MAX_BYTES, Stream
from echo_p2p.net.blobs import fetch_blob, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run, Swarm
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, PULL, ROLLOUT, Border, Opened, Sealer
from echo_protocols.peer import RoleRecord
from echo_protocols.rollout import Sample, Segment, Slot, group_fault
from echo_protocols.run import RunManifest, Sampling
from echo_protocols.sync import PullReply, PullRequest
from echo_protocols.values import PolicyVersion

TRAINER, WORKER, HOSTILE = from_seed(b"t" * 32), from_seed(b"w" * 32), from_seed(b"h" * 32)
VERSION = PolicyVersion(epoch=0, step=3)


def presence_of(identity: Identity, network: MemoryNetwork) -> Presence:
    node, border = network.node(identity.peer_id), Border()
    sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
    record = RoleRecord(role="inference", software="test")
    swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=lambda: record)
    return Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, record)  # type: ignore[arg-type]


class LongWinded:
    """A chain that fills every answer, and never switches."""

    def __init__(self) -> None:
        self.version = VERSION
        self.failed = trio.Event()
        self.engine = "test"
        self.asked = 0

    def groups_at_once(self, group_size: int) -> int:
        return 1

    async def generate(self, request: GroupRequest, on_token=None, so_far=None) -> tuple[Sample, ...]:
        self.asked += 1
        await trio.sleep(0.01)
        length = request.sampling.max_new_tokens
        segments = (Segment(start=0, version=self.version),)
        one = Sample(tokens=(1,) * length, logprobs=(-1.0,) * length, finish="length", segments=segments)
        return (one,) * request.samples

    async def switch(self, version: PolicyVersion, timeout_s: float) -> None:
        raise WeightsError(f"version {version} can't be had")


class Scene:
    def __init__(self, folder: Path, *, tokens: int, protocol: str) -> None:
        self.network = MemoryNetwork()
        self.worker, self.trainer, self.hostile = (
            presence_of(each, self.network) for each in (WORKER, TRAINER, HOSTILE)
        )
        self.manifest = RunManifest(
            swarm="s", model="tiny", tokenizer_hash=bytes(32), layers=4, vocabulary=64, group_size=4, protocol=protocol,
            trainers=(TRAINER.peer_id,), sampling=Sampling(max_new_tokens=tokens),
        )  # fmt: skip
        self.run = Run(self.manifest, self.manifest.run_id(), TRAINER.peer_id, 0.0)
        self.store = Store(folder / "blobs", 1 << 20)
        self.driver = LongWinded()
        prompts = SimpleNamespace(ids=lambda index: (1, 2), stop_tokens=frozenset())
        counter = Counter(folder / "counter")
        self.head = Head(self.worker, self.run, prompts, counter)  # type: ignore[arg-type]
        self.pulls = Pulls(self.worker, self.run, self.head)
        feed = SimpleNamespace(version=VERSION)
        self.pusher = Pusher(self.worker, self.run, self.head, feed, self.store)  # type: ignore[arg-type]

    def pull(self, by: Presence, version: PolicyVersion = VERSION, run_id: bytes | None = None) -> bytes:
        request = PullRequest(version=version, slots=(Slot(step=4, slot=0), Slot(step=4, slot=1)))
        return by.sealer.seal(PULL, run_id or self.run.run_id, request, time.time())

    async def ask(self, by: Presence, data: bytes) -> list[PullReply]:
        replies = []
        with trio.fail_after(5):
            async with by.hive.open(WORKER.peer_id, names.PULL) as stream:
                await stream.send(data)
                while len(replies) < 2 and not (replies and replies[-1].failure):
                    replies.append(msgspec.msgpack.decode(await stream.receive(), type=PullReply))
        return replies


@asynccontextmanager
async def answering(folder: Path, *, tokens: int = 8) -> AsyncIterator[Scene]:
    scene = Scene(folder, tokens=tokens, protocol="sequential")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.pulls.run)
        await trio.testing.wait_all_tasks_blocked()
        with scene.head.using(scene.driver):  # type: ignore[arg-type]
            yield scene
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("store_bytes", [1 << 20, 10])
def test_a_group_too_large_for_gossip_is_named_by_hash_and_lost_only_if_nothing_holds_it(
    tmp_path: Path, store_bytes: int
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, tokens=4000, protocol="async")
        scene.store.max_bytes = store_bytes
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_blobs, scene.worker.hive, scene.store.get)
            async with scene.trainer.gossip.subscribe(names.large_rollout_topic("s")) as messages:
                nursery.start_soon(scene.pusher.run)
                with trio.fail_after(5), scene.head.using(scene.driver):  # type: ignore[arg-type]
                    if store_bytes == 10:
                        while scene.driver.asked < 3:  # noqa: ASYNC110  goes on making groups
                            await trio.sleep(0.01)
                    else:
                        await check_large(scene, (await messages.receive()).data)
            nursery.cancel_scope.cancel()

    trio.run(main)


async def check_large(scene: Scene, message: bytes) -> None:
    pointer = scene.trainer.border.open(message, LARGE_ROLLOUT, scene.run.run_id, time.time())
    assert isinstance(pointer, Opened)
    blob = pointer.payload
    data = await fetch_blob(scene.trainer.hive, WORKER.peer_id, blob.blob, blob.size_bytes)
    assert len(data) == blob.size_bytes > GOSSIP_MAX_BYTES
    opened = scene.trainer.border.open(data, ROLLOUT, scene.run.run_id, time.time())
    assert isinstance(opened, Opened)
    assert group_fault(opened.payload, WORKER.peer_id, scene.manifest) is None


def test_only_the_trainer_gets_answers_and_each_refusal_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with answering(tmp_path) as scene:
            request = scene.pull(scene.trainer)
            assert all(reply.group for reply in await scene.ask(scene.trainer, request))
            assert scene.driver.asked == 2

            for data in (
                b"\xff",
                b"\x91" * 5000,
                request,
                scene.pull(scene.hostile),
                scene.pull(scene.trainer, run_id=bytes(32)),
            ):
                (reply,) = await scene.ask(scene.hostile, data)
                assert reply.failure
            assert scene.driver.asked == 2
            assert dict(scene.worker.border.refused) == {
                "malformed": 2, "replayed": 1, "not-a-trainer": 1, "wrong-run": 1,
            }  # fmt: skip
            older = scene.pull(scene.trainer, PolicyVersion(epoch=0, step=1))
            (reply,) = await scene.ask(scene.trainer, older)
            assert "can't be had" in reply.failure

    trio.run(main)


def test_callers_that_say_nothing_too_much_or_leave_are_dropped_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with answering(tmp_path) as scene:
            refused = scene.worker.border.refused

            async def leave(data: bytes, wait_s: float) -> None:
                async with scene.trainer.hive.open(WORKER.peer_id, names.PULL) as stream:
                    if data:
                        await stream.send(data)
                    await trio.sleep(wait_s)

            await leave(b"", 30.0)
            assert refused == {"no-request": 1}
            await leave(bytes(PULL.max_bytes + 513), 0.1)
            assert refused == {"no-request": 1, "oversized": 1}
            await leave(scene.pull(scene.trainer), 0.0)
            await trio.sleep(1.0)
            assert all(reply.group for reply in await scene.ask(scene.trainer, scene.pull(scene.trainer)))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.2))
    assert "Traceback" not in caplog.text


def test_a_caller_that_takes_no_answer_does_not_hold_the_chain_for_ever(tmp_path: Path) -> None:
    class Stuck:
        peer = TRAINER.peer_id

        async def send(self, *parts: bytes) -> None:
            await trio.sleep_forever()

        async def receive(self) -> bytes:
            return scene.pull(scene.trainer)

        async def aclose(self) -> None: ...

    scene = Scene(tmp_path, tokens=8, protocol="sequential")

    async def main() -> None:
        stuck: Stream = Stuck()
        started = trio.current_time()
        with trio.fail_after(600), scene.head.using(scene.driver):  # type: ignore[arg-type]
            await scene.pulls._on_pull(stuck)
        assert trio.current_time() - started < 120

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.2))


def test_a_counter_goes_on_over_restarts_and_says_when_it_can_not(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    counter = Counter(path)
    assert [counter.take(), counter.take()] == [0, 1]
    assert Counter(path).take() == 2
    path.write_text("two")
    with pytest.raises(EchoError, match="can't be read"):
        Counter(path)
    unwritable = Counter(tmp_path / "counter-file")
    (tmp_path / "counter-file").mkdir()
    with pytest.raises(EchoError, match="free some disk space"):
        unwritable.take()
