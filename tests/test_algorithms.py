"""The table of algorithms, what a manifest may change in it, and which groups a step trains on. Pure."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_p2p.config import load_config
from echo_p2p.errors import ConfigError, UnknownName
from echo_p2p.rl.algorithms import RECIPES, StepSize, chosen, missing, recipe_of, step_size
from echo_p2p.rl.shaping import overlong_penalty, shape_overlong
from echo_p2p.rl.trainer import TrainingRow
from echo_protocols.run import Algorithm, Critic, Divergence, Overlong
from echo_protocols.values import canonical, decode


def test_a_name_gives_its_recipe_and_only_what_is_set_changes_it() -> None:
    for name, recipe in RECIPES.items():
        assert recipe_of(Algorithm(name=name)) == recipe
    changed = recipe_of(
        Algorithm(
            name="ppo",
            clip_ratio=0.1,
            clip_ratio_high=0.3,
            loss_aggregation="seq-mean-token-mean",
            dynamic_sampling=True,
            rejection_k3=0.5,
            mini_batches=4,
            kl=Divergence(place="reward", coefficient=0.2),
            critic=Critic(learning_rate=1e-3, warmup_steps=7, value_clip=0.2, gamma=0.9, gae_lambda=0.8),
            overlong=Overlong(buffer=0.1, penalty=0.5, filter=True),
        )
    )
    assert (changed.clip_ratio_low, changed.clip_ratio_high) == (0.1, 0.3)
    assert (changed.kl_place, changed.kl_coefficient, changed.kl_estimator) == ("reward", 0.2, "k1")
    assert (changed.critic_learning_rate, changed.critic_warmup_steps, changed.value_clip) == (1e-3, 7, 0.2)
    assert (changed.gamma, changed.gae_lambda) == (0.9, 0.8)
    assert (changed.overlong_buffer, changed.overlong_penalty, changed.overlong_filter) == (0.1, 0.5, True)
    assert (changed.loss_aggregation, changed.mini_batches) == ("seq-mean-token-mean", 4)
    assert (changed.dynamic_sampling, changed.rejection_k3) == (True, 0.5)
    assert changed.critic
    assert changed.reference


def test_an_unknown_name_is_answered_by_all_that_are_known() -> None:
    with pytest.raises(UnknownName, match="'magic'") as raised:
        recipe_of(Algorithm(name="magic"))
    assert all(name in str(raised.value) for name in RECIPES)


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(),
        Algorithm(name="dapo", clip_ratio=0.2, clip_ratio_high=0.28, dynamic_sampling=True, mini_batches=2),
        Algorithm(kl=Divergence(), critic=Critic(warmup_steps=3), overlong=Overlong(filter=True), rejection_k3=1),
    ],
)
def test_what_is_not_set_is_not_written_and_the_rest_in_its_shortest_form(algorithm: Algorithm) -> None:
    data = canonical(algorithm)
    plain = msgspec.msgpack.decode(data)
    assert msgspec.msgpack.encode(plain) == data
    assert decode(data, Algorithm) == algorithm
    assert ("clip_ratio" in plain) == (algorithm.clip_ratio is not msgspec.UNSET)


def test_a_manifest_s_settings_are_bounded_and_named_with_their_path() -> None:
    assert load_config(None, {"run.algorithm.kl.place": "loss"}).run.algorithm.kl == Divergence(place="loss")
    with pytest.raises(ConfigError, match=r"`run\.algorithm\.critic\.warmup`; did you mean `.*warmup_steps`"):
        load_config(None, {"run.algorithm.critic.warmup": 3})
    with pytest.raises(ConfigError, match=r"`run\.algorithm\.kl\.place`.*Choose none, loss or reward"):
        load_config(None, {"run.algorithm.kl.place": "nowhere"})
    for key, value in {"clip_ratio": 1.0, "rejection_k3": 0.0, "mini_batches": 0, "overlong.buffer": 1.5}.items():
        with pytest.raises(ConfigError, match=rf"run\.algorithm\.{key}"):
            load_config(None, {f"run.algorithm.{key}": value})


def test_the_overlong_punishment_is_equation_13_of_dapo() -> None:
    wanted = {1: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1.0, 101: -1.0}
    assert {length: overlong_penalty(length, 100, 20) for length in wanted} == pytest.approx(wanted)


def test_rewards_are_shaped_by_length_alone() -> None:
    rows = tuple(
        TrainingRow(group=0, prompt=(1,), response=(2,) * length, behaviour_logprobs=(-1.0,) * length, reward=1.0)
        for length in (10, 18, 20)
    )
    shaped = shape_overlong(rows, longest=20, share=0.2, factor=0.5)
    assert [row.reward for row in shaped] == pytest.approx([1.0, 0.75, 0.5])
    assert shape_overlong(rows, longest=20, share=0.0, factor=0.5) is rows
    assert shape_overlong(rows, longest=2, share=0.2, factor=0.5) is rows  # a buffer of no token


@given(st.lists(st.booleans(), max_size=64), st.integers(1, 8), st.integers(1, 5))
def test_a_step_is_gathered_until_enough_vary_or_its_bound_and_is_always_whole(
    answers: list[bool], groups: int, factor: int
) -> None:
    size, seen = StepSize(groups, groups * factor), list[bool]()
    answers = answers + [False] * (size.bound - len(answers))
    while more := missing(seen, size):
        seen += answers[len(seen) : len(seen) + more]
    assert groups <= len(seen) <= size.bound
    assert sum(seen) <= groups  # no group that says something is passed over
    assert sum(seen) == groups or len(seen) == size.bound
    places = chosen(seen, size)
    assert len(places) == groups
    assert list(places) == sorted(set(places))
    assert {place for place, varies in enumerate(seen) if varies} <= set(places)


def test_only_dynamic_sampling_looks_at_more_than_it_trains_on() -> None:
    assert step_size(Algorithm(name="dapo"), 8) == StepSize(8, 32)
    assert step_size(Algorithm(name="grpo"), 8) == StepSize(8, 8)
    assert step_size(Algorithm(name="dapo", dynamic_sampling=False), 8) == StepSize(8, 8)
