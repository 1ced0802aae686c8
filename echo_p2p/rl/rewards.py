"""Rewards: a score for each completion, from the task itself or from a function that the trainer's owner names.

Trainer side only: no name of a function ever comes from a peer. Knows nothing of groups or advantages.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from echo_p2p.errors import ConfigError
from echo_p2p.rl.tasks import Task

Reward = Callable[..., float]


def rewards(task: Task, index: int, completions: Sequence[str]) -> list[float]:
    """The task's own score of each completion of one prompt."""
    return [task.score(index, completion) for completion in completions]


def load_reward(name: str) -> Reward:
    """The function named `package.module:function` or `file.py:function`. Raises ConfigError."""
    place, _, function_name = name.rpartition(":")
    if not place or not function_name:
        raise ConfigError(f'Reward "{name}" names no function: write package.module:function or file.py:function.')
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f'Reward "{name}" can\'t be imported ({error}): correct the part before the colon.'
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f'Reward "{name}" names no function of {place}: correct the part after the colon.')
    reward: Reward = function
    return reward


def call_reward(reward: Reward, row: Mapping[str, object], completion: str) -> float:
    """Call a reward with what its parameters ask for by name: `completion` and the fields of the data row.

    Raises ConfigError for a parameter that the row doesn't have, and for a reward that is no finite number.
    """
    offered = {**row, "completion": completion}
    parameters = inspect.signature(reward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        wanted = offered
    else:
        wanted = {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.name not in wanted
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if missing:
        raise ConfigError(f"The reward asks for {', '.join(missing)}: a row has only {', '.join(sorted(offered))}.")
    value = float(reward(**wanted))
    if not math.isfinite(value):
        raise ConfigError(f"The reward gave {value}: return a finite number.")
    return value


def _load_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OSError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
