"""Public randomness: the same everywhere, and nobody's choice."""

from hypothesis import given
from hypothesis import strategies as st

from echo_protocols.uniform import group_id, prompt_index, uniform, uniforms

SEED, GROUP = bytes(range(32)), b"g" * 32
places = st.tuples(st.just("slot"), st.integers(0, 2**53), st.integers(0, 2**53)) | st.tuples(
    st.text(max_size=60), st.integers(0, 2**53)
)


@given(places, places)
def test_every_place_has_a_group_of_its_own(one, other):
    assert (group_id(SEED, one) == group_id(SEED, other)) == (one == other)


def test_groups_differ_between_runs():
    assert group_id(SEED, ("slot", 1, 2)) != group_id(bytes(32), ("slot", 1, 2))


@given(places, st.integers(1, 2**40))
def test_prompts_are_in_range(place, prompts):
    assert 0 <= prompt_index(SEED, place, prompts) < prompts


@given(st.binary(max_size=80), st.binary(max_size=64), st.integers(0, 2**53), st.integers(0, 2**53))
def test_uniforms_are_inside_the_unit_interval(seed, group, sample, position):
    assert 0.0 < uniform(seed, group, sample, position) < 1.0


def test_uniforms_are_spread_evenly_and_differ_by_sample_and_position():
    drawn = [u for position in range(100) for u in uniforms(SEED, GROUP, range(50), position)]
    assert len(set(drawn)) == 5000
    tenths = [sum(n / 10 <= u < (n + 1) / 10 for u in drawn) for n in range(10)]
    assert all(400 < count < 600 for count in tenths)  # 500 ± 21


def test_prompts_are_spread_evenly():
    counts = [0] * 10
    for counter in range(5000):
        counts[prompt_index(SEED, ("A" * 52, counter), 10)] += 1
    assert all(400 < count < 600 for count in counts)
