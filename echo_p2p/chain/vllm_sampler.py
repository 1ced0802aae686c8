"""Draws with public uniforms inside vLLM: `sampler.draw` in torch on the engine's device, in place of vLLM's sampler.

Knows no group: each row's uniform and sampling come from its request.
"""

# vLLM's own plug point for logits runs before top-k and top-p, and leaves its log-probabilities without them; so the
# sampler itself is replaced, of which vLLM 0.32's first model runner has one as an attribute.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from echo_p2p.errors import ChainError
from echo_protocols.run import Sampling

_VALUES_AT_ONCE = 1 << 22
"""Logits that are computed with together, in float64: what the sampler adds to the memory that vLLM has measured."""


class Chance(NamedTuple):
    """How the next token of one row is drawn."""

    uniform: float
    sampling: Sampling


Chances = Callable[[int], Sequence[Chance]]
"""Of the first so many rows of the batch."""


class PublicSampler(Sampler):
    """The log-probabilities that it returns are of the distribution drawn from, whatever the engine's mode is."""

    def __init__(self, chances: Chances) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._chances = chances

    def forward(self, logits: torch.Tensor, *_: object, **__: object) -> SamplerOutput:
        """One token a row. Raises ChainError on logits that are not finite."""
        tokens, logprobs = self.draw(logits, self._chances(logits.shape[0]))
        column = tokens.to(torch.int32)[:, None]  # (rows, 1)
        ranks = torch.zeros(len(tokens), dtype=torch.int64, device=logits.device)  # asked for by nobody
        return SamplerOutput(
            sampled_token_ids=column, logprobs_tensors=LogprobsTensors(column, logprobs.float()[:, None], ranks)
        )

    def draw(self, logits: torch.Tensor, chances: Sequence[Chance]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (rows,) and log-probabilities (rows,) of logits (rows, vocabulary)."""
        at_once = max(1, _VALUES_AT_ONCE // logits.shape[1])
        parts = [draw(logits[i : i + at_once], chances[i : i + at_once]) for i in range(0, len(logits), at_once)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def draw(logits: torch.Tensor, chances: Sequence[Chance]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chain.sampler.draw`, with a sampling for each row. Raises ChainError."""
    if not bool(torch.isfinite(logits).all()):
        raise ChainError("logits hold NaN or infinity: the weights or the engine are at fault, replay elsewhere")

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scores = logits.double() / column([chance.sampling.temperature for chance in chances])  # (rows, vocabulary)
    scores -= scores.amax(1, keepdim=True)
    cut = [i for i, chance in enumerate(chances) if _truncates(chance.sampling, scores.shape[1])]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        scores[rows] = _truncated(scores[rows], [chances[i].sampling for i in cut])
    mass = scores.exp().cumsum(1)
    total = mass[:, -1:].contiguous()
    tokens = torch.searchsorted(mass, column([chance.uniform for chance in chances]) * total, right=True)
    # a share so near all of the mass that it rounds up to it: the last token that added any
    tokens = torch.where(tokens < mass.shape[1], tokens, torch.searchsorted(mass, total))
    logprobs = scores.gather(1, tokens) - total.log()
    return tokens[:, 0], logprobs[:, 0].clamp(max=0.0)


def _truncates(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.top_p < 1.0 or 0 < sampling.top_k < vocabulary


def _truncated(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Scores with -inf for what top-k, then top-p leave out; among equals the lower id goes first."""
    vocabulary = scores.shape[1]
    most = torch.tensor([min(each.top_k or vocabulary, vocabulary) for each in samplings], device=scores.device)[
        :, None
    ]
    shares = torch.tensor([each.top_p for each in samplings], dtype=torch.float64, device=scores.device)[:, None]
    total = scores.exp().sum(1, keepdim=True)
    # Tokens under this floor add up to less than what top-p leaves out, so it keeps none of them.
    floor = (0.5 * (1.0 - shares) * total / vocabulary).log()
    if (largest := max(each.top_k if each.top_k < vocabulary else 0 for each in samplings)) > 0:
        last = scores.topk(largest, 1).values.gather(1, most.clamp(max=largest) - 1)
        floor = torch.where(most < vocabulary, last, floor)
    rough = scores >= floor
    ids = scores.topk(int(rough.sum(1).max()), 1).indices.sort(1).values  # (rows, those that may be kept)
    ranked, order = scores.gather(1, ids).sort(dim=1, descending=True, stable=True)
    kept = torch.arange(ids.shape[1], device=scores.device) < most
    mass = (ranked.exp() * kept).cumsum(1)
    total = torch.where(most < vocabulary, mass[:, -1:], total)
    before = mass.roll(1, 1)
    before[:, 0] = -1.0  # the first is always kept
    kept &= (before < shares * total) | (shares >= 1.0)
    left = torch.zeros_like(rough).scatter(1, ids.gather(1, order), kept)
    return scores.masked_fill(~left, -torch.inf)
