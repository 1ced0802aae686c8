"""A volunteer needs no model: its trainer's folder is on no other machine, and there is no hub."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trio
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_node.demo import join_address
from echo_node.fleet import Fleet, NodeProcess
from echo_node.learning import RunLog, StepRecord
from echo_p2p.models import load_tokenizer, model_folder

pytestmark = pytest.mark.slow

PATIENCE_S = 200.0
LAYERS = 4


def random_model(folder: Path) -> Path:
    torch.manual_seed(5)
    tokenizer = load_tokenizer("tiny")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("tiny") / name, folder / name)
    return folder


def steps_of(home: Path) -> list[StepRecord]:
    return [record for run in (home / "runs").glob("*") for record in RunLog(run).read()]


def test_a_chain_serves_a_model_that_only_its_trainer_has(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fleet(tmp_path) as fleet:
            flags = ["--swarm", f"test-{secrets.token_hex(4)}", "--host", "127.0.0.1"]
            address = await join_address(fleet.launch("bootstrap", ["bootstrap", *flags]))
            path = random_model(tmp_path / "only-here")
            settings = ["--set", f"run.model={path}", "--set", "run.sampling.max_new_tokens=8"]
            trainer = fleet.launch("trainer", ["join", "--role", "trainer", "--peer", address, *flags, *settings])
            await eventually(lambda: "policy version 0.0 is out" in trainer.output())
            path.rename(tmp_path / "hidden")  # the volunteers' machines have no such folder
            join = ["join", "--role", "inference", "--peer", address, "--max-layers", "2", *flags]
            peers = [fleet.launch(name, join) for name in ("one", "two")]
            await eventually(lambda: len(steps_of(trainer.home)) >= 3)
            for peer in peers:
                check_from_peers(peer)
            again = peers[1]
            again.process.kill()
            again.process.wait()
            before = len(steps_of(trainer.home))
            fleet.launch("two", join)
            await eventually(lambda: len(steps_of(trainer.home)) >= before + 3)
            assert again.output().count("files of") == 1  # the second time all were here

    trio.run(main)


def check_from_peers(peer: NodeProcess) -> None:
    assert "from peers" in peer.output()
    (folder,) = peer.home.glob("runs/*/model")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "echo_tensors.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


async def eventually(condition: Callable[[], bool]) -> None:
    """Other processes have no event to wait for: look now and then, and give up loudly."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.2)
