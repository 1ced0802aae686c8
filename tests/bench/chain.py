"""How well chains use their machines: `python tests/bench/chain.py --model MODEL_FOLDER --json FILE`, ten minutes.

Sleeping stages over real streams show what scheduling costs; a real model on one thread, in CPU seconds, shows what a
chain costs over one machine, and what lanes gain that never wait. Plans and single stages are measured by siblings.
"""

import json
import logging
import platform
from pathlib import Path

import click
import numpy as np
import torch
import trio
from chain_answers import batching_figures, chain_figures
from chain_hop import hop_figures
from chain_plan import plan_figures
from chain_rings import open_peers, scheduling_figures
from chain_stage import prefix_sharing
from transformers import AutoModelForCausalLM

from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.torch_stage import load_stage
from echo_protocols.values import Span

MARKS = {
    "scheduling_efficiency_min": (">=", 0.97),
    "cpu_per_token_over_whole": ("<=", 1.10),
    "continuous_batching_gain": (">=", 1.8),
    "prefix_sharing_gain": (">=", 5.0),
    "over_generate_fixed": (">=", 1.0),
    "over_generate_mixed": (">=", 1.5),
    "hop_over_stream": ("<=", 1.5),
    "plan_over_exact_mean": (">=", 0.97),
    "plan_seconds_256": ("<=", 1.0),
}
"""What each figure is asked to be."""


DEADLINE_S = 7200.0


async def measure(model: Path, *, quick: bool) -> dict[str, float]:
    """All figures but those of plans."""
    layers = model_shape(model).layers
    figures: dict[str, float] = {}
    async with open_peers(4) as nodes:
        figures |= await hop_figures(*nodes[:2], trips=300 if quick else 2000)
        figures |= await scheduling_figures(nodes, steps=10 if quick else 40)
        whole = load_stage(model, Span(start=0, end=layers, layers=layers), device="cpu")
        rounds, tokens = (1, 8) if quick else (3, 16)
        figures |= await chain_figures(model, whole, nodes[:2], rounds=rounds, tokens=tokens)
    prompt = np.random.default_rng(0).integers(1, 32_000, (1, 128), np.int32)
    figures |= prefix_sharing(whole, prompt, samples=8, rounds=1 if quick else 5)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # lengths are what is asked
    reference.generation_config.pad_token_id = 0
    return figures | await batching_figures(whole, reference, requests=8 if quick else 16, rounds=1 if quick else 3)


async def within_deadline(model: Path, quick: bool) -> dict[str, float]:
    """Raises trio.TooSlowError when something is stuck."""
    with trio.fail_after(DEADLINE_S):
        return await measure(model, quick=quick)


def print_table(figures: dict[str, float]) -> None:
    """One line a figure; what is asked of it beside."""
    for name, value in figures.items():
        sign, mark = MARKS.get(name, ("", 0.0))
        met = value >= mark if sign == ">=" else value <= mark
        click.echo(f"{name:<44}{value:>12.4g}" + (f"   {sign} {mark:g} {'' if met else 'MISSED'}" if sign else ""))


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="A Hugging Face folder.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--quick", is_flag=True, help="A rough look, in a quarter of the time.")
def main(model: Path, file: Path | None, quick: bool) -> None:
    """Measure chains."""
    logging.basicConfig(level=logging.ERROR)  # chains that end are no news here
    torch.set_num_threads(1)
    measured = trio.run(within_deadline, model, quick) | plan_figures(*((12, 1) if quick else (120, 5)))
    figures = {name: measured[name] for name in MARKS} | measured
    print_table(figures)
    if file is not None:
        machine = f"{platform.processor() or platform.machine()}, {platform.system()}"
        file.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
