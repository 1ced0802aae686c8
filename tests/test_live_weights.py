"""Published tensors are read from and written to an engine's own, however it lays them out."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from echo_p2p.chain.layouts import Place, check_layout, experts_apart, same_layout, view_of
from echo_p2p.chain.live_weights import TorchWeights
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.errors import WeightsError
from echo_p2p.rl.verl_trainer import VerlTrainer
from echo_p2p.tensors import Bits, TensorUpdate, updated
from echo_protocols.run import Algorithm
from echo_protocols.values import Span

Live = dict[str, tuple[int, ...]]


def random_layout(draws: np.random.Generator) -> tuple[Live, dict[str, Place]]:
    """Live tensors: whole, of fused rows, stacked, or stacks of fused rows; what they publish may be transposed."""
    live: Live = {}
    layout: dict[str, Place] = {}
    for i in range(draws.integers(1, 5)):
        name, rows, columns = f"live.{i}", *draws.integers(1, 7, 2).tolist()
        fused = draws.integers(1, 4, draws.integers(1, 4)).tolist()
        kind = draws.choice(["vector", "whole", "fused", "stacked", "fused stack"])
        match kind:
            case "vector":
                live[name] = (rows,)
                places = [Place.whole(name, live[name])]
            case "whole":
                live[name] = (rows, columns)
                places = [Place.whole(name, live[name])]
            case "stacked":
                live[name] = (len(fused), rows, columns)
                places = [Place.whole(name, live[name]).item(k) for k in range(len(fused))]
            case _:
                stack = rows if kind == "fused stack" else 1
                live[name] = (stack, sum(fused), columns)
                items = [Place.whole(name, live[name]).item(k) for k in range(stack)]
                starts = np.cumsum([0, *fused]).tolist()
                places = [
                    item.rows(start, count) for item in items for start, count in zip(starts[:-1], fused, strict=True)
                ]
        for k, place in enumerate(places):
            turned = len(place.shape) == 2 and draws.random() < 0.5
            layout[f"published.{i}.{k}"] = place.transposed() if turned else place
    return live, layout


def random_update(draws: np.random.Generator, shape: tuple[int, ...]) -> TensorUpdate:
    size = int(np.prod(shape))
    if draws.random() < 0.3:
        return TensorUpdate(None, draws.integers(0, 2**16, shape, dtype=np.uint16))
    index = np.unique(draws.integers(0, size, draws.integers(0, size + 1)))
    return TensorUpdate(index, draws.integers(0, 2**16, index.size, dtype=np.uint16))


def make_weights(seed: int, dtype: torch.dtype) -> tuple[TorchWeights, dict[str, torch.Tensor], np.random.Generator]:
    draws = np.random.default_rng(seed)
    shapes, layout = random_layout(draws)
    live = {
        name: torch.tensor(finite(draws, shape).view(np.int16)).view(torch.bfloat16) for name, shape in shapes.items()
    }
    live = {name: tensor.to(dtype) for name, tensor in live.items()}
    return TorchWeights(live, layout), live, draws


def finite(draws: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """bf16 bits but those of NaN, whose payload no float32 is bound to keep."""
    return draws.integers(0, 0x7F80, shape, dtype=np.uint16) | draws.integers(0, 2, shape, dtype=np.uint16) << 15


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_updates_through_a_layout_equal_updates_of_the_plain_tensors(seed: int, dtype: torch.dtype) -> None:
    weights, live, draws = make_weights(seed, dtype)
    before = weights.tensors()
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    chosen = [name for name in before if draws.random() < 0.7]
    updates = {name: random_update(draws, before[name].shape) for name in chosen}
    weights.apply(updates)
    after = weights.tensors()
    for name, bits in before.items():
        expected = updated(bits, updates[name]) if name in updates else bits
        assert same_values(after[name], expected)
    assert addresses == {name: tensor.data_ptr() for name, tensor in live.items()}


def same_values(left: Bits, right: Bits) -> bool:
    """Equal bit for bit, but for what NaN carries."""
    nan = (left & 0x7FFF) > 0x7F80
    return bool(np.array_equal(left[~nan], right[~nan]) and np.array_equal(nan, (right & 0x7FFF) > 0x7F80))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_positions_are_where_the_view_has_its_values(seed: int) -> None:
    live, layout = random_layout(np.random.default_rng(seed))
    check_layout(layout, live)
    for place in layout.values():
        flat = np.arange(int(np.prod(live[place.live])))
        seen = view_of(flat, place).reshape(-1)
        assert np.array_equal(place.positions(np.arange(seen.size)), seen)


def test_a_layout_names_each_live_value_exactly_once() -> None:
    live, whole = {"qkv": (6, 4)}, Place.whole("qkv", (6, 4))
    check_layout({"q": whole.rows(0, 2), "k": whole.rows(2, 2).transposed(), "v": whole.rows(4, 2)}, live)
    for wrong, message in [
        ({"q": whole.rows(0, 2), "k": whole.rows(2, 2)}, "exactly once"),
        ({"q": whole.rows(0, 4), "k": whole.rows(3, 2)}, "exactly once"),
        ({"q": whole.rows(0, 3).transposed(), "k": whole.rows(2, 3)}, "exactly once"),
        ({"q": whole, "again": whole}, "exactly once"),
        ({"q": whole.rows(4, 3)}, "outside"),
        ({"q": Place.whole("other", (6, 4))}, "has not"),
        ({}, "exactly once"),
    ]:
        with pytest.raises(WeightsError, match=message):
            check_layout(wrong, live)


def test_policies_in_float16_and_float32_are_carried_exactly() -> None:
    for policy, word in [(torch.float16, np.uint16), (torch.float32, np.uint32)]:
        live = {"w": torch.linspace(-3, 3, 12).reshape(3, 4).to(policy)}
        weights = TorchWeights(live, same_layout({"w": (3, 4)}), policy=policy)
        bits = weights.tensors()["w"]
        assert bits.dtype == word
        live["w"].zero_()
        weights.apply({"w": TensorUpdate(None, bits)})
        assert np.array_equal(weights.tensors()["w"], bits)
        with pytest.raises(WeightsError, match="does not fit"):
            weights.apply({"w": TensorUpdate(None, bits.astype(np.uint8))})
    with pytest.raises(WeightsError, match="load it in float32"):
        TorchWeights({"w": torch.zeros(1, dtype=torch.float16)}, same_layout({"w": (1,)}))


def test_arrays_that_may_not_be_written_to_are_applied() -> None:
    weights = TorchWeights({"w": torch.zeros(8)}, same_layout({"w": (8,)}))
    index, values = np.array([1, 5]), np.array([0x3F80, 0xBF80], np.uint16)
    index.flags.writeable = values.flags.writeable = False
    weights.apply({"w": TensorUpdate(index, values)})
    assert weights.tensors()["w"].tolist() == [0, 0x3F80, 0, 0, 0, 0xBF80, 0, 0]


SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"head_dim": 8, "num_local_experts": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("models")
    torch.set_num_threads(threads)


def model(folder: Path, family: str) -> Path:
    path = folder / family
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(SIZES | EXPERTS[family]))
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_stage_has_the_names_shapes_and_bits_that_a_trainer_publishes(folder: Path, family: str) -> None:
    path = model(folder, family)
    published = VerlTrainer(path, Algorithm(), seed=1).weights()
    held = load_stage(path, Span(start=0, end=2, layers=2), device="cpu").tensors()
    assert held.keys() == published.keys()
    assert all(np.array_equal(held[name], bits) for name, bits in published.items())


def test_an_update_of_one_expert_moves_its_matrix_only(folder: Path) -> None:
    stage = load_stage(model(folder, "mixtral"), Span(start=0, end=1, layers=2), device="cpu")
    before, name = stage.tensors(), "model.layers.0.mlp.experts.2.up_proj.weight"
    stage.apply({name: TensorUpdate(np.array([0, 32, 48 * 32 - 1]), np.array([1, 2, 3], np.uint16))})
    after = stage.tensors()
    assert after[name].reshape(-1)[[0, 32, -1]].tolist() == [1, 2, 3]
    assert changed(before, after) == {name: 3}


def changed(before: Mapping[str, Bits], after: Mapping[str, Bits]) -> dict[str, int]:
    counts = {name: int((before[name] != after[name]).sum()) for name in before}
    return {name: count for name, count in counts.items() if count}


def test_packed_experts_are_published_apart_unless_checkpoints_pack_them() -> None:
    live = {"model.layers.0.mlp.experts.gate_up_proj": (2, 8, 4), "model.layers.0.mlp.experts.down_proj": (2, 4, 4)}
    assert set(experts_apart(live, "gpt_oss")) == set(live)
    apart = experts_apart(live, "qwen3_moe")
    check_layout(apart, live)
    assert len(apart) == 6
    assert apart["model.layers.0.mlp.experts.1.up_proj.weight"].offset == 8 * 4 + 4 * 4


def test_every_bit_pattern_of_a_bf16_policy_is_held_in_float32() -> None:
    bits = np.arange(2**16, dtype=np.uint16)  # NaNs of all payloads among them
    for update in (TensorUpdate(None, bits), TensorUpdate(np.arange(2**16), bits)):
        weights = TorchWeights({"w": torch.zeros(2**16)}, same_layout({"w": (2**16,)}))
        weights.apply({"w": update})
        assert np.array_equal(weights.tensors()["w"], bits)


def test_whatever_memory_an_update_lies_in_it_is_taken_whole_or_refused_whole() -> None:
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    weights = TorchWeights(live, same_layout({"a": (4,), "b": (4,)}))
    ones, backwards = np.full(4, 0x3F80, np.uint16), np.array([0, 0, 0, 0x3F80], np.uint16)[::-1]
    weights.apply({"b": TensorUpdate(None, backwards)})
    assert live["b"].tolist() == [1.0, 0.0, 0.0, 0.0]
    for index in (np.array([0.0, 1.0]), np.array([True, True]), np.array([0, 1], np.uint64)):
        with pytest.raises(WeightsError):
            weights.apply({"a": TensorUpdate(None, ones), "b": TensorUpdate(index, ones[:2])})  # type: ignore[arg-type]
        assert not live["a"].any()
