"""Tasks: a prompt and a score for each index, all of it reasoning-gym's own.

Deterministic in (name, seed, settings, index), so that a peer and the trainer make the same prompt without sending it.
Knows nothing of tokens, models, groups or the network.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from echo_p2p.errors import ConfigError, UnknownName

_CACHED_ITEMS = 4096
_SIZE = 1_000_000
# Indices of reasoning-gym that stand behind one index of ours: enough that one of them always is an unsolved board.
_SOKOBAN_STRIDE = 64


class Task(Protocol):
    """What a run needs to know of its task. `index` is in [0, size)."""

    name: str
    size: int

    def prompt(self, index: int) -> str:
        """The text that the model continues."""
        ...

    def score(self, index: int, completion: str) -> float:
        """The score of a completion, in [0, 1]."""
        ...


class ReasoningGymTask:
    """Any reasoning-gym data set: the full question is the prompt, `score_answer` is the score.

    Made items are cached; the least recently used of more than 4,096 is dropped.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.size: int = dataset.size
        self._dataset = dataset
        self._items: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def prompt(self, index: int) -> str:
        """The full question of reasoning-gym."""
        return str(self.item(index)["question"])

    def score(self, index: int, completion: str) -> float:
        """reasoning-gym's score of the completion without its surrounding white space."""
        return float(self._dataset.score_answer(completion.strip(), entry=self.item(index)))

    def item(self, index: int) -> dict[str, Any]:
        """The item that reasoning-gym made: its question, its own answer and its metadata."""
        if not 0 <= index < self.size:
            raise ConfigError(
                f"Prompt {index} of task {self.name} does not exist: use an index from 0 to {self.size - 1}."
            )
        if index in self._items:
            self._items.move_to_end(index)
            return self._items[index]
        item = self._items[index] = self._make(index)
        if len(self._items) > _CACHED_ITEMS:
            self._items.popitem(last=False)
        return item

    def _make(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self._dataset[index]
        return item


class SokobanTask(ReasoningGymTask):
    """reasoning-gym's Sokoban, of which boards that are already solved are passed over.

    One board in ten comes solved, and reasoning-gym scores any answer to it, even none, 1.0: nothing could be learnt.

    The prompt is the board alone, without the spaces between its squares: reasoning-gym's instructions are 300
    characters that never change, too long and of no use to a character model. `prompt="question"` gives the
    full text, as real language models need it.
    """

    def __init__(self, name: str, dataset: Any, *, full_question: bool) -> None:
        super().__init__(name, dataset)
        self.size = dataset.size // _SOKOBAN_STRIDE
        self._full_question = full_question

    def prompt(self, index: int) -> str:
        """The board, a row a line, or the full question."""
        if self._full_question:
            return super().prompt(index)
        board: str = self.item(index)["metadata"]["gamestr"]
        return board.replace(" ", "").strip() + "\n"

    def _make(self, index: int) -> dict[str, Any]:
        first = index * _SOKOBAN_STRIDE
        for candidate in range(first, first + _SOKOBAN_STRIDE):
            item = super()._make(candidate)
            if "@" in item["metadata"]["gamestr"]:
                break
        return item


def load_task(name: str, seed: int, **settings: object) -> Task:
    """The task of that name: `sokoban`, or `rg:NAME` for any data set of reasoning-gym.

    `sokoban` takes the settings of `load_sokoban`; `rg:NAME` takes `size` and what the data set's own config takes.
    Raises UnknownName for a name, ConfigError for a setting that doesn't exist.
    """
    if name == "sokoban":
        return load_sokoban(seed, **settings)
    if name.startswith("rg:"):
        return ReasoningGymTask(name, _dataset(name.removeprefix("rg:"), seed, {"size": _SIZE, **settings}))
    raise UnknownName(f'Unknown task "{name}": use "sokoban", or "rg:NAME" for a data set of reasoning-gym.')


def load_sokoban(seed: int, **settings: object) -> SokobanTask:
    """Sokoban with the settings `width`, `height`, `boxes`, `size` and `prompt` ("board" or "question")."""
    chosen: dict[str, Any] = {"width": 6, "height": 6, "boxes": 1, "size": _SIZE, "prompt": "board"}
    unknown = sorted(settings.keys() - chosen.keys())
    if unknown:
        raise ConfigError(f"Task sokoban has no setting {', '.join(unknown)}: it takes {', '.join(chosen)}.")
    chosen.update(settings)
    if chosen["prompt"] not in ("board", "question"):
        raise ConfigError(f'Task sokoban has no prompt "{chosen["prompt"]}": use "board" or "question".')
    bounds = {"size": chosen["size"] * _SOKOBAN_STRIDE}
    for long, short in (("width", "w"), ("height", "h"), ("boxes", "boxes")):
        bounds[f"min_{short}"] = bounds[f"max_{short}"] = chosen[long]
    return SokobanTask("sokoban", _dataset("sokoban", seed, bounds), full_question=chosen["prompt"] == "question")


def _dataset(dataset_name: str, seed: int, settings: Mapping[str, object]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset_name not in DATASETS:
        raise UnknownName(f'reasoning-gym has no data set "{dataset_name}": see its gallery for the names.')
    try:
        return reasoning_gym.create_dataset(dataset_name, seed=_spread(dataset_name, seed), **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym refuses the settings of {dataset_name}: {error}. Correct them.") from error


def _spread(dataset_name: str, seed: int) -> int:
    # reasoning-gym makes item i from seed + i, so neighbouring seeds would share nearly all of their items.
    digest = hashlib.sha256(f"{dataset_name} {seed}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
