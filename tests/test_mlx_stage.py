"""An mlx stage computes what a torch stage does, for each family it takes, and refuses what it would get wrong."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo_p2p.chain import torch_stage
from echo_p2p.chain.parity import check_parity, disagreement, probed_layers
from echo_p2p.chain.stage import Stage, TensorUpdate
from echo_p2p.errors import ChainError, ModelError, WeightsError
from echo_p2p.models.layout import tensor_entries
from echo_protocols.values import Span

pytest.importorskip(
    "mlx_lm", reason="mlx-lm is not installed: pip install 'echo-p2p[mlx]' on a Mac, mlx-lm[cpu] on Linux"
)

import mlx.core as mx

from echo_p2p.chain import mlx_stage
from echo_p2p.chain.mlx_model import FAMILIES
from echo_p2p.chain.mlx_stage import MlxStage

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
ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "ernie4_5": {"head_dim": 8},
    "glm4": {"head_dim": 16, "rope_parameters": PART},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 0.5, "residual_multiplier": 0.5},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "llama": {"tie_word_embeddings": False, "rope_parameters": ROPE | {"original_max_position_embeddings": 32}},
    "llama-tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "mixtral": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmoe": EXPERTS,
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "mlp_only_layers": [1], **EXPERTS},
    "seed_oss": {"head_dim": 8},
    "smollm3": {"no_rope_layer_interval": 2},
}
WHOLE = Span(start=0, end=4, layers=4)
NATS = 1e-4  # of log-probabilities, in float32


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(folder: Path, name: str, *, shards: str = "5GB") -> Path:
    path = folder / f"{name}-{shards}"
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name.split("-")[0], **(SIZES | MODELS.get(name, {})))
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.15))
        whole.save_pretrained(path, max_shard_size=shards)
    return path


def by_torch(path: Path, span: Span) -> Stage:
    return torch_stage.load_stage(path, span, device="cpu")


def by_mlx(path: Path, span: Span) -> Stage:
    return mlx_stage.load_stage(path, span, device="cpu")


def chain(path: Path, cuts: Sequence[int], loaders: Sequence[Callable[[Path, Span], Stage]]) -> list[Stage]:
    spans = [Span(start=a, end=b, layers=4) for a, b in pairwise(cuts)]
    return [load(path, span) for load, span in zip(loaders, spans, strict=True)]


def call(
    stages: Sequence[Stage], rows: Sequence[int], position: int | Sequence[int], tokens: NDArray[Any], lane: int = 0
) -> Any:
    names, carried = np.array(rows, dtype=np.int32), tokens
    for stage in stages:
        carried = stage.forward(lane, names, np.full(len(names), position, np.int32), carried)
    return carried


def begin(stages: Sequence[Stage], prompt: Sequence[int], rows: Sequence[int], lane: int = 0) -> NDArray[np.float32]:
    """Rows join the lane from one that reads the prompt and is closed; logits (vocabulary,) after the prompt."""
    logits = call(stages, [0], 0, np.array([prompt], np.int32), lane=99)
    try:
        for stage in stages:
            stage.join(lane, np.array(rows, np.int32), 99)
    finally:
        for stage in stages:
            stage.close(99)
    return np.asarray(logits[0])


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).numpy()


def follow(stages: Sequence[Stage], lane: int = 0) -> list[NDArray[np.float64]]:
    """Log-probabilities of a prefill of 9 tokens and 8 steps, in which rows leave and change places."""
    tokens = np.random.default_rng(0).integers(1, 48, (4, 9), dtype=np.int32)
    seen = [log_probabilities(call(stages, [0, 1, 2, 3], 0, tokens, lane))]
    for step, rows in enumerate([[0, 1, 2, 3]] * 3 + [[3, 0, 1]] * 2 + [[1, 3]] * 2 + [[3]]):
        newest = (np.array(rows, dtype=np.int32) * 5 + step + 1)[:, None]
        seen.append(log_probabilities(call(stages, rows, 9 + step, newest, lane)))
    for stage in stages:
        stage.close(lane)
    return seen


def greedy(stages: Sequence[Stage], patches: Sequence[dict[str, TensorUpdate]]) -> list[int]:
    """12 tokens of two rows; a patch is applied after each fourth."""
    tokens, position, seen = np.array([[5, 6, 7, 8, 9], [9, 3, 1, 4, 1]], np.int32), 0, []
    for step in range(12):
        logits = call(stages, [0, 1], position, tokens)
        position += tokens.shape[1]
        tokens = logits.argmax(-1)[:, None].astype(np.int32)
        seen += tokens[:, 0].tolist()
        if step % 4 == 3 and step // 4 < len(patches):
            for stage in stages:
                held = stage.tensors()
                stage.apply({name: update for name, update in patches[step // 4].items() if name in held})
    return seen


@dataclass
class Row:
    """One greedy answer while it grows: prompt and tokens, and the logits (vocabulary,) that each token came from."""

    tokens: list[int]
    ends: int
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def take(self, logits: NDArray[np.float32]) -> None:
        self.logits.append(logits)
        self.tokens.append(int(logits.argmax()))


def churn(stages: Sequence[Stage], *, steps: int) -> list[Row]:
    """What grows in one lane that rows join, alone and in groups, and leave at random, in random order."""
    draws, live, every = np.random.default_rng(3), dict[int, Row](), list[Row]()
    for _ in range(steps):
        held = set(live)  # who leaves is gone with the next step
        live = {name: row for name, row in live.items() if len(row.logits) < row.ends}
        while len(live) < 5:
            prompt = draws.integers(1, 48, draws.integers(1, 12)).tolist()
            names = [name for name in range(15) if name not in held][: draws.integers(1, 4)]
            logits = begin(stages, prompt, names)
            held |= set(names)
            for name in names:
                live[name] = Row(list(prompt), int(draws.integers(2, 26)))
                live[name].take(logits)
                every.append(live[name])
        names = draws.permutation(list(live)).tolist()
        lengths = [len(live[name].tokens) - 1 for name in names]
        logits = call(stages, names, lengths, np.array([live[name].tokens[-1:] for name in names], np.int32))
        for name, seen in zip(names, logits, strict=True):
            live[name].take(seen)
    return every


def patch(stage: Stage, seed: int) -> dict[str, TensorUpdate]:
    draws, updates = np.random.default_rng(seed), {}
    for i, (name, bits) in enumerate(stage.tensors().items()):
        fresh = (draws.standard_normal(bits.shape, np.float32) * np.float32(0.3)).view(np.uint32) >> 16
        index = np.unique(draws.integers(0, bits.size, max(1, bits.size // 20)))
        values = fresh.astype(np.uint16)
        updates[name] = TensorUpdate(None, values) if i % 3 == 0 else TensorUpdate(index, values.reshape(-1)[index])
    return updates


def worst(left: Sequence[NDArray[Any]], right: Sequence[NDArray[Any]]) -> float:
    return float(max(np.abs(a - b).max() for a, b in zip(left, right, strict=True)))


def test_every_family_that_is_taken_is_held_to_parity_here() -> None:
    assert {name.split("-")[0] for name in MODELS} == FAMILIES


@pytest.mark.parametrize("name", MODELS)
def test_chains_of_torch_and_mlx_compute_what_torch_does(folder: Path, name: str) -> None:
    path = model(folder, name)
    expected = follow(chain(path, (0, 4), [by_torch]))
    for cuts, loaders in [
        ((0, 4), [by_mlx]),
        ((0, 2, 4), [by_torch, by_mlx]),
        ((0, 1, 3, 4), [by_mlx, by_torch, by_mlx]),
        ((0, 1, 2, 4), [by_mlx, by_mlx, by_torch]),
    ]:
        assert worst(follow(chain(path, cuts, loaders)), expected) < NATS


@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe", "mixtral", "phi3"])
def test_tensors_are_those_of_a_torch_stage(folder: Path, name: str) -> None:
    path = model(folder, name)
    for start, end in [(0, 1), (1, 3), (2, 4), (0, 4)]:
        span = Span(start=start, end=end, layers=4)
        ours, theirs = by_mlx(path, span).tensors(), by_torch(path, span).tensors()
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "qwen3_moe"])
def test_a_mixed_chain_that_is_patched_gives_the_same_greedy_tokens(folder: Path, name: str) -> None:
    path = model(folder, name)
    patches = [patch(by_torch(path, WHOLE), seed) for seed in (1, 2)]
    expected = greedy(chain(path, (0, 4), [by_torch]), patches)
    assert len(set(expected)) > 4
    assert expected != greedy(chain(path, (0, 4), [by_torch]), patches[:1])
    for loaders in ([by_torch, by_mlx], [by_mlx, by_torch], [by_mlx, by_mlx]):
        assert greedy(chain(path, (0, 2, 4), loaders), patches) == expected


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_join_and_leave_answer_as_if_alone(folder: Path, name: str) -> None:
    path = model(folder, name)
    expected = churn(chain(path, (0, 4), [by_torch]), steps=50)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    alone = []
    for row in expected:
        with torch.inference_mode():
            logits = plain(torch.tensor([row.tokens[:-1]])).logits[0, -len(row.logits) :].numpy()
        assert row.tokens[-len(row.logits) :] == logits.argmax(-1).tolist()
        alone.append(log_probabilities(logits))
    for cuts, loaders in [
        ((0, 4), [by_mlx]),
        ((0, 2, 4), [by_torch, by_mlx]),
        ((0, 1, 3, 4), [by_mlx, by_torch, by_mlx]),
    ]:
        stages = chain(path, cuts, loaders)
        assert all(stage.ragged for stage in stages)
        rows = churn(stages, steps=50)
        assert [row.tokens for row in rows] == [row.tokens for row in expected]
        assert worst([log_probabilities(np.array(row.logits)) for row in rows], alone) < NATS


def test_a_prompt_lane_goes_on_after_rows_have_joined_from_it(folder: Path) -> None:
    stages = chain(model(folder, "llama"), (0, 2, 4), [by_mlx, by_mlx])
    call(stages, [0], 0, np.array([[5, 4, 3, 2, 1]], np.int32), lane=1)
    newest, seen = np.array([[6], [7]], np.int32), []
    for stage in stages:
        stage.join(0, np.array([7, 2], np.int32), 1)
    for step in range(3):
        both = call(stages, [7, 2], 5 + step, newest)
        seen.append((both[0], call(stages, [0], 5 + step, newest[:1], lane=1)[0]))
    assert worst([joined for joined, _ in seen], [source for _, source in seen]) < NATS
    for stage in stages:
        stage.join(0, np.array([0], np.int32), 1)
    again = call(stages, [0, 7], 8, newest[[0, 0]])
    np.testing.assert_allclose(again[0], again[1], atol=NATS)


def test_a_number_is_free_again_and_its_row_forgets_who_had_it(folder: Path) -> None:
    stages = chain(model(folder, "qwen3"), (0, 1, 4), [by_mlx, by_mlx])
    begin(stages, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    call(stages, [0, 1], 8, np.array([[9], [10]], np.int32))
    with pytest.raises(ChainError, match="it lacks"):
        begin(stages, [11, 12], [1])
    call(stages, [0], 9, np.array([[9]], np.int32))
    begin(stages, [11, 12], [1])
    both = call(stages, [1, 0], [2, 10], np.array([[13], [9]], np.int32))
    begin(stages, [11, 12], [0], lane=5)
    np.testing.assert_allclose(both[:1], call(stages, [0], 2, np.array([[13]], np.int32), lane=5), atol=NATS)


def test_weights_may_change_while_rows_stand_apart(folder: Path) -> None:
    path, seen = model(folder, "qwen3"), []
    change = patch(by_torch(path, WHOLE), 1)
    for loaders in ([by_torch, by_torch], [by_mlx, by_torch], [by_mlx, by_mlx]):
        stages = chain(path, (0, 2, 4), loaders)
        begin(stages, [3, 4, 5], [4, 2])
        call(stages, [2, 4], 3, np.array([[1], [2]], np.int32))
        begin(stages, [3, 4, 5], [0])
        for stage in stages:
            held = stage.tensors()
            stage.apply({name: update for name, update in change.items() if name in held})
        seen.append([log_probabilities(call(stages, [4, 0], [4, 3], np.array([[3], [1]], np.int32)))])
    assert max(worst(seen[0], other) for other in seen[1:]) < NATS


def test_a_row_of_broken_numbers_leaves_its_neighbours_alone(folder: Path) -> None:
    stage = by_mlx(model(folder, "llama"), Span(start=2, end=3, layers=4))
    hidden = np.random.default_rng(5).standard_normal((2, 6, 32)).astype(np.float32)
    newest, names = hidden[:, :1], np.arange(2, dtype=np.int32)
    call([stage], [0], 0, np.full_like(hidden[:1], np.nan), lane=1)
    call([stage], [0], 0, hidden[:1, :2], lane=2)
    stage.join(0, names[:1], 1)
    stage.join(0, names[1:], 2)
    both = stage.forward(0, names, np.array([6, 2], np.int32), newest)
    assert np.isnan(both[0]).all()
    assert np.isfinite(both[1]).all()
    call([stage], [1], 3, newest[:1])
    stage.join(0, names[:1], 2)  # where the broken row was
    assert np.isfinite(stage.forward(0, names, np.array([2, 4], np.int32), newest)).all()


def test_a_lane_whose_computation_failed_is_closed(folder: Path) -> None:
    stage = by_mlx(model(folder, "llama"), Span(start=1, end=2, layers=4))
    hidden = np.ones((1, 3, 32), np.float32)
    call([stage], [0], 0, hidden, lane=1)
    stage.join(0, np.arange(2, dtype=np.int32), 1)
    with pytest.raises(ChainError, match="lane 0 failed"):
        call([stage], [0, 1], 3, np.full((2, 1, 32), None))  # what mlx has no arrays of
    with pytest.raises(ChainError, match="rows must be 0"):
        call([stage], [1], 3, hidden[:, :1])
    stage.join(0, np.arange(2, dtype=np.int32), 1)
    assert np.isfinite(call([stage], [0, 1], 3, hidden[[0, 0], :1])).all()


def test_models_that_rotate_by_the_longest_row_join_at_one_position_only(folder: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = changed(model(folder, "llama-tied"), tmp_path / "dynamic", rope_parameters=rope)
    stages = chain(path, (0, 2, 4), [by_mlx, by_mlx])
    assert not any(stage.ragged for stage in stages)
    begin(stages, [1, 2, 3], [0, 1])
    begin(stages, [4, 5, 6], [2])
    with pytest.raises(ChainError, match="needs all at one"):
        begin(stages, [1, 2], [3])
    assert call(stages, [0, 1, 2], 3, np.array([[1], [2], [3]], np.int32)).shape == (3, 48)


def test_positions_of_all_lanes_are_bounded(folder: Path) -> None:
    stage = mlx_stage.load_stage(model(folder, "qwen3"), WHOLE, device="cpu", kv_positions=14)
    begin([stage], [1, 2, 3], [0, 1])
    call([stage], [0, 1], 3, np.array([[1], [2]], np.int32))
    with pytest.raises(ChainError, match="18 KV positions of at most 14: wait until rows have left"):
        begin([stage], [1, 2], [2, 3])
    begin([stage], [1, 2], [2])
    with pytest.raises(ChainError, match="15 KV positions of at most 14"):
        call([stage], [0, 1, 2], [4, 4, 2], np.array([[1], [2], [3]], np.int32))
    assert call([stage], [0, 2], [4, 2], np.array([[1], [3]], np.int32)).shape == (2, 48)


def test_lanes_are_apart_bounded_and_freed(folder: Path) -> None:
    stage = mlx_stage.load_stage(model(folder, "qwen3"), WHOLE, device="cpu", max_lanes=2, max_length=6)
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


def test_lanes_in_turn_do_not_disturb_each_other(folder: Path) -> None:
    stages = chain(model(folder, "llama"), (0, 2, 4), [by_mlx, by_mlx])
    alone = follow(stages)
    tokens = np.array([[3, 4], [5, 6]], np.int32)
    for position in (0, 2, 4):
        call(stages, [0, 1], position, tokens, lane=1)
    assert worst(follow(stages), alone) == 0.0


def test_a_stage_works_in_whatever_thread_it_is_called(folder: Path) -> None:
    path = model(folder, "llama")
    expected, results = follow(chain(path, (0, 4), [by_mlx])), {}

    def within(thread: str, work: Callable[[], Any]) -> Any:
        worker = threading.Thread(target=lambda: results.__setitem__(thread, work()))
        worker.start()
        worker.join(timeout=30)
        return results[thread]

    stages = within("loads", lambda: chain(path, (0, 2, 4), [by_mlx, by_mlx]))
    tokens = np.random.default_rng(0).integers(1, 48, (4, 9), dtype=np.int32)
    prefill = within("prefills", lambda: call(stages, range(4), 0, tokens))
    assert worst([log_probabilities(prefill)], expected[:1]) < 1e-6
    within("patches", lambda: stages[0].apply(patch(stages[0], 1)))
    newest = (np.arange(4, dtype=np.int32) * 5 + 1)[:, None]
    step = within("steps", lambda: call(stages, range(4), 9, newest))
    assert np.isfinite(step).all()
    within("narrows", lambda: call(stages, [1, 3], 10, newest[:2]))
    within("closes", lambda: stages[0].close(0))


def test_calls_and_updates_that_do_not_fit_are_refused_and_change_nothing(folder: Path) -> None:
    stage = by_mlx(model(folder, "qwen3"), Span(start=0, end=2, layers=4))
    rows, zero, tokens = np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.full((2, 3), 3, np.int32)
    cases: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any], str]] = [
        (rows + 1, zero, tokens, "rows must be 0"),
        (rows, zero + 1, tokens, "positions"),
        (rows, zero, tokens + 45, "vocabulary"),
        (rows, zero, tokens[:1], "do not fit"),
        (rows, zero, np.zeros((2, 3, 32), np.float32), "do not fit"),
    ]
    for bad_rows, positions, inputs, message in cases:
        with pytest.raises(ChainError, match=message):
            stage.forward(0, bad_rows, positions, inputs)
    before = stage.tensors()
    with pytest.raises(WeightsError, match="not of this span"):
        stage.apply({"model.norm.weight": TensorUpdate(None, np.ones(32, np.uint16))})
    assert all(np.array_equal(bits, before[name]) for name, bits in stage.tensors().items())
    assert stage.forward(0, rows, zero, tokens).shape == (2, 3, 32)


def test_a_stage_opens_no_file_of_other_spans(folder: Path, tmp_path: Path) -> None:
    path, span = model(folder, "llama", shards="20KB"), Span(start=1, end=3, layers=4)
    wanted = {entry.file.name for name, entry in tensor_entries(path).items() if ".1." in name or ".2." in name}
    for file in path.iterdir():
        data = file.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        (tmp_path / file.name).write_bytes(data if file.suffix == ".json" or file.name in wanted else data[:header])
    assert len(wanted) < len(list(path.glob("*.safetensors")))
    held = by_mlx(tmp_path, span).tensors()
    assert held.keys() == by_torch(path, span).tensors().keys()


def test_the_fingerprint_names_backend_version_device_and_dtype(folder: Path) -> None:
    path = model(folder, "qwen3")
    assert by_mlx(path, WHOLE).engine == f"mlx-{mx.__version__}-cpu-float32"
    half = mlx_stage.load_stage(path, WHOLE, device="cpu", dtype=mx.bfloat16)
    assert half.engine == f"mlx-{mx.__version__}-cpu-bfloat16"
    assert disagreement(follow([half]), follow([by_torch(path, WHOLE)])) < 0.05


def changed(path: Path, folder: Path, **settings: Any) -> Path:
    """The model with some of its configuration changed; None takes a key away."""
    folder.mkdir()
    for file in path.glob("*.safetensors*"):
        (folder / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_what_mlx_would_compute_wrongly_is_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    llama = model(folder, "llama-tied")
    for number, (path, settings, words) in enumerate([
        (model(folder, "gemma3_text"), {}, "not proven for 'gemma3_text'"),
        (model(folder, "mistral"), {"sliding_window": 6}, "sliding window"),
        (model(folder, "qwen2"), {"use_sliding_window": True, "sliding_window": 6}, "sliding window"),
        (llama, {"layer_types": ["sliding_attention"] * 4}, "sliding window"),
        (llama, {"quantization": {"bits": 4}}, "quantised"),
        (llama, {"rope_parameters": None}, "names no rope_theta"),
        (llama, {"num_hidden_layers": 5}, "has 5 layers"),
        (llama, {"intermediate_size": 40}, "can't read span"),
    ]):  # fmt: skip
        with pytest.raises(ModelError, match=words) as refusal:
            by_mlx(changed(path, tmp_path / str(number), **settings), WHOLE)
        assert "\n" not in str(refusal.value)
    assert by_mlx(changed(model(folder, "qwen2"), tmp_path / "off", sliding_window=6), WHOLE).span == WHOLE


def test_files_that_lack_a_tensor_or_are_cut_short_are_refused(folder: Path, tmp_path: Path) -> None:
    path = model(folder, "llama")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    partial = load_file(path / "model.safetensors")
    del partial["model.norm.weight"]
    save_file(partial, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"norm\.weight"):
        by_mlx(tmp_path, Span(start=2, end=4, layers=4))
    whole = (path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="can't read span"):
        by_mlx(tmp_path, WHOLE)


def test_the_self_check_passes_what_agrees_and_tells_a_wrong_rotation(folder: Path, tmp_path: Path) -> None:
    path = model(folder, "llama-tied")
    assert mlx_stage.prove(path, WHOLE, by_torch, device="cpu") < 1e-5
    wrong = changed(path, tmp_path / "wrong", rope_parameters={"rope_type": "default", "rope_theta": 10.0})
    for span in (WHOLE, Span(start=1, end=2, layers=4), Span(start=3, end=4, layers=4)):
        with pytest.raises(ModelError, match="otherwise than torch"):
            check_parity(lambda _, alone: by_mlx(wrong, alone), by_torch, path, span)


class Mistaken(MlxStage):
    """Gives each row of unlike positions what its neighbour should have."""

    def __init__(self, path: Path, span: Span) -> None:
        vars(self).update(vars(by_mlx(path, span)))

    def forward(self, lane, rows, positions, inputs):  # type: ignore[no-untyped-def]
        outputs = super().forward(lane, rows, positions, inputs)
        return outputs if np.ptp(positions) == 0 else outputs[[*range(1, len(rows)), 0]]


def test_the_self_check_tells_rows_that_are_mixed_up(folder: Path) -> None:
    path = model(folder, "llama-tied")
    with pytest.raises(ModelError, match="otherwise than torch"):
        check_parity(Mistaken, by_torch, path, WHOLE)


def test_the_self_check_visits_each_kind_of_layer_of_the_span(folder: Path) -> None:
    every_second = model(folder, "smollm3")
    assert probed_layers(every_second, WHOLE) == [0, 1, 3]
    assert probed_layers(every_second, Span(start=2, end=3, layers=4)) == [2]
    assert probed_layers(model(folder, "qwen3_moe"), WHOLE) == [0, 1, 3]
    assert probed_layers(model(folder, "llama"), WHOLE) == [0, 3]
