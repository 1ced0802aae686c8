"""Adapters are published alone, and an engine with one computes what PEFT's own model does, merged or not."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from echo_p2p.chain.adapters import MergedAdapter, SeparateAdapter
from echo_p2p.chain.layouts import Place, same_layout
from echo_p2p.chain.live_weights import TorchWeights
from echo_p2p.chain.torch_stage import TorchStage, load_stage
from echo_p2p.errors import ModelError, WeightsError
from echo_p2p.tensors import Bits, TensorUpdate
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.adapter import AdapterSpec, adapter_names
from echo_protocols.release import Chunk, Release, total_bytes
from echo_protocols.values import PolicyVersion, Span

LAYERS = 2
WHOLE, LOW, HIGH = (Span(start=a, end=b, layers=LAYERS) for a, b in ((0, 2), (0, 1), (1, 2)))
SPECS = (
    AdapterSpec(rank=4, alpha=8.0),
    AdapterSpec(rank=3, alpha=5.0, targets=("q_proj", "down_proj"), rslora=True),
)
TOKENS = np.random.default_rng(0).integers(1, 48, (3, 7), dtype=np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("models")
    torch.set_num_threads(threads)


def model(folder: Path, family: str, hidden: int = 32) -> Path:
    path = folder / f"{family}-{hidden}"
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            family,
            vocab_size=48,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def trained(path: Path, spec: AdapterSpec, seed: int) -> Any:
    """PEFT's own model in float32, with an adapter of random bf16 values."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=int(spec.alpha),
        target_modules=list(spec.targets),
        use_rslora=spec.rslora,
    )
    whole = get_peft_model(base, config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(False)
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape).mul(0.2).to(torch.bfloat16))
    return whole


def published(whole: Any) -> dict[str, Bits]:
    state = get_peft_model_state_dict(whole)
    return {name: tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16) for name, tensor in state.items()}


def logits_of(whole: Any) -> np.ndarray:
    with torch.inference_mode():
        return np.asarray(whole(torch.tensor(TOKENS, dtype=torch.int64)).logits[:, -1])


def run(*stages: TorchStage) -> np.ndarray:
    rows, carried = np.arange(3, dtype=np.int32), TOKENS
    for stage in stages:
        carried = stage.forward(0, rows, np.zeros(3, np.int32), carried)
        stage.close(0)
    return carried


class Swarm:
    """A publisher of adapters, and replicas that take everything from its store."""

    def __init__(self, folder: Path, *stages: TorchStage) -> None:
        self.store = Store(folder / "trainer", 2**26)
        self.publisher = Publisher(self.store)
        self.stages = stages
        self.replicas = [Replica(stage.tensors(), Store(folder / f"{i}", 2**26)) for i, stage in enumerate(stages)]

    def publish(self, step: int, tensors: Mapping[str, Bits]) -> Release:
        version = PolicyVersion(epoch=0, step=step)
        release = self.publisher.publish(version, tensors)
        self.publisher.sealed(self.store.put(msgspec.msgpack.encode(release)))
        trio.run(self._bring, release)
        for replica, stage in zip(self.replicas, self.stages, strict=True):
            replica.switch(version, stage)
        return release

    async def _bring(self, release: Release) -> None:
        for replica in self.replicas:
            await replica.stage(release, self._lookup, self._fetch)

    async def _lookup(self, hash: bytes) -> Release:
        return msgspec.msgpack.decode(self.store.get(hash) or b"", type=Release)

    async def _fetch(self, chunk: Chunk) -> bytes:
        return self.store.get(chunk.hash) or b""


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_released_adapter_gives_what_pefts_own_model_computes(
    folder: Path, tmp_path: Path, family: str, spec: AdapterSpec, merged: bool
) -> None:
    path = model(folder, family)
    stages = [load_stage(path, span, device="cpu") for span in (WHOLE, LOW, HIGH)]
    plain = run(stages[0])
    for stage in stages:
        stage.adapt(spec, merged=merged)
    assert np.array_equal(run(stages[0]), plain)
    swarm = Swarm(tmp_path, *stages)
    for step in range(2):
        whole = trained(path, spec, seed=step)
        swarm.publish(step, published(whole))
        expected = logits_of(whole.merge_and_unload() if merged else whole)
        assert np.abs(expected - plain).max() > 0.01
        assert np.allclose(run(stages[0]), expected, rtol=0, atol=1e-5)
        assert np.array_equal(run(*stages[1:]), run(stages[0]))
    assert {name: bits.tolist() for name, bits in stages[0].tensors().items()} == {
        name: bits.tolist() for name, bits in published(trained(path, spec, seed=1)).items()
    }


@pytest.mark.parametrize("merged", [True, False])
def test_an_adapter_of_zeros_gives_the_bits_of_the_base_back(folder: Path, tmp_path: Path, merged: bool) -> None:
    path, spec = model(folder, "qwen3"), SPECS[0]
    stage = load_stage(path, WHOLE, device="cpu")
    base, plain = stage.tensors(), run(stage)
    live = dict(stage._model.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in live.items()}
    stage.adapt(spec, merged=merged)
    adapter = published(trained(path, spec, seed=0))
    swarm = Swarm(tmp_path, stage)
    swarm.publish(0, adapter)
    assert not np.array_equal(run(stage), plain)
    swarm.publish(1, {name: bits * ("lora_A" in name) for name, bits in adapter.items()})
    assert np.array_equal(run(stage), plain)
    assert addresses == {name: parameter.data_ptr() for name, parameter in live.items()}
    for name, bits in base.items():
        assert np.array_equal(live[name].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), bits)


def test_a_release_of_an_adapter_is_a_small_share_of_the_model(folder: Path, tmp_path: Path) -> None:
    path, spec = model(folder, "llama", hidden=512), AdapterSpec(rank=16)
    stage = load_stage(path, WHOLE, device="cpu")
    model_bytes = sum(bits.nbytes for bits in stage.tensors().values())
    stage.adapt(spec, merged=False)
    release = Swarm(tmp_path, stage).publish(0, published(trained(path, spec, seed=0)))
    assert total_bytes(release.snapshot) < 0.06 * model_bytes


def test_only_matrices_whose_factors_change_are_computed_anew(folder: Path) -> None:
    path, spec = model(folder, "llama"), SPECS[0]
    stage = load_stage(path, WHOLE, device="cpu")
    stage.adapt(spec, merged=True)
    before = {name: parameter.clone() for name, parameter in stage._model.named_parameters()}
    module = "model.layers.1.mlp.up_proj"
    factors = stage.tensors()
    stage.apply({name: TensorUpdate(None, np.full_like(factors[name], 0x3F80)) for name in adapter_names(module)})
    changed = {n for n, parameter in stage._model.named_parameters() if not torch.equal(parameter, before[n])}
    assert changed == {f"{module}.weight"}
    difference = stage._model.get_parameter(f"{module}.weight") - before[f"{module}.weight"]
    assert torch.allclose(difference, torch.tensor(spec.rank * spec.scale))


def test_an_adapter_is_merged_into_fused_and_transposed_matrices() -> None:
    live = {"fused": torch.zeros(6, 4), "turned": torch.zeros(4, 2)}
    whole = Place.whole("fused", (6, 4))
    layout = {
        "attn.q_proj.weight": whole.rows(0, 4),
        "attn.k_proj.weight": whole.rows(4, 2),
        "attn.v_proj.weight": Place.whole("turned", (4, 2)).transposed(),
    }
    adapter = MergedAdapter(TorchWeights(live, layout), AdapterSpec(rank=1, alpha=1.0, targets=("k_proj", "v_proj")))
    for module in ("attn.k_proj", "attn.v_proj"):
        a, b = adapter_names(module)
        adapter.apply({a: bf16([[1, 2, 3, 4]]), b: bf16([[1], [10]])})
    expected = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]])
    assert torch.equal(live["fused"], torch.cat((torch.zeros(4, 4), expected)))
    assert torch.equal(live["turned"], expected.T)


def test_a_bf16_matrix_is_the_exact_sum_rounded_once() -> None:
    draws = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(*shape, generator=draws).to(torch.bfloat16) for shape in ((6, 5), (2, 5), (6, 2)))
    live = {"q_proj.weight": base.clone()}
    spec = AdapterSpec(rank=2, alpha=1.0, targets=("q_proj",))
    adapter = MergedAdapter(TorchWeights(live, same_layout({"q_proj.weight": (6, 5)})), spec)
    factors = zip(adapter_names("q_proj"), (a, b), strict=True)
    adapter.apply(
        {name: TensorUpdate(None, factor.view(torch.int16).numpy().view(np.uint16)) for name, factor in factors}
    )
    exact = base.double() + spec.scale * (b.double() @ a.double())
    assert torch.equal(live["q_proj.weight"], exact.to(torch.bfloat16))


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 2.0**-11), (torch.bfloat16, 0.0)])
def test_float32_matrices_keep_what_is_less_than_a_bf16_unit_of_the_base(dtype: torch.dtype, kept: float) -> None:
    live = {"q_proj.weight": torch.ones(3, 2, dtype=dtype)}
    spec = AdapterSpec(rank=1, alpha=2.0**-11, targets=("q_proj",))
    MergedAdapter(TorchWeights(live, same_layout({"q_proj.weight": (3, 2)})), spec).apply(
        dict(zip(adapter_names("q_proj"), (bf16([[1, 1]]), bf16([[1], [1], [1]])), strict=True))
    )
    assert torch.equal(live["q_proj.weight"].float() - 1, torch.full((3, 2), kept))


def test_modules_fused_into_others_take_an_adapter_merged_only() -> None:
    linears = {"o_proj": torch.nn.Linear(4, 4, bias=False), "qkv_proj": torch.nn.Linear(4, 6, bias=False)}
    root = torch.nn.ModuleDict(linears)
    whole = Place.whole("qkv_proj.weight", (6, 4))
    layout = {"q_proj.weight": whole.rows(0, 4), "k.weight": whole.rows(4, 2)}
    base = TorchWeights(dict(root.named_parameters()), same_layout({"o_proj.weight": (4, 4)}) | layout)
    MergedAdapter(base, AdapterSpec(targets=("q_proj",)))
    with pytest.raises(ModelError, match="merge the adapter"):
        SeparateAdapter(root, base, AdapterSpec(targets=("o_proj", "q_proj")))
    assert not linears["o_proj"]._forward_hooks  # all or nothing


def bf16(values: list[list[int]]) -> TensorUpdate:
    return TensorUpdate(None, (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16))


def test_what_an_adapted_stage_can_not_take_is_refused_whole(folder: Path) -> None:
    stage = load_stage(model(folder, "llama"), LOW, device="cpu")
    with pytest.raises(ModelError, match="targets"):
        stage.adapt(AdapterSpec(targets=("c_attn",)), merged=True)
    base = stage.tensors()
    stage.adapt(SPECS[0], merged=True)
    with pytest.raises(ModelError, match="already"):
        stage.adapt(SPECS[0], merged=True)
    before = run(stage)
    good = {name: TensorUpdate(None, np.full_like(bits, 0x3F80)) for name, bits in stage.tensors().items()}
    for name, bits in [*base.items(), (adapter_names("model.layers.0.mlp.up_proj")[0], np.ones((5, 5), np.uint16))]:
        with pytest.raises(WeightsError):
            stage.apply(good | {name: TensorUpdate(None, bits)})
    assert np.array_equal(run(stage), before)
