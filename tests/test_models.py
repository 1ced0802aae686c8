"""Model references, the tokenizers behind them, and the tiny model that ships."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from echo_p2p.errors import ModelError
from echo_p2p.models import decode, encode_prompt, load_tokenizer, resolve_model, tokenizer_hash
from echo_p2p.models.layout import read_header
from echo_p2p.models.warm_start import make_model, make_tokenizer, train
from echo_p2p.rl.rewards import rewards
from echo_p2p.rl.tasks import load_task

_ROOT = Path(__file__).parents[1]


def test_a_board_survives_the_tiny_tokenizer() -> None:
    tokenizer = load_tokenizer("tiny")
    board = load_task("sokoban", 1).prompt(0)
    token_ids = encode_prompt(tokenizer, board)
    assert len(token_ids) == len(board)
    assert decode(tokenizer, [*token_ids, tokenizer.eos_token_id]) == board


def test_all_printable_characters_survive_the_tiny_tokenizer() -> None:
    tokenizer = load_tokenizer("tiny")
    text = "".join(chr(code) for code in range(32, 127)) + "\n\n  ' s n't ."
    assert decode(tokenizer, encode_prompt(tokenizer, text)) == text


def test_a_chat_template_opens_the_answer() -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert decode(tokenizer, encode_prompt(tokenizer, "hi")) == "<user>hi<assistant>"


def test_the_tiny_model_is_small_and_in_bf16_with_four_layers() -> None:
    folder = resolve_model("tiny")
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert (folder / "model.safetensors").stat().st_size < 2_000_000
    assert {name.split(".")[2] for name in weights if ".layers." in name} == {"0", "1", "2", "3"}


def test_the_tiny_model_solves_some_boards_but_not_all() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    tokenizer, task = load_tokenizer("tiny"), load_task("sokoban", 1)
    prompts = torch.tensor([encode_prompt(tokenizer, task.prompt(index)) for index in range(32)])  # (32, 42)
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=24
    )  # (32, 42 + up to 24)
    texts = [decode(tokenizer, row[prompts.shape[1] :].tolist()) for row in made]
    scores = [rewards(task, index, [text])[0] for index, text in enumerate(texts)]
    assert 0.1 < sum(scores) / 32 < 0.9


def test_the_warm_start_is_deterministic_by_seed() -> None:
    def made() -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = make_model(100)
        tokens = torch.arange(24).reshape(4, 6) % 100
        train(model, tokens, tokens, steps=3, rows=2, learning_rate=1e-3, report=lambda line: None)
        return [weight.detach() for weight in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(made(), made(), strict=True))


def test_a_model_in_a_folder_resolves(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="tokenizer"):
        tokenizer_hash(str(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    assert decode(load_tokenizer(str(tmp_path)), encode_prompt(load_tokenizer(str(tmp_path)), "ab\n")) == "ab\n"


def test_the_tokenizer_hash_follows_the_content_of_the_tokenizer(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((resolve_model("tiny") / name).read_bytes())
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_hash(str(tmp_path)) == tokenizer_hash("tiny")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_hash(str(tmp_path)) != tokenizer_hash("tiny")


def test_a_reference_to_nothing_is_one_sentence(tmp_path: Path) -> None:
    for reference in (str(tmp_path), str(tmp_path / "absent"), "./absent", "absent"):
        with pytest.raises(ModelError) as error:
            resolve_model(reference)
        assert "\n" not in str(error.value)


def test_a_hub_model_that_is_not_cached_says_so_offline() -> None:
    program = (
        "from echo_p2p.errors import ModelError\n"
        "from echo_p2p.models import resolve_model\n"
        "try: resolve_model('echo/absent@v1')\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={"HF_HUB_OFFLINE": "1"},
        check=True,
    )
    assert done.stdout.count("\n") == 1
    assert "not in the cache" in done.stdout


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b"[]",
        b"3",
        b'{"a": 3}',
        b'{"a": {"shape": 3}}',
        b'{"a": {"shape": [Infinity]}}',
        b'{"a": {"shape": [NaN]}}',
        b'{"a": {"shape": [[]]}}',
        b"\xff",
    ],
)
def test_a_header_that_lies_is_a_model_error_and_nothing_else(tmp_path: Path, header: bytes) -> None:
    """Such a file may come from a stranger's repository, and what a peer does without it is to ask other peers."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match="can't be read as safetensors"):
        read_header(file)


def test_importing_models_loads_neither_torch_nor_transformers() -> None:
    program = "import sys, echo_p2p.models; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
