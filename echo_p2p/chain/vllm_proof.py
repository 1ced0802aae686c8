"""The start-up proof of an engine that we reach into: it draws as told from the model's logits, and patches reach it.

Whatever vLLM changes inside, an engine that passes draws auditable tokens from the weights that its node believes it
has. Knows no vllm: what is judged is what it says.
"""

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import numpy as np
import torch

from echo_p2p.chain.group import Answers, GroupRequest
from echo_p2p.chain.live_weights import TorchWeights
from echo_p2p.chain.sampler import Floats, audit
from echo_p2p.chain.vllm_loop import Core
from echo_p2p.errors import ModelError
from echo_p2p.tensors import Bits, TensorUpdate
from echo_protocols.release import part_of
from echo_protocols.run import Sampling
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion

_TOKENS = 8
_SAMPLINGS = (Sampling(max_new_tokens=_TOKENS), Sampling(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=_TOKENS))
_PROOF = PolicyVersion(epoch=0, step=0)
_NOISE = 0.5
_EDGES = 0.25
"""Honest draws may be refused where two tokens tie at the edge of a truncation."""

_CURE = "choose --engine torch"


class Provable(Core, Protocol):
    """A core whose model can be asked for its distributions past the sampler."""

    weights: TorchWeights

    def score(self, tokens: Sequence[int]) -> Floats:
        """Log-probabilities (tokens - 1, vocabulary) of what follows each token, before temperature and truncation."""


def prove(core: Provable, *, vocabulary: int, tolerance: float) -> float:
    """How far log-probabilities are from the model's own, at worst. Raises ModelError beyond `tolerance`.

    An idle core, which is left as it was but for its cache.
    """
    apart = _prove_draws(core, vocabulary, tolerance)
    _prove_patches(core, vocabulary, tolerance)
    return apart


def _prove_draws(core: Provable, vocabulary: int, tolerance: float) -> float:
    """Answers of several lengths and samplings, computed together, audited one by one."""
    requests = {
        number: GroupRequest(
            group_id=bytes([number]) * 32,
            run_seed=b"the start-up proof".ljust(32),
            prompt=_prompt(3 + 4 * number, vocabulary),
            samples=2,
            sampling=sampling,
            stop_tokens=frozenset(),
        )
        for number, sampling in zip(count(1), _SAMPLINGS, strict=False)
    }
    answers = {number: Answers(request) for number, request in requests.items()}
    for number, request in requests.items():
        core.add(number, request, dict.fromkeys(range(request.samples), ()))
    steps = iter(range(len(requests) * (_TOKENS + 2)))
    while core.busy and next(steps, None) is not None:
        for number, sample, token, logprob in core.step():
            answers[number].take(sample, token, logprob, _PROOF)
    if core.busy or not all(grown.finished for grown in answers.values()):
        raise ModelError(f"vllm does not end its answers where it should: {_CURE}")
    return max(_judge(core, request, answers[number], tolerance) for number, request in requests.items())


def _judge(core: Provable, request: GroupRequest, grown: Answers, tolerance: float) -> float:
    worst, refused, plain = 0.0, 0, request.sampling == _SAMPLINGS[0]
    for number, sample in enumerate(grown.samples()):
        scores = core.score((*request.prompt, *sample.tokens))[len(request.prompt) - 1 :]
        for position, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
            chance = uniform(request.run_seed, request.group_id, number, position)
            refused += not audit(scores[position].astype(np.float32), token, chance, request.sampling, tolerance)
            if plain:  # a token at the edge of a truncation would be infinitely far
                worst = max(worst, abs(float(scores[position, token]) - logprob))
    if refused > (0 if plain else request.samples * _TOKENS * _EDGES):
        raise ModelError(f"vllm does not draw by public uniforms here, so nobody could audit it: {_CURE}")
    if worst > tolerance:
        raise ModelError(f"vllm's log-probabilities are {worst:.1e} from those of its own model: {_CURE}")
    return worst


def _prove_patches(core: Provable, vocabulary: int, tolerance: float) -> None:
    """Each kind of tensor is changed once, must change what the model says, and is put back."""
    prompt = _prompt(6, vocabulary)
    before, draws = core.score(prompt), np.random.default_rng(0)
    for name in core.weights.layout:
        if part_of(name).startswith("layer.") and part_of(name) != "layer.0":
            continue
        bits = _bits(core.weights, name)
        core.weights.apply({name: TensorUpdate(None, _noisy(bits, draws))})
        changed = core.score(prompt)
        core.weights.apply({name: TensorUpdate(None, bits)})
        if np.array_equal(changed, before):
            raise ModelError(f"vllm computes from a copy of {name}, which no patch would reach: {_CURE}")
    if not np.allclose(core.score(prompt), before, atol=tolerance, equal_nan=False):
        raise ModelError(f"vllm does not compute as before once its weights are as before: {_CURE}")


def _prompt(length: int, vocabulary: int) -> tuple[int, ...]:
    return tuple((7 * i + 3) % vocabulary for i in range(length))


def _bits(weights: TorchWeights, name: str) -> Bits:
    bits: Bits = weights.view(name).to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return bits.copy()


def _noisy(bits: Bits, draws: np.random.Generator) -> Bits:
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    values = values + _NOISE * draws.standard_normal(values.shape, np.float32)
    noisy: Bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return noisy
