import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from echo_p2p.errors import BaseMismatch, CorruptChunk
from echo_p2p.tensors import Bits, difference, merged, updated
from echo_p2p.weights.codec import content_hash, decode_patch, decode_snapshot, encode_patch, encode_snapshot

SHAPES = st.one_of(st.just(()), array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9))
BITS = st.integers(0, 0xFFFF)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Tensors of any bits, and the same with anything from nothing to everything changed."""
    base, new = {}, {}
    for number in range(draw(st.integers(0, 4))):
        shape = draw(SHAPES)
        base[f"t{number}"] = draw(arrays(np.uint16, shape, elements=BITS))
        fresh = draw(arrays(np.uint16, shape, elements=BITS))
        touched = draw(arrays(np.bool_, shape, fill=st.just(draw(st.booleans()))))
        new[f"t{number}"] = np.asarray(np.where(touched, fresh, base[f"t{number}"]), np.uint16)
    return base, new


def sparse_pair(size: int = 20_000, share: float = 0.01, seed: int = 0) -> tuple[dict[str, Bits], dict[str, Bits]]:
    random = np.random.default_rng(seed)
    base = {"w": random.integers(0, 0xFFFF, size, dtype=np.uint16)}
    new = base["w"].copy()
    new[random.choice(size, int(size * share), replace=False)] += np.uint16(1)
    return base, {"w": new}


def applied(base: dict[str, Bits], blob: bytes) -> dict[str, Bits]:
    updates = decode_patch(blob, base)
    return {name: updated(bits, updates[name]) if name in updates else bits for name, bits in base.items()}


def same(left: dict[str, Bits], right: dict[str, Bits]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@given(pairs())
def test_a_patch_is_lossless_for_any_bits_and_shapes(pair: tuple[dict[str, Bits], dict[str, Bits]]) -> None:
    base, new = pair
    result = applied(base, encode_patch(base, new))
    assert same(result, new)
    assert content_hash(result) == content_hash(new)


@given(pairs())
def test_a_snapshot_is_lossless_for_any_bits_and_shapes(pair: tuple[dict[str, Bits], dict[str, Bits]]) -> None:
    _, new = pair
    result = decode_snapshot(encode_snapshot(new))
    assert same(result, new)
    assert all(result[name].shape == new[name].shape for name in new)


def test_every_bit_pattern_steps_to_every_special_one() -> None:
    every = np.arange(65536, dtype=np.uint16)
    for target in (0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80):
        new = {"w": np.full(65536, target, np.uint16)}
        assert same(applied({"w": every}, encode_patch({"w": every}, new)), new)


@settings(max_examples=300)
@given(st.data())
def test_damaged_blobs_raise_nothing_but_corrupt_chunk(data: st.DataObject) -> None:
    base, new = sparse_pair(size=600, share=data.draw(st.sampled_from((0.02, 0.9))))
    blob = bytearray(data.draw(st.sampled_from((encode_patch(base, new), encode_snapshot(new)))))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    for at in data.draw(st.lists(st.integers(0, max(len(blob) - 1, 0)), max_size=4)):
        if blob:
            blob[at] ^= data.draw(st.integers(1, 255))
    for decode in (lambda: decode_patch(bytes(blob), base), lambda: decode_snapshot(bytes(blob), max_bytes=1200)):
        try:
            result = decode()
        except CorruptChunk:
            continue
        assert set(result) <= {"w"}


@given(st.binary(max_size=200))
def test_noise_raises_corrupt_chunk(noise: bytes) -> None:
    for blob in (noise, b"EWC\x01" + noise):
        with pytest.raises(CorruptChunk):
            decode_snapshot(blob)


def test_truncation_is_always_noticed() -> None:
    base, new = sparse_pair(size=600)
    blob = encode_patch(base, new)
    for length in range(len(blob)):
        with pytest.raises(CorruptChunk):
            decode_patch(blob[:length], base)


def test_a_snapshot_larger_than_expected_is_refused_before_it_is_unpacked() -> None:
    blob = encode_snapshot({"w": np.zeros(2**24, np.uint16)})
    assert len(blob) < 200
    with pytest.raises(CorruptChunk, match="33554432"):
        decode_snapshot(blob, max_bytes=2**20)


def test_a_patch_for_other_shapes_is_refused() -> None:
    base, new = sparse_pair()
    blob = encode_patch(base, new)
    with pytest.raises(CorruptChunk):
        decode_patch(blob, {"w": base["w"][:100]})
    with pytest.raises(CorruptChunk):
        decode_patch(blob, {"v": base["w"]})
    with pytest.raises(BaseMismatch):
        encode_patch(base, {"w": base["w"][:100]})


def test_a_patch_is_no_snapshot() -> None:
    base, new = sparse_pair()
    with pytest.raises(CorruptChunk, match="patch"):
        decode_snapshot(encode_patch(base, new))


def test_a_sparse_patch_is_far_smaller_than_the_tensors() -> None:
    base, new = sparse_pair(size=200_000)
    assert len(encode_patch(base, new)) < 400_000 / 80


def test_content_hash_sees_names_shapes_and_bits() -> None:
    w = np.arange(6, dtype=np.uint16)
    hashes = {
        content_hash({"a": w}),
        content_hash({"b": w}),
        content_hash({"a": w.reshape(2, 3)}),
        content_hash({"a": w + np.uint16(1)}),
        content_hash({"a": w, "b": w}),
        content_hash({}),
    }
    assert len(hashes) == 6
    assert content_hash({"a": w, "b": w}) == content_hash({"b": w, "a": w.copy()})
    assert content_hash({"a": w.reshape(2, 3).T}) == content_hash({"a": w.reshape(2, 3).T.copy()})


@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.01, 0.2, 1.0)), st.sampled_from((0.0, 0.01, 0.2, 1.0)))
def test_merged_updates_act_like_one_after_the_other(seed: int, first_share: float, then_share: float) -> None:
    random = np.random.default_rng(seed)
    states = [random.integers(0, 0xFFFF, (5, 40), dtype=np.uint16)]
    for share in (first_share, then_share):
        touched = random.random((5, 40)) < share
        states.append(np.where(touched, random.integers(0, 0xFFFF, (5, 40), dtype=np.uint16), states[-1]))
    first, then = difference(states[0], states[1]), difference(states[1], states[2])
    if first and then:
        assert np.array_equal(updated(states[0], merged(first, then)), states[2])


@pytest.mark.parametrize("head", [b"\x91" * 100_000 + b"\xc0", b"\x94\x90\x90\x93\x90\x90\x90" + b"\x91" * 100_000])
def test_a_deeply_nested_header_is_corrupt(head: bytes) -> None:
    frame = zstandard.compress(head)
    with pytest.raises(CorruptChunk):
        decode_snapshot(b"EWC\x01" + len(frame).to_bytes(4, "little") + frame)
