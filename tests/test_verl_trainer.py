"""The trainer on verl, on a small random model: right gradient, right weights out, exact resume."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

from echo_p2p.errors import TrainerError, UnknownName
from echo_p2p.rl.trainer import Trainer, TrainingRow
from echo_p2p.rl.verl_cpu import prepare_verl
from echo_p2p.rl.verl_trainer import VerlTrainer
from echo_protocols.run import Algorithm, Sampling

VOCABULARY, GROUP = 40, 4
FIGURES = {
    "loss", "grad_norm", "k3_kl", "ess", "clip_fraction", "logprob_gap", "logprob_gap_max", "entropy", "lr",
    "correction_rejected_share", "trained_rows", "trained_token_share",
}  # fmt: skip


def save_model(folder: Path, *, tied: bool = False) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_rows(seed: int = 0, groups: int = 3, same_reward: tuple[int, ...] = ()) -> tuple[TrainingRow, ...]:
    random = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        prompt = tuple(random.integers(3, VOCABULARY, random.integers(3, 9)).tolist())
        for answer in range(GROUP):
            length = int(random.integers(1, 7))
            rows.append(
                TrainingRow(
                    group=group,
                    prompt=prompt,
                    response=tuple(random.integers(3, VOCABULARY, length).tolist()),
                    behaviour_logprobs=tuple((-3.7 - 0.5 * random.random(length)).tolist()),
                    reward=1.0 if group in same_reward else float(answer % 2),
                )
            )
    return tuple(rows)


def make_trainer(model: Path, **changes: Any) -> VerlTrainer:
    settings: dict[str, Any] = {"algorithm": Algorithm(learning_rate=1e-3), "seed": 5} | changes
    return VerlTrainer(model, settings.pop("algorithm"), **settings)


def reference_logprobs(module: Any, row: TrainingRow, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a row's answer, one row at a time and without padding: (response,)."""
    tokens = torch.tensor([row.prompt + row.response])
    logits = module(input_ids=tokens).logits[0, len(row.prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.response)[:, None])[:, 0]


def load_reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)


def equal(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_loss_and_gradient_are_those_of_grpo_written_by_hand(model: Path) -> None:
    rows = make_rows(same_reward=(1,))
    trainer: Trainer = make_trainer(model, algorithm=Algorithm(correction="tis", correction_bounds=(0.5, 1.2)))
    report = trainer.step(rows)

    reference = load_reference(model)
    rewards = torch.tensor([row.reward for row in rows]).view(-1, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    loss, tokens = torch.tensor(0.0), sum(len(row.response) for row in rows)
    for row, advantage in zip(rows, advantages, strict=True):
        logprobs = reference_logprobs(reference, row)
        weight = (logprobs.detach() - torch.tensor(row.behaviour_logprobs)).exp().clamp(max=1.2)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (advantage * weight * ratio).sum() / tokens
    torch.autograd.backward(loss)
    norm = torch.stack([weight.grad.norm() for weight in reference.parameters()]).norm()
    assert report.updated
    assert report.figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert report.figures["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_figures_are_complete_and_rejected_tokens_are_counted(model: Path) -> None:
    rows = make_rows()
    reference = load_reference(model)
    with torch.no_grad():
        ratios = torch.cat([reference_logprobs(reference, r) - torch.tensor(r.behaviour_logprobs) for r in rows]).exp()
    outside = float(((ratios < 0.5) | (ratios > 1.0)).float().mean())
    cases = (
        (Algorithm(correction="none"), 0.0),
        (Algorithm(correction="icepop", correction_bounds=(0.5, 1.0)), outside),
    )
    for algorithm, expected in cases:
        figures = make_trainer(model, algorithm=algorithm).step(rows).figures
        assert figures.keys() == FIGURES
        assert np.isfinite(list(figures.values())).all()
        assert figures["correction_rejected_share"] == pytest.approx(expected)


def test_a_batch_that_the_correction_rejects_as_a_whole_changes_nothing(model: Path) -> None:
    trainer = make_trainer(model, algorithm=Algorithm(correction="icepop", correction_bounds=(1e6, 1e7)))
    before = trainer.weights()
    report = trainer.step(make_rows())
    assert not report.updated
    assert report.figures["correction_rejected_share"] == 1.0
    assert equal(trainer.weights(), before)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_sampled_from_the_policy_show_no_drift(model: Path, temperature: float) -> None:
    reference = load_reference(model)
    with torch.no_grad():
        rows = tuple(
            TrainingRow(
                group=row.group, prompt=row.prompt, response=row.response, reward=row.reward,
                behaviour_logprobs=tuple(reference_logprobs(reference, row, temperature).tolist()),
            )
            for row in make_rows()
        )  # fmt: skip
    figures = make_trainer(model, sampling=Sampling(temperature=temperature)).step(rows).figures
    assert figures["logprob_gap_max"] < 1e-4
    assert figures["k3_kl"] < 1e-8
    assert figures["ess"] == pytest.approx(1.0, abs=1e-6)
    assert figures["clip_fraction"] == 0.0


def test_steps_raise_the_probability_of_rewarded_answers(model: Path) -> None:
    rows = make_rows()
    trainer = make_trainer(model)
    before = load_reference(model)
    for _ in range(4):
        trainer.step(rows)
    after = load_reference(model)
    after.load_state_dict(
        {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in trainer.weights().items()}
    )
    with torch.no_grad():
        for rewarded in (0.0, 1.0):
            chosen = [row for row in rows if row.reward == rewarded]
            gain = sum(float((reference_logprobs(after, r) - reference_logprobs(before, r)).sum()) for r in chosen)
            assert gain > 0 if rewarded else gain < 0


def test_the_learning_rate_is_the_algorithms_from_the_first_step_on(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, algorithm=Algorithm(learning_rate=2e-3))
    masters = []
    for number in range(3):
        trainer.save(tmp_path / str(number))
        masters.append(safetensors.torch.load_file(tmp_path / str(number) / "state.safetensors"))
        trainer.step(make_rows())
    # Adam's first step moves a parameter by the learning rate; on unchanged rows the second one does nearly so.
    for before, after in pairwise(masters):
        moved = (after["model/lm_head.weight"] - before["model/lm_head.weight"]).abs().max()
        assert float(moved) == pytest.approx(2e-3, rel=0.05)


def test_groups_of_equal_rewards_change_nothing_not_even_momentum(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    trainer.step(make_rows())
    trainer.save(tmp_path / "before")
    report = trainer.step(make_rows(seed=1, same_reward=(0, 1, 2)))
    trainer.save(tmp_path / "after")
    assert not report.updated
    for name in ("state.safetensors", "checkpoint.json"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def test_two_trainers_with_one_seed_and_the_same_rows_stay_equal(model: Path) -> None:
    left, right = make_trainer(model), make_trainer(model)
    for seed in range(3):
        torch.rand(seed + 1)  # the process's generator is none of the trainer's business
        left.step(make_rows(seed))
        right.step(make_rows(seed))
    assert equal(left.weights(), right.weights())


def test_the_process_generator_is_left_alone(model: Path) -> None:
    before = torch.get_rng_state()
    make_trainer(model).step(make_rows())
    assert torch.equal(torch.get_rng_state(), before)


def test_resuming_gives_the_next_step_bit_for_bit(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    trainer.step(make_rows(0))
    trainer.save(tmp_path / "checkpoint")
    trainer.step(make_rows(1))
    trainer.save(tmp_path / "next")

    for resumed in (make_trainer(model, seed=99), trainer):
        resumed.load(tmp_path / "checkpoint")
        assert resumed.updates == 1
        resumed.step(make_rows(1))
        resumed.save(tmp_path / "again")
        for name in ("state.safetensors", "checkpoint.json"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "next" / name).read_bytes()


def test_a_checkpoint_from_before_the_first_step_brings_the_optimiser_back_too(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    trainer.save(tmp_path / "start")
    trainer.step(make_rows())
    expected = trainer.weights()
    trainer.step(make_rows())
    trainer.load(tmp_path / "start")
    trainer.step(make_rows())
    assert equal(trainer.weights(), expected)


def test_incomplete_damaged_and_foreign_checkpoints_are_refused(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    trainer.step(make_rows())
    weights = trainer.weights()
    trainer.save(tmp_path / "whole")
    state = (tmp_path / "whole" / "state.safetensors").read_bytes()
    cases = {"no-manifest": state, "truncated": state[:-8], "flipped": state[:-1] + bytes([state[-1] ^ 1])}
    for name, damaged in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").write_bytes(damaged)
        if name != "no-manifest":
            manifest = (tmp_path / "whole" / "checkpoint.json").read_bytes()
            (tmp_path / name / "checkpoint.json").write_bytes(manifest)
    make_trainer(save_model(tmp_path / "tied-model", tied=True)).save(tmp_path / "foreign")
    for name in (*cases, "foreign", "missing"):
        with pytest.raises(TrainerError, match=name):
            trainer.load(tmp_path / name)
    assert equal(trainer.weights(), weights)


def test_saving_over_a_checkpoint_leaves_one_whole_checkpoint(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    for seed in range(2):
        trainer.step(make_rows(seed))
        trainer.save(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    (tmp_path / "latest").rename(tmp_path / "latest.older")  # as if stopped between the two renames
    make_trainer(model).load(tmp_path / "latest")


def test_weights_are_bf16_rounded_to_nearest_even_from_fp32(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    original = safetensors.torch.load_file(model / "model.safetensors")
    start = trainer.weights()
    assert equal(start, {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in original.items()})
    trainer.step(make_rows())
    trainer.save(tmp_path / "checkpoint")
    masters = safetensors.torch.load_file(tmp_path / "checkpoint" / "state.safetensors")
    for name, bits in trainer.weights().items():
        pattern = masters[f"model/{name}"].numpy().view(np.uint32).astype(np.uint64)
        nearest_even = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        assert np.array_equal(bits, nearest_even.astype(np.uint16))
    assert not equal(start, trainer.weights())


def test_weights_are_copies_and_leave_out_the_alias_of_tied_embeddings(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path / "tied", tied=True))
    before = trainer.weights()
    trainer.step(make_rows())
    trainer.save(tmp_path / "checkpoint")
    after = trainer.weights()
    assert "model.embed_tokens.weight" in after
    assert "lm_head.weight" not in after
    assert not equal(before, after)
    trainer.step(make_rows(1))
    trainer.load(tmp_path / "checkpoint")
    assert equal(trainer.weights(), after)


def test_micro_batches_give_the_same_update(model: Path) -> None:
    whole, halves = (make_trainer(model, micro_batch_rows=rows).step(make_rows()).figures for rows in (64, 5))
    assert halves == pytest.approx(whole, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ()},
        {"response": ()},
        {"behaviour_logprobs": (-1.0,)},
        {"response": (3, VOCABULARY), "behaviour_logprobs": (-1.0, -1.0)},
        {"response": (3, -1), "behaviour_logprobs": (-1.0, -1.0)},
        {"response": (3, 4), "behaviour_logprobs": (-1.0, float("nan"))},
        {"reward": float("inf")},
    ],
)
def test_rows_that_no_update_can_be_made_of_are_refused(model: Path, changes: dict[str, Any]) -> None:
    row: dict[str, Any] = {
        "group": 0, "prompt": (3, 4), "response": (5, 6), "behaviour_logprobs": (-1.0, -2.0), "reward": 1.0
    }  # fmt: skip
    with pytest.raises(TrainerError, match="group 0"):
        make_trainer(model).step((*make_rows(), TrainingRow(**(row | changes))))


def test_unknown_algorithm_other_device_and_closed_trainer_are_said(model: Path) -> None:
    with pytest.raises(UnknownName, match=r"algorithm\.name"):
        make_trainer(model, algorithm=Algorithm(name="magic"))
    trainer = make_trainer(model)
    with pytest.raises(TrainerError, match="one device"):
        prepare_verl("cuda")
    trainer.close()
    with pytest.raises(TrainerError, match="closed"):
        trainer.weights()


def test_the_process_is_left_quiet(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    make_trainer(model).step(make_rows())
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""
    assert not ray.is_initialized()
    assert psutil.Process().children() == []
    assert not [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
    open_ports = [link.laddr.ip for link in psutil.Process().net_connections(kind="inet") if link.laddr]
    assert set(open_ports) <= {"127.0.0.1", "::1"}
