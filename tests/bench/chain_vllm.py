"""vLLM as an engine, on a real model: `python tests/bench/chain_vllm.py --model FOLDER --json FILE` in `.venv-vllm`.

How far its log-probabilities are from one forward pass of transformers, how many tokens a second it draws for each that
`generate` of transformers does, and what a switch to weights of which 1 % have changed costs, in steps. Both engines
take turns in one run, so that a busy machine slows both; minutes on two cores.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
import trio
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version

from echo_p2p.chain.answerer import GroupBounds
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.sampler import audit
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.vllm_engine import Changing, VllmEngine, load_for
from echo_p2p.chain.vllm_process import open_process
from echo_p2p.tensors import Bits, TensorUpdate
from echo_protocols.rollout import Sample
from echo_protocols.run import Sampling
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion, Span

BATCHES = (1, 8, 32)
SAMPLINGS = (Sampling(max_new_tokens=48), Sampling(temperature=0.8, top_p=0.9, max_new_tokens=48))
TEXTS = (
    "Write a short story about a river.",
    "Explain why the sky is blue.",
    "List three facts about cats.",
    "What is the sum of 17 and 25?",
)


class Patches:
    """Every version changes the same 1 % of the values, there and back."""

    def __init__(self) -> None:
        self.updates: dict[bool, Mapping[str, TensorUpdate]] = {False: {}, True: {}}

    def change(self, tensors: Mapping[str, Bits]) -> None:
        """Choose the values: each moves by one unit in the last place."""
        draws = np.random.default_rng(0)
        there, back = dict[str, TensorUpdate](), dict[str, TensorUpdate]()
        for name, bits in tensors.items():
            index = np.unique(draws.integers(0, bits.size, max(1, bits.size // 100)))
            old = bits.reshape(-1)[index]
            there[name], back[name] = TensorUpdate(index, old ^ np.uint16(1)), TensorUpdate(index, old)
        self.updates = {True: there, False: back}

    async def prepare(self, version: PolicyVersion) -> None:
        """All are here."""

    def switch(self, version: PolicyVersion, stage: Changing) -> None:
        """Odd versions are changed."""
        if version.step:
            stage.apply(self.updates[version.step % 2 == 1])


def request(number: int, prompt: Sequence[int], sampling: Sampling, samples: int = 1) -> GroupRequest:
    """Answers of full length."""
    return GroupRequest(number.to_bytes(32, "big"), bytes(32), tuple(prompt), samples, sampling, frozenset())


async def log_probabilities(engine: VllmEngine, reference: Any, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Gaps to one forward pass, and draws that an audit refuses."""
    figures: dict[str, Any] = {}
    for name, sampling in zip(("plain", "truncated"), SAMPLINGS, strict=True):
        requests = [request(number, prompt, sampling, samples=2) for number, prompt in enumerate(prompts)]
        answers = await all_of(engine, requests)
        gaps, refused = list[float](), 0
        for asked, group in zip(requests, answers, strict=True):
            for number, sample in enumerate(group):
                with torch.inference_mode():
                    outputs = reference(torch.tensor([[*asked.prompt, *sample.tokens]]))
                logits = outputs.logits[0, len(asked.prompt) - 1 :].numpy()  # (tokens + 1, vocabulary)
                for position, token in enumerate(sample.tokens):
                    chance = uniform(asked.run_seed, asked.group_id, number, position)
                    refused += not audit(logits[position], token, chance, sampling, 1e-4)
                    wide = logits[position].astype(np.float64)
                    gaps.append(abs(wide[token] - np.logaddexp.reduce(wide) - sample.logprobs[position]))
        figures[name] = {"tokens": len(gaps), "refused_by_audit": refused}
        if sampling == SAMPLINGS[0]:
            figures[name] |= {"gap_mean": float(np.mean(gaps)), "gap_max": float(max(gaps))}
    return figures


async def all_of(engine: VllmEngine, requests: Sequence[GroupRequest]) -> list[tuple[Sample, ...]]:
    """All answers, asked for at once."""
    answers: dict[int, tuple[Sample, ...]] = {}

    async def ask(number: int) -> None:
        answers[number] = await engine.generate(requests[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(requests)):
            nursery.start_soon(ask, number)
    return [answers[number] for number in range(len(requests))]


async def speed(engine: VllmEngine, reference: Any, prompts: Sequence[list[int]], rounds: int) -> dict[str, float]:
    """Tokens a second over those of `generate`, by batch: medians of rounds that take turns."""
    figures: dict[str, float] = {}
    length = min(len(prompt) for prompt in prompts)
    for batch in BATCHES:
        chosen = [prompts[i % len(prompts)][:length] for i in range(batch)]
        ratios, ours = list[float](), list[float]()
        for turn in range(rounds + 1):
            requests = [request(1000 * turn + i, prompt, SAMPLINGS[0]) for i, prompt in enumerate(chosen)]
            begun = time.perf_counter()
            await all_of(engine, requests)
            here = time.perf_counter() - begun
            begun = time.perf_counter()
            with torch.inference_mode():
                reference.generate(
                    torch.tensor(chosen), do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=48,
                    min_new_tokens=48, attention_mask=torch.ones(batch, length, dtype=torch.long), pad_token_id=0,
                )  # fmt: skip
            if turn:
                ratios.append((time.perf_counter() - begun) / here)
                ours.append(batch * 48 / here)
        figures[f"over_transformers_batch_{batch}"] = median(ratios)
        figures[f"tokens_per_s_batch_{batch}"] = median(ours)
    return figures


async def switches(engine: VllmEngine, prompts: Sequence[list[int]], rounds: int) -> dict[str, float]:
    """Seconds of a switch while eight answers grow, and how many of their steps that is."""
    ratios, seconds = list[float](), list[float]()
    for turn in range(1, rounds + 1):
        drawn = trio.Event()
        before = engine.statistics
        async with trio.open_nursery() as nursery:
            for i in range(8):
                asked = request(10_000 * turn + i, prompts[i % len(prompts)], SAMPLINGS[0])
                nursery.start_soon(engine.generate, asked, lambda *_, drawn=drawn: drawn.set())
            await drawn.wait()
            begun = time.perf_counter()
            await engine.switch(PolicyVersion(epoch=0, step=turn), 60.0)
            seconds.append(time.perf_counter() - begun)
        after = engine.statistics
        ratios.append(seconds[-1] / ((after.busy_s - before.busy_s) / (after.steps - before.steps)))
    return {"switch_s": median(seconds), "switch_over_step": median(ratios)}


async def measure(model: Path, rounds: int) -> dict[str, Any]:
    """All figures."""
    layers = model_shape(model).layers
    span = Span(start=0, end=layers, layers=layers)
    load = load_for(model, span, device="cpu", rows=32, positions=512, memory_bytes=6 << 30, memory_share=0.5)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for text in TEXTS:
        turns = [{"role": "user", "content": text}]
        prompts.append(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    patches, begun = Patches(), time.perf_counter()
    async with open_process(load) as process:
        figures: dict[str, Any] = {"load_and_proof_s": time.perf_counter() - begun}
        patches.change(await trio.to_thread.run_sync(process.tensors))
        engine = VllmEngine(process, patches, GroupBounds(samples=load.rows, positions=load.positions))
        await engine.begin(PolicyVersion(epoch=0, step=0))
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        figures |= {"engine": engine.engine, "transformers": transformers_version, "threads": torch.get_num_threads()}
        figures["log_probabilities"] = await log_probabilities(engine, reference, prompts)
        figures["speed"] = await speed(engine, reference, prompts, rounds)
        figures["switch"] = await switches(engine, prompts, 2 * rounds)
    return figures


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="A folder in Hugging Face format.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--rounds", default=3, help="Rounds that are measured.")
def main(model: Path, file: Path | None, rounds: int) -> None:
    """Measure the vLLM engine against transformers."""
    text = json.dumps(trio.run(measure, model, rounds), indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
