"""The log that a trainer leaves of its run, read from outside: steps, configuration, and a state made from both.

Reads what `echo_node.learning` writes, but by a schema of its own: what it says can be checked against the code that
enforced it.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from echo_node.state import RECENT_STEPS, NodeState, RunView, TrainerView
from echo_p2p.config import NodeConfig

STEPS_FILE = "steps.jsonl"
CONFIG_FILE = "config.json"


class LoggedGroup(Struct, frozen=True, kw_only=True):
    """A rollout group that a step trained on."""

    worker: str
    version: str
    lag: int
    counter: int = 0
    reward_mean: float = 0.0


class LoggedStep(Struct, frozen=True, kw_only=True):
    """One line: what a summary needs of it. `version` is the policy that the step started from."""

    step: int
    version: str
    reward_mean: float
    groups: tuple[LoggedGroup, ...] = ()
    release_bytes: int | None = None
    model_bytes_bf16: int = 0
    policy_hash: str = ""
    waited_s: float = 0.0
    step_s: float = 0.0


def read_steps(home: Path) -> list[LoggedStep]:
    """The steps in the newest run under a trainer's home; a line that a kill cut short is left out."""
    folder = _newest_run(home, STEPS_FILE)
    steps: list[LoggedStep] = []
    for line in (folder / STEPS_FILE).read_bytes().splitlines() if folder else ():
        with suppress(msgspec.DecodeError):
            steps.append(msgspec.json.decode(line, type=LoggedStep))
    return steps


def read_config(home: Path) -> NodeConfig | None:
    """The configuration that the newest run was started with, None if there is none yet."""
    folder = _newest_run(home, CONFIG_FILE)
    if folder is None:
        return None
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=NodeConfig)
    return None


def lag_histogram(steps: Sequence[LoggedStep]) -> dict[int, int]:
    """Lag → groups trained on at it."""
    return dict(sorted(Counter(group.lag for step in steps for group in step.groups).items()))


def rollouts_by_peer(steps: Sequence[LoggedStep], group_size: int) -> dict[str, int]:
    """Worker → rollouts of it trained on, most first."""
    groups = Counter(group.worker for step in steps for group in step.groups)
    return {worker: count * group_size for worker, count in groups.most_common()}


def idle_share(steps: Sequence[LoggedStep]) -> float:
    """Share of the time since the first batch in which the trainer waited for rollouts."""
    waited = sum(step.waited_s for step in steps[1:])
    worked = sum(step.step_s for step in steps)
    return waited / (waited + worked) if waited + worked > 0.0 else 0.0


def state_from_log(name: str, steps: Sequence[LoggedStep], config: NodeConfig) -> NodeState:
    """The state that a trainer without an HTTP port would serve."""
    lags = [group.lag for step in steps for group in step.groups]
    run = config.run
    return NodeState(
        peer=next((group.worker for step in steps for group in step.groups), name),
        role="trainer",
        swarm=config.swarm,
        software="",
        pid=0,
        started_at=0.0,
        now=0.0,
        run=RunView(
            run_id=name,
            model=run.model,
            task=run.task.name,
            algorithm=run.algorithm.name,
            protocol=run.protocol,
            max_lag=run.max_lag,
            group_size=run.group_size,
            groups_per_step=run.groups_per_step,
        ),
        trainer=TrainerView(
            step=len(steps),
            version=steps[-1].version if steps else "",
            reward_history=tuple(step.reward_mean for step in steps[-1000:]),
            lag_histogram=lag_histogram(steps),
            lag_mean=sum(lags) / len(lags) if lags else 0.0,
            lag_max=max(lags, default=0),
            release_bytes=tuple(step.release_bytes or 0 for step in steps[-1000:]),
            model_bytes_bf16=max((step.model_bytes_bf16 for step in steps), default=0),
            step_seconds=sum(step.step_s for step in steps[-RECENT_STEPS:]) / max(1, len(steps[-RECENT_STEPS:])),
            idle_share=idle_share(steps[-RECENT_STEPS:]),
            rollouts_by_peer=rollouts_by_peer(steps, run.group_size),
            policy_hash=steps[-1].policy_hash if steps else "",
        ),
    )


def _newest_run(home: Path, file: str) -> Path | None:
    found = sorted(home.glob(f"runs/*/{file}"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None
