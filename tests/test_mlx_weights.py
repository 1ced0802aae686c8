"""Published tensors are written into a live mlx module's own memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_p2p.chain.layouts import Place
from echo_p2p.errors import WeightsError
from echo_p2p.tensors import Bits, TensorUpdate, updated

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'echo-p2p[mlx]' on a Mac, mlx[cpu] on Linux")

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from echo_p2p.chain.mlx_weights import MlxWeights, live_arrays


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(8, 12, bias=False)
        self.norm = nn.RMSNorm(8)

    def __call__(self, x: Any) -> Any:
        return self.qkv_proj(self.norm(x))


def make(dtype: Any) -> tuple[Block, MlxWeights]:
    block = Block()
    live_arrays(block, dtype)
    fused = Place.whole("qkv_proj.weight", (12, 8))
    layout = {"q": fused.rows(0, 6), "k": fused.rows(6, 3).transposed(), "v": fused.rows(9, 3)}
    return block, MlxWeights(block, layout | {"norm.weight": Place.whole("norm.weight", (8,))})


def random_bits(draws: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    return (draws.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_updates_are_written_in_place_and_computed_with(dtype: Any) -> None:
    block, weights = make(dtype)
    x = mx.ones((1, 8), dtype)
    mx.eval(block(x))
    arrays = dict(tree_flatten(block.parameters()))
    addresses = {name: address(array) for name, array in arrays.items()}
    draws, before = np.random.default_rng(0), weights.tensors()
    updates = {
        "q": TensorUpdate(None, random_bits(draws, (6, 8))),
        "k": TensorUpdate(np.array([0, 5, 23]), random_bits(draws, (3,))),
        "norm.weight": TensorUpdate(np.array([2]), random_bits(draws, (1,))),
    }
    weights.apply(updates)
    after = weights.tensors()
    for name, bits in before.items():
        assert np.array_equal(after[name], updated(bits, updates[name]) if name in updates else bits)
    assert addresses == {name: address(array) for name, array in arrays.items()}

    fresh, written = make(dtype)
    written.apply({name: TensorUpdate(None, bits) for name, bits in after.items()})
    assert mx.array_equal(block(x), fresh(x))
    fused = np.concatenate((after["q"], after["k"].T, after["v"]))
    assert mx.array_equal(block.qkv_proj.weight, mx.array(fused).view(mx.bfloat16).astype(dtype))


def address(array: Any) -> int:
    word = mx.uint16 if array.dtype == mx.bfloat16 else mx.uint32
    return int(np.array(array.view(word), copy=False).ctypes.data)


def test_updates_that_do_not_fit_are_refused_whole() -> None:
    _, weights = make(mx.float32)
    before = weights.tensors()
    good = {"v": TensorUpdate(None, np.zeros((3, 8), np.uint16))}
    for name, update in [
        ("absent", TensorUpdate(None, np.zeros(1, np.uint16))),
        ("k", TensorUpdate(None, np.zeros((3, 8), np.uint16))),
        ("k", TensorUpdate(np.array([24]), np.zeros(1, np.uint16))),
        ("q", TensorUpdate(np.array([0]), np.zeros(1, np.uint32))),
    ]:
        with pytest.raises(WeightsError):
            weights.apply(good | {name: update})
    assert all(np.array_equal(bits, before[name]) for name, bits in weights.tensors().items())


def test_modules_that_can_not_be_written_to_are_refused() -> None:
    block = Block()
    block.qkv_proj.weight = mx.zeros((8, 12)).T
    with pytest.raises(WeightsError, match="live_arrays"):
        MlxWeights(block)
    live_arrays(block, mx.float32)
    MlxWeights(block)
    both = Block()
    both.norm.weight = block.norm.weight
    twins = nn.Module()
    twins.one, twins.other = block, both
    with pytest.raises(WeightsError, match="are one"):
        MlxWeights(twins)
    live_arrays(twins, mx.float32)
    MlxWeights(twins)
    block.norm.weight = block.norm.weight.astype(mx.float16)
    with pytest.raises(WeightsError, match="bf16"):
        MlxWeights(block)


def test_live_arrays_are_nobody_elses() -> None:
    block = Block()
    mine = mx.ones((12, 8)).astype(mx.bfloat16)
    block.qkv_proj.weight = mine
    live_arrays(block, mx.bfloat16)
    weights = MlxWeights(block)
    weights.apply({"qkv_proj.weight": TensorUpdate(np.array([0]), np.array([0], np.uint16))})
    assert mx.array_equal(mine, mx.ones((12, 8)))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_an_mlx_model_has_the_names_and_shapes_of_a_torch_stage(tmp_path: Path, family: str) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'echo-p2p[mlx]'")
    import torch
    from mlx_lm.utils import _get_classes
    from transformers import AutoConfig, AutoModelForCausalLM

    from echo_p2p.chain.torch_stage import load_stage
    from echo_protocols.values import Span

    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    sizes |= {"tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(family, **sizes, **(experts if family != "llama" else {}))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    published = load_stage(tmp_path, Span(start=0, end=2, layers=2), device="cpu").tensors()

    plain = {**config.to_dict(), **experts, "rope_theta": 10000.0}
    model_class, arguments = _get_classes(plain)
    model = model_class(arguments.from_dict(plain))
    live_arrays(model, mx.float32)
    weights = MlxWeights(model)
    held = weights.tensors()
    assert {name: bits.shape for name, bits in held.items()} == {name: bits.shape for name, bits in published.items()}
    weights.apply({name: TensorUpdate(None, bits) for name, bits in published.items()})
    assert all(np.array_equal(bits, published[name]) for name, bits in weights.tensors().items())
