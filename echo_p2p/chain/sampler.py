"""Draws tokens from logits with given uniforms, and checks such draws. Pure numpy float64: knows no engine, no lane.

Temperature, then top-k, then top-p, then the inverse of the cumulative distribution in token-id order. Each row is
computed from itself alone, so the same logits give the same token in any batch.
"""

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import ChainError
from echo_protocols.run import Sampling

Floats = NDArray[np.float64]


def draw(
    logits: NDArray[np.float32],  # (rows, vocabulary)
    uniforms: Floats,  # (rows,) each in [0, 1)
    sampling: Sampling,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens (rows,) and their log-probabilities (rows,) in the distribution truly drawn from; never above 0.

    Raises ChainError on logits that are not finite or do not fit.
    """
    _check(logits)
    uniforms = np.asarray(uniforms, dtype=np.float64)
    if uniforms.shape != logits.shape[:1] or not ((uniforms >= 0.0) & (uniforms < 1.0)).all():
        raise ChainError(f"{len(logits)} rows need as many uniforms in [0, 1), not {uniforms.tolist()[:8]}")
    tokens, logprobs = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
    for place, uniform in enumerate(uniforms.tolist()):  # one by one: a row fits the cache, all of them don't
        scores = _scores(logits[place], sampling)
        if _truncates(sampling, len(scores)):
            scores[~_kept(scores, sampling)] = -np.inf
        mass = np.cumsum(np.exp(scores))  # (vocabulary,) not normalised
        tokens[place] = token = _invert(mass, uniform)
        logprobs[place] = min(scores[token] - np.log(mass[-1]), 0.0)
    return tokens, logprobs + np.float32(0.0)  # makes -0.0 plain


def audit(
    logits: NDArray[np.float32],  # (vocabulary,)
    token: int,
    uniform: float,
    sampling: Sampling,
    epsilon: float,
) -> bool:
    """Whether `uniform` draws `token` from these logits, give or take `epsilon` of probability.

    Tolerates a token at the edge of the truncation. A near tie between two *other* tokens at that edge may still
    refuse an honest draw: judge a peer by its rate of refusals, never by one.
    """
    _check(logits[None])
    scores = _scores(logits, sampling)
    if not 0 <= token < len(scores):
        return False
    if not _truncates(sampling, len(scores)):
        return _inside(scores, token, uniform, epsilon)
    for top_p in (sampling.top_p, max(sampling.top_p - epsilon, epsilon), min(sampling.top_p + epsilon, 1.0)):
        kept = _kept(scores, sampling, top_p=top_p, favoured=token, favour=epsilon)
        if kept[token] and _inside(np.where(kept, scores, -np.inf), token, uniform, epsilon):
            return True
    return False


def _check(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 2 or not logits.size:
        raise ChainError(f"logits of shape {logits.shape} are not (rows, vocabulary): the last stage is at fault")
    if not np.isfinite(logits).all():
        raise ChainError("logits hold NaN or infinity: the weights or the last stage are at fault, replay elsewhere")


def _scores(logits: NDArray[np.float32], sampling: Sampling) -> Floats:
    """Logits (vocabulary,) over temperature, shifted so that the best is 0."""
    scores: Floats = logits.astype(np.float64) / sampling.temperature
    scores -= scores.max()
    return scores


def _truncates(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.top_p < 1.0 or 0 < sampling.top_k < vocabulary


def _kept(
    scores: Floats, sampling: Sampling, *, top_p: float | None = None, favoured: int | None = None, favour: float = 0.0
) -> NDArray[np.bool_]:
    """Which tokens (vocabulary,) top-k and top-p leave; among equals the lower id goes first.

    `favoured` is ranked as if its score were higher by `favour`.
    """
    top_p = sampling.top_p if top_p is None else top_p
    ranking = scores.copy()
    if favoured is not None:
        ranking[favoured] += favour
    mass = np.exp(scores)
    if 0 < sampling.top_k < len(scores):
        rough = np.flatnonzero(ranking >= np.partition(ranking, -sampling.top_k)[-sampling.top_k])
        order = rough[np.argsort(-ranking[rough], kind="stable")][: sampling.top_k]
        total = mass[order].sum()
    else:  # Tokens under this floor add up to less than what top-p leaves out, so it keeps none of them.
        total = mass.sum()
        rough = np.flatnonzero(mass >= 0.5 * (1.0 - top_p) * total / len(scores))
        order = rough[np.argsort(-ranking[rough], kind="stable")]
    if top_p < 1.0:
        order = order[: int(np.searchsorted(np.cumsum(mass[order]), top_p * total, side="left")) + 1]
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[order] = True
    return kept


def _invert(mass: Floats, uniform: float) -> int:
    """The first token whose cumulated mass passes the uniform's share. One without mass is never it."""
    token = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    # u so near 1 that its share rounds up to all of the mass: the last token that added any.
    return token if token < len(mass) else int(np.searchsorted(mass, mass[-1], side="left"))


def _inside(scores: Floats, token: int, uniform: float, epsilon: float) -> bool:
    mass = np.cumsum(np.exp(scores))
    low = mass[token - 1] / mass[-1] if token else 0.0
    return bool(low - epsilon <= uniform <= mass[token] / mass[-1] + epsilon)
