"""Rollout groups: which can't belong to a run, and why."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_protocols.rollout import LargeRollout, RolloutGroup, Sample, Segment, Slot, group_fault, sample_fault
from echo_protocols.run import Admission, RunManifest, Sampling
from echo_protocols.uniform import prompt_index
from echo_protocols.values import PolicyVersion, encode

WORKER, OTHER = "A" * 52, "B" * 52
MANIFEST = RunManifest(
    swarm="echo",
    model="tiny",
    tokenizer_hash=bytes(32),
    layers=4,
    vocabulary=64,
    stop_tokens=(63,),
    group_size=2,
    sampling=Sampling(max_new_tokens=4),
    trainers=(WORKER,),
)
SEQUENTIAL = msgspec.structs.replace(MANIFEST, protocol="sequential", max_lag=0)
SAMPLE = Sample(
    tokens=(1, 2, 63),
    logprobs=(-0.5, 0.0, -9.0),
    finish="stop",
    segments=(Segment(start=0, version=PolicyVersion(epoch=0, step=3)),),
)


def group(**changes: object) -> RolloutGroup:
    fields = {
        "counter": 7,
        "prompt_index": prompt_index(MANIFEST.randomness(), (WORKER, 7), MANIFEST.prompts),
        "samples": (SAMPLE, SAMPLE),
        "sampling_hash": MANIFEST.sampling.hash(),
        "engine": "torch-float32",
    }
    return RolloutGroup(**{**fields, **changes})


def sample(**changes: object) -> Sample:
    return msgspec.structs.replace(SAMPLE, **changes)


def segments(*starts_and_steps: tuple[int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(start=at, version=PolicyVersion(epoch=0, step=step)) for at, step in starts_and_steps)


def test_a_worker_s_own_group_has_no_fault():
    assert group_fault(group(), WORKER, MANIFEST) is None


def test_a_group_of_the_wrong_size_is_refused():
    assert group_fault(group(samples=(SAMPLE,)), WORKER, MANIFEST) == "group-size"
    assert group_fault(group(samples=(SAMPLE,) * 3), WORKER, MANIFEST) == "group-size"


def test_other_sampling_is_refused():
    assert group_fault(group(sampling_hash=Sampling(temperature=0.1).hash()), WORKER, MANIFEST) == "sampling"


def test_a_prompt_that_is_not_the_worker_s_is_refused():
    assert group_fault(group(), OTHER, MANIFEST) == "prompt-index"
    assert group_fault(group(counter=8), WORKER, MANIFEST) == "prompt-index"
    assert group_fault(group(prompt_index=group().prompt_index + 1), WORKER, MANIFEST) == "prompt-index"
    assert group_fault(group(), WORKER, msgspec.structs.replace(MANIFEST, seed=2)) == "prompt-index"


def test_a_slot_belongs_to_the_sequential_protocol_only():
    slot = Slot(step=2, slot=1)
    index = prompt_index(SEQUENTIAL.randomness(), ("slot", 2, 1), SEQUENTIAL.prompts)
    assert group_fault(group(slot=slot, prompt_index=index), WORKER, MANIFEST) == "wrong-protocol"
    assert group_fault(group(), WORKER, SEQUENTIAL) == "wrong-protocol"
    assert group_fault(group(slot=slot, prompt_index=index), WORKER, SEQUENTIAL) is None
    assert group_fault(group(slot=slot, prompt_index=index), OTHER, SEQUENTIAL) is None  # any chain draws the same
    assert group_fault(group(slot=Slot(step=2, slot=0), prompt_index=index), WORKER, SEQUENTIAL) == "prompt-index"


def test_one_bad_sample_is_enough():
    assert group_fault(group(samples=(SAMPLE, sample(tokens=(1, 2, 64)))), WORKER, MANIFEST) == "token-range"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.001, 1e300])
def test_log_probabilities_are_finite_and_not_positive(value):
    assert sample_fault(sample(logprobs=(-0.5, value, -0.5)), MANIFEST) == "logprob"


def test_token_ids_are_of_the_vocabulary():
    assert sample_fault(sample(tokens=(0, 1, 63)), MANIFEST) is None
    assert sample_fault(sample(tokens=(0, 1, 2**31)), MANIFEST) == "token-range"
    for bad in ((-1,), (2**31 + 1,), (1.5,), ("a",), (True,), ()):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**msgspec.to_builtins(SAMPLE), "tokens": bad}, Sample)


def test_lengths_agree_and_are_bounded():
    assert sample_fault(sample(logprobs=(-0.5, -0.5)), MANIFEST) == "length"
    assert sample_fault(sample(tokens=(1,) * 5, logprobs=(0.0,) * 5), MANIFEST) == "length"
    assert sample_fault(sample(tokens=(1,) * 4, logprobs=(0.0,) * 4, finish="length"), MANIFEST) is None
    assert sample_fault(sample(finish="length"), MANIFEST) == "finish"


def test_an_answer_stops_at_its_first_stop_token():
    assert sample_fault(sample(tokens=(1, 2, 3)), MANIFEST) == "finish"  # it says stop and has not
    assert sample_fault(sample(tokens=(1, 63, 63)), MANIFEST) == "finish"  # it went on after the stop
    assert sample_fault(sample(tokens=(1, 2, 3, 63), logprobs=(0.0,) * 4, finish="length"), MANIFEST) == "finish"


@pytest.mark.parametrize("good", [[(0, 3)], [(0, 3), (1, 4)], [(0, 3), (1, 4), (2, 9)]])
def test_segments_cover_the_answer_with_newer_and_newer_versions(good):
    assert sample_fault(sample(segments=segments(*good)), MANIFEST) is None


@pytest.mark.parametrize(
    "bad",
    [
        [(1, 3)],  # begins late
        [(0, 3), (3, 4)],  # begins behind the last token
        [(0, 3), (2, 4), (1, 5)],  # out of order
        [(0, 3), (0, 4)],  # empty
        [(0, 3), (1, 2)],  # an older version
        [(0, 3), (1, 3)],  # the same version again
    ],
)
def test_other_segments_are_refused(bad):
    assert sample_fault(sample(segments=segments(*bad)), MANIFEST) == "segments"


def test_lag_counts_from_the_oldest_segment_of_all_samples():
    mixed = group(samples=(SAMPLE, sample(segments=segments((0, 2), (1, 5)))))
    assert (mixed.oldest.step, mixed.newest.step) == (2, 5)
    assert mixed.token_count == 6


def test_admission_names_who_may_take_part():
    assert Admission().admits(WORKER)
    assert not Admission(banned=(WORKER,)).admits(WORKER)
    assert not Admission(allowed=(OTHER,)).admits(WORKER)
    assert not Admission(allowed=(WORKER,), banned=(WORKER,)).admits(WORKER)
    assert not Admission(allowed=()).admits(WORKER)


def test_a_pointer_to_a_large_group_is_bounded():
    for size in (0, (16 << 20) + 1, -1):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(encode({"blob": bytes(32), "size_bytes": size}), type=LargeRollout)


@given(
    st.lists(st.integers(0, 2**31), min_size=1, max_size=6),
    st.lists(st.floats(), min_size=1, max_size=6),
    st.sampled_from(["stop", "length"]),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_whatever_decodes_is_judged(tokens, logprobs, finish, places):
    judged = Sample(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=finish, segments=segments(*places))
    fault = sample_fault(msgspec.msgpack.decode(encode(judged), type=Sample), MANIFEST)
    assert fault in (None, "length", "token-range", "logprob", "finish", "segments")
    if fault is None:
        assert len(tokens) == len(logprobs) <= 4
        assert max(tokens) < 64
        assert all(value <= 0.0 and math.isfinite(value) for value in logprobs)
