"""The two sync protocols: lag over epochs, the producer's rule, and one sequential step whatever workers do."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_protocols.rollout import RolloutGroup, Sample, Segment, Slot
from echo_protocols.sync import (
    LatestRelease,
    Lineage,
    PullReply,
    PullRequest,
    SequentialStep,
    lag_fault,
    may_generate,
    release_fault,
)
from echo_protocols.values import PolicyVersion, decode, encode


def v(epoch: int, step: int) -> PolicyVersion:
    return PolicyVersion(epoch=epoch, step=step)


def group(*versions: PolicyVersion, slot: Slot | None = None) -> RolloutGroup:
    segments = tuple(Segment(start=at, version=version) for at, version in enumerate(versions))
    count = len(versions)
    sample = Sample(tokens=(1,) * count, logprobs=(0.0,) * count, finish="stop", segments=segments)
    return RolloutGroup(counter=0, prompt_index=0, slot=slot, samples=(sample,), sampling_hash=bytes(32), engine="none")


# -- lineage ----------------------------------------------------------------------------------------------------------

# 0.0 … 0.5 … 0.9(lost)    epoch 1 continues 0.5, epoch 2 continues 1.7, epoch 3 continues 1.6 (so 2 is abandoned)
LINEAGE = Lineage({1: v(0, 5), 2: v(1, 7), 3: v(1, 6)})


@pytest.mark.parametrize(
    ("rollout", "current", "lag"),
    [
        (v(0, 3), v(0, 3), 0),
        (v(0, 1), v(0, 3), 2),
        (v(0, 4), v(0, 3), "future-version"),
        (v(1, 0), v(0, 3), "unknown-epoch"),
        (v(0, 5), v(1, 5), 0),
        (v(0, 4), v(1, 6), 2),
        (v(0, 6), v(1, 6), "abandoned-branch"),
        (v(1, 7), v(2, 9), 2),
        (v(1, 8), v(2, 9), "abandoned-branch"),
        (v(0, 5), v(2, 9), 4),
        (v(0, 6), v(2, 9), "abandoned-branch"),
        (v(1, 6), v(3, 8), 2),
        (v(1, 7), v(3, 8), "abandoned-branch"),
        (v(2, 7), v(3, 8), "abandoned-branch"),
        (v(0, 5), v(3, 6), 1),
        (v(4, 0), v(3, 6), "unknown-epoch"),
    ],
)
def test_lag_follows_the_epochs_that_lead_to_the_policy(rollout, current, lag):
    assert LINEAGE.lag(rollout, current) == lag


def test_an_epoch_of_unknown_origin_has_no_lag():
    assert Lineage().lag(v(0, 5), v(1, 5)) == "unknown-epoch"
    assert Lineage({5: v(3, 0)}).lag(v(4, 0), v(5, 0)) == "unknown-epoch"


def test_an_epoch_continues_from_an_older_one_and_from_one_only():
    lineage = Lineage({1: v(0, 5)})
    lineage.open_epoch(1, v(0, 5))
    for epoch, version in ((1, v(0, 6)), (2, v(2, 0)), (2, v(3, 0))):
        with pytest.raises(ValueError, match="can't continue"):
            lineage.open_epoch(epoch, version)
    with pytest.raises(ValueError, match="can't continue"):
        Lineage({1: v(2, 0), 2: v(1, 0)})
    assert lineage.epochs == {1: v(0, 5)}


small_versions = st.builds(v, st.integers(0, 5), st.integers(0, 12))


@given(st.dictionaries(st.integers(1, 5), small_versions), small_versions, small_versions)
def test_a_lag_is_never_negative_and_only_of_ancestors(continues, rollout, current):
    lineage = Lineage({epoch: fork for epoch, fork in continues.items() if fork.epoch < epoch})
    lag = lineage.lag(rollout, current)
    ancestors, edge = {current.epoch: current.step}, current
    while (fork := lineage.epochs.get(edge.epoch)) is not None:
        ancestors[fork.epoch] = min(fork.step, min(ancestors.values()))
        edge = fork
    if isinstance(lag, int):
        assert lag == current.step - rollout.step >= 0
    assert isinstance(lag, int) == (rollout.epoch in ancestors and rollout.step <= ancestors[rollout.epoch])


def test_every_segment_must_be_fresh_and_on_the_lineage():
    assert lag_fault(group(v(0, 4), v(0, 5)), LINEAGE, v(1, 6), 2) is None
    assert lag_fault(group(v(0, 3), v(0, 5)), LINEAGE, v(1, 6), 2) == "stale"
    assert lag_fault(group(v(0, 5), v(0, 6)), LINEAGE, v(1, 6), 2) == "abandoned-branch"
    assert lag_fault(group(v(1, 6), v(1, 7)), LINEAGE, v(1, 6), 2) == "future-version"
    assert lag_fault(group(v(1, 6), v(9, 9)), LINEAGE, v(1, 6), 2) == "unknown-epoch"
    assert lag_fault(group(v(1, 6)), LINEAGE, v(1, 6), 0) is None


# -- producer and releases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "latest", "may"),
    [
        (None, v(0, 0), False),
        (v(0, 0), None, False),
        (v(0, 1), v(0, 1), True),
        (v(0, 1), v(0, 3), True),
        (v(0, 1), v(0, 4), False),
        (v(0, 4), v(0, 1), True),  # news came over the chain first
        (v(0, 5), v(1, 5), False),  # the same weights, but refresh first
        (v(1, 5), v(0, 9), True),
    ],
)
def test_producers_stop_when_they_would_be_too_late(own, latest, may):
    assert may_generate(own, latest, 2) is may


def test_without_lag_producers_keep_to_the_latest():
    assert may_generate(v(0, 1), v(0, 1), 0)
    assert not may_generate(v(0, 1), v(0, 2), 0)


def test_versions_only_grow():
    assert release_fault(v(0, 0), None) is None
    assert release_fault(v(0, 2), v(0, 1)) is None
    assert release_fault(v(1, 0), v(0, 9)) is None
    assert release_fault(v(0, 1), v(0, 1)) == "known-version"
    assert release_fault(v(0, 9), v(1, 0)) == "regressed-version"


# -- one sequential step ----------------------------------------------------------------------------------------------


def step(slots: int = 3) -> SequentialStep:
    return SequentialStep(7, v(0, 6), slots, 10.0)


def answer(slot: int, version: PolicyVersion | None = None, at: int = 7) -> RolloutGroup:
    return group(version or v(0, 6), slot=Slot(step=at, slot=slot))


def numbers(slots: tuple[Slot, ...]) -> list[int]:
    assert {slot.step for slot in slots} <= {7}
    return [slot.slot for slot in slots]


def test_answers_are_lined_up_by_slot_whatever_order_they_came_in():
    ours = step()
    assert numbers(ours.take("a", 2, 0.0)) == [0, 1]
    assert numbers(ours.take("b", 2, 0.0)) == [2]
    for worker, slot in (("b", 2), ("a", 1), ("a", 0)):
        with pytest.raises(ValueError, match="no answer yet"):
            ours.ordered()
        assert ours.accept(worker, answer(slot)) is None
    assert [(worker, group.slot.slot) for worker, group in ours.ordered()] == [("a", 0), ("a", 1), ("b", 2)]
    assert (ours.missing, ours.next_deadline(), ours.reassigned) == (0, None, 0)


def test_taking_twice_gives_other_slots():
    ours = step()
    assert numbers(ours.take("a", 1, 0.0)) == [0]
    assert numbers(ours.take("a", 9, 0.0)) == [1, 2]
    assert numbers(ours.take("a", 9, 0.0)) == []
    assert numbers(step().take("a", 0, 0.0)) == numbers(step().take("a", -1, 0.0)) == []


def test_a_late_slot_is_given_to_another_and_the_first_answer_wins():
    ours = step(1)
    ours.take("slow", 1, 0.0)
    assert ours.take("b", 1, 9.9) == ()
    assert ours.next_deadline() == 10.0
    assert numbers(ours.take("b", 1, 10.0)) == [0]
    assert (ours.reassigned, ours.next_deadline()) == (1, 20.0)
    assert ours.accept("slow", answer(0)) is None
    assert ours.accept("b", answer(0)) == "duplicate"
    assert ours.take("c", 1, 99.0) == ()
    assert [worker for worker, _ in ours.ordered()] == ["slow"]


def test_a_worker_that_is_gone_frees_its_slots_and_may_still_answer():
    ours = step(2)
    ours.take("a", 2, 0.0)
    assert ours.accept("a", answer(0)) is None
    assert (ours.give_back("a"), ours.give_back("a"), ours.give_back("nobody")) == (1, 0, 0)
    assert ours.next_deadline() is None
    assert ours.accept("a", answer(1)) is None
    assert ours.missing == 0
    assert ours.reassigned == 1


def test_giving_back_leaves_what_another_has_taken_over():
    ours = step(1)
    ours.take("a", 1, 0.0)
    ours.take("b", 1, 10.0)
    assert ours.give_back("a") == 0
    assert ours.take("c", 1, 11.0) == ()


def test_only_what_was_asked_for_is_accepted():
    ours = step()
    ours.take("a", 2, 0.0)
    assert ours.accept("a", group(v(0, 6))) == "unknown-slot"
    assert ours.accept("a", answer(3)) == "unknown-slot"
    assert ours.accept("a", answer(0, at=6)) == "unknown-slot"
    assert ours.accept("a", answer(2)) == "not-asked"
    assert ours.accept("b", answer(0)) == "not-asked"
    assert ours.accept("a", answer(0, v(0, 5))) == "wrong-version"
    assert ours.accept("a", answer(0, v(1, 6))) == "wrong-version"
    assert ours.accept("a", group(v(0, 6), v(0, 7), slot=Slot(step=7, slot=0))) == "wrong-version"
    assert ours.missing == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 4)), max_size=60))
def test_whatever_workers_do_every_slot_is_answered_once(deeds):
    ours, now, answered = step(4), 0.0, {}
    for worker, deed, slot in deeds:
        now += 3.0
        if deed == 0:
            taken = numbers(ours.take(worker, 2, now))
            assert not set(taken) & set(answered)
        elif deed == 1:
            ours.give_back(worker)
        elif ours.accept(worker, answer(slot)) is None:
            assert slot not in answered
            answered[slot] = worker
        assert ours.missing == 4 - len(answered)
    for slot in numbers(ours.take("z", 9, now + 100.0)):
        answered[slot] = "z"
        assert ours.accept("z", answer(slot)) is None
    assert [worker for worker, _ in ours.ordered()] == [answered[slot] for slot in range(4)]


# -- messages ---------------------------------------------------------------------------------------------------------


def test_replies_are_bounded():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode({"group": bytes((17 << 20) + 1)}), type=PullReply)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode({"failure": "x" * 1025}), type=PullReply)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode({"version": v(0, 1), "slots": [(1, n) for n in range(1025)]}), type=PullRequest)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode({"version": v(0, 1), "release": bytes(31), "size_bytes": 1}), type=LatestRelease)


@given(st.binary(max_size=200) | st.integers(1, 100_000).map(lambda depth: b"\x81\xa1z" + b"\x91" * depth))
def test_no_bytes_of_a_reply_raise_anything_but_a_decode_error(data):
    with suppress(msgspec.DecodeError):
        decode(data, PullReply)
