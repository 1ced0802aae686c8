"""Drift figures of a batch, and what the coordinator makes of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_p2p.rl.drift import DriftReport, advice, effective_lag, measure_drift, staleness_histogram


def report(ess: float, k3_kl: float) -> DriftReport:
    return DriftReport(k3_kl=k3_kl, ess=ess, clip_fraction=0.0, logprob_gap=0.0, logprob_gap_max=0.0)


def column(*values: float) -> NDArray[np.float32]:
    return np.array([values], dtype=np.float32)


def test_the_same_policy_has_no_drift() -> None:
    logprobs = column(-0.1, -2.0, -5.0)
    drift = measure_drift(logprobs, logprobs, column(1, 1, 1), clip_ratio=0.2)
    assert (drift.k3_kl, drift.ess, drift.clip_fraction, drift.logprob_gap) == (0.0, 1.0, 0.0, 0.0)


def test_figures_are_those_of_the_formulas_and_padding_does_not_count() -> None:
    behaviour = column(math.log(0.5), math.log(0.5), 0.0)
    policy = column(math.log(0.5), math.log(0.25), -9.0)
    drift = measure_drift(policy, behaviour, column(1, 1, 0), clip_ratio=0.2, lags=(0, 2, 2))
    assert drift.k3_kl == pytest.approx((0.5 - 1 - math.log(0.5)) / 2, rel=1e-6)
    assert drift.ess == pytest.approx(1.5**2 / (2 * 1.25), rel=1e-6)
    assert drift.clip_fraction == 0.5
    assert drift.logprob_gap == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert drift.logprob_gap_max == pytest.approx(math.log(2), rel=1e-6)
    assert drift.staleness == {0: 1, 2: 2}


@given(st.lists(st.tuples(st.floats(-1e4, 0.0), st.floats(-1e4, 0.0)), min_size=1, max_size=30))
def test_figures_stay_finite_and_in_range_whatever_a_peer_sends(pairs: list[tuple[float, float]]) -> None:
    policy, behaviour = np.array(pairs).T[:, None]
    drift = measure_drift(policy, behaviour, np.ones_like(policy), clip_ratio=0.2)
    assert 0.0 <= drift.k3_kl < math.inf
    assert 0.0 < drift.ess <= 1.0 + 1e-9
    assert 0.0 <= drift.clip_fraction <= 1.0


def test_staleness_is_counted_by_lag() -> None:
    assert list(staleness_histogram((3, 0, 3)).items()) == [(0, 1), (3, 2)]
    assert staleness_histogram(()) == {}


def test_the_lag_bound_tightens_on_drift_loosens_without_and_holds_between() -> None:
    assert effective_lag(report(ess=0.3, k3_kl=0.01), 4, 8) == 3
    assert effective_lag(report(ess=0.95, k3_kl=0.5), 4, 8) == 3
    assert effective_lag(report(ess=0.95, k3_kl=0.01), 4, 8) == 5
    assert effective_lag(report(ess=0.7, k3_kl=0.01), 4, 8) == 4


@given(st.floats(0, 1), st.floats(0, 10), st.integers(0, 20), st.integers(0, 8))
def test_the_lag_bound_never_leaves_the_manifests(ess: float, k3_kl: float, current: int, max_lag: int) -> None:
    assert 0 <= effective_lag(report(ess, k3_kl), current, max_lag) <= max_lag


def test_advice_says_how_many_peers_are_missing() -> None:
    # 60 rollouts a step of 10 s with 2 s to spread: 7.5 a second needed, 4.5 there.
    found = advice(rollouts_per_step=60, step_s=10.0, broadcast_s=2.0, publish_interval=1, rates=(1.0, 1.0, 2.5))
    assert found.missing_rate == pytest.approx(3.0)
    assert found.more_peers == 3
    assert found.idle_share == pytest.approx(1 - 10 / (60 / 4.5 + 2))
    assert found.words == "trainer idle 35 %: about 3 more peers like the median would fill it"


def test_advice_is_content_with_enough_peers_and_singular_with_one_missing() -> None:
    enough = advice(rollouts_per_step=60, step_s=10.0, broadcast_s=2.0, publish_interval=1, rates=(7.5, 7.5))
    assert (enough.idle_share, enough.more_peers) == (0.0, 0)
    assert enough.words == "trainer busy: peers make 2.0 times what it needs"
    short = advice(rollouts_per_step=60, step_s=10.0, broadcast_s=2.0, publish_interval=1, rates=(7.0,))
    assert "about 1 more peer like" in short.words


def test_advice_knows_when_peers_are_not_the_cure() -> None:
    slow = advice(rollouts_per_step=8, step_s=1.0, broadcast_s=3.0, publish_interval=2, rates=(100.0,))
    assert slow.more_peers is None
    assert slow.words.endswith("publish less often")
    assert advice(rollouts_per_step=8, step_s=1.0, broadcast_s=0.0, publish_interval=1, rates=()).idle_share == 1.0
    still = advice(rollouts_per_step=8, step_s=1.0, broadcast_s=0.0, publish_interval=1, rates=(0.0, 0.0, 1.0))
    assert still.more_peers is None


@given(
    st.integers(1, 512),
    st.floats(0.1, 100),
    st.floats(0, 1),
    st.integers(1, 8),
    st.lists(st.floats(0.01, 50), min_size=1),
)
def test_the_advised_peers_make_the_trainer_busy(
    rollouts: int, step_s: float, broadcast_share: float, interval: int, rates: list[float]
) -> None:
    broadcast_s = 0.9 * broadcast_share * interval * step_s
    first = advice(
        rollouts_per_step=rollouts, step_s=step_s, broadcast_s=broadcast_s, publish_interval=interval, rates=rates
    )
    assert first.more_peers is not None
    assert 0.0 <= first.idle_share < 1.0
    filled = [*rates, *[float(np.median(rates)) * 1.000001] * min(first.more_peers, 10_000)]
    if first.more_peers <= 10_000:
        second = advice(
            rollouts_per_step=rollouts, step_s=step_s, broadcast_s=broadcast_s, publish_interval=interval, rates=filled
        )
        assert second.more_peers == 0
