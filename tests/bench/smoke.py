"""Whether algorithms learn: `python tests/bench/smoke.py --json FILE`, three minutes each on a core or two.

Co-located, the tiny model on its Sokoban, as the demo does; everything that is not set here is the recipe's own.
The gain is the mean reward of the last ten steps less that of the first ten, over all that was sampled: with dynamic
sampling, groups that were passed over count too.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

SETTINGS = {
    "grpo": (),
    "dapo": (),
    "ppo": ("run.algorithm.critic.learning_rate=5e-4",),
}
"""What the tiny model wants: it learns at 1.5e-4, which is 150 times the rate for models of the hub."""


def learn(folder: Path, name: str, seconds: float, seed: int) -> dict[str, Any]:
    """One run's figures, from its log. Raises if the run fails."""
    file, home = folder / f"{name}.json", folder / name
    settings = (f"run.algorithm.name={name}", *SETTINGS[name])
    command = [sys.executable, "-m", "echo_node", "demo", "--co-located", "--home", str(home), "--json", str(file)]
    command += ["--seconds", str(seconds), "--seed", str(seed), *(f"--set={setting}" for setting in settings)]
    click.echo(f"{name}: {' '.join(command[2:])}", err=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads(file.read_text())
    steps = [json.loads(line) for log in home.glob("*/runs/*/steps.jsonl") for line in log.read_text().splitlines()]
    return {
        "gain": summary["reward_last10"] - summary["reward_first10"],
        "reward_first10": summary["reward_first10"],
        "reward_last10": summary["reward_last10"],
        "steps": summary["steps"],
        "updated_steps": sum(step["updated"] for step in steps),
        "passed_over_groups": sum(step["passed_over"] for step in steps),
        "trained_groups": sum(len(step["groups"]) for step in steps),
        "settings": settings,
    }


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--seconds", default=180.0, help="Wall time of each run.")
@click.option("--seed", default=1)
@click.argument("names", nargs=-1, type=click.Choice(list(SETTINGS)))
def main(file: Path | None, seconds: float, seed: int, names: tuple[str, ...]) -> None:
    """Run the algorithms of those names, or all, one after the other."""
    with tempfile.TemporaryDirectory() as root:
        runs = {name: learn(Path(root), name, seconds, seed) for name in names or SETTINGS}
    figures = {
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "seconds": seconds,
        "seed": seed,
        "smoke_gain_min": min(run["gain"] for run in runs.values()),
        "runs": runs,
    }
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
