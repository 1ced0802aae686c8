"""What one torch stage costs: `python tests/bench/chain_stage.py --model MODEL_FOLDER --json FILE`.

A whole model in float32 on one thread, timed in CPU seconds, so that a busy machine does not matter: one prompt read
for a group instead of one each, a batch of greedy answers against `generate` of transformers, rows of unlike lengths.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.torch_stage import TorchStage, load_stage
from echo_protocols.values import Span

Tokens = NDArray[np.int32]

GROUP, PREFIX = 0, 1
"""Lanes: of the answers, and of a prompt that they share."""


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def step(stage: Stage, rows: Tokens, positions: Tokens, tokens: Tokens) -> Tokens:
    """The greedy next token (rows, 1) of each row after tokens (rows, length)."""
    best: Tokens = stage.forward(GROUP, rows, positions, tokens).argmax(-1).astype(np.int32)
    return best[:, None]


def share(stage: Stage, prompt: Tokens, rows: int) -> None:
    """A group of rows that have read the prompt (1, length)."""
    stage.forward(PREFIX, np.zeros(1, np.int32), np.zeros(1, np.int32), prompt)
    stage.join(GROUP, np.arange(rows, dtype=np.int32), PREFIX)


def free(stage: Stage) -> None:
    """Close both lanes."""
    stage.close(GROUP)
    stage.close(PREFIX)


def prefix_sharing(stage: Stage, prompt: Tokens, *, samples: int, rounds: int) -> dict[str, float]:
    """One prompt read as often as there are samples, against once and joined."""
    apart, shared, first, later, stepped = [], [], [], [], []
    rows, start = np.arange(samples, dtype=np.int32), np.zeros(samples, np.int32)
    each = np.repeat(prompt, samples, axis=0)
    for _ in range(rounds):
        apart.append(seconds_of(stage.forward, GROUP, rows, start, each))
        free(stage)
        shared.append(seconds_of(share, stage, prompt, samples))
        stepped.append(
            median(seconds_of(step, stage, rows, start + prompt.shape[1] + i, each[:, :1]) for i in range(8))
        )
        first.append(seconds_of(stage.join, GROUP, rows[:1] + samples, PREFIX))  # the buffers grow by a row
        step(stage, rows[1:], start[1:] + prompt.shape[1] + 8, each[1:, :1])
        later.append(seconds_of(stage.join, GROUP, rows[:1], PREFIX))
        free(stage)
    return {
        "prefill_of_each_s": median(apart),
        "prefill_once_and_join_s": median(shared),
        "prefix_sharing_gain": median(a / b for a, b in zip(apart, shared, strict=True)),
        "first_join_over_decode_step": median(a / b for a, b in zip(first, stepped, strict=True)),
        "join_over_decode_step": median(a / b for a, b in zip(later, stepped, strict=True)),
    }


def answers_of(stage: TorchStage, prompts: Tokens, tokens: int) -> Tokens:
    """Greedy answers (rows, tokens)."""
    rows, length = prompts.shape
    names, newest, answers = np.arange(rows, dtype=np.int32), prompts, []
    for i in range(tokens):
        newest = step(stage, names, np.full(rows, 0 if i == 0 else length + i - 1, np.int32), newest)
        answers.append(newest)
    free(stage)
    return np.concatenate(answers, axis=1)


def over_generate(stage: TorchStage, reference: Any, prompts: Tokens, *, tokens: int, rounds: int) -> dict[str, object]:
    """The same batch by `generate` of transformers."""
    ids = torch.tensor(prompts, dtype=torch.int64)
    settings = {"do_sample": False, "max_new_tokens": tokens, "attention_mask": torch.ones_like(ids)}
    answers: list[Tokens] = []
    ours, theirs = [], []

    def generate() -> None:
        with torch.inference_mode():
            answers.append(reference.generate(ids, **settings)[:, ids.shape[1] :].numpy())

    for _ in range(rounds):
        ours.append(seconds_of(lambda: answers.append(answers_of(stage, prompts, tokens))))
        theirs.append(seconds_of(generate))
    made = prompts.shape[0] * tokens
    return {
        "tokens_per_s": made / median(ours),
        "generate_tokens_per_s": made / median(theirs),
        "over_generate": median(b / a for a, b in zip(ours, theirs, strict=True)),
        "same_tokens": all(np.array_equal(answer, answers[0]) for answer in answers),
    }


def ragged_steps(stage: Stage, prompt: Tokens, *, rows: int, steps: int) -> dict[str, float]:
    """A step of rows that stand at one position, and of as many whose lengths differ by up to `steps`."""
    share(stage, prompt, rows)
    names, newest = np.arange(rows, dtype=np.int32), np.repeat(prompt[:, :1], rows, axis=0)
    start = np.full(rows, prompt.shape[1], np.int32)
    level = [seconds_of(step, stage, names, start + i, newest) for i in range(steps)]
    stage.join(GROUP, np.array([rows], np.int32), PREFIX)
    names, start = names + 1, start + steps
    start[-1] = prompt.shape[1]
    ragged = [seconds_of(step, stage, names, start + i, newest) for i in range(steps)]
    free(stage)
    return {
        "level_step_s": median(level),
        "ragged_step_s": median(ragged),
        "ragged_over_level": median(ragged) / median(level),
    }


def measure(model: Path, *, samples: int, prompt: int, tokens: int, rounds: int) -> dict[str, object]:
    """All figures."""
    torch.set_num_threads(1)
    layers = model_shape(model).layers
    stage = load_stage(model, Span(start=0, end=layers, layers=layers), device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # fixed lengths
    reference.generation_config.pad_token_id = 0
    prompts = np.random.default_rng(0).integers(1, reference.config.vocab_size, (samples, prompt), np.int32)
    answers_of(stage, prompts[:, :8], 2)  # warm
    figures: dict[str, object] = {"engine": stage.engine, "samples": samples, "prompt": prompt, "tokens": tokens}
    figures |= prefix_sharing(stage, prompts[:1], samples=samples, rounds=rounds)
    figures |= over_generate(stage, reference, prompts, tokens=tokens, rounds=rounds)
    return figures | ragged_steps(stage, prompts[:1], rows=samples, steps=tokens // 2)


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="A Hugging Face folder.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--samples", default=8, help="Rows of a group.")
@click.option("--prompt", default=128, help="Tokens of a prompt.")
@click.option("--tokens", default=64, help="Tokens of each answer.")
@click.option("--rounds", default=5, help="How often each is timed; medians are reported.")
def main(model: Path, file: Path | None, samples: int, prompt: int, tokens: int, rounds: int) -> None:
    """Measure one torch stage that hosts a whole model."""
    figures = measure(model, samples=samples, prompt=prompt, tokens=tokens, rounds=rounds)
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
