"""The algorithms that a run can name, each a table of settings on verl's own functions. Knows no engine, imports none.

A manifest's `Algorithm` names one and may override its settings, field by field. The clips, coefficients and rates are
those of the papers; where verl's default differs from a paper and is the better known, the recipe says so.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from msgspec import UNSET

from echo_p2p.errors import UnknownName
from echo_protocols.run import Algorithm, LossAggregation

BOUND = 4
"""With dynamic sampling, a step looks at no more than so many times the groups that it trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of one algorithm, by verl's names where verl has one."""

    estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
    """verl's advantage estimator."""
    loss_mode: Literal["vanilla", "gspo"] = "vanilla"
    """verl's policy loss. `vanilla` is PPO's clip, with the dual clip where the advantage is negative."""
    loss_aggregation: LossAggregation = "token-mean"
    """`seq-mean-token-sum-norm` divides by the longest possible answer, so that a batch's lengths don't matter."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    normalise_by_std: bool = True
    """Of a group's rewards; for `grpo` only."""
    mini_batches: int = 1
    gamma: float = 1.0
    gae_lambda: float = 1.0
    critic_learning_rate: float = 1e-5
    critic_warmup_steps: int = 0
    value_clip: float = 0.5
    kl_place: Literal["none", "loss", "reward"] = "none"
    """Where the divergence from the first policy counts; other than `none`, the trainer holds that policy too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_coefficient: float = 0.001
    dynamic_sampling: bool = False
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0
    overlong_filter: bool = False
    rejection_k3: float | None = None

    @property
    def critic(self) -> bool:
        """Whether a value model learns beside the policy."""
        return self.estimator == "gae"

    @property
    def reference(self) -> bool:
        """Whether the first policy is held for comparison."""
        return self.kl_place != "none"

    @property
    def groups_stand_alone(self) -> bool:
        """Whether a group of equal rewards has no advantage, and no other group's advantage depends on it."""
        return self.estimator in ("grpo", "rloo")

    @property
    def may_leave_out(self) -> bool:
        """Whether the passes of a step may leave groups of equal rewards out, and give the same update.

        Not with a reference, which pulls on every answer, nor with rejection, since the mean is over what it keeps, nor
        with several mini-batches, whose means are their own.
        """
        alone = self.groups_stand_alone and self.kl_place == "none"
        return alone and self.rejection_k3 is None and self.mini_batches == 1


GRPO = Recipe(estimator="grpo", kl_coefficient=0.04)
"""Group relative policy optimisation (arXiv 2402.03300). As in verl, the loss is a mean over tokens (the paper: over
answers of a mean over tokens) and there is no KL unless `kl.place = "loss"` asks for the paper's 0.04 · k3."""

DR_GRPO = Recipe(estimator="grpo", normalise_by_std=False, loss_aggregation="seq-mean-token-sum-norm")
"""GRPO done right (arXiv 2503.20783): no division by the standard deviation, none by an answer's own length."""

DAPO = Recipe(
    estimator="grpo", clip_ratio_high=0.28, clip_ratio_c=10.0, dynamic_sampling=True, overlong_buffer=0.2
)  # fmt: skip
"""Decoupled clip and dynamic sampling (arXiv 2503.14476): clip-higher, mean over tokens, groups whose rewards differ
only, and a soft punishment in the last fifth of the longest answer (equation 13)."""

GSPO = Recipe(
    estimator="grpo",
    loss_mode="gspo",
    loss_aggregation="seq-mean-token-mean",
    clip_ratio_low=3e-4,
    clip_ratio_high=4e-4,
)
"""Group sequence policy optimisation (arXiv 2507.18071): ratio and clip are the answer's; the clip is much narrower."""

RLOO = Recipe(estimator="rloo", kl_estimator="k1")
"""REINFORCE leave-one-out (arXiv 2402.14740): the baseline of an answer is the mean of the group's others."""

REINFORCE_PLUS_PLUS = Recipe(estimator="reinforce_plus_plus", kl_place="reward", kl_estimator="k1")
"""REINFORCE++ (arXiv 2501.03262): no groups; returns with the KL in each token's reward, whitened over the batch."""

REINFORCE_PLUS_PLUS_BASELINE = Recipe(estimator="reinforce_plus_plus_baseline", kl_place="loss", kl_estimator="k2")
"""REINFORCE++ with the group's mean as baseline (the same paper): whitened over the batch, the KL in the loss by k2."""

PPO = Recipe(estimator="gae", gae_lambda=0.95, kl_estimator="k1")
"""Proximal policy optimisation (arXiv 1707.06347) with a critic and GAE (arXiv 1506.02438), whitened over the batch;
verl's rate and clip of the critic. `kl.place = "reward"` makes it InstructGPT's (arXiv 2203.02155)."""

RECIPES: dict[str, Recipe] = {
    "grpo": GRPO,
    "dr-grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "reinforce++": REINFORCE_PLUS_PLUS,
    "reinforce++-baseline": REINFORCE_PLUS_PLUS_BASELINE,
    "ppo": PPO,
}


def recipe_of(algorithm: Algorithm) -> Recipe:
    """The recipe that an algorithm names, with what the algorithm overrides. Raises UnknownName."""
    recipe = RECIPES.get(algorithm.name)
    if recipe is None:
        raise UnknownName(f"algorithm.name is {algorithm.name!r}: the trainer knows {', '.join(RECIPES)}.")
    changes: dict[str, Any] = {}
    if algorithm.clip_ratio is not UNSET:
        changes = {"clip_ratio_low": algorithm.clip_ratio, "clip_ratio_high": algorithm.clip_ratio}
    names = {field.name for field in fields(Recipe)}
    for prefix in ("", "kl", "critic", "overlong"):
        given = getattr(algorithm, prefix) if prefix else algorithm
        for name in () if given is UNSET else given.__struct_fields__:
            place = f"{prefix}_{name}" if f"{prefix}_{name}" in names else name
            if place in names and getattr(given, name) is not UNSET:
                changes[place] = getattr(given, name)
    return replace(recipe, **changes)


@dataclass(frozen=True, slots=True)
class StepSize:
    """How many groups a step trains on, and how many it looks at, at most, to find so many whose rewards differ.

    Both are the same without dynamic sampling: whatever comes is trained on.
    """

    groups: int
    bound: int


def step_size(algorithm: Algorithm, groups_per_step: int) -> StepSize:
    """The size of a run's steps. Raises UnknownName."""
    return StepSize(groups_per_step, groups_per_step * (BOUND if recipe_of(algorithm).dynamic_sampling else 1))


def missing(varies: list[bool], size: StepSize) -> int:
    """How many groups to gather next, where `varies` says of each gathered one whether its rewards differ."""
    return max(0, min(size.groups - sum(varies), size.bound - len(varies)))


def chosen(varies: list[bool], size: StepSize) -> tuple[int, ...]:
    """Places of the groups to train on, in order: those that vary first come first, others fill up what is left.

    So a step that reached its bound still has its full number of groups, and its mean is over all of them.
    """
    places = sorted(range(len(varies)), key=lambda place: not varies[place])  # stable
    return tuple(sorted(places[: size.groups]))
