"""A chain of torch stages computes the whole model's bits, for every family, and its weights change in place."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from echo_p2p.chain.shape import model_shape, span_bytes
from echo_p2p.chain.stage import TensorUpdate
from echo_p2p.chain.torch_cache import folded_attention
from echo_p2p.chain.torch_products import onednn_helps
from echo_p2p.chain.torch_stage import TorchStage, load_stage
from echo_p2p.errors import ChainError, ModelError, WeightsError
from echo_p2p.models.layout import LAYOUT, encode_layout, tensor_entries, tensor_shapes
from echo_protocols.values import Span

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "llama": {"tie_word_embeddings": False},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"head_dim": 8, "sliding_window": 6},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 6},
    "mixtral": {"head_dim": 8, "num_local_experts": 4},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 4.0},
    "olmo2": {},
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
CUTS = ((0, 4), (0, 2, 4), (0, 1, 3, 4))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(
    folder: Path, family: str, *, shards: str = "20KB", dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Path:
    path = folder / f"{family}-{shards}-{str(dtype).removeprefix('torch.')}"
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family.split("-")[0], **(SIZES | FAMILIES.get(family, {}) | settings))
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in whole.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.1)
        whole.save_pretrained(path, max_shard_size=shards)
    return path


def chain(path: Path, cuts: Sequence[int]) -> list[TorchStage]:
    return [load_stage(path, Span(start=a, end=b, layers=4), device="cpu") for a, b in pairwise(cuts)]


def call(
    stages: Sequence[TorchStage], rows: Sequence[int], position: int | Sequence[int], tokens: np.ndarray, lane: int = 0
) -> np.ndarray:
    names, carried = np.array(rows, dtype=np.int32), tokens
    for stage in stages:
        carried = stage.forward(lane, names, np.full(len(names), position, dtype=np.int32), carried)
    return carried


def read(stages: Sequence[TorchStage], prompt: Sequence[int], lane: int) -> np.ndarray:
    """Logits (vocabulary,) after a prompt, which a lane of one row has then read."""
    return call(stages, [0], 0, np.array([prompt], np.int32), lane)[0]


def join(stages: Sequence[TorchStage], rows: Sequence[int], source: int, lane: int = 0) -> None:
    for stage in stages:
        stage.join(lane, np.array(rows, np.int32), source)


def generate(stages: Sequence[TorchStage]) -> list[np.ndarray]:
    """Logits of a prefill of 5 tokens and 8 steps, in which rows leave; then the lane is closed."""
    tokens = np.random.default_rng(0).integers(1, 48, (4, 5), dtype=np.int32)
    seen = [call(stages, [0, 1, 2, 3], 0, tokens)]
    for step, rows in enumerate([[0, 1, 2, 3]] * 3 + [[0, 1, 3]] * 2 + [[1, 3]] * 2 + [[3]]):
        newest = (np.array(rows, dtype=np.int32) * 5 + step + 1)[:, None]
        seen.append(call(stages, rows, 5 + step, newest))
    for stage in stages:
        stage.close(0)
    return seen


def same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_of_a_model_gives_the_whole_models_bits(folder: Path, family: str) -> None:
    whole, two, three = (generate(chain(model(folder, family), cuts)) for cuts in CUTS)
    assert whole[0].shape == (4, 48)
    assert whole[0].dtype == np.float32
    assert same(whole, two)
    assert same(whole, three)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_stage_gives_the_bits_of_the_plain_model(folder: Path, family: str) -> None:
    path = model(folder, family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    plain.requires_grad_(False)  # torch picks other kernels for weights that want gradients: 1e-7 apart
    cache = DynamicCache(config=plain.config)
    stages = chain(path, (0, 4))
    tokens = np.random.default_rng(1).integers(1, 48, (3, 5), dtype=np.int32)
    for position in (0, 5, 6, 7, 8):
        with torch.inference_mode():
            expected = plain(torch.tensor(tokens, dtype=torch.int64), past_key_values=cache, logits_to_keep=1).logits
        assert np.array_equal(call(stages, [0, 1, 2], position, tokens), expected[:, -1].numpy())
        tokens = tokens[:, -1:]


WIDE = {"hidden_size": 512, "intermediate_size": 2304, "head_dim": 128, "vocab_size": 2304}
"""So large that a few rows are multiplied with its matrices by oneDNN, where torch has it."""


def test_a_chain_of_wide_stages_gives_the_whole_stages_bits_however_many_rows_there_are(folder: Path) -> None:
    path = model(folder, "llama-wide", shards="1GB", **WIDE)
    whole, halves = chain(path, (0, 4)), chain(path, (0, 2, 4))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for rows in (1, 3, 4, 8, 15, 16, 48, 64):
        tokens = np.random.default_rng(rows).integers(1, 2304, (rows, 1), dtype=np.int32)
        outputs = call(whole, range(rows), 0, tokens, lane=rows)
        assert np.array_equal(outputs, call(halves, range(rows), 0, tokens, lane=rows))
        with torch.inference_mode():
            expected = plain(torch.tensor(tokens, dtype=torch.int64)).logits[:, -1].numpy()
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.skipif(not onednn_helps(), reason="torch has no oneDNN here")
def test_few_rows_of_a_wide_stage_are_multiplied_by_onednn_with_the_weights_as_they_are_now(folder: Path) -> None:
    path = model(folder, "llama-wide", shards="1GB", **WIDE)
    stages, name = chain(path, (0, 4)), "lm_head.weight"
    tokens = np.random.default_rng(0).integers(1, 2304, (8, 1), dtype=np.int32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        before = call(stages, range(8), 0, tokens)
    called = {each.key: each.count for each in profile.key_averages()}
    assert called["mkldnn::_linear_pointwise"] == 4 * 3 + 1  # gate, up and down of each layer, and the output matrix
    bits = stages[0].tensors()[name]
    stages[0].apply({name: TensorUpdate(index=None, values=bits ^ np.uint16(0x8000))})
    assert np.array_equal(call(stages, range(8), 0, tokens, lane=1), -before)


@dataclass
class Row:
    """One answer while it grows, and the logits (vocabulary,) of each of its steps."""

    tokens: list[int]
    ends: int
    logits: list[np.ndarray] = field(default_factory=list)


def churn(stages: Sequence[TorchStage], *, steps: int, seed: int = 3) -> tuple[list[Row], int]:
    """Greedy answers of one lane that rows join, alone and in groups, and leave at random; how often it was ragged."""
    draws, live, done, ragged = np.random.default_rng(seed), dict[int, Row](), list[Row](), 0
    for _ in range(steps):
        left = {name for name, row in live.items() if len(row.logits) >= row.ends}
        done += [live[name] for name in left]
        while len(live) - len(left) < 5:
            prompt, rows = draws.integers(1, 48, draws.integers(1, 12)).tolist(), draws.integers(1, 4)
            logits = read(stages, prompt, lane=1)
            names = [name for name in range(12) if name not in live][:rows]
            join(stages, names, source=1)
            for stage in stages:
                stage.close(1)
            live |= {name: Row([*prompt, int(logits.argmax())], int(draws.integers(2, 26)), [logits]) for name in names}
        live = {name: row for name, row in live.items() if name not in left}
        names = draws.permutation(list(live)).tolist()
        lengths = [len(live[name].tokens) - 1 for name in names]
        ragged += len(set(lengths)) > 1
        logits = call(stages, names, lengths, np.array([live[name].tokens[-1:] for name in names], np.int32))
        for name, seen in zip(names, logits, strict=True):
            row = live[name]
            row.tokens.append(int(seen.argmax()))
            row.logits.append(seen)
    return [*done, *live.values()], ragged


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_join_and_leave_answer_as_if_alone(folder: Path, family: str) -> None:
    path = model(folder, family)
    stages = chain(path, (0, 2, 4))
    assert all(stage.ragged for stage in stages)
    rows, ragged = churn(stages, steps=75)
    assert ragged > 65
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for row in rows:
        with torch.inference_mode():
            alone = plain(torch.tensor([row.tokens[:-1]])).logits[0, -len(row.logits) :].numpy()
        np.testing.assert_allclose(np.array(row.logits), alone, atol=1e-4)
        assert row.tokens[-len(row.logits) :] == alone.argmax(-1).tolist()
    again, _ = churn(chain(path, (0, 1, 4)), steps=75)
    assert same([logits for row in rows for logits in row.logits], [logits for row in again for logits in row.logits])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_in_chunks_is_the_prompt_read_whole(folder: Path, family: str) -> None:
    stages = chain(model(folder, family), (0, 2, 4))
    tokens = np.random.default_rng(4).integers(1, 48, (2, 14), dtype=np.int32)
    whole = call(stages, [0, 1], 0, tokens, lane=1)
    for start, end in pairwise((0, 5, 6, 13, 14)):
        logits = call(stages, [0, 1], start, tokens[:, start:end])
    np.testing.assert_allclose(logits, whole, atol=1e-4)
    newest = np.full((2, 1), 7, np.int32)
    np.testing.assert_allclose(call(stages, [0, 1], 14, newest), call(stages, [0, 1], 14, newest, lane=1), atol=1e-4)


def test_a_group_that_shares_a_prefix_has_the_bits_of_one_prompt_read_for_each(folder: Path) -> None:
    stages = chain(model(folder, "llama"), (0, 2, 4))
    prompt = [5, 4, 3, 2, 1]
    read(stages, prompt, lane=1)
    join(stages, [0, 1, 2], source=1)
    call(stages, [0, 1, 2], 0, np.array([prompt] * 3, np.int32), lane=2)
    newest = np.array([[6], [7], [8]], np.int32)
    shared, apart = call(stages, [0, 1, 2], 5, newest), call(stages, [0, 1, 2], 5, newest, lane=2)
    np.testing.assert_allclose(shared, apart, atol=1e-5)
    join(stages, [9], source=1)  # the source goes on as it was
    assert same([call(stages, [9], 5, newest[:1])], [call(stages, [0], 5, newest[:1], lane=1)])


def test_weights_may_change_while_rows_stand_apart(folder: Path) -> None:
    path = model(folder, "qwen3")
    stages, whole = chain(path, (0, 2, 4)), chain(path, (0, 4))
    patch = {name: TensorUpdate(None, bits ^ np.uint16(1)) for name, bits in whole[0].tensors().items()}
    seen = []
    for each in (stages, whole):
        read(each, [3, 4, 5], lane=1)
        join(each, [4, 2], source=1)
        call(each, [2, 4], 3, np.array([[1], [2]], np.int32))
        join(each, [0], source=1)
        before = call(each, [0, 2, 4], [3, 4, 4], np.array([[1], [2], [3]], np.int32))
        for stage in each:
            held = stage.tensors()
            stage.apply({name: update for name, update in patch.items() if name in held})
        after = call(each, [4, 0], [5, 4], np.array([[3], [1]], np.int32))
        seen.append([before, after])
        assert np.isfinite(after).all()
    assert same(*seen)


def test_a_row_of_broken_numbers_leaves_its_neighbours_alone(folder: Path) -> None:
    stage = chain(model(folder, "llama"), (0, 2, 4))[1]
    hidden = np.random.default_rng(5).standard_normal((2, 6, 32)).astype(np.float32)
    names, newest = np.arange(2, dtype=np.int32), hidden[:, :1]
    call([stage], [0], 0, np.full_like(hidden[:1], np.nan), lane=1)
    call([stage], [0], 0, hidden[:1, :2], lane=2)
    join([stage], [0], source=1)
    join([stage], [1], source=2)
    both = stage.forward(0, names, np.array([6, 2], np.int32), newest)
    assert np.isnan(both[0]).all()
    assert np.isfinite(both[1]).all()
    call([stage], [1], 3, newest[:1])
    join([stage], [0], source=2)  # where the broken row was
    assert np.isfinite(stage.forward(0, names, np.array([2, 4], np.int32), newest)).all()


def test_folded_heads_attend_as_those_of_transformers() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 4)
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [8]]))[:, None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    expected, _ = sdpa_attention_forward(module, query, keys, values, mask, scaling=0.3)
    torch.testing.assert_close(folded_attention(query, keys, values, mask, 0.3), expected)


def test_families_whose_rows_depend_on_the_longest_join_at_one_position_only(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    stages = chain(model(folder, "llama-dynamic", rope_parameters=rope), (0, 2, 4))
    assert not any(stage.ragged for stage in stages)
    read(stages, [1, 2, 3], lane=1)
    read(stages, [1, 2], lane=2)
    join(stages, [0, 1], source=1)
    join(stages, [2], source=1)
    for stage in stages:
        with pytest.raises(ChainError, match="needs all at one"):
            stage.join(0, np.array([3], np.int32), 2)
    assert call(stages, [0, 1, 2], 3, np.array([[1], [2], [3]], np.int32)).shape == (3, 48)


@pytest.mark.parametrize("family", ["qwen3", "llama", "llama-tied", "gemma3_text"])
def test_updates_in_place_equal_a_fresh_load_of_the_updated_model(folder: Path, family: str, tmp_path: Path) -> None:
    path, draws = model(folder, family), np.random.default_rng(2)
    whole = chain(path, (0, 4))[0]
    sparse, dense = {}, {}
    for name, bits in whole.tensors().items():
        index = np.unique(draws.integers(0, bits.size, max(1, bits.size // 50)))
        fresh = torch.randn(bits.shape).mul(0.1).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        sparse[name], dense[name] = TensorUpdate(index, fresh.reshape(-1)[index]), TensorUpdate(None, fresh)
    kinds = {name: (sparse if i % 2 else dense)[name] for i, name in enumerate(sparse)}
    updated = tmp_path / "updated"
    updated.mkdir()
    (updated / "config.json").write_text((path / "config.json").read_text())
    whole.apply(kinds)
    as_torch = {name: torch.tensor(bits.view(np.int16)).view(torch.bfloat16) for name, bits in whole.tensors().items()}
    save_file(as_torch, updated / "model.safetensors", {"format": "pt"})

    stages = chain(path, (0, 1, 3, 4))
    for stage in stages:
        places = {name: parameter.data_ptr() for name, parameter in stage._model.named_parameters()}
        stage.apply({name: update for name, update in kinds.items() if name in stage.tensors()})
        assert places == {name: parameter.data_ptr() for name, parameter in stage._model.named_parameters()}

    assert same(generate(stages), generate(chain(updated, (0, 4))))


def test_tensors_are_the_files_bits_and_leave_the_tied_matrix_out(folder: Path) -> None:
    path = model(folder, "llama-tied", shards="5GB")
    stored = load_file(path / "model.safetensors")
    first, last = chain(path, (0, 2, 4))
    assert set(first.tensors()) | set(last.tensors()) == set(stored)
    assert set(first.tensors()) & set(last.tensors()) == {"model.embed_tokens.weight"}
    for stage in (first, last):
        for name, bits in stage.tensors().items():
            assert np.array_equal(bits, stored[name].view(torch.int16).numpy().view(np.uint16))


def test_a_float32_checkpoint_is_rounded_to_the_bf16_policy(folder: Path) -> None:
    path = model(folder, "qwen3", shards="5GB", dtype=torch.float32)
    stored = load_file(path / "model.safetensors")
    for name, bits in chain(path, (0, 4))[0].tensors().items():
        assert np.array_equal(bits, stored[name].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("shards", ["20KB", "5GB"])
def test_a_stage_holds_its_span_and_opens_no_other_file(folder: Path, tmp_path: Path, shards: str) -> None:
    path, span = model(folder, "llama", shards=shards), Span(start=1, end=3, layers=4)
    copy = tmp_path / "copy"
    copy.mkdir()
    wanted = {entry.file.name for name, entry in tensor_entries(path).items() if ".1." in name or ".2." in name}
    for file in path.iterdir():
        text = file.suffix != ".safetensors"
        (copy / file.name).write_bytes(file.read_bytes() if text or file.name in wanted else _header_of(file))
    stage = load_stage(copy, span, device="cpu")
    held = sum(parameter.numel() for parameter in stage._model.parameters())
    assert 4 * held == span_bytes(path, span)
    assert not [b for b in stage._model.buffers() if b.is_meta]
    assert len(wanted) < len(list(path.glob("*.safetensors"))) or shards == "5GB"


def _header_of(file: Path) -> bytes:
    data = file.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]  # without the values: opening it for them would fail


def test_lanes_are_apart_bounded_and_freed(folder: Path) -> None:
    stage = load_stage(model(folder, "qwen3"), Span(start=0, end=4, layers=4), device="cpu", max_lanes=2, max_length=6)
    rows, start, tokens = np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.full((2, 5), 3, np.int32)
    first = stage.forward(7, rows, start, tokens)
    assert np.array_equal(first, stage.forward(8, rows, start, tokens))
    with pytest.raises(ChainError, match="one more than the 2"):
        stage.forward(9, rows, start, tokens)
    with pytest.raises(ChainError, match="pass 6 positions"):
        stage.forward(8, rows, start + 5, tokens)
    stage.forward(8, rows, start + 5, tokens[:, :1])
    stage.close(8)
    stage.close(8)
    assert np.array_equal(first, stage.forward(9, rows, start, tokens))


def test_calls_that_do_not_fit_are_refused_and_change_nothing(folder: Path) -> None:
    stage = load_stage(model(folder, "qwen3"), Span(start=0, end=2, layers=4), device="cpu")
    rows, zero, tokens = np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.full((2, 3), 3, np.int32)
    cases: list[tuple[np.ndarray, np.ndarray, np.ndarray, str]] = [
        (rows + 1, zero, tokens, "rows must be 0"),
        (rows, zero + 1, tokens, "positions"),
        (rows, np.array([0, 1], np.int32), tokens, "positions"),
        (rows, zero, tokens + 45, "vocabulary"),
        (rows, zero, tokens - 4, "vocabulary"),
        (rows, zero, tokens[:1], "do not fit"),
        (rows, zero, tokens[:, :0], "do not fit"),
        (rows, zero, np.zeros((2, 3, 32), np.float32), "do not fit"),
        (rows[:0], zero[:0], tokens[:0], "do not fit"),
    ]
    for bad_rows, positions, inputs, message in cases:
        with pytest.raises(ChainError, match=message):
            stage.forward(0, bad_rows, positions, inputs)
    stage.forward(0, rows, zero, tokens)
    for names in ([0, 2], [1, 1]):
        with pytest.raises(ChainError, match="not among rows"):
            stage.forward(0, np.array(names, np.int32), zero + 3, tokens[:, :1])
    assert stage.forward(0, rows, zero + 3, tokens[:, :1]).shape == (2, 1, 32)


def test_updates_that_do_not_fit_are_refused_whole(folder: Path) -> None:
    stage = load_stage(model(folder, "llama"), Span(start=0, end=2, layers=4), device="cpu")
    before, one = stage.tensors(), np.ones(1, np.uint16)
    good = {"model.layers.0.mlp.up_proj.weight": TensorUpdate(np.zeros(1, np.int64), one)}
    for name, update in [
        ("model.norm.weight", TensorUpdate(None, np.ones(32, np.uint16))),
        ("model.layers.1.mlp.up_proj.weight", TensorUpdate(None, np.ones((2, 2), np.uint16))),
        ("model.layers.1.mlp.up_proj.weight", TensorUpdate(np.array([48 * 32]), one)),
        ("model.layers.1.mlp.up_proj.weight", TensorUpdate(np.array([-1]), one)),
        ("model.layers.1.mlp.up_proj.weight", TensorUpdate(np.array([0, 1]), one)),
    ]:
        with pytest.raises(WeightsError):
            stage.apply(good | {name: update})
    after = stage.tensors()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_fingerprint_names_backend_version_device_and_dtype(folder: Path) -> None:
    version = torch.__version__.split("+")[0]
    path, span = model(folder, "qwen3"), Span(start=0, end=4, layers=4)
    assert load_stage(path, span, device="cpu").engine == f"torch-{version}-cpu-float32"
    half = load_stage(path, span, device="cpu", dtype=torch.bfloat16)
    assert half.engine == f"torch-{version}-cpu-bfloat16"
    assert (
        half.forward(0, np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.ones((2, 3), np.int32)).dtype
        == np.float32
    )


def test_folders_that_hold_no_such_model_are_refused(folder: Path, tmp_path: Path) -> None:
    path = model(folder, "llama", shards="5GB")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_stage(tmp_path, Span(start=0, end=4, layers=4), device="cpu")
    with pytest.raises(ModelError, match="4 layers"):
        load_stage(path, Span(start=0, end=4, layers=5), device="cpu")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ModelError, match="safetensors"):
        load_stage(broken, Span(start=0, end=4, layers=4), device="cpu")
    partial = load_file(path / "model.safetensors")
    del partial["model.norm.weight"]
    save_file(partial, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_stage(broken, Span(start=2, end=4, layers=4), device="cpu")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="no safetensors"):
        load_stage(broken, Span(start=2, end=4, layers=4), device="cpu")


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama-tied", True), ("gemma3_text", True)])
def test_the_shape_is_read_without_loading(folder: Path, family: str, tied: bool) -> None:
    path = model(folder, family)
    shape = model_shape(path)
    bits = chain(path, (0, 4))[0].tensors()
    assert shape[:4] == (4, 48, tied, 32)
    assert shape.size_bytes == sum(tensor.nbytes for tensor in bits.values())
    assert span_bytes(path, Span(start=0, end=4, layers=4)) == 2 * shape.size_bytes


def without_weights(path: Path, folder: Path) -> Path:
    """What a peer has of a model whose weights come with the releases."""
    folder.mkdir()
    (folder / "config.json").write_bytes((path / "config.json").read_bytes())
    (folder / LAYOUT).write_bytes(encode_layout(tensor_shapes(path)))
    return folder


@pytest.mark.parametrize(
    "family", ["qwen3", "llama-tied", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
)
def test_a_stage_that_is_filled_later_is_the_one_that_was_loaded(folder: Path, tmp_path: Path, family: str) -> None:
    path = model(folder, family)
    bare = without_weights(path, tmp_path / "bare")
    for a, b in ((0, 2), (2, 4)):
        span = Span(start=a, end=b, layers=4)
        loaded, empty = load_stage(path, span, device="cpu"), load_stage(bare, span, device="cpu", weights=False)
        assert not any(bits.any() for bits in empty.tensors().values())
        assert {name: bits.shape for name, bits in empty.tensors().items()} == {
            name: bits.shape for name, bits in loaded.tensors().items()
        }
        empty.apply({name: TensorUpdate(None, bits) for name, bits in loaded.tensors().items()})
        tokens = np.array([[3, 7, 11]], np.int32)
        inputs = tokens if span.first else np.full((1, 3, 32), 0.25, np.float32)
        assert np.array_equal(call([loaded], [0], 0, inputs), call([empty], [0], 0, inputs))


def test_no_more_is_allocated_than_the_layout_says(folder: Path, tmp_path: Path) -> None:
    bare = without_weights(model(folder, "llama"), tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**36}))
    with pytest.raises(ModelError, match="larger tensors than its layout"):
        load_stage(bare, Span(start=0, end=2, layers=4), device="cpu", weights=False)
    (bare / LAYOUT).write_text("{}")
    with pytest.raises(ModelError):
        load_stage(bare, Span(start=0, end=2, layers=4), device="cpu", weights=False)
    (bare / LAYOUT).write_text("[" * 100_000)
    with pytest.raises(ModelError, match="can't be read"):
        load_stage(bare, Span(start=0, end=2, layers=4), device="cpu", weights=False)
