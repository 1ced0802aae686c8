"""Rows of training as padded arrays, and the checks that an update depends on. Pure numpy; knows no engine."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import TrainerError
from echo_p2p.rl.trainer import TrainingRow


def check_rows(rows: tuple[TrainingRow, ...], vocabulary: int) -> None:
    """Raises TrainerError, naming the group, for a row that no update can be made of."""
    if not rows:
        raise TrainerError("A step needs rows: wait for a batch.")
    for row in rows:
        if not row.prompt or not 0 < len(row.response) == len(row.behaviour_logprobs):
            raise TrainerError(f"A row of group {row.group} lacks a prompt, an answer or log-probabilities: drop it.")
        if not 0 <= min(row.prompt + row.response) <= max(row.prompt + row.response) < vocabulary:
            raise TrainerError(f"A row of group {row.group} has a token outside 0…{vocabulary - 1}: drop it.")
        if not np.isfinite([row.reward, *row.behaviour_logprobs]).all():
            raise TrainerError(f"A row of group {row.group} has a number that is not finite: drop it.")


def rows_of_varying_groups(rows: tuple[TrainingRow, ...]) -> tuple[TrainingRow, ...]:
    """The rows of groups whose rewards differ: only they have an advantage."""
    rewards: dict[int, set[float]] = {}
    for row in rows:
        rewards.setdefault(row.group, set()).add(row.reward)
    return tuple(row for row in rows if len(rewards[row.group]) > 1)


def pad_rows(rows: tuple[TrainingRow, ...]) -> dict[str, NDArray[Any]]:
    """verl's canonical layout, by its names: prompts padded on the left to one length, answers on the right.

    Whole sequences are (rows, prompt + response), the rest (rows, prompt) or (rows, response).
    The reward of a row stands at its last token.
    """
    longest_prompt = max(len(row.prompt) for row in rows)
    longest_response = max(len(row.response) for row in rows)
    shape = (len(rows), longest_prompt + longest_response)
    tokens, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    behaviour, rewards = np.zeros((2, len(rows), longest_response), np.float32)
    for number, row in enumerate(rows):
        start, end = longest_prompt - len(row.prompt), longest_prompt + len(row.response)
        tokens[number, start:end] = row.prompt + row.response
        attention[number, start:end] = 1
        behaviour[number, : len(row.response)] = row.behaviour_logprobs
        rewards[number, len(row.response) - 1] = row.reward
    return {
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "prompts": np.ascontiguousarray(tokens[:, :longest_prompt]),
        "responses": np.ascontiguousarray(tokens[:, longest_prompt:]),
        "response_mask": np.ascontiguousarray(attention[:, longest_prompt:]),
        "rollout_log_probs": behaviour,
        "token_level_rewards": rewards,
    }
