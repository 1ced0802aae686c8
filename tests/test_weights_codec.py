import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from echo_p2p.errors import BaseMismatch, CorruptChunk
from echo_p2p.kernels import (
    NUMBER_MAX,
    positions_in,
    rice_coded,
    rice_decoded,
    values_below,
)
from echo_p2p.tensors import Bits, changed_values, difference, merged, updated
from echo_p2p.weights import entropy
from echo_p2p.weights.codec import (
    content_hash,
    decode_patch,
    decode_snapshot,
    encode_changes,
    encode_patch,
    encode_snapshot,
    find_changes,
)
from echo_p2p.weights.container import PATCH, BlobReader, BlobWriter

SHAPES = st.one_of(st.just(()), array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9))
WIDTHS = st.sampled_from((np.uint16, np.uint32))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Tensors of any bits, and the same with anything from nothing to everything changed."""
    base, new = {}, {}
    for number in range(draw(st.integers(0, 4))):
        shape, width = draw(SHAPES), draw(WIDTHS)
        bits = st.integers(0, np.iinfo(width).max)
        base[f"t{number}"] = draw(arrays(width, shape, elements=bits))
        fresh = draw(arrays(width, shape, elements=bits))
        touched = draw(arrays(np.bool_, shape, fill=st.just(draw(st.booleans()))))
        new[f"t{number}"] = np.asarray(np.where(touched, fresh, base[f"t{number}"]), width)
    return base, new


def as_bits(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> Bits:
    """Rounded to bf16."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def optimiser_pair(size: int = 300_000, moved: float = 1e-6) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Weights of some tensors, each moved by about as much."""
    random = np.random.default_rng(3)
    base, new = {}, {}
    for name in ("a", "b"):
        weights = random.normal(0, 0.05, (size // 100, 50)).astype(np.float32)
        base[name] = as_bits(weights)
        new[name] = as_bits(weights + random.normal(0, moved, weights.shape).astype(np.float32))
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


@pytest.mark.parametrize("target", [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF])
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_single_precision_reaches_every_special_value(target: int, share: float) -> None:
    random = np.random.default_rng(target)
    base = {"w": random.integers(0, 2**32, 3000, dtype=np.uint32)}
    new = {"w": np.where(random.random(3000) < share, np.uint32(target), base["w"])}
    assert same(applied(base, encode_patch(base, new)), new)


def test_special_values_among_ordinary_ones_step_to_each_other() -> None:
    special = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF], np.uint16)
    special = np.concatenate((special, special | 0x8000))
    before, after = (grid.reshape(-1) for grid in np.meshgrid(special, special))
    base, new = optimiser_pair(60_000)
    base["a"].reshape(-1)[100 : 100 + before.size], new["a"].reshape(-1)[100 : 100 + after.size] = before, after
    assert same(applied(base, encode_patch(base, new)), new)


def test_a_thousand_patches_in_a_chain_lose_nothing() -> None:
    random = np.random.default_rng(1)
    masters = {"w": random.normal(0, 0.02, (30, 64)).astype(np.float32), "v": np.zeros(7, np.float32)}
    sent = {name: as_bits(values) for name, values in masters.items()}
    held = {name: bits.copy() for name, bits in sent.items()}
    for number in range(1000):
        for values in masters.values():
            values += random.normal(0, 10.0 ** random.integers(-7, -1), values.shape).astype(np.float32)
        new = {name: as_bits(values) for name, values in masters.items()}
        if number % 10 == 0:
            new["w"].reshape(-1)[random.integers(0, 1920, 40)] = random.integers(0, 2**16, 40)
        held = applied(held, encode_patch(sent, new))
        assert same(held, new)
        sent = new
    assert content_hash(held) == content_hash(sent)


def test_torch_and_numpy_agree_bit_for_bit() -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.randn((40, 300), generator=random).mul_(0.02).to(torch.bfloat16)
    after = (before.float() + torch.randn((40, 300), generator=random) * 1e-5).to(torch.bfloat16)
    base, new = ({"w": bits.view(torch.int16).numpy().view(np.uint16)} for bits in (before, after))
    update = decode_patch(encode_patch(base, new), base)["w"]
    assert update.index is not None
    live = before.clone()
    values = torch.from_numpy(update.values.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    live.view(-1)[torch.from_numpy(update.index)] = values
    assert torch.equal(live.view(torch.int16), after.view(torch.int16))
    assert np.array_equal(updated(base["w"], update), new["w"])


def test_what_was_found_outlives_the_new_tensors() -> None:
    for moved in (1e-5, 1.0):
        base, new = optimiser_pair(20_000, moved)
        wanted = {name: bits.copy() for name, bits in new.items()}
        changes = find_changes(base, new)
        for bits in new.values():
            bits[...] = 0
        assert same(applied(base, encode_changes(base, changes)), wanted)


def test_positions_and_steps_cost_less_than_their_order_0_entropy() -> None:
    base, new = optimiser_pair()
    bits, steps = 0.0, []
    for name, old in base.items():
        changed = old != new[name]
        share = np.count_nonzero(changed) / old.size
        bits -= old.size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
        steps.append(new[name].astype(np.int64)[changed] - old[changed])
    _, counts = np.unique(np.concatenate(steps), return_counts=True)
    bits -= float((counts * np.log2(counts / counts.sum())).sum())
    assert len(encode_patch(base, new)) < 0.87 * bits / 8


def test_a_tensor_of_which_all_changed_takes_less_than_its_values() -> None:
    random = np.random.default_rng(2)
    weights = random.normal(0, 0.02, 50_000).astype(np.float32)
    moved = weights + random.normal(0, 1e-6, 50_000).astype(np.float32)
    base, new = {"w": weights.view(np.uint32)}, {"w": moved.view(np.uint32)}
    blob = encode_patch(base, new)
    assert len(blob) < 0.6 * 200_000
    assert same(applied(base, blob), new)


@given(st.data())
def test_compiled_loops_find_what_plain_comparisons_find(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size, share = data.draw(st.integers(0, 700)), data.draw(st.sampled_from((0.0, 0.01, 0.3, 1.0)))
    old = random.integers(0, 2**16, size).astype(data.draw(WIDTHS))
    new = np.where(random.random(size) < share, old + old.dtype.type(1), old)
    if data.draw(st.booleans()):
        old.flags.writeable = False
    index, before, after = changed_values(old, new)
    assert np.array_equal(index, np.flatnonzero(old != new))
    assert np.array_equal(before, old[index])
    assert np.array_equal(after, new[index])
    assert before.dtype == after.dtype == old.dtype
    magnitudes = old & ((1 << (8 * old.itemsize - 1)) - 1)
    for limit in (0, 100, 20_000, 1 << (8 * old.itemsize - 1)):
        places, values = values_below(old, limit)
        assert np.array_equal(places, np.flatnonzero(magnitudes < limit))
        assert np.array_equal(values, old[places])
    assert np.array_equal(positions_in(np.arange(size) * 3, index * 3), index)


def test_compiled_loops_go_on_from_tile_to_tile() -> None:
    random = np.random.default_rng(4)
    old = random.integers(0, 2**16, 2_100_003, dtype=np.uint16)
    new = np.where(random.random(old.size) < 0.01, old + np.uint16(1), old)
    assert np.array_equal(changed_values(old, new)[0], np.flatnonzero(old != new))
    assert np.array_equal(values_below(old, 500)[0], np.flatnonzero((old & 0x7FFF) < 500))


def test_arrays_of_two_sizes_or_types_are_not_compared() -> None:
    values = np.zeros(64, np.uint16)
    for other in (
        np.zeros(65, np.uint16),
        np.zeros(63, np.uint16),
        np.zeros(64, np.uint32),
        np.zeros((8, 8), np.uint16),
    ):
        with pytest.raises(ValueError, match="compared"):
            changed_values(values, other)


NUMBERS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**20), st.integers(0, NUMBER_MAX)), max_size=300)


@given(NUMBERS, st.floats(0, 1), st.integers(0, 2**32))
def test_streams_give_back_what_was_written(numbers: list[int], share: float, seed: int) -> None:
    values, flags = np.array(numbers, np.int64), np.random.default_rng(seed).random(500) < share
    writer = BlobWriter(PATCH)
    entropy.write_numbers(values, writer)
    entropy.write_set(np.flatnonzero(flags), flags.size, writer)
    entropy.write_bits(flags, writer)
    reader = BlobReader(writer.blob(), PATCH)
    assert np.array_equal(entropy.read_numbers(values.size, sum(numbers), reader), values)
    assert np.array_equal(entropy.read_set(flags.size, reader), flags)
    assert np.array_equal(entropy.read_bits(flags.size, reader), flags)
    reader.end()


@given(NUMBERS, st.data())
def test_a_stream_that_is_not_as_expected_is_corrupt(numbers: list[int], data: st.DataObject) -> None:
    stream = memoryview(rice_coded(np.array(numbers, np.int64)))
    with pytest.raises(CorruptChunk):
        rice_decoded(stream, len(numbers) + 8, 2**62)
    if numbers:
        with pytest.raises(CorruptChunk):
            rice_decoded(stream[: data.draw(st.integers(0, len(stream) - 1))], len(numbers), 2**62)
    if sum(numbers):
        with pytest.raises(CorruptChunk):
            rice_decoded(stream, len(numbers), data.draw(st.integers(0, sum(numbers) - 1)))


@given(st.binary(max_size=300), st.integers(0, 2**40), st.integers(0, 2**80))
def test_noise_never_decodes_to_more_than_allowed(noise: bytes, count: int, limit: int) -> None:
    for expected in (count, min(count, 8 * len(noise)), len(noise) // 2):
        try:
            numbers = rice_decoded(memoryview(noise), expected, limit)
        except CorruptChunk:
            continue
        assert numbers.size == expected
        assert numbers.min(initial=0) >= 0
        assert sum(numbers.tolist()) <= limit


SECTIONS = st.one_of(
    st.binary(max_size=40),
    st.lists(st.integers(0, 255), max_size=40).map(lambda plane: entropy.compress(np.array(plane, np.uint8))),
)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2**40), max_size=8), st.lists(SECTIONS, max_size=20), st.booleans())
def test_well_formed_nonsense_raises_nothing_but_corrupt_chunk(
    numbers: list[int], sections: list[bytes], real: bool
) -> None:
    base, new = sparse_pair(size=600)
    writer = BlobWriter(PATCH)
    if real:  # what comes first in every patch, so that the rest is looked at
        reader = BlobReader(encode_patch(base, new), PATCH)
        writer.section(bytes(reader.section()))
        writer.section(bytes(reader.section()))
    for number in numbers:
        writer.number(number)
    for section in sections:
        writer.section(section)
    try:
        updates = decode_patch(writer.blob(), base)
    except CorruptChunk:
        return
    for update in updates.values():
        assert update.index is None or update.index.size == np.unique(update.index).size


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
        assert len(result) <= 1  # a damaged name, or values: content hashes tell


@given(st.binary(max_size=200))
def test_noise_raises_corrupt_chunk(noise: bytes) -> None:
    for blob in (noise, b"EWC\x03" + noise):
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


@pytest.mark.parametrize("head", [b"\x91" * 4000 + b"\xc0", b"\x93\x01\x90" + b"\x91" * 4000])
def test_a_deeply_nested_header_is_corrupt(head: bytes) -> None:
    with pytest.raises(CorruptChunk):
        decode_snapshot(b"EWC\x03" + len(head).to_bytes(4, "little") + head)


def test_an_older_format_is_refused_by_name() -> None:
    with pytest.raises(CorruptChunk, match="version"):
        decode_snapshot(b"EWC\x02" + bytes(20))
