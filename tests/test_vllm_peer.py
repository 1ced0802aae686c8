"""An inference peer with vLLM, whole: releases come in, groups go out, both protocols. `make test-vllm`."""

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
import torch
import trio
import trio.testing
from transformers import AutoConfig, AutoModelForCausalLM

from echo_node.board import Board
from echo_node.inference import _keep_serving
from echo_node.logs import Journal
from echo_node.produce import Counter
from echo_node.serve import Service
from echo_p2p.chain.sampler import audit
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.config import InferenceConfig, NetworkConfig, NodeConfig
from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run, Swarm
from echo_p2p.tensors import Bits, TensorUpdate
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import PULL, ROLLOUT, Border, Opened, Sealer
from echo_protocols.peer import Plan, RoleRecord, Stop
from echo_protocols.release import Chunk, Release
from echo_protocols.rollout import RolloutGroup, Slot, group_fault
from echo_protocols.run import RunManifest, Sampling
from echo_protocols.sync import PullReply, PullRequest
from echo_protocols.uniform import Place, group_id, uniform
from echo_protocols.values import PolicyVersion, Span

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vllm is not installed here: make test-vllm runs these in an environment of its own")

TRAINER, WORKER = from_seed(b"t" * 32), from_seed(b"w" * 32)
WHOLE = Span(start=0, end=2, layers=2)
V0, V1 = (PolicyVersion(epoch=0, step=step) for step in (0, 1))
PROMPT = (1, 5, 7, 9)


def model(folder: Path) -> Path:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def presence_of(identity: Identity, network: MemoryNetwork) -> Presence:
    node, border = network.node(identity.peer_id), Border()
    sealer = Sealer(identity.public_key, identity.sign, time.time_ns() // 1000)
    record = RoleRecord(role="inference", software="test")
    swarm = Swarm("s", peer=identity.peer_id, records=node, sealer=sealer, border=border, describe=lambda: record)
    return Presence(identity, NetworkConfig(), node, node, border, sealer, swarm, record)  # type: ignore[arg-type]


class Releases:
    """A feed without a network: what a trainer has published so far."""

    def __init__(self, store: Store, bits: dict[str, Bits]) -> None:
        self._store = store
        self._publisher = Publisher(store)
        self._news = trio.Event()
        self.bits = bits
        self.version = V0
        self.release = self._publish(V0)

    def change(self) -> None:
        """V1: one value in ten moves by one unit in the last place."""
        for name, bits in self.bits.items():
            self.bits[name] = bits.copy()
            self.bits[name].reshape(-1)[::10] ^= np.uint16(1 << 5)
        self.version, self.release = V1, self._publish(V1)
        self._news.set()

    def _publish(self, version: PolicyVersion) -> Release:
        release = self._publisher.publish(version, self.bits)
        self._publisher.sealed(self._store.put(b"sealed %d" % version.step))
        return release

    async def keep_staged(self, replica: Replica) -> None:
        """As `Feed.keep_staged`."""
        while True:
            await replica.stage(self.release, self._lookup, self._fetch)
            await self._news.wait()
            self._news = trio.Event()

    async def _fetch(self, chunk: Chunk) -> bytes:
        blob = self._store.get(chunk.hash)
        assert blob is not None
        return blob

    async def _lookup(self, hash: bytes) -> Release:
        raise AssertionError("no older release is needed")


class Scene:
    """A peer whose plan gives it the whole model, and a trainer that listens."""

    def __init__(self, folder: Path, protocol: str) -> None:
        network = MemoryNetwork()
        self.worker, self.trainer = presence_of(WORKER, network), presence_of(TRAINER, network)
        self.model = model(folder / "model")
        self.manifest = RunManifest(
            swarm="s", model="test", tokenizer_hash=bytes(32), layers=2, vocabulary=96, group_size=4, stop_tokens=(2,),
            protocol=protocol, trainers=(TRAINER.peer_id,), sampling=Sampling(max_new_tokens=12), prompts=64,
        )  # fmt: skip
        self.run = Run(self.manifest, self.manifest.run_id(), TRAINER.peer_id, 0.0)
        store = Store(folder / "blobs", 1 << 30)
        self.stage = load_stage(self.model, WHOLE, device="cpu")
        self.feed = Releases(store, dict(self.stage.tensors()))
        prompts = SimpleNamespace(model_path=self.model, ids=lambda index: PROMPT)
        config = NodeConfig(
            inference=InferenceConfig(engine="vllm", device="cpu", memory_share=0.1, store_bytes=1 << 30)
        )
        board = Board(config, self.worker, Journal())
        files = SimpleNamespace(folder=self.model, bring_weights=lambda span, report: "folder")
        counter = Counter(folder / "counter")
        self.service = Service(board, self.run, files, prompts, self.feed, store, counter)  # type: ignore[arg-type]
        self.desk = board.desk

    async def serve(self) -> None:
        """Hold the model, standing by at first, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.service.run)
            await _keep_serving(self.service, WHOLE)

    async def standing_by(self) -> None:
        """Return once the peer is ready, and has no chain."""
        while self.service.view().activity != "standing by":  # noqa: ASYNC110  a view has no event
            await trio.sleep(0.1)
        assert self.desk.voice is None

    def plan(self, number: int, *, standby: bool = False) -> None:
        """Have the peer serve alone, or stand by."""
        stop = (Stop(peer=WORKER.peer_id, span=WHOLE),)
        chains, waiting = ((), stop) if standby else ((stop,), ())
        self.worker.swarm.plan = Plan(number=number, layers=2, chains=chains, standby=waiting)
        self.worker.swarm.wake()

    def opened(self, data: bytes) -> RolloutGroup:
        """A group as a trainer takes it, audited against the weights of its version."""
        opened = self.trainer.border.open(data, ROLLOUT, self.run.run_id, time.time(), once=True)
        assert isinstance(opened, Opened)
        group = opened.payload
        assert group_fault(group, WORKER.peer_id, self.manifest) is None
        assert group.engine == "vllm-0.32.0-cpu-float32"
        return group

    def check(self, group: RolloutGroup, place: Place) -> None:
        """Whether public uniforms drew the tokens of a group of one version from `stage`, which has that version."""
        seed = self.manifest.randomness()
        for number, sample in enumerate(group.samples):
            row, inputs, position = np.zeros(1, np.int32), PROMPT, 0
            for at, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
                start = np.array([position], np.int32)
                (logits,) = self.stage.forward(number, row, start, np.array([inputs], np.int32))
                position, inputs = position + len(inputs), (token,)
                chance = uniform(seed, group_id(seed, place), number, at)
                assert audit(logits, token, chance, self.manifest.sampling, 1e-4)
                wide = logits.astype(np.float64)
                assert abs(wide[token] - np.logaddexp.reduce(wide) - logprob) < 1e-3
            self.stage.close(number)


def version_of(group: RolloutGroup) -> PolicyVersion | None:
    """None for a group that crossed a switch."""
    versions = {segment.version for sample in group.samples for segment in sample.segments}
    return versions.pop() if len(versions) == 1 else None


def test_asynchronously_it_publishes_groups_of_each_release(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, "async")
        with trio.fail_after(300):
            async with (
                scene.trainer.gossip.subscribe(names.rollout_topic("s")) as messages,
                trio.open_nursery() as nursery,
            ):
                scene.plan(1, standby=True)
                nursery.start_soon(scene.serve)
                await scene.standing_by()
                scene.plan(2)
                for version in (V0, V1):
                    if version == V1:
                        scene.feed.change()
                        scene.stage.apply({name: TensorUpdate(None, bits) for name, bits in scene.feed.bits.items()})
                    checked = 0
                    while checked < 2:
                        group = scene.opened((await messages.receive()).data)
                        if version_of(group) == version:
                            await trio.to_thread.run_sync(scene.check, group, (WORKER.peer_id, group.counter))
                            checked += 1
                view = scene.service.view()
                assert (view.activity, view.version, view.switches) == ("generating", "0.1", 1)
                assert view.tokens > 0
                assert scene.desk.voice is not None
                for child in psutil.Process().children():
                    child.kill()
                while scene.service.view().resumed == 0 or scene.desk.voice is None:
                    scene.opened((await messages.receive()).data)  # those that were on their way, then new ones
                scene.plan(3, standby=True)
                await scene.standing_by()
                nursery.cancel_scope.cancel()
        assert scene.desk.voice is None
        assert not psutil.Process().children()

    trio.run(main)


def test_sequentially_it_answers_every_slot_at_the_version_that_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, "sequential")
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                scene.plan(1)
                nursery.start_soon(scene.serve)
                while scene.desk.voice is None:  # noqa: ASYNC110  a desk has no event
                    await trio.sleep(0.1)
                scene.feed.change()
                scene.stage.apply({name: TensorUpdate(None, bits) for name, bits in scene.feed.bits.items()})
                slots = tuple(Slot(step=1, slot=slot) for slot in range(3))
                request = PullRequest(version=V1, slots=slots)
                data = scene.trainer.sealer.seal(PULL, scene.run.run_id, request, time.time())
                groups = []
                async with scene.trainer.hive.open(WORKER.peer_id, names.PULL) as stream:
                    await stream.send(data)
                    while len(groups) < len(slots):
                        reply = msgspec.msgpack.decode(await stream.receive(), type=PullReply)
                        assert not reply.failure
                        assert reply.group is not None
                        groups.append(scene.opened(reply.group))
                nursery.cancel_scope.cancel()
        assert {(group.slot.step, group.slot.slot) for group in groups if group.slot} == {(1, 0), (1, 1), (1, 2)}
        for group in groups:
            assert version_of(group) == V1
            assert group.slot is not None
            scene.check(group, ("slot", group.slot.step, group.slot.slot))

    trio.run(main)
