"""Draws follow the stated distribution, whatever the batch, and can be checked by whoever has the logits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_p2p.chain.sampler import audit, draw
from echo_p2p.errors import ChainError
from echo_protocols.run import Sampling

ALMOST_ONE = 1.0 - 2.0**-53

samplings = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 12),
)
rows_of_logits = st.tuples(st.integers(1, 6), st.integers(2, 20), st.integers(0, 2**32 - 1)).map(
    lambda shape: (np.random.default_rng(shape[2]).normal(0.0, 3.0, shape[:2])).astype(np.float32)
)
unit = st.floats(0.0, ALMOST_ONE)


def expected(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution of one row, written plainly."""
    scores = logits.astype(np.float64) / sampling.temperature
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    ranked = ranked[: sampling.top_k or len(ranked)]
    mass = {token: np.exp(scores[token] - scores.max()) for token in ranked}
    kept, gathered = [], 0.0
    for token in ranked:
        kept.append(token)
        gathered += mass[token]
        if sampling.top_p < 1.0 and gathered >= sampling.top_p * sum(mass.values()):
            break
    chances = np.zeros(len(scores))
    for token in kept:
        chances[token] = mass[token] / gathered
    return chances


def test_tokens_come_up_as_often_as_the_distribution_says() -> None:
    logits, count = np.random.default_rng(1).normal(0.0, 1.5, 12).astype(np.float32), 20_000
    uniforms = np.random.default_rng(2).random(count)
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=8, top_p=0.9)):
        tokens, _ = draw(np.tile(logits, (count, 1)), uniforms, sampling)
        chances = expected(logits, sampling)
        frequencies = np.bincount(tokens, minlength=12) / count
        assert np.abs(frequencies - chances).max() < 4.0 * 0.5 / np.sqrt(count)
        assert (frequencies[chances == 0.0] == 0.0).all()


@given(rows_of_logits, unit, samplings)
def test_log_probabilities_are_those_of_the_truncated_distribution(
    logits: np.ndarray, uniform: float, sampling: Sampling
) -> None:
    tokens, logprobs = draw(logits, np.full(len(logits), uniform), sampling)
    for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
        chances = expected(row, sampling)
        assert chances[token] > 0.0
        assert logprob <= 0.0
        assert not np.signbit(logprob) or logprob < 0.0
        assert np.isclose(logprob, np.log(chances[token]), rtol=1e-6, atol=1e-6)
        low = chances[:token].sum()
        assert low - 1e-9 <= uniform <= low + chances[token] + 1e-9


def test_without_truncation_the_log_probability_is_log_softmax() -> None:
    logits = np.random.default_rng(3).normal(0.0, 5.0, (64, 300)).astype(np.float32)
    tokens, logprobs = draw(logits, np.random.default_rng(4).random(64), Sampling())
    wide = logits.astype(np.float64)
    reference = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert np.allclose(logprobs, reference[np.arange(64), tokens], rtol=1e-6, atol=1e-6)


@settings(max_examples=50)
@given(samplings, st.integers(3, 700), st.integers(0, 2**32 - 1))
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(sampling: Sampling, vocabulary: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, uniforms = rng.normal(0.0, 3.0, (7, vocabulary)).astype(np.float32), rng.random(7)
    together = draw(logits, uniforms, sampling)
    backwards = draw(logits[::-1], uniforms[::-1], sampling)
    for i in range(7):
        token, logprob = draw(logits[i : i + 1], uniforms[i : i + 1], sampling)
        assert (token[0], logprob[0]) == (together[0][i], together[1][i]) == (backwards[0][6 - i], backwards[1][6 - i])


def test_drawing_leaves_the_logits_as_they_were() -> None:
    logits = np.random.default_rng(5).normal(size=(2, 9)).astype(np.float32)
    before = logits.copy()
    draw(logits, np.array([0.1, 0.9]), Sampling(top_k=2))
    assert np.array_equal(before, logits)


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_the_ends_of_the_unit_interval_never_draw_a_token_without_probability(uniform: float) -> None:
    logits = np.full((1, 50), -2000.0, dtype=np.float32)
    logits[0, 20:23] = [1.0, 3.0, 2.0]
    token, logprob = draw(logits, np.array([uniform]), Sampling())
    assert 20 <= token[0] <= 22
    assert np.isfinite(logprob[0])
    tokens, _ = draw(np.arange(50, dtype=np.float32)[None, ::-1], np.array([uniform]), Sampling(top_k=3))
    assert tokens[0] <= 2


def test_a_certain_token_has_log_probability_zero() -> None:
    logits = np.array([[0.0, 500.0, 0.0]], dtype=np.float32)
    token, logprob = draw(logits, np.array([0.5]), Sampling())
    assert token[0] == 1
    assert logprob[0] == 0.0
    assert not np.signbit(logprob[0])


def test_equal_logits_are_cut_in_token_order() -> None:
    logits = np.zeros((40, 10), dtype=np.float32)
    tokens, logprobs = draw(logits, np.linspace(0.0, ALMOST_ONE, 40), Sampling(top_k=4))
    assert set(tokens.tolist()) == {0, 1, 2, 3}
    assert np.allclose(logprobs, np.log(0.25))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros((2, 5), dtype=np.float32)
    logits[1, 3] = bad
    with pytest.raises(ChainError, match="NaN or infinity"):
        draw(logits, np.array([0.5, 0.5]), Sampling())


@pytest.mark.parametrize("uniforms", [[0.5], [0.5, 1.0], [-0.1, 0.5], [np.nan, 0.5]])
def test_uniforms_that_do_not_fit_are_refused(uniforms: list[float]) -> None:
    with pytest.raises(ChainError, match="uniforms"):
        draw(np.zeros((2, 5), dtype=np.float32), np.array(uniforms), Sampling())


@given(rows_of_logits, unit, samplings, st.integers(0, 2**32 - 1))
def test_an_honest_draw_passes_the_audit_of_slightly_other_logits(
    logits: np.ndarray, uniform: float, sampling: Sampling, seed: int
) -> None:
    sampling = Sampling(temperature=sampling.temperature)  # at a truncation's edge, rates are judged: see audit
    tokens, _ = draw(logits, np.full(len(logits), uniform), sampling)
    noise = np.random.default_rng(seed).uniform(-1e-6, 1e-6, logits.shape).astype(np.float32)
    for row, token in zip(logits + noise, tokens, strict=True):
        assert audit(row, int(token), uniform, sampling, 1e-4)


@given(rows_of_logits, unit, samplings)
def test_an_honest_draw_passes_the_audit_of_the_same_logits(
    logits: np.ndarray, uniform: float, sampling: Sampling
) -> None:
    tokens, _ = draw(logits, np.full(len(logits), uniform), sampling)
    for row, token in zip(logits, tokens, strict=True):
        assert audit(row, int(token), uniform, sampling, 1e-9)


def test_greedy_best_of_n_and_invented_tokens_fail_the_audit() -> None:
    rng, sampling = np.random.default_rng(6), Sampling()
    logits, uniforms = rng.normal(size=(200, 30)).astype(np.float32), rng.random(200)
    greedy = logits.argmax(axis=1)
    passed = sum(
        audit(row, int(token), u, sampling, 1e-4) for row, token, u in zip(logits, greedy, uniforms, strict=True)
    )
    assert passed < 60
    assert not audit(logits[0], 30, 0.5, sampling, 1e-4)
    assert not audit(logits[0], -1, 0.5, sampling, 1e-4)
    assert not audit(logits[0], int(logits[0].argmin()), 0.5, Sampling(top_k=3), 1e-4)


def test_the_audit_tolerates_a_token_at_the_edge_of_the_truncation() -> None:
    logits = np.array([2.0, 1.0, 1.0 - 1e-7, 0.0], dtype=np.float32)
    assert audit(logits, 2, 0.9, Sampling(top_k=2), 1e-4)
    assert not audit(logits, 3, 0.9, Sampling(top_k=2), 1e-4)
    share = float(np.exp(2.0) / np.exp([2.0, 1.0, 0.0]).sum())
    edge = np.array([2.0, 1.0, 0.0], dtype=np.float32)
    assert audit(edge, 1, 0.99 * 0.73 + 0.27, Sampling(top_p=share - 1e-6), 1e-4)
