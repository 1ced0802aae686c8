"""What a few rows cost with a large matrix: `python tests/bench/products.py --json FILE`.

oneDNN's float32 product, which stages take for few rows, over the one that torch takes by itself, in CPU seconds of one
thread; each time over several matrices in turn, so that none waits in the cache.
"""

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import torch

from echo_p2p.chain.torch_products import FEW, onednn_helps, onednn_product

SHAPES = ((576, 576), (1536, 576), (576, 1536), (1024, 1024), (3072, 1024), (1024, 3072), (5632, 2048), (49152, 576))
"""Outputs and inputs: of SmolLM2-135M, Qwen3-0.6B and a model of 1.5 B parameters."""

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 32, 48, 64)

BYTES = 100 * 2**20
"""Of matrices that are read in turn."""


def seconds_of(
    onednn: bool,
    inputs: torch.Tensor,
    matrices: Sequence[torch.Tensor],
) -> float:
    """CPU seconds of one product of inputs (rows, in) with a matrix (out, in)."""
    begun = time.process_time()
    for matrix in matrices:
        onednn_product(inputs, matrix) if onednn else torch.nn.functional.linear(inputs, matrix)
    return (time.process_time() - begun) / len(matrices)


def gains_of(outputs: int, inputs: int, *, rounds: int) -> dict[int, float]:
    """Time that torch's own product takes over oneDNN's, by rows; medians of rounds in which they take turns."""
    matrices = [torch.randn(outputs, inputs) for _ in range(max(1, BYTES // (4 * outputs * inputs)))]
    found: dict[int, float] = {}
    for rows in ROWS:
        values = torch.randn(rows, inputs)
        taken = [[seconds_of(onednn, values, matrices) for onednn in (False, True)] for _ in range(rounds + 1)][1:]
        found[rows] = median(own for own, _ in taken) / median(theirs for _, theirs in taken)
    return found


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--rounds", default=7, show_default=True)
def main(file: Path | None, rounds: int) -> None:
    """Measure all shapes, and print where a stage takes oneDNN."""
    if not onednn_helps():
        raise click.ClickException("torch has no oneDNN beside MKL on this machine: there is nothing to compare")
    torch.set_num_threads(1)
    figures = {}
    with torch.inference_mode():
        for outputs, inputs in SHAPES:
            gains = gains_of(outputs, inputs, rounds=rounds)
            taken = next((rows for values, rows in FEW if outputs * inputs >= values), range(0))
            click.echo(
                f"{outputs} × {inputs}: "
                + "  ".join(f"{rows}: {gain:.2f}{'*' if rows in taken else ''}" for rows, gain in gains.items())
            )
            figures[f"{outputs}x{inputs}"] = {
                "gain_by_rows": {str(rows): round(gain, 3) for rows, gain in gains.items()},
                "least_gain_where_taken": round(min((gains[r] for r in ROWS if r in taken), default=1.0), 3),
            }
    click.echo("* a stage takes oneDNN here")
    if file is not None:
        machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
        file.write_text(json.dumps({"machine": machine, "shapes": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
