"""A hostile member in a swarm of real processes: it may be a nuisance, but neither stop nor steer the run."""

import json
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import psutil
import pytest
import trio

from echo_node.demo import join_address
from echo_node.fleet import Fleet, NodeProcess
from echo_node.learning import RunLog, StepRecord
from echo_p2p.config import NetworkConfig
from echo_p2p.errors import EchoError
from echo_p2p.identity import generate
from echo_p2p.presence import Presence, open_presence
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, PULL, RELEASE, ROLLOUT
from echo_protocols.hop import Open, encode
from echo_protocols.peer import Capacity, Plan, RoleRecord, Stop
from echo_protocols.release import Chunk, Release
from echo_protocols.rollout import LargeRollout, RolloutGroup, Sample, Segment, Slot
from echo_protocols.sync import LatestRelease, PullRequest
from echo_protocols.uniform import prompt_index
from echo_protocols.values import PolicyVersion, Span

pytestmark = pytest.mark.slow

PATIENCE_S = 90.0
GROWTH_MAX_BYTES = {"bootstrap": 200 << 20, "trainer": 600 << 20, "honest": 200 << 20}
"""Of resident memory. A trainer that nobody attacks goes up and down by 450 MiB as torch frees what it used."""
LORIS = 40
OPENS = 200


def test_a_hostile_member_neither_stops_nor_steers_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fleet(tmp_path) as fleet:
            flags = ["--swarm", f"test-{secrets.token_hex(4)}", "--host", "127.0.0.1"]
            bootstrap = fleet.launch("bootstrap", ["bootstrap", *flags])
            address = await join_address(bootstrap)
            trainer = fleet.launch("trainer", ["join", "--role", "trainer", "--peer", address, *flags])
            honest = fleet.launch("honest", ["join", "--role", "inference", "--peer", address, *flags])
            nodes = (bootstrap, trainer, honest)

            record = RoleRecord(role="inference", software="hostile")
            network = NetworkConfig(peers=(address,), host="127.0.0.1")
            async with open_presence(generate(), swarm=flags[1], network=network, record=record) as presence:
                await eventually(lambda: step_of(trainer) >= 3)
                resident = {node.name: resident_bytes(node) for node in nodes}
                attack = await Attack.begin(presence, peer_of(trainer), peer_of(honest))
                before = step_of(trainer)
                with trio.fail_after(PATIENCE_S):
                    await attack.everything([trainer, honest])
                await eventually(lambda: step_of(trainer) >= before + 5)
                check_refusals(state(trainer)["refused"], state(honest)["refused"], attack)

            check_run(trainer, peer_of(honest))
            for node in nodes:
                assert node.ended is None, node.output()
                assert resident_bytes(node) - resident[node.name] < GROWTH_MAX_BYTES[node.name]
                assert len(node.output()) < 100_000
                assert "\x1b" not in node.output()
                assert "Traceback" not in node.output()
                os.kill(node.process.pid, signal.SIGINT)
            await eventually(lambda: [node.ended for node in nodes] == [130] * 3)
        assert fleet.processes() == []

    trio.run(main)


def check_run(trainer: NodeProcess, honest: str) -> None:
    """Nothing of ours was trained on, and nothing too old."""
    groups = [group for record in steps_of(trainer) for group in record.groups]
    assert {group.worker for group in groups} == {honest}
    assert all(0 <= group.lag <= 4 for group in groups)
    assert len({group.counter for group in groups}) == len(groups)


TRAINER_REFUSES = {
    "malformed", "replayed", "wrong-run", "group-size", "sampling", "prompt-index", "logprob", "token-range",
    "future-version", "unknown-epoch", "stale", "oversized", "unfetchable", "bad-signature", "too-many-streams",
}  # fmt: skip
HONEST_REFUSES = {"malformed", "not-a-trainer", "too-many-streams", "bad-frame", "not-in-route"}


def check_refusals(by_trainer: dict[str, int], by_honest: dict[str, int], attack: "Attack") -> None:
    assert not TRAINER_REFUSES - set(by_trainer), by_trainer
    assert not HONEST_REFUSES - set(by_honest), by_honest
    assert len(by_trainer) < 64
    assert by_trainer["replayed"] >= attack.replayed // 2


class Attack:
    """Everything at once, by one member with one key."""

    def __init__(self, presence: Presence, run: Run, trainer: str, honest: str) -> None:
        self.presence = presence
        self.run = run
        self.trainer = trainer
        self.honest = honest
        self.captured: list[bytes] = []
        self.replayed = 0

    @classmethod
    async def begin(cls, presence: Presence, trainer: str, honest: str) -> "Attack":
        swarm = presence.swarm
        with trio.fail_after(PATIENCE_S):
            while not ({trainer, honest} <= set(swarm.members) and swarm.runs):
                await swarm.changed()
            while trainer not in presence.gossip.peers():  # noqa: ASYNC110  a vendor's set has no event
                await trio.sleep(0.1)
        swarm.join(swarm.runs[0])
        return cls(presence, swarm.runs[0], trainer, honest)

    async def everything(self, nodes: list[NodeProcess]) -> None:
        await self.lie_in_records()
        async with trio.open_nursery() as nursery:
            for task in (self.replay, self.send_bad_groups, self.send_bad_releases, self.garbage_on_topics):
                nursery.start_soon(task)
            for peer in (self.trainer, self.honest):
                for protocol in names.CALL_PROTOCOLS:
                    nursery.start_soon(self.garbage_on_streams, peer, protocol)
            for node in nodes:
                nursery.start_soon(trio.to_thread.run_sync, abuse_http, state_url(node))
        async with trio.open_nursery() as nursery:  # a second wave: many streams that say nothing
            for peer in (self.trainer, self.honest):
                for protocol in names.CALL_PROTOCOLS:
                    nursery.start_soon(self.hold_streams, peer, protocol)

    async def lie_in_records(self) -> None:
        """Call ourselves a trainer at addresses of others; a run, a plan and a release of our own; absurd capacity."""
        presence, run = self.presence, self.run
        ours = presence.identity.peer_id
        bad = ("garbage", f"/ip4/127.0.0.1/tcp/99999999/p2p/{ours}", f"/ip4/127.0.0.1/tcp/9/p2p/{self.trainer}")
        presence.gossip_addresses = (*bad, f"/dns4/{'a' * 80}/tcp/1/p2p/{ours}", f"/ip4/127.0.0.1/tcp/1/p2p/{ours}")
        presence.stream_addresses = bad
        capacity = Capacity(max_layers=65536, layers_per_s=1e12, memory_bytes=2**53)
        presence.say(run_id=run.run_id, capacity=capacity, version=PolicyVersion(epoch=2**31, step=2**31))
        await presence.swarm.publish_run(
            msgspec.structs.replace(run.manifest, trainers=(ours,), model="/no/such/model")
        )
        span = Span(start=0, end=run.manifest.layers, layers=run.manifest.layers)
        plan = Plan(number=2**53, layers=run.manifest.layers, chains=((Stop(peer=ours, span=span),),))
        await presence.swarm.publish_plan(run.run_id, plan)
        latest = LatestRelease(version=PolicyVersion(epoch=9, step=9), release=bytes(32), size_bytes=1)
        await presence.swarm.publish_latest(run.run_id, latest)
        await trio.sleep(5.0)  # until everybody has looked twice
        presence.say(role="inference")  # and now into the plan
        presence.gossip_addresses = ()

    async def replay(self) -> None:
        gossip, topic = self.presence.gossip, names.rollout_topic(self.presence.swarm.name)
        async with gossip.subscribe(topic) as messages:
            with trio.move_on_after(20):
                async for message in messages:
                    self.captured.append(message.data)
                    if len(self.captured) >= 20:
                        break
        for data in self.captured * 2:
            await gossip.publish(topic, data)
            self.replayed += 1
        for place in range(0, 200, 5):  # and each with a byte changed
            data = bytearray(self.captured[0])
            data[-1 - place] ^= 1
            await gossip.publish(topic, bytes(data))

    async def send_bad_groups(self) -> None:
        topic = names.rollout_topic(self.presence.swarm.name)
        for number, made in enumerate(bad_groups(self.run, self.presence.identity.peer_id)):
            run_id = bytes(32) if number == 0 else self.run.run_id
            await self.presence.gossip.publish(topic, self.seal(ROLLOUT, made, run_id))
        for number in range(12):
            pointer = LargeRollout(blob=bytes([number]) * 32, size_bytes=20_000 if number else 16 << 20)
            topic = names.large_rollout_topic(self.presence.swarm.name)
            await self.presence.gossip.publish(topic, self.seal(LARGE_ROLLOUT, pointer))

    async def send_bad_releases(self) -> None:
        chunk = Chunk(part="embed", hash=bytes(32), size_bytes=1, base=None, result=bytes(32))
        release = Release(
            version=PolicyVersion(epoch=9, step=9), parent=None, parent_release=None, snapshot_release=None,
            policy_hash=bytes(32), snapshot=(chunk,), model_bytes=1,
        )  # fmt: skip
        for _ in range(20):
            topic = names.release_topic(self.presence.swarm.name)
            await self.presence.gossip.publish(topic, self.seal(RELEASE, release))

    async def garbage_on_topics(self) -> None:
        for number in range(60):
            for topic in names.topics(self.presence.swarm.name):
                await self.presence.gossip.publish(topic, GARBAGE[number % len(GARBAGE)] + bytes([number]))

    async def garbage_on_streams(self, peer: str, protocol: str) -> None:
        hive = self.presence.hive
        request = PullRequest(version=PolicyVersion(epoch=0, step=0), slots=(Slot(step=1, slot=0),))
        frames = [*GARBAGE, self.seal(PULL, request), open_frame(), bytes(3000), bytes(100_000)]
        limiter = trio.CapacityLimiter(8)

        async def one(number: int) -> None:
            async with limiter:
                with suppress(EchoError, OSError, trio.TooSlowError), trio.fail_after(10):
                    async with hive.open(peer, protocol, timeout_s=3) as stream:
                        await stream.send(frames[number % len(frames)])
                        if number % 3:
                            await stream.receive()

        async with trio.open_nursery() as nursery:
            for number in range(OPENS // 4):
                nursery.start_soon(one, number)

    async def hold_streams(self, peer: str, protocol: str) -> None:
        """Slow loris: as many streams as we get, of which half began a frame that never ends."""

        async def hold(number: int) -> None:
            with suppress(EchoError, OSError, trio.BrokenResourceError):
                connection = await self.presence.hive._daemon.dial(peer, protocol, 3)
                async with connection:
                    if number % 2:
                        await connection.send_all(b"\x00\x00\x03\xff" + b"x")
                    await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            for number in range(LORIS):
                nursery.start_soon(hold, number)

    def seal(self, kind, payload: object, run_id: bytes | None = None) -> bytes:
        return self.presence.sealer.seal(kind, run_id or self.run.run_id, payload, time.time())


GARBAGE = (
    b"", b"\x00", b"\xff" * 64, b"\xc1" * 1000, b"\x91" * 50_000, b"\x98" + secrets.token_bytes(60_000),
    b"\x1b[2J\x1b]0;owned\x07\r\nfalse line", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
)  # fmt: skip


def open_frame() -> bytes:
    """A well-formed opening of a chain in which the receiver has no place."""
    span = Span(start=0, end=4, layers=4)
    opening = Open(route=(Stop(peer="1" * 50, span=span),), run_id=bytes(32), plan=1, lanes=1)
    return b"".join(bytes(part) for part in encode(bytes(16), opening))


def bad_groups(run: Run, worker: str) -> list[RolloutGroup]:
    manifest = run.manifest
    now = PolicyVersion(epoch=0, step=10**6)

    def sample(step: int = 0, epoch: int = 0, **changes: object) -> Sample:
        version = PolicyVersion(epoch=epoch, step=step)
        given = {"tokens": (1, manifest.stop_tokens[0]), "logprobs": (-1.0, -1.0), "finish": "stop"}
        return Sample(**(given | {"segments": (Segment(start=0, version=version),)} | changes))

    def group(counter: int, each: Sample, **changes: object) -> RolloutGroup:
        index = prompt_index(manifest.randomness(), (worker, counter), manifest.prompts)
        given = {"counter": counter, "prompt_index": index, "samples": (each,) * manifest.group_size}
        return RolloutGroup(**(given | {"sampling_hash": manifest.sampling.hash(), "engine": "hostile"} | changes))

    return [
        group(0, sample()),  # sealed for another run
        group(1, sample(), samples=(sample(),)),
        group(2, sample(), sampling_hash=bytes(32)),
        group(3, sample(), prompt_index=0),
        group(4, sample(logprobs=(math.nan, -1.0))),
        group(5, sample(logprobs=(5.0, -1.0))),
        group(6, sample(logprobs=(-1e300, -1.0))),
        group(7, sample(tokens=(1, manifest.vocabulary))),
        group(8, sample(tokens=(1, 2**31))),
        group(9, sample(step=now.step)),
        group(10, sample(epoch=7)),
        group(11, sample(), engine="\N{RIGHT-TO-LEFT OVERRIDE}late"),  # older than the bound by now
        group(2**53, sample(step=2**31)),
    ]


def abuse_http(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with closing(HTTPConnection(host, int(port), timeout=10)) as connection:
        connection.request("GET", "/state", headers={"Host": "evil.example"})
        assert connection.getresponse().status == 403
    held = []
    for request in (
        b"GET /state HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"POST /state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"\x16\x03\x01" + bytes(500),
        b"GET / HTTP/1.1\r\n",
    ):
        raw = socket.create_connection((host, int(port)), timeout=10)
        with suppress(OSError):
            raw.sendall(request)
        held.append(raw)
    for raw in held:
        raw.close()


def state_url(node: NodeProcess) -> str:
    return str(json.loads((node.home / "node.json").read_text())["http"])


def state(node: NodeProcess) -> dict:
    host, port = state_url(node).removeprefix("http://").split(":")
    with closing(HTTPConnection(host, int(port), timeout=10)) as connection:
        connection.request("GET", "/state")
        return json.loads(connection.getresponse().read())


def peer_of(node: NodeProcess) -> str:
    return str(json.loads((node.home / "node.json").read_text())["peer"])


def steps_of(trainer: NodeProcess) -> list[StepRecord]:
    return [record for run in (trainer.home / "runs").glob("*") for record in RunLog(run).read()]


def step_of(trainer: NodeProcess) -> int:
    records = steps_of(trainer)
    return records[-1].step if records else 0


def resident_bytes(node: NodeProcess) -> int:
    process = psutil.Process(node.process.pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


async def eventually(condition: Callable[[], bool]) -> None:
    """Other processes have no event to wait for: look now and then, and give up loudly."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.2)
