"""How far the sampled data has drifted from the policy that trains on it, and what follows for a run. Pure numpy.

Knows no engine, clock or network. Ratios are π_train / π_behaviour per token, after clamping their logarithm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOG_RATIO_BOUND = 20.0
_ESS_LOW, _ESS_FINE = 0.5, 0.9
_K3_HIGH, _K3_FINE = 0.1, 0.02


@dataclass(frozen=True, slots=True)
class DriftReport:
    """One batch's drift. Means are over tokens."""

    k3_kl: float
    """KL(behaviour ‖ policy) by the k3 estimator r − 1 − log r (Schulman 2020): never negative, low variance."""
    ess: float
    """Effective sample size of the importance weights as a share of the tokens: (Σr)² / (n Σr²), in (0, 1]."""
    clip_fraction: float
    """Share of tokens whose ratio lies outside [1 − clip_ratio, 1 + clip_ratio]."""
    logprob_gap: float
    """Mean of |log π_train − log π_behaviour|, in nats."""
    logprob_gap_max: float
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Groups by lag."""


def measure_drift(
    policy_logprobs: NDArray[Any],
    behaviour_logprobs: NDArray[Any],
    mask: NDArray[Any],
    *,
    clip_ratio: float,
    lags: Sequence[int] = (),
) -> DriftReport:
    """The drift of a batch; all arrays (rows, response), `mask` non-zero at real tokens. At least one token."""
    chosen = mask.astype(bool)
    gap = policy_logprobs[chosen].astype(np.float64) - behaviour_logprobs[chosen].astype(np.float64)  # (tokens,)
    log_ratio = np.clip(gap, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    ratio = np.exp(log_ratio)
    return DriftReport(
        k3_kl=float(np.mean(np.expm1(log_ratio) - log_ratio)),
        ess=float(ratio.sum() ** 2 / (ratio.size * np.square(ratio).sum())),
        clip_fraction=float(np.mean(np.abs(ratio - 1.0) > clip_ratio)),
        logprob_gap=float(np.abs(gap).mean()),
        logprob_gap_max=float(np.abs(gap).max()),
        staleness=staleness_histogram(lags),
    )


def staleness_histogram(lags: Sequence[int]) -> dict[int, int]:
    """Groups by lag, smallest lag first."""
    values, counts = np.unique(np.asarray(lags, dtype=np.int64), return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


def effective_lag(report: DriftReport, current: int, max_lag: int) -> int:
    """The lag bound to use from now on, inside [0, max_lag]: one tighter on high drift, one looser on low drift."""
    if report.ess < _ESS_LOW or report.k3_kl > _K3_HIGH:
        wanted = current - 1
    elif report.ess > _ESS_FINE and report.k3_kl < _K3_FINE:
        wanted = current + 1
    else:
        wanted = current
    return max(0, min(wanted, max_lag))


@dataclass(frozen=True, slots=True)
class Advice:
    """What a run lacks."""

    idle_share: float
    """Share of its time that the trainer would wait for rollouts at these rates, in [0, 1]."""
    missing_rate: float
    """Rollouts a second that are missing for a trainer that is never idle; infinite if no rate would do."""
    more_peers: int | None
    """Peers like the median that would fill it; None if no number would, or nobody's rate is known."""
    lacks: str
    """What the run lacks, without a figure of idleness: who has measured that, says his."""

    @property
    def words(self) -> str:
        """What the run lacks, with the share that is expected."""
        return self.lacks if self.more_peers == 0 else said_idle(self.idle_share, self.lacks)


def advice(
    *, rollouts_per_step: int, step_s: float, broadcast_s: float, publish_interval: int, rates: Sequence[float]
) -> Advice:
    """Whether peers that make `rates` rollouts a second keep the trainer busy, and how many more would.

    The trainer is never idle iff Σμ ≥ κR / (κ T_train − T_bcast) (arXiv 2602.02192), with R rollouts a step, a step of
    `step_s`, a release every κ = `publish_interval` steps that spreads in `broadcast_s` seconds.
    """
    busy_s = publish_interval * step_s
    wanted_rollouts = publish_interval * rollouts_per_step
    total = math.fsum(rates)
    if total <= 0.0:
        return Advice(1.0, math.inf, None, "no peer makes rollouts")
    cycle_s = max(busy_s, wanted_rollouts / total + broadcast_s)
    idle_share = 1.0 - busy_s / cycle_s
    if busy_s <= broadcast_s:
        lacks = f"a release takes longer to spread than {publish_interval} steps take; publish less often"
        return Advice(idle_share, math.inf, None, lacks)
    needed = wanted_rollouts / (busy_s - broadcast_s)
    missing = max(0.0, needed - total)
    if missing <= 1e-9 * needed:
        return Advice(0.0, 0.0, 0, f"trainer busy: peers make {total / needed:.1f} times what it needs")
    median = float(np.median(np.asarray(rates)))
    more = math.ceil(missing / median - 1e-9) if median > 0.0 else None
    if more is None:
        return Advice(idle_share, missing, None, "most peers make nothing")
    plural = "peer" if more == 1 else "peers"
    return Advice(idle_share, missing, more, f"about {more} more {plural} like the median would fill it")


def said_idle(share: float, lacks: str) -> str:
    """A share of idleness and what would help, in words."""
    return f"trainer idle {100.0 * share:.0f} %: {lacks}"
