"""Lanes of an mlx peer that hosts the whole model: `python tests/bench/chain_mlx_lanes.py MODEL_FOLDER --json FILE`.

What is gained by rows that are replaced as soon as they are finished, and mlx-lm's own batches on the same model, in
CPU seconds of this process, so that a busy machine matters little. Metal has other costs: not run here.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import mlx.core as mx
import numpy as np
import trio
from chain_answers import ALONE, answer_all, prompts_of, tokens_of
from chain_rings import ROWS, V0, request
from chain_stage import free, prefix_sharing, ragged_steps, seconds_of, share, step
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.memory_stage import MemoryWeights
from echo_p2p.chain.mlx_stage import load_stage
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Stage
from echo_p2p.errors import ChainError
from echo_protocols.peer import Stop
from echo_protocols.run import Sampling
from echo_protocols.values import Span

FIXED = 32
LONGEST = 128
STOPS = frozenset(range(0, 1 << 16, 12))
"""Tokens that end an answer, so that the answers of one group have unlike lengths."""


@asynccontextmanager
async def open_whole(stage: Stage, *, exclusive: bool) -> AsyncIterator[tuple[ChainDriver, StageHost]]:
    """A chain of one peer, with one lane."""
    host = StageHost(ALONE, stage, MemoryWeights({}), V0)
    ring = Ring((Stop(peer=ALONE, span=stage.span),), bytes(32), lanes=1, rows=ROWS, exclusive=exclusive)
    async with open_chain(ring, host) as driver:
        yield driver, host


def unlike(number: int, prompt: Sequence[int]) -> GroupRequest:
    """A group that fills a lane and whose answers end sooner or later."""
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"bench",
        prompt=tuple(prompt),
        samples=ROWS,
        sampling=Sampling(max_new_tokens=LONGEST),
        stop_tokens=STOPS,
    )


async def answered(driver: ChainDriver, requests: Sequence[GroupRequest]) -> tuple[float, list[tuple[int, ...]]]:
    """CPU seconds of all groups, asked for at once, and the tokens of their answers."""
    answers: dict[int, list[tuple[int, ...]]] = {}

    async def one(place: int) -> None:
        answers[place] = [sample.tokens for sample in await driver.generate(requests[place])]

    begun = time.process_time()
    async with trio.open_nursery() as nursery:
        for place in range(len(requests)):
            nursery.start_soon(one, place)
    return time.process_time() - begun, [answer for place in sorted(answers) for answer in answers[place]]


def full_step_over_one_row(stage: Stage, prompt: NDArray[np.int32]) -> dict[str, float]:
    """What a step of a full lane costs, in steps of a single row."""
    seconds = []
    for rows in (1, ROWS):
        share(stage, prompt, rows)
        names, newest = np.arange(rows, dtype=np.int32), np.repeat(prompt[:, :1], rows, axis=0)
        start = np.full(rows, prompt.shape[1], np.int32)
        seconds.append(median(seconds_of(step, stage, names, start + i, newest) for i in range(8)))
        free(stage)
    return {"full_step_over_step_of_one_row": seconds[1] / seconds[0]}


async def continuous_over_exclusive(stage: Stage, *, groups: int) -> dict[str, float]:
    """The same groups together, and one after the other.

    The ratio of steps is what there is to gain where a step of few rows costs as much as one of many; CPUs are far from
    it: `full_step_over_step_of_one_row`.
    """
    requests = [unlike(number, prompt) for number, prompt in enumerate(prompts_of(groups).tolist())]
    async with open_whole(stage, exclusive=False) as (driver, together):
        together_s, answers = await answered(driver, requests)
    async with open_whole(stage, exclusive=True) as (driver, apart):
        apart_s, expected = await answered(driver, requests)
    lengths = np.array([len(answer) for answer in answers]).reshape(groups, ROWS)
    rate, exclusive_rate = lengths.sum() / together_s, sum(map(len, expected)) / apart_s
    return {
        "continuous_over_exclusive": rate / exclusive_rate,
        "tokens_per_cpu_s_continuous": rate,
        "tokens_per_cpu_s_exclusive": exclusive_rate,
        "steps_exclusive_over_continuous": apart.statistics.steps / together.statistics.steps,
        "same_answers": float(np.mean([ours == theirs for ours, theirs in zip(answers, expected, strict=True)])),
        "answer_tokens_mean": float(lengths.mean()),
        "answer_tokens_mean_of_longest": float(lengths.max(axis=1).mean()),
    }


def rate_of_batch_generate(model: Any, requests: Sequence[GroupRequest]) -> float:
    """Tokens of a CPU second by the batch generator of mlx-lm, which draws by the model's distribution too."""
    generator = BatchGenerator(model, sampler=mx.random.categorical, completion_batch_size=len(requests))
    begun, made = time.process_time(), 0
    generator.insert([list(each.prompt) for each in requests], [each.sampling.max_new_tokens for each in requests])
    while responses := generator.next_generated():
        made += len(responses)
    rate = made / (time.process_time() - begun)
    generator.close()
    if made != tokens_of(requests):
        raise ChainError(f"mlx-lm made {made} tokens of {tokens_of(requests)}")
    return rate


async def over_batch_generate(stage: Stage, model: Path, *, rounds: int) -> dict[str, float]:
    """Fixed lengths: as many unlike prompts as fill a lane, and one prompt as often; rounds that take turns."""
    reference, _ = load_model(model)
    reference.set_dtype(mx.float32)
    prompts = prompts_of(ROWS).tolist()
    apart = [request(number, prompt, tokens=FIXED) for number, prompt in enumerate(prompts)]
    alike = [request(0, prompts[0], tokens=FIXED)] * ROWS
    group = [request(0, prompts[0], tokens=FIXED, samples=ROWS)]
    rate_of_batch_generate(reference, [request(0, prompts[0], tokens=2)])  # warm
    figures: dict[str, float] = {}
    async with open_whole(stage, exclusive=False) as (driver, _):
        await answer_all(driver, [request(0, prompts[0], tokens=2)])
        for name, ours, theirs in (("unlike_prompts", apart, apart), ("one_prompt", group, alike)):
            rates, their_rates = [], []
            for _ in range(rounds):
                begun = time.process_time()
                await answer_all(driver, ours)
                rates.append(tokens_of(ours) / (time.process_time() - begun))
                their_rates.append(rate_of_batch_generate(reference, theirs))
            figures[f"over_batch_generate_{name}"] = median(a / b for a, b in zip(rates, their_rates, strict=True))
            figures[f"tokens_per_cpu_s_{name}"] = median(rates)
            figures[f"tokens_per_cpu_s_batch_generate_{name}"] = median(their_rates)
    return figures


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--groups", default=8, help="Groups of answers of unlike lengths.")
@click.option("--rounds", default=1, help="Rounds of which medians are taken.")
@click.option("--machine", default="", help="What to note about the machine.")
def main(model: Path, file: Path | None, groups: int, rounds: int, machine: str) -> None:
    """Measure the lanes of an mlx peer."""
    layers = model_shape(model).layers
    stage = load_stage(model, Span(start=0, end=layers, layers=layers), device="cpu")
    figures: dict[str, object] = {"machine": machine, "engine": stage.engine, "rows": ROWS, "groups": groups}

    def note(found: Mapping[str, float]) -> None:
        figures.update(found)
        click.echo(json.dumps(found, indent=2), err=True)

    prompt = prompts_of(4)[:1]
    shared = prefix_sharing(stage, prompt, samples=ROWS, rounds=rounds)
    note({name: value for name, value in shared.items() if not name.endswith("_s")})
    note(ragged_steps(stage, prompt, rows=ROWS, steps=8))
    note(full_step_over_one_row(stage, prompt))
    note(trio.run(lambda: over_batch_generate(stage, model, rounds=rounds)))
    note(trio.run(lambda: continuous_over_exclusive(stage, groups=groups)))
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
