"""Chains of torch and mlx stages on a real model: `python tests/bench/chain_mlx.py MODEL_FOLDER --json FILE`.

Greedy tokens of 20 prompts against the whole model in torch, the error of their log-probabilities, and both again with
1 % of all weights patched half-way. Minutes on two cores; stages are called one after the other, with no network.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from echo_p2p.chain import mlx_stage, torch_stage
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Stage, TensorUpdate
from echo_protocols.values import Span

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "Question: What is 12 + 30? Answer:",
    "The three primary colours are",
    "Water boils at",
    "import numpy as np\n\n",
    "The opposite of hot is",
    "Dear Sir or Madam,",
    "In 1969, humans first",
    "The recipe needs two eggs,",
    "To be, or not to be,",
    "A triangle has three",
    "The quick brown fox",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "The square root of 144 is",
    "Roses are red,",
    "The largest planet in the solar system is",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens and their log-probabilities."""

    tokens: list[int]
    log_probabilities: list[float]


def generate(stages: Sequence[Stage], prompt: NDArray[np.int32], tokens: int) -> Answer:
    """The greedy answer to (1, length) tokens."""
    row, position, answer = np.zeros(1, np.int32), 0, Answer([], [])
    carried: NDArray[np.int32] | NDArray[np.float32]
    for _ in range(tokens):
        carried = prompt
        for stage in stages:
            carried = stage.forward(0, row, np.full(1, position, np.int32), carried)
        logits = carried[0].astype(np.float64) - carried[0].max()
        answer.tokens.append(int(logits.argmax()))
        answer.log_probabilities.append(float(logits.max() - np.log(np.exp(logits).sum())))
        position += prompt.shape[1]
        prompt = np.array([answer.tokens[-1:]], np.int32)
    for stage in stages:
        stage.close(0)
    return answer


def small_patch(stage: Stage) -> dict[str, TensorUpdate]:
    """One percent of all values, each moved by one unit in the last place of its bf16 pattern."""
    draws, updates = np.random.default_rng(0), {}
    for name, bits in stage.tensors().items():
        index = np.unique(draws.integers(0, bits.size, max(1, bits.size // 100)))
        updates[name] = TensorUpdate(index, bits.reshape(-1)[index] ^ np.uint16(1))
    return updates


def apply(stages: Sequence[Stage], patch: Mapping[str, TensorUpdate]) -> None:
    """To each stage its part."""
    for stage in stages:
        held = stage.tensors()
        stage.apply({name: update for name, update in patch.items() if name in held})


def compare(answers: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, object]:
    """How a chain's answers differ; log-probabilities up to the first token that does."""
    same = [np.equal(ours.tokens, theirs.tokens) for ours, theirs in zip(answers, expected, strict=True)]
    errors = [
        abs(a - b)
        for ours, theirs, equal in zip(answers, expected, same, strict=True)
        for a, b in list(zip(ours.log_probabilities, theirs.log_probabilities, strict=True))[: _run_of(equal)]
    ]
    return {
        "prompts": len(same),
        "identical_prompts": int(sum(equal.all() for equal in same)),
        "log_probability_error_max": max(errors),
        "log_probability_error_mean": float(np.mean(errors)),
    }


def _run_of(equal: NDArray[np.bool_]) -> int:
    return int(equal.argmin()) if not equal.all() else len(equal)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--tokens", default=40, help="Tokens of each answer.")
def main(model: Path, file: Path | None, tokens: int) -> None:
    """Measure how well chains of torch and mlx stages agree with torch."""
    layers = model_shape(model).layers
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [np.array([tokenizer(text).input_ids], np.int32) for text in PROMPTS]
    front, back = (
        Span(start=start, end=end, layers=layers) for start, end in ((0, layers // 2), (layers // 2, layers))
    )
    whole = torch_stage.load_stage(model, Span(start=0, end=layers, layers=layers), device="cpu")
    by_torch = [torch_stage.load_stage(model, span, device="cpu") for span in (front, back)]
    by_mlx = [mlx_stage.load_stage(model, span, device="cpu") for span in (front, back)]
    chains: dict[str, list[Stage]] = {"torch_mlx": [by_torch[0], by_mlx[1]], "mlx_torch": [by_mlx[0], by_torch[1]]}
    patch = small_patch(whole)
    figures: dict[str, object] = {
        "engines": [by_torch[0].engine, by_mlx[0].engine],
        "tokens": tokens,
        "self_check_disagreement": mlx_stage.prove(
            model, whole.span, lambda path, span: torch_stage.load_stage(path, span, device="cpu"), device="cpu"
        ),
    }
    for state in ("", "_patched"):
        expected = [generate([whole], prompt, tokens) for prompt in prompts]
        for name, stages in chains.items():
            figures[name + state] = compare([generate(stages, prompt, tokens) for prompt in prompts], expected)
            click.echo(f"{name + state}: {figures[name + state]}", err=True)
        if not state:
            apply([whole, *by_torch, *by_mlx], patch)
            changed = [generate([whole], prompt, tokens).tokens for prompt in prompts[:5]]
            figures["answers_changed_by_the_patch"] = sum(
                a != b.tokens for a, b in zip(changed, expected[:5], strict=True)
            )
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
