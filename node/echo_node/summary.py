"""What a run came to, from the trainer's own log of its steps and the nodes' last words. Pure but for `read_steps`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from echo_node.charts import bytes_text, plain, short_peer
from echo_node.state import NodeState

STEPS_FILE = "steps.jsonl"


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A rollout group that a step trained on."""

    worker: str
    version: int | str
    lag: int
    counter: int = 0
    reward_mean: float = 0.0


class StepLine(Struct, frozen=True, kw_only=True):
    """One line of the trainer's run log: what a summary needs of it."""

    step: int
    reward_mean: float
    groups: tuple[TrainedGroup, ...] = ()
    release_bytes: int | None = None
    model_bytes_bf16: int = 0
    policy_hash: str = ""
    waited_s: float = 0.0
    step_s: float = 0.0


class Summary(Struct, frozen=True, kw_only=True):
    """What `echo-node demo --json` writes. Means of nothing are null."""

    reward_first10: float | None
    reward_last10: float | None
    steps: int
    rollouts_by_peer: dict[str, int]
    lag_mean: float | None
    lag_max: int | None
    max_lag: int | None
    release_bytes_mean: float | None
    model_bytes_bf16: int
    trainer_idle_share: float
    refused: dict[str, int]
    policy_hash: str
    orphans: int


def read_steps(home: Path) -> list[StepLine]:
    """The steps in the newest run log under a trainer's home; a line that a kill cut short is left out."""
    logs = sorted(home.glob(f"runs/*/{STEPS_FILE}"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return []
    steps: list[StepLine] = []
    for line in logs[-1].read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            steps.append(msgspec.json.decode(line, type=StepLine))
    return steps


def summarise(steps: Sequence[StepLine], states: Iterable[NodeState], orphans: int) -> Summary:
    """The summary of these steps; `states` are the last that each node served."""
    known = list(states)
    groups = [group for step in steps for group in step.groups]
    lags = [group.lag for group in groups]
    sizes = [step.release_bytes for step in steps if step.release_bytes]
    refused: Counter[str] = Counter()
    for state in known:
        refused.update(state.refused)
    return Summary(
        reward_first10=_mean([step.reward_mean for step in steps[:10]]),
        reward_last10=_mean([step.reward_mean for step in steps[-10:]]),
        steps=len(steps),
        rollouts_by_peer=dict(Counter(group.worker for group in groups).most_common()),
        lag_mean=_mean(lags),
        lag_max=max(lags, default=None),
        max_lag=max((state.run.max_lag for state in known if state.run is not None), default=None),
        release_bytes_mean=_mean(sizes),
        model_bytes_bf16=max((step.model_bytes_bf16 for step in steps), default=0),
        trainer_idle_share=_idle_share(steps),
        refused=dict(refused.most_common()),
        policy_hash=steps[-1].policy_hash if steps else "",
        orphans=orphans,
    )


def render_summary(summary: Summary, names: dict[str, str] | None = None) -> Table:
    """The summary as a table; `names` gives peers a readable name."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for label, value in _rows(summary, names or {}):
        table.add_row(label, Text(value))
    return table


def _rows(summary: Summary, names: dict[str, str]) -> Iterable[tuple[str, str]]:
    first, last = summary.reward_first10, summary.reward_last10
    if first is None or last is None:
        yield "steps", "none: the trainer had no rollouts in time"
    else:
        yield "steps", f"{summary.steps:,}"
        yield "reward", f"{first:.3f} (first 10 steps) → {last:.3f} (last 10): {last - first:+.3f}"
    yield "rollout groups", _counts({_name(peer, names): made for peer, made in summary.rollouts_by_peer.items()})
    if summary.lag_mean is not None:
        bound = "" if summary.max_lag is None else f", the bound is {summary.max_lag}"
        yield "lag", f"mean {summary.lag_mean:.2f}, largest {summary.lag_max}{bound}"
    if summary.release_bytes_mean:
        whole = summary.model_bytes_bf16
        against = f"; the bf16 model has {bytes_text(whole)}" if whole else ""
        yield "release", f"{bytes_text(summary.release_bytes_mean)} on average{against}"
    yield "trainer idle", f"{summary.trainer_idle_share:.0%}"
    yield "refused", _counts(summary.refused)
    yield "policy hash", summary.policy_hash or "–"
    yield "processes left", str(summary.orphans)


def _name(peer: str, names: dict[str, str]) -> str:
    return f"{names[peer]} {short_peer(peer)}" if peer in names else short_peer(peer)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{plain(name)} {count:,}" for name, count in counts.items()) or "none"


def _idle_share(steps: Sequence[StepLine]) -> float:
    waited = sum(step.waited_s for step in steps)
    worked = sum(step.step_s for step in steps)
    return waited / (waited + worked) if waited + worked > 0.0 else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
