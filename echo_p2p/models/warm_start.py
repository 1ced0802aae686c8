"""Makes the built-in tiny model: a small Qwen3 over characters, taught by reasoning-gym's own Sokoban solutions.

`python -m echo_p2p.models.warm_start --out DIR` writes a folder in Hugging Face form, the same for the same seed.
Some of the taught moves are random and many of the taught answers end too early, so the model has seen the right way
but strays from it and gives up: a policy that reinforcement learning can visibly sharpen (one whose training stopped
early, before it has seen the way, climbs slowly).
Knows nothing of runs and peers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from echo_p2p.rl.tasks import load_sokoban

# Runs take small seeds; the boards taught here come from this one, so no run's prompts are its training data.
_BOARDS_SEED = 7_919_000_000
_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_PAD, _BOS, _EOS, _UNK = range(4)
_IGNORED = -100

Report = Callable[[str], None]


def make_tokenizer() -> Any:
    """One token a character: printable ASCII and the newline. Adds no special token by itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    characters = "\n" + "".join(chr(code) for code in range(32, 127))
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL_TOKENS[_UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL_TOKENS[_PAD],
        bos_token=_SPECIAL_TOKENS[_BOS],
        eos_token=_SPECIAL_TOKENS[_EOS],
        unk_token=_SPECIAL_TOKENS[_UNK],
        model_max_length=512,
    )


def make_model(vocabulary_size: int) -> Any:
    """A randomly initialised Qwen3 of four layers and 0.5 million parameters, fp32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=96,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def make_rows(tokenizer: Any, boards: int, report: Report) -> tuple[Any, Any]:
    """Token ids and labels, (boards, longest) both: the prompt as the task gives it, the solution, the end."""
    import torch

    task = load_sokoban(_BOARDS_SEED, size=boards)
    rows: list[tuple[list[int], list[int]]] = []
    for index in range(boards):
        prompt = tokenizer(task.prompt(index))["input_ids"]
        answer = [*tokenizer(task.item(index)["answer"])["input_ids"], _EOS]
        rows.append((prompt, answer))
        if (index + 1) % 2000 == 0:
            report(f"boards {index + 1}/{boards}")
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((boards, longest), _PAD)
    labels = torch.full((boards, longest), _IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return tokens, labels


def train(model: Any, tokens: Any, labels: Any, *, steps: int, rows: int, learning_rate: float, report: Report) -> None:
    """Adam with a linear warm-up and a linear decay, over the rows again and again."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / (steps + 1)))
    for step in range(steps):
        start = step * rows % (len(tokens) - rows + 1)
        logits = model(input_ids=tokens[start : start + rows, :-1]).logits  # (rows, longest - 1, vocab)
        targets = labels[start : start + rows, 1:]  # (rows, longest - 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            report(f"step {step + 1}/{steps} loss {loss.item():.3f}")


def stray(labels: Any, moves: Any, share: float) -> Any:
    """The labels with that share of their moves drawn at random; the end of an answer stays where it is."""
    import torch

    strayed = (labels > _EOS) & (torch.rand(labels.shape) < share)
    return torch.where(strayed, moves[torch.randint(len(moves), labels.shape)], labels)


def cut_short(labels: Any, share: float) -> Any:
    """The labels with that share of their answers ended at a random place."""
    import torch

    answer = labels != _IGNORED  # (boards, longest)
    cut = torch.rand(len(labels)) < share  # (boards,)
    end = answer.float().argmax(1) + (torch.rand(len(labels)) * answer.sum(1)).long()  # (boards,)
    place = torch.arange(labels.shape[1]).expand_as(labels)
    after = (place > end[:, None]) & cut[:, None]
    there = (place == end[:, None]) & cut[:, None]
    return labels.masked_fill(after, _IGNORED).masked_fill(there, _EOS)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the initial weights and of the random moves, and of the cuts."
)
@click.option("--boards", default=20_000, show_default=True, help="Solved boards to learn from.")
@click.option("--steps", default=900, show_default=True, help="Optimizer steps, of 64 boards each.")
@click.option("--stray-share", default=0.10, show_default=True, help="Share of the taught moves that are random.")
@click.option("--cut-share", default=0.55, show_default=True, help="Share of the taught answers that end too early.")
def main(out: Path, seed: int, boards: int, steps: int, stray_share: float, cut_share: float) -> None:
    """Make the built-in tiny model."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    tokens, labels = make_rows(tokenizer, boards, click.echo)
    labels = stray(labels, torch.tensor(tokenizer("LDUR")["input_ids"]), stray_share)
    labels = cut_short(labels, cut_share)
    train(model, tokens, labels, steps=steps, rows=64, learning_rate=2e-3, report=click.echo)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    click.echo(f"wrote {out}: {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
