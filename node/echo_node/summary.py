"""What a run came to, from the trainer's own log of its steps and the nodes' last words. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich.text import Text

from echo_node.charts import bytes_text, plain, short_peer
from echo_node.runlog import LoggedStep, idle_share, rollouts_by_peer
from echo_node.state import NodeState
from echo_p2p.config import RunConfig


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


def summarise(steps: Sequence[LoggedStep], run: RunConfig | None, states: Iterable[NodeState], orphans: int) -> Summary:
    """The summary of these steps; `run` is None if the trainer never began, `states` are the last of each node."""
    groups = [group for step in steps for group in step.groups]
    lags = [group.lag for group in groups]
    sizes = [step.release_bytes for step in steps if step.release_bytes]
    refused: Counter[str] = Counter()
    for state in states:
        refused.update(state.refused)
    return Summary(
        reward_first10=_mean([step.reward_mean for step in steps[:10]]),
        reward_last10=_mean([step.reward_mean for step in steps[-10:]]),
        steps=len(steps),
        rollouts_by_peer=rollouts_by_peer(steps, run.group_size if run else 1),
        lag_mean=_mean(lags),
        lag_max=max(lags, default=None),
        max_lag=run.max_lag if run else None,
        release_bytes_mean=_mean(sizes),
        model_bytes_bf16=max((step.model_bytes_bf16 for step in steps), default=0),
        trainer_idle_share=idle_share(steps),
        refused=dict(refused.most_common()),
        policy_hash=steps[-1].policy_hash if steps else "",
        orphans=orphans,
    )


def render_summary(summary: Summary, names: dict[str, str] | None = None) -> Text:
    """The summary as two columns, a row a line whatever its length; `names` gives peers a readable name."""
    return Text("\n".join(f"{label:<16}{value}" for label, value in _rows(summary, names or {})))


def _rows(summary: Summary, names: dict[str, str]) -> Iterable[tuple[str, str]]:
    first, last = summary.reward_first10, summary.reward_last10
    if first is None or last is None:
        yield "steps", "none: the trainer had no rollouts in time"
    else:
        yield "steps", f"{summary.steps:,}"
        enough = f"{last - first:+.3f}" if summary.steps >= 20 else "too few steps to compare"
        yield "reward", f"{first:.3f} (first 10 steps) → {last:.3f} (last 10): {enough}"
    yield "rollouts", _counts({_name(peer, names): made for peer, made in summary.rollouts_by_peer.items()})
    if summary.lag_mean is not None:
        bound = "" if summary.max_lag is None else f", the bound is {summary.max_lag}"
        yield "lag", f"mean {summary.lag_mean:.2f}, largest {summary.lag_max}{bound}"
    if summary.release_bytes_mean:
        whole = summary.model_bytes_bf16
        against = f"; the bf16 model has {bytes_text(whole)}" if whole else ""
        yield "release", f"{bytes_text(summary.release_bytes_mean)} on average{against}"
    yield "trainer idle", f"{summary.trainer_idle_share:.0%} of the whole run"
    yield "refused", _counts(summary.refused)
    yield "policy hash", summary.policy_hash or "–"
    yield "processes left", str(summary.orphans)


def _name(peer: str, names: dict[str, str]) -> str:
    return f"{names[peer]} {short_peer(peer)}" if peer in names else short_peer(peer)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{plain(name)} {count:,}" for name, count in counts.items()) or "none"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
