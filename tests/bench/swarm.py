"""Whole swarms on this machine, measured: `python tests/bench/swarm.py --json FILE`, a quarter of an hour on two cores.

Learning: the demo for three seeds. Lag: three minutes of the asynchronous protocol with a peer slowed on purpose.
Equality: five sequential steps through a whole-model peer and through a chain, beside the co-located run of that seed.
Every figure comes from the runs' own logs.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click


def demo(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """One demo's summary, with its groups' lags from the log of trained groups. Raises if it fails."""
    file = folder / f"{name}.json"
    home = folder / name
    command = [sys.executable, "-m", "echo_node", "demo", "--home", str(home), "--json", str(file), *options]
    click.echo(f"{name}: echo-node demo {' '.join(options)}", err=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads(file.read_text())
    lines = [line for log in home.glob("*/runs/*/steps.jsonl") for line in log.read_text().splitlines()]
    summary["lags"] = [group["lag"] for line in lines for group in json.loads(line)["groups"]]
    return summary


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--seeds", default="1,2,3", help="Seeds of the learning runs.")
def main(file: Path | None, seeds: str) -> None:
    """Measure whole swarms."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        learning = {seed: demo(folder, f"seed-{seed}", "--seed", seed) for seed in seeds.split(",")}
        slowed = demo(folder, "slowed", "--seconds", "210", "--slow", "0.05")
        sequential = ("--protocol", "sequential", "--steps", "5", "--seed", "1")
        hashes = {
            "co_located": demo(folder, "co-located", "--co-located", *sequential)["policy_hash"],
            "whole": demo(folder, "whole", "--peers", "whole", *sequential)["policy_hash"],
            "chain": demo(folder, "chain", "--peers", "chain", *sequential)["policy_hash"],
        }
    gains = {seed: run["reward_last10"] - run["reward_first10"] for seed, run in learning.items()}
    figures = {
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "reward_gain": gains,
        "reward_gain_min": min(gains.values()),
        "steps": {seed: run["steps"] for seed, run in learning.items()},
        "release_over_model": {
            seed: run["release_bytes_mean"] / run["model_bytes_bf16"] for seed, run in learning.items()
        },
        "trainer_idle_share": {seed: run["trainer_idle_share"] for seed, run in learning.items()},
        "slowed_lag_min": min(slowed["lags"]),
        "slowed_lag_max": max(slowed["lags"]),
        "slowed_groups": len(slowed["lags"]),
        "max_lag": slowed["max_lag"],
        "sequential_equals_colocated": len(set(hashes.values())) == 1,
        "policy_hashes": hashes,
        "orphans": sum(run["orphans"] for run in [*learning.values(), slowed]),
    }
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
