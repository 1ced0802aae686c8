"""A real model in chains, one thread for each stage: what a chain costs over the whole model, and what lanes gain whose
finished rows are replaced at once.

All is counted in CPU seconds of this process and of the network daemons, so that a busy machine does not matter.
"""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import trio
from chain_rings import ROWS, open_ring, request, spans
from numpy.typing import NDArray

from echo_p2p.chain.driver import ChainDriver
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.torch_stage import TorchStage, load_stage
from echo_p2p.net.hive import HiveNode

ALONE = "A" * 44
PROMPT = 32
FIXED = 64
SHORTEST, LONGEST = 8, 256


@asynccontextmanager
async def open_alone(whole: TorchStage, lanes: int = 1, rows: int = ROWS) -> AsyncIterator[ChainDriver]:
    """A chain of one stage that hosts the whole model."""
    async with open_ring([whole], [ALONE], [], lanes=lanes, rows=rows) as driver:
        yield driver


async def answer_all(driver: ChainDriver, requests: Sequence[GroupRequest]) -> None:
    """All at once; returns when the last is done."""
    async with trio.open_nursery() as nursery:
        for each in requests:
            nursery.start_soon(driver.generate, each)


async def chain_figures(
    model: Path, whole: TorchStage, nodes: Sequence[HiveNode], *, rounds: int, tokens: int
) -> dict[str, float]:
    """CPU seconds of a token in a chain of two over those in one stage; medians of rounds that take turns."""
    halves = [load_stage(model, span, device="cpu") for span in spans(2, model_shape(model).layers)]
    daemons = [psutil.Process(node.daemon_pid) for node in nodes]

    def cpu_s() -> float:
        return time.process_time() + sum(sum(daemon.cpu_times()[:2]) for daemon in daemons)

    peers = [node.peer_id for node in nodes]
    apart: list[float] = []
    together: list[float] = []
    prompts = prompts_of(3)
    groups = [request(number, prompts[number], samples=ROWS, tokens=tokens) for number in range(3)]
    async with open_alone(whole, 3) as one, open_ring(halves, peers, nodes, lanes=3) as two:
        for _ in range(rounds + 1):
            for driver, taken in ((one, together), (two, apart)):
                begun = cpu_s()
                await answer_all(driver, groups)
                taken.append((cpu_s() - begun) / (3 * ROWS * tokens))
    return {
        "cpu_per_token_over_whole": median(a / b for a, b in zip(apart[1:], together[1:], strict=True)),
        "cpu_s_per_token_chain": median(apart[1:]),
        "cpu_s_per_token_whole": median(together[1:]),
    }


def prompts_of(count: int) -> NDArray[np.int32]:
    """Random prompts (count, length)."""
    return np.random.default_rng(count).integers(1, 32_000, (count, PROMPT), np.int32)


def tokens_of(requests: Sequence[GroupRequest]) -> int:
    """Tokens that are asked for."""
    return sum(each.samples * each.sampling.max_new_tokens for each in requests)


def mixed_lengths(count: int) -> list[int]:
    """Log-uniform in 8–256: their quantiles, shuffled."""
    quantiles = [(i + 0.5) / count for i in range(count)]
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** each) for each in quantiles]
    random.Random(1).shuffle(lengths)
    return lengths


async def rate_of_batches(driver: ChainDriver, requests: Sequence[GroupRequest], *, padded: bool = False) -> float:
    """Tokens of a CPU second when as many as fill a lane are asked, and the next only when the longest is done.

    Rows that are done leave; `padded` ones go on for nothing, as in a batch of fixed shape.
    """
    begun = time.process_time()
    for start in range(0, len(requests), ROWS):
        batch = requests[start : start + ROWS]
        longest = max((each.sampling for each in batch), key=lambda sampling: sampling.max_new_tokens)
        await answer_all(driver, [replace(each, sampling=longest) for each in batch] if padded else batch)
    return tokens_of(requests) / (time.process_time() - begun)


async def rate_of_stream(driver: ChainDriver, requests: Sequence[GroupRequest]) -> float:
    """Tokens of a CPU second when there is always a request that waits; for as many tokens as the requests have."""
    before, total = driver.statistics.tokens, tokens_of(requests)
    async with trio.open_nursery() as nursery:
        for each in (*requests, *requests):
            nursery.start_soon(driver.generate, each)
        begun = time.process_time()
        while driver.statistics.tokens < before + total:  # noqa: ASYNC110 (a figure has no event)
            await trio.sleep(0.05)
        rate = (driver.statistics.tokens - before) / (time.process_time() - begun)
        nursery.cancel_scope.cancel()
    return rate


def rate_of_generate(reference: Any, requests: Sequence[GroupRequest]) -> float:
    """Tokens of a CPU second by `generate` of transformers, batch by batch; each runs to its longest answer."""
    begun = time.process_time()
    for start in range(0, len(requests), ROWS):
        batch = requests[start : start + ROWS]
        ids = torch.tensor([each.prompt for each in batch])
        longest = max(each.sampling.max_new_tokens for each in batch)
        with torch.inference_mode():
            reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=longest
            )
    return tokens_of(requests) / (time.process_time() - begun)


async def batching_figures(whole: TorchStage, reference: Any, *, requests: int, rounds: int) -> dict[str, float]:
    """One lane of rows whose places are taken at once, against lanes that wait for their longest row, and `generate`.

    The batch of fixed lengths is a group of one prompt; that of unlike prompts, each read by itself, is there to show.
    """
    prompts = prompts_of(max(requests, ROWS))
    mixed = [request(i, prompts[i], tokens=length) for i, length in enumerate(mixed_lengths(requests))]
    unlike = [request(i, prompts[i], tokens=FIXED) for i in range(ROWS)]
    alike = [request(0, prompts[0], tokens=FIXED)] * ROWS
    group = request(0, prompts[0], tokens=FIXED, samples=ROWS)
    by_group, by_generate, by_prompts = [], [], []
    async with open_alone(whole) as driver:
        await answer_all(driver, unlike)
        for _ in range(rounds):
            begun = time.process_time()
            await driver.generate(group)
            by_group.append(tokens_of(alike) / (time.process_time() - begun))
            by_generate.append(await trio.to_thread.run_sync(rate_of_generate, reference, alike))
            by_prompts.append(await rate_of_batches(driver, unlike))
        stream = await rate_of_stream(driver, mixed)
        batches = await rate_of_batches(driver, mixed)
        padded = await rate_of_batches(driver, mixed, padded=True)
        theirs = await trio.to_thread.run_sync(rate_of_generate, reference, mixed)
    async with open_alone(whole, rows=2 * ROWS) as driver:  # as a peer alone serves what would be two lanes
        merged = await rate_of_stream(driver, [*mixed, *mixed])
    return {
        "continuous_batching_gain": stream / batches,
        "continuous_batching_gain_two_lanes_in_one": merged / batches,
        "continuous_batching_gain_over_padded": stream / padded,
        "over_generate_fixed": median(a / b for a, b in zip(by_group, by_generate, strict=True)),
        "over_generate_fixed_unlike_prompts": median(a / b for a, b in zip(by_prompts, by_generate, strict=True)),
        "over_generate_mixed": stream / theirs,
        "tokens_per_cpu_s_fixed": median(by_group),
        "tokens_per_cpu_s_stream": stream,
        "tokens_per_cpu_s_batches": batches,
        "tokens_per_cpu_s_generate_fixed": median(by_generate),
        "tokens_per_cpu_s_generate_mixed": theirs,
    }
