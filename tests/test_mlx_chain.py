"""Chains of torch and mlx peers keep their lanes full, and draw what a chain of torch peers draws."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
import trio.testing
from transformers import AutoConfig, AutoModelForCausalLM

from echo_p2p.chain import torch_stage
from echo_p2p.chain.driver import open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.host import HostStatistics, StageHost
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.memory_stage import MemoryWeights
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.stage import Stage
from echo_p2p.net.memory import MemoryNetwork
from echo_protocols.peer import Stop
from echo_protocols.rollout import Sample
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

pytest.importorskip(
    "mlx_lm", reason="mlx-lm is not installed: pip install 'echo-p2p[mlx]' on a Mac, mlx-lm[cpu] on Linux"
)

from echo_p2p.chain import mlx_stage

LAYERS = 3
PEERS = ("A" * 44, "B" * 44)
ROWS = 6
LIMITS = ChainLimits(lanes=32, rows=16, positions=64)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    whole.save_pretrained(folder)
    return folder


def by_torch(path: Path, span: Span) -> Stage:
    return torch_stage.load_stage(path, span, device="cpu")


def by_mlx(path: Path, span: Span) -> Stage:
    return mlx_stage.load_stage(path, span, device="cpu")


def request(number: int, *, top_k: int) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple(3 + (number * 7 + i * i) % 45 for i in range(1 + 3 * number % 11)),
        samples=1 + number % 4,
        sampling=Sampling(max_new_tokens=(4, 30, 9, 17)[number % 4], top_k=top_k),
        stop_tokens=frozenset({2, 5}),
    )


async def answers(stages: Sequence[Stage], *, top_k: int) -> tuple[list[tuple[Sample, ...]], HostStatistics]:
    """Ten groups asked for at once of a chain of these stages, and what its last peer did."""
    network, results = MemoryNetwork(), [()] * 10  # type: list[tuple[Sample, ...]]
    route = tuple(Stop(peer=peer, span=stage.span) for peer, stage in zip(PEERS, stages, strict=False))
    version = PolicyVersion(epoch=0, step=0)
    hosts = [
        StageHost(s.peer, stage, MemoryWeights({}), version, limits=LIMITS)
        for s, stage in zip(route, stages, strict=True)
    ]
    servers = [ChainServer(network.node(host.peer), host) for host in hosts]

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(server.serve)
        await trio.testing.wait_all_tasks_blocked()
        async with open_chain(Ring(route, bytes(32), lanes=2, rows=ROWS), hosts[0], servers[0]) as driver:

            async def one(number: int) -> None:
                results[number] = await driver.generate(request(number, top_k=top_k))

            async with trio.open_nursery() as groups:
                for number in range(len(results)):
                    groups.start_soon(one, number)
        nursery.cancel_scope.cancel()
    return results, hosts[-1].statistics


@pytest.mark.parametrize("top_k", [1, 0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "helium"])
def test_a_mixed_chain_draws_the_tokens_of_a_torch_chain_in_lanes_that_stay_full(
    tmp_path: Path, family: str, top_k: int
) -> None:
    path = model(tmp_path, family)

    def drawn(*loaders: Callable[[Path, Span], Stage]) -> tuple[list[tuple[Sample, ...]], HostStatistics]:
        cuts = pairwise((0, 1, LAYERS))
        stages = [load(path, Span(start=a, end=b, layers=LAYERS)) for load, (a, b) in zip(loaders, cuts, strict=True)]
        return trio.run(lambda: answers(stages, top_k=top_k))

    expected, _ = drawn(by_torch, by_torch)
    one_by_one = sum(max(len(sample.tokens) for sample in group) for group in expected)  # steps without mixing
    assert len({sample.tokens for group in expected for sample in group}) >= 10
    for loaders in ([by_torch, by_mlx], [by_mlx, by_torch], [by_mlx, by_mlx]):
        mixed, figures = drawn(*loaders)
        for group, theirs in zip(mixed, expected, strict=True):
            assert [sample.tokens for sample in group] == [sample.tokens for sample in theirs]
            for sample, other in zip(group, theirs, strict=True):
                np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-4)
        assert figures.steps < one_by_one
