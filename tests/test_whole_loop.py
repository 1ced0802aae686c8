"""Any model in Hugging Face form goes round the whole loop: a chain samples, verl steps, patches bring the chain along.

In one process, over the in-memory network; the rewards are made up, the rest is real.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from transformers import AutoConfig, AutoModelForCausalLM

from echo_p2p.chain.driver import open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.rl.trainer import TrainingRow
from echo_p2p.rl.verl_trainer import VerlTrainer
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.peer import Stop
from echo_protocols.release import Chunk, Release
from echo_protocols.rollout import Sample
from echo_protocols.run import Algorithm, Sampling
from echo_protocols.values import PolicyVersion, Span

PEERS = ("A" * 44, "B" * 44)
LAYERS, CUT = 3, 1


def random_model(folder: Path, family: str, *, tied: bool) -> Path:
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        family,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_a_randomly_initialised_model_goes_round_the_loop(tmp_path: Path, family: str, tied: bool) -> None:
    path = random_model(tmp_path / "model", family, tied=tied)
    assert model_shape(path).layers == LAYERS
    trainer = VerlTrainer(path, Algorithm(learning_rate=1e-3), seed=1)
    trio.run(go_round, path, trainer, Store(tmp_path / "blobs", 1 << 30))
    trainer.close()


async def go_round(path: Path, trainer: VerlTrainer, store: Store) -> None:
    publisher = Publisher(store)
    version = PolicyVersion(epoch=0, step=0)
    release = publish(publisher, store, version, trainer)
    spans = [Span(start=0, end=CUT, layers=LAYERS), Span(start=CUT, end=LAYERS, layers=LAYERS)]
    stages: list[Stage] = [load_stage(path, span, device="cpu") for span in spans]
    replicas = [Replica(stage.tensors(), store) for span, stage in zip(spans, stages, strict=True)]
    for replica, stage in zip(replicas, stages, strict=True):
        await bring(replica, release, store)
        replica.switch(version, stage)
        assert replica.statistics().bytes_fetched == 0  # the model's own weights are version 0
    network = MemoryNetwork()
    hosts = [StageHost(peer, stages[i], replicas[i], version) for i, peer in enumerate(PEERS)]
    servers = [ChainServer(network.node(peer), host) for peer, host in zip(PEERS, hosts, strict=True)]
    route = tuple(Stop(peer=peer, span=span) for peer, span in zip(PEERS, spans, strict=True))
    async with trio.open_nursery() as nursery:
        for server in servers:
            await nursery.start(server.serve)
        async with open_chain(Ring(route, bytes(32)), hosts[0], servers[0]) as driver:
            for step in (1, 2):
                groups = [await driver.generate(request(step, slot)) for slot in range(2)]
                assert {sample.segments[0].version for group in groups for sample in group} == {version}
                report = trainer.step(rows(groups))
                assert report.updated
                # behaviour log-probabilities are the policy's own; later, the masters are finer than their bf16
                assert report.figures["logprob_gap_max"] < (1e-5 if step == 1 else 1e-2)
                version = PolicyVersion(epoch=0, step=step)
                release = publish(publisher, store, version, trainer)
                for replica in replicas:
                    await bring(replica, release, store)
                await driver.switch(version, 10.0)
        nursery.cancel_scope.cancel()
    replicas[1].switch(version, stages[1])  # a stage switches before its next frame, and there was none
    check_equal(stages, trainer)


def check_equal(stages: list[Stage], trainer: VerlTrainer) -> None:
    """The chain holds the trainer's policy, bit for bit."""
    wanted = trainer.weights()
    held = {name: bits for stage in stages for name, bits in stage.tensors().items()}
    assert held.keys() == wanted.keys()
    for name, bits in wanted.items():
        assert np.array_equal(held[name], bits), name


def publish(publisher: Publisher, store: Store, version: PolicyVersion, trainer: VerlTrainer) -> Release:
    release = publisher.publish(version, trainer.weights())
    publisher.sealed(store.put(b"sealed %d" % version.step))
    return release


async def bring(replica: Replica, release: Release, store: Store) -> None:
    async def fetch(chunk: Chunk) -> bytes:
        blob = store.get(chunk.hash)
        assert blob is not None
        return blob

    async def lookup(hash: bytes) -> Release:
        raise AssertionError("no older release is needed")

    await replica.stage(release, lookup, fetch)


def request(step: int, slot: int) -> GroupRequest:
    return GroupRequest(
        group_id=b"%d/%d" % (step, slot),
        run_seed=b"seed",
        prompt=(1, 5 + slot, 7, 9),
        samples=4,
        sampling=Sampling(max_new_tokens=6),
        stop_tokens=frozenset({2}),
    )


def rows(groups: list[tuple[Sample, ...]]) -> tuple[TrainingRow, ...]:
    """The first answer of each group is the good one."""
    return tuple(
        TrainingRow(
            group=slot,
            prompt=(1, 5 + slot, 7, 9),
            response=sample.tokens,
            behaviour_logprobs=sample.logprobs,
            reward=float(number == 0),
        )
        for slot, group in enumerate(groups)
        for number, sample in enumerate(group)
    )
