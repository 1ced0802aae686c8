"""Which engine computes a span: a pure choice, one sentence when it can't be had, and torch to fall back on."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from echo_node.cli import main
from echo_p2p.chain.engines import (
    Device,
    Engine,
    Machine,
    engines_to_try,
    free_where_it_computes,
    load_engine,
    takes_vllm,
    vllm_device,
)
from echo_p2p.chain.torch_stage import free_on_gpu
from echo_p2p.errors import ConfigError, ModelError
from echo_protocols.values import Span

MAC, BARE_MAC = Machine(apple_silicon=True, mlx_installed=True), Machine(apple_silicon=True, mlx_installed=False)
PC, BARE_PC = Machine(apple_silicon=False, mlx_installed=True), Machine(apple_silicon=False, mlx_installed=False)
GPU = Machine(apple_silicon=False, mlx_installed=False, vllm_installed=True, cuda=True)
PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNTXdxNUAjRhGCe1UBFSd2HYpfhAnG5BKCUZwW8AAvXvh"
SPAN = Span(start=0, end=2, layers=2)


def model(folder: Path, family: str) -> Path:
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("engine", "device", "machine", "names"),
    [
        ("auto", "auto", MAC, ("mlx", "torch")),
        ("auto", "mps", MAC, ("mlx", "torch")),
        ("auto", "cpu", MAC, ("torch",)),
        ("auto", "auto", BARE_MAC, ("torch",)),
        ("auto", "auto", PC, ("torch",)),
        ("auto", "cuda", BARE_PC, ("torch",)),
        ("torch", "auto", MAC, ("torch",)),
        ("mlx", "auto", MAC, ("mlx",)),
        ("mlx", "cpu", PC, ("mlx",)),
    ],
)
def test_the_choice(engine: Engine, device: Device, machine: Machine, names: tuple[str, ...]) -> None:
    assert engines_to_try(engine, device, machine) == names


@pytest.mark.parametrize(
    ("engine", "device", "machine", "taken"),
    [
        ("auto", "auto", GPU, True),
        ("auto", "cuda", GPU, True),
        ("auto", "cpu", GPU, False),
        ("auto", "auto", replace(GPU, cuda=False), False),
        ("auto", "cuda", replace(GPU, vllm_installed=False), False),
        ("torch", "cuda", GPU, False),
        ("vllm", "cpu", replace(GPU, cuda=False), True),
    ],
)
def test_vllm_takes_whole_models_on_a_gpu_or_by_name(
    engine: Engine, device: Device, machine: Machine, taken: bool
) -> None:
    assert takes_vllm(engine, device, machine, SPAN) == taken
    assert not takes_vllm(engine, device, machine, Span(start=0, end=1, layers=2))
    assert engines_to_try(engine, device, machine) == ("torch",)  # for part of a model


def test_vllm_computes_where_the_machine_and_the_user_say() -> None:
    assert vllm_device("auto", GPU) == vllm_device("cuda", BARE_PC) == "cuda"
    assert vllm_device("auto", PC) == vllm_device("cpu", GPU) == "cpu"


def test_a_stage_on_a_gpu_has_the_memory_of_the_gpu() -> None:
    """A peer that counted the machine's would be given more layers than its GPU holds, and end as it loads them."""
    gpu = partial(free_where_it_computes, free_bytes=100, on_gpu=lambda: 30)
    assert gpu("auto", GPU) == gpu("cuda", PC) == 30
    assert gpu("cpu", GPU) == gpu("auto", PC) == gpu("auto", MAC) == 100
    assert free_where_it_computes("auto", GPU, 100, on_gpu=lambda: 300) == 100
    assert free_where_it_computes("auto", GPU, 100, on_gpu=lambda: None) == 100  # torch can't use it
    assert free_on_gpu() is None or torch.cuda.is_available()


def test_auto_always_ends_with_torch() -> None:
    devices: tuple[Device, ...] = ("auto", "cpu", "cuda", "mps")
    for device, machine in product(devices, (MAC, BARE_MAC, PC, BARE_PC)):
        assert engines_to_try("auto", device, machine)[-1] == "torch"


def test_an_engine_that_can_not_be_had_is_said_with_the_cure() -> None:
    for device, machine, cure in [
        ("auto", BARE_MAC, r"pip install 'echo-p2p\[mlx\]'"),
        ("auto", BARE_PC, r"pip install 'mlx-lm\[cpu\]'"),
        ("cuda", PC, "--engine torch"),
    ]:
        with pytest.raises(ConfigError, match=cure):
            engines_to_try("mlx", device, machine)
    with pytest.raises(ConfigError, match=r"pip install 'echo-p2p\[vllm\]'"):
        engines_to_try("vllm", "auto", PC)
    with pytest.raises(ConfigError, match="--engine mlx or torch"):
        engines_to_try("vllm", "mps", replace(MAC, vllm_installed=True))


def test_asking_loads_no_engine() -> None:
    code = (
        "import sys\n"
        "from echo_p2p.chain.engines import engines_to_try, this_machine\n"
        "engines_to_try('auto', 'auto', this_machine())\n"
        "sys.exit(', '.join({'torch', 'transformers', 'mlx.core', 'mlx_lm'} & set(sys.modules)) or None)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vlm"], "`inference.engine`: Invalid enum value 'vlm'. Choose auto, torch, mlx or vllm."),
        (["--set", "inference.engine=9"], "`inference.engine`"),
        (["--set", "inference.device=gpu"], "Choose auto, cpu, cuda or mps."),
        (["--engine", "mlx", "--set", "inference.device=cuda"], "--engine mlx"),
    ],
)
def test_a_wrong_engine_is_one_sentence_before_anything_starts(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    command = ["--home", str(tmp_path), "join", "--role", "inference", "--peer", PEER, *arguments]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_torch_is_loaded_when_it_is_asked_for(tmp_path: Path) -> None:
    stage = load_engine("torch", model(tmp_path, "llama"), SPAN, device="cpu", machine=MAC)
    assert stage.engine.startswith("torch-")


def test_auto_takes_mlx_on_a_mac_if_it_computes_the_model_and_torch_if_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(
        "mlx_lm", reason="mlx-lm is not installed: pip install 'echo-p2p[mlx]', or mlx-lm[cpu] on Linux"
    )
    with caplog.at_level(logging.INFO, "echo_p2p.chain.engines"):
        assert load_engine("auto", model(tmp_path / "llama", "llama"), SPAN, machine=MAC).engine.startswith("mlx-")
    assert "as transformers does, within" in caplog.text
    gemma = model(tmp_path / "gemma3", "gemma3_text")
    assert load_engine("auto", gemma, SPAN, machine=MAC).engine.startswith("torch-")
    assert "not proven for 'gemma3_text'" in caplog.text
    assert "taking torch instead" in caplog.text
    with pytest.raises(ModelError, match="choose --engine torch"):
        load_engine("mlx", gemma, SPAN, device="cpu", machine=PC)
