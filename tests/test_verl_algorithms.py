"""Each algorithm's step is verl's own functions put together by hand: advantages, loss, gradient of every parameter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from echo_p2p.errors import TrainerError
from echo_p2p.rl.trainer import TrainingRow
from echo_p2p.rl.verl_trainer import VerlTrainer
from echo_p2p.rl.verl_worker import verl_module
from echo_protocols.run import Algorithm, Critic, Divergence, Overlong, Sampling

VOCABULARY, GROUP, LONGEST = 40, 4, 6
NEAR = 1e-6
"""In fp32, with rows padded in the trainer and not here; 4e-7 was the most seen."""


def save_model(folder: Path, seed: int = 7) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_rows(seed: int, same_reward: tuple[int, ...] = (1,)) -> tuple[TrainingRow, ...]:
    """Three groups; those in `same_reward` have no advantage. Answers of the longest length are cut off."""
    random = np.random.default_rng(seed)
    rows = []
    for group in range(3):
        prompt = tuple(random.integers(3, VOCABULARY, random.integers(3, 9)).tolist())
        for answer in range(GROUP):
            length = int(random.integers(1, LONGEST + 1))
            rows.append(
                TrainingRow(
                    group=group,
                    prompt=prompt,
                    response=tuple(random.integers(3, VOCABULARY, length).tolist()),
                    behaviour_logprobs=tuple((-3.7 - 0.5 * random.random(length)).tolist()),
                    reward=1.0 if group in same_reward else float(answer % 2),
                    truncated=length == LONGEST,
                )
            )
    return tuple(rows)


def make_trainer(model: Path, algorithm: Algorithm, **changes: Any) -> VerlTrainer:
    return VerlTrainer(model, algorithm, seed=5, sampling=Sampling(max_new_tokens=LONGEST), **changes)


def saved(trainer: VerlTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save(folder)
    return safetensors.torch.load_file(folder / "state.safetensors")


def loaded(model: Path, state: dict[str, torch.Tensor], prefix: str = "model/", kind: str = "CausalLM") -> Any:
    """A transformers model in fp32 with the weights of a checkpoint; with those of the model itself without any."""
    import transformers

    more: dict[str, Any] = {"num_labels": 1} if kind == "TokenClassification" else {}
    module = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(str(model), dtype=torch.float32, **more)
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if own:
        module.load_state_dict(own)
    return module.eval()


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    """(rows, response), zero after the end of a row."""
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def logprobs_of(module: Any, rows: tuple[TrainingRow, ...]) -> torch.Tensor:
    """One row at a time and without padding: (rows, response)."""
    parts = []
    for row in rows:
        logits = module(input_ids=torch.tensor([row.prompt + row.response])).logits[0, len(row.prompt) - 1 : -1]
        parts.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.response)[:, None])[:, 0])
    return padded(parts)


def values_of(module: Any, rows: tuple[TrainingRow, ...]) -> torch.Tensor:
    return padded(
        [module(input_ids=torch.tensor([r.prompt + r.response])).logits[0, len(r.prompt) - 1 : -1, 0] for r in rows]
    )


@dataclass
class Fields:
    """What verl's functions take, all (rows, response)."""

    rewards: torch.Tensor
    mask: torch.Tensor
    index: np.ndarray
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor | None = None


def fields_of(rows: tuple[TrainingRow, ...], old: torch.Tensor, reference: torch.Tensor) -> Fields:
    rewards = torch.zeros_like(old)
    for number, row in enumerate(rows):
        rewards[number, len(row.response) - 1] = row.reward
    return Fields(
        rewards=rewards,
        mask=padded([torch.ones(len(row.response)) for row in rows]),
        index=np.array([row.group for row in rows], dtype=object),
        old=old,
        behaviour=padded([torch.tensor(row.behaviour_logprobs) for row in rows]),
        reference=reference,
    )


Advantages = Callable[[Any, Fields], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """An algorithm, and what it is by its paper: which of verl's functions, with which numbers."""

    algorithm: Algorithm
    advantages: Advantages
    loss: str = "vanilla"
    aggregation: str = "token-mean"
    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0
    kl_loss: tuple[float, str] | None = None
    overlong: bool = False


def grpo(core: Any, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    return core.compute_grpo_outcome_advantage(fields.rewards, fields.mask, fields.index)  # type: ignore[no-any-return]


def reinforce_plus_plus(core: Any, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = core.compute_rewards(fields.rewards, fields.old, fields.reference, 0.001) * fields.mask
    config = verl_module("trainer.config").AlgoConfig(gamma=1.0)
    return core.compute_reinforce_plus_plus_outcome_advantage(rewards, fields.mask, config=config)  # type: ignore[no-any-return]


def gae(rewards: Callable[[Any, Fields], torch.Tensor]) -> Advantages:
    return lambda core, fields: core.compute_gae_advantage_return(
        rewards(core, fields), fields.values, fields.mask, 1.0, 0.95
    )


CASES = {
    "grpo": Case(Algorithm(name="grpo"), grpo),
    "grpo with kl": Case(Algorithm(name="grpo", kl=Divergence(place="loss")), grpo, kl_loss=(0.04, "k3")),
    "grpo, other clip": Case(Algorithm(name="grpo", clip_ratio=0.1, clip_ratio_high=0.3), grpo, low=0.1, high=0.3),
    "dr-grpo": Case(
        Algorithm(name="dr-grpo"),
        lambda core, f: core.compute_grpo_outcome_advantage(f.rewards, f.mask, f.index, norm_adv_by_std_in_grpo=False),
        aggregation="seq-mean-token-sum-norm",
    ),
    "dapo": Case(Algorithm(name="dapo"), grpo, high=0.28, dual=10.0, overlong=True),
    "gspo": Case(
        Algorithm(name="gspo"), grpo, loss="gspo", aggregation="seq-mean-token-mean", low=3e-4, high=4e-4
    ),
    "rloo": Case(
        Algorithm(name="rloo"), lambda core, f: core.compute_rloo_outcome_advantage(f.rewards, f.mask, f.index)
    ),
    "reinforce++": Case(Algorithm(name="reinforce++"), reinforce_plus_plus),
    "reinforce++-baseline": Case(
        Algorithm(name="reinforce++-baseline"),
        lambda core, f: core.compute_reinforce_plus_plus_baseline_outcome_advantage(f.rewards, f.mask, f.index),
        kl_loss=(0.001, "k2"),
    ),
    "ppo": Case(Algorithm(name="ppo"), gae(lambda core, f: f.rewards.clone())),
    "ppo with kl": Case(
        Algorithm(name="ppo", kl=Divergence(place="reward", coefficient=0.05)),
        gae(lambda core, f: core.compute_rewards(f.rewards, f.old, f.reference, 0.05) * f.mask),
    ),
}  # fmt: skip


def policy_loss_by_hand(
    case: Case, policy: Any, rows: tuple[TrainingRow, ...], fields: Fields, places: slice = slice(None)
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and verl's metrics of `rows`, which stand at `places` of the fields, whose advantages are of all rows.

    With the default correction: truncated importance weights of tokens, up to 5.
    """
    core = verl_module("trainer.ppo.core_algos")
    advantages, _ = case.advantages(core, fields)
    weights, _ = verl_module("trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights(
        log_ratio=fields.old - fields.behaviour, response_mask=fields.mask, rollout_is_threshold=5.0
    )
    config = verl_module("workers.config").FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=case.low, clip_ratio_high=case.high, clip_ratio_c=case.dual,
    )  # fmt: skip
    scale = {"loss_scale_factor": LONGEST} if case.aggregation == "seq-mean-token-sum-norm" else {}
    config.global_batch_info.update(scale)
    old, mask, found = fields.old[places], fields.mask[places].bool(), logprobs_of(policy, rows)
    logprobs = torch.nn.functional.pad(found, (0, old.shape[1] - found.shape[1]))
    loss, said = core.get_policy_loss_fn(case.loss)(
        old_log_prob=old, log_prob=logprobs, advantages=advantages[places], response_mask=mask,
        loss_agg_mode=case.aggregation, config=config, rollout_is_weights=weights[places],
    )  # fmt: skip
    if case.kl_loss is not None:
        coefficient, estimator = case.kl_loss
        divergence = core.kl_penalty(logprobs, fields.reference[places], estimator)
        loss = loss + coefficient * core.agg_loss(divergence, mask, case.aggregation)
    return loss, said


def gradients(module: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.autograd.backward(loss)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def gradient_of_step(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The gradient that Adam was given, from its running mean m: m' = 0.9 m + 0.1 g."""
    start = f"{prefix}optimizer/exp_avg/"
    return {
        name.removeprefix(start): (mean.double() - 0.9 * before.get(name, torch.zeros_like(mean)).double()) / 0.1
        for name, mean in after.items()
        if name.startswith(start)
    }


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all parameters."""
    assert found.keys() == wanted.keys()
    difference = sum(float((found[name] - wanted[name].double()).square().sum()) for name in wanted)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in wanted.values())) ** 0.5


def shaped(rows: tuple[TrainingRow, ...]) -> tuple[TrainingRow, ...]:
    """Equation 13 of DAPO for a longest length of 6 and a buffer of a fifth, which is one token."""
    return tuple(replace(row, reward=row.reward - float(len(row.response) == LONGEST)) for row in rows)


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_verls_own_functions_put_together(model: Path, tmp_path: Path, name: str) -> None:
    case, rows = CASES[name], make_rows(0)
    # No clipping of the gradient's norm, and a rate at which one step moves the policy off the reference.
    settings = {"grad_clip": 1e12, "learning_rate": 1e-3}
    algorithm = msgspec.structs.replace(case.algorithm, **settings)
    trainer = make_trainer(model, algorithm, micro_batch_rows=4)
    assert trainer.step(make_rows(9)).updated
    before = saved(trainer, tmp_path / "before")
    report = trainer.step(rows)
    after = saved(trainer, tmp_path / "after")

    policy = loaded(model, before)
    with torch.no_grad():
        fields = fields_of(
            shaped(rows) if case.overlong else rows, logprobs_of(policy, rows), logprobs_of(loaded(model, {}), rows)
        )
    critic = None
    if algorithm.name == "ppo":
        critic = loaded(model, before, "critic/model/", "TokenClassification")
        with torch.no_grad():
            fields.values = values_of(critic, rows)
    loss, _ = policy_loss_by_hand(case, policy, rows, fields)
    assert report.updated
    assert report.figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-7)
    assert distance(gradient_of_step(before, after), gradients(policy, loss)) < NEAR
    if critic is not None:
        core = verl_module("trainer.ppo.core_algos")
        _, returns = case.advantages(core, fields)
        value_loss, _ = core.compute_value_loss(
            values_of(critic, rows), returns, fields.values, fields.mask, cliprange_value=0.5
        )
        assert report.figures["critic_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-5)
        assert distance(gradient_of_step(before, after, "critic/"), gradients(critic, value_loss)) < NEAR


@pytest.mark.parametrize("name", ["grpo, other clip", "dapo", "gspo"])
def test_from_the_second_mini_batch_on_the_clip_acts_as_in_verl(model: Path, tmp_path: Path, name: str) -> None:
    case, rows = CASES[name], make_rows(0, same_reward=())
    settings = {"grad_clip": 1e12, "learning_rate": 5e-3, "mini_batches": 2}
    trainer = make_trainer(model, msgspec.structs.replace(case.algorithm, **settings))
    before = saved(trainer, tmp_path / "before")
    report = trainer.step(rows)
    after = saved(trainer, tmp_path / "after")
    assert trainer.updates == 2

    policy, losses, clipped = loaded(model, before), list[float](), 0.0
    optimiser = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.0)
    with torch.no_grad():
        old = logprobs_of(policy, rows)
        fields = fields_of(shaped(rows) if case.overlong else rows, old, old)
    for places in (slice(0, 6), slice(6, 12)):
        optimiser.zero_grad()
        loss, said = policy_loss_by_hand(case, policy, rows[places], fields, places)
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(float(loss.detach()))
        clipped = said["actor/pg_clipfrac"]
    assert clipped > 0.0
    assert report.figures["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    moved = {name: after[f"model/{name}"] - before[f"model/{name}"] for name, _ in policy.named_parameters()}
    wanted = {name: (weight - before[f"model/{name}"]).detach() for name, weight in policy.named_parameters()}
    assert distance(moved, wanted) < 1e-3  # Adam's first steps divide small gradients by themselves


def test_rejection_is_verls_by_the_mean_k3_of_an_answer(model: Path, tmp_path: Path) -> None:
    rows = make_rows(0, same_reward=())
    with torch.no_grad():
        old = logprobs_of(loaded(model, {}), rows)
        fields = fields_of(rows, old, old)
    log_ratio = fields.old - fields.behaviour
    k3 = ((log_ratio.exp() - 1 - log_ratio) * fields.mask).sum(1) / fields.mask.sum(1)
    bound = float(k3.sort().values[5:7].mean())  # between the two in the middle
    keep, _ = verl_module("trainer.ppo.rollout_corr_helper").compute_rollout_rejection_mask(
        log_ratio=log_ratio, response_mask=fields.mask, rollout_rs="seq_mean_k3", rollout_rs_threshold=bound
    )
    kept = keep.any(1)
    assert torch.equal(kept, k3 <= bound)
    assert int(kept.sum()) == 6

    for name in ("grpo", "ppo", "gspo"):
        algorithm = msgspec.structs.replace(CASES[name].algorithm, rejection_k3=bound, grad_clip=1e12)
        trainer = make_trainer(model, algorithm)
        before = saved(trainer, tmp_path / f"{name}-before")
        report = trainer.step(rows)
        after = saved(trainer, tmp_path / f"{name}-after")
        assert report.figures["rejected_answers_share"] == pytest.approx(0.5)
        policy = loaded(model, {})
        if name == "ppo":
            with torch.no_grad():
                fields.values = values_of(loaded(model, before, "critic/model/", "TokenClassification"), rows)
        loss, _ = policy_loss_by_hand(CASES[name], policy, rows, replace(fields, mask=keep))
        if name == "gspo":  # a mean over answers counts the rejected ones too
            loss = loss * 0.5
        assert distance(gradient_of_step(before, after), gradients(policy, loss)) < NEAR, name


def test_a_batch_that_rejection_leaves_nothing_of_changes_nothing(model: Path) -> None:
    for name in ("grpo", "ppo", "reinforce++"):
        trainer = make_trainer(model, Algorithm(name=name, rejection_k3=1e-9))
        before = trainer.weights()
        report = trainer.step(make_rows(0))
        assert not report.updated
        assert report.figures["rejected_answers_share"] == 1.0
        assert all(np.array_equal(bits, before[name]) for name, bits in trainer.weights().items())


def test_answers_that_were_cut_off_can_be_left_out_of_the_loss_but_not_of_the_baseline(
    model: Path, tmp_path: Path
) -> None:
    rows = make_rows(0, same_reward=())
    trainer = make_trainer(model, Algorithm(name="grpo", overlong=Overlong(filter=True), grad_clip=1e12))
    before = saved(trainer, tmp_path / "before")
    assert trainer.step(rows).updated
    after = saved(trainer, tmp_path / "after")
    policy = loaded(model, {})
    with torch.no_grad():
        old = logprobs_of(policy, rows)
        fields = fields_of(rows, old, old)
    fields.mask = fields.mask * torch.tensor([[float(not row.truncated)] for row in rows])
    loss, _ = policy_loss_by_hand(CASES["grpo"], policy, rows, fields)
    assert any(row.truncated for row in rows)
    assert distance(gradient_of_step(before, after), gradients(policy, loss)) < NEAR


@pytest.mark.parametrize("name", ["ppo", "grpo", "reinforce++"])
def test_resuming_gives_the_next_step_bit_for_bit(model: Path, tmp_path: Path, name: str) -> None:
    critic = Critic(warmup_steps=2, learning_rate=1e-3)
    algorithm = Algorithm(name=name, learning_rate=1e-3, kl=Divergence(place="loss", coefficient=0.1), critic=critic)
    trainer = make_trainer(model, algorithm)
    for step in range(4):  # with a critic, the checkpoint of step 1 has its optimiser's state and none of the policy's
        trainer.save(tmp_path / f"{step}")
        trainer.step(make_rows(step))
        trainer.save(tmp_path / f"{step}-next")
    for step in (3, 1, 0):
        for resumed in (make_trainer(model, algorithm), trainer):
            resumed.load(tmp_path / f"{step}")
            resumed.step(make_rows(step))
            resumed.save(tmp_path / "again")
            for file in ("state.safetensors", "checkpoint.json"):
                assert (tmp_path / "again" / file).read_bytes() == (tmp_path / f"{step}-next" / file).read_bytes()


def test_the_policy_waits_for_the_critic_and_the_critic_for_nobody(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, Algorithm(name="ppo", learning_rate=1e-3, critic=Critic(warmup_steps=2)))
    weights, critics = trainer.weights(), [saved(trainer, tmp_path / "0")["critic/model/score.weight"]]
    for step in range(3):
        report = trainer.step(make_rows(0))
        critics.append(saved(trainer, tmp_path / f"{step + 1}")["critic/model/score.weight"])
        assert report.updated == (step == 2)
        assert ("loss" in report.figures) == report.updated
        assert np.isfinite(report.figures["critic_loss"])
        assert not torch.equal(critics[-1], critics[-2])
        assert trainer.updates == int(report.updated)
        unchanged = all(np.array_equal(bits, weights[name]) for name, bits in trainer.weights().items())
        assert unchanged != report.updated


def test_the_critic_learns_the_returns(model: Path) -> None:
    trainer = make_trainer(model, Algorithm(name="ppo", critic=Critic(warmup_steps=100, learning_rate=1e-3)))
    losses = [trainer.step(make_rows(0)).figures["critic_loss"] for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_policy_held_to_its_reference_stays_nearer_to_it(model: Path) -> None:
    far = []
    for coefficient in (0.0, 3.0):
        kl = Divergence(place="loss", coefficient=coefficient)
        trainer = make_trainer(model, Algorithm(name="grpo", learning_rate=1e-3, kl=kl))
        far.append([trainer.step(make_rows(0)).figures["kl_from_first"] for _ in range(12)])
    assert far[0][0] == far[1][0] == 0.0
    assert far[1][-1] < 0.5 * far[0][-1]


def test_a_checkpoint_of_another_algorithm_or_reference_is_refused(model: Path, tmp_path: Path) -> None:
    with_kl = Algorithm(kl=Divergence(place="loss"))
    other = save_model(tmp_path / "other", seed=8)
    makers = {
        "critic": lambda: make_trainer(model, Algorithm(name="ppo")),
        "plain": lambda: make_trainer(model, Algorithm()),
        "reference": lambda: make_trainer(model, with_kl),
        "another": lambda: make_trainer(other, with_kl),
    }
    for name, make in makers.items():
        make().save(tmp_path / name)
    for name, make in makers.items():
        trainer = make()
        trainer.load(tmp_path / name)
        for foreign in makers.keys() - {name}:
            with pytest.raises(TrainerError, match=foreign):
                trainer.load(tmp_path / foreign)


@pytest.mark.parametrize("name", ["ppo", "gspo", "dr-grpo", "reinforce++-baseline"])
def test_micro_batches_give_the_same_update(model: Path, name: str) -> None:
    steps = [make_trainer(model, Algorithm(name=name), micro_batch_rows=rows).step(make_rows(0)) for rows in (64, 5)]
    assert steps[1].figures == pytest.approx(steps[0].figures, rel=1e-4, abs=1e-6)


def test_groups_without_an_advantage_may_be_left_out_of_the_passes_and_the_update_is_the_same(
    model: Path, tmp_path: Path
) -> None:
    rows = make_rows(0)
    for name in ("grpo", "dr-grpo", "gspo", "rloo"):
        left_out = make_trainer(model, Algorithm(name=name, grad_clip=1e12))
        assert left_out.step(rows).figures["trained_rows"] < len(rows)
        # rejection needs every answer; at this bound it rejects none
        whole = make_trainer(model, Algorithm(name=name, grad_clip=1e12, rejection_k3=1e6))
        assert whole.step(rows).figures["trained_rows"] == len(rows)
        found, wanted = (
            gradient_of_step({}, saved(trainer, tmp_path / f"{name}{number}"))
            for number, trainer in enumerate((left_out, whole))
        )
        assert distance(found, wanted) < NEAR, name


def test_a_process_with_a_critic_and_a_reference_is_left_quiet(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_trainer(model, Algorithm(name="ppo", kl=Divergence(place="reward"))).step(make_rows(0))
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""
