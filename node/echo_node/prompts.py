"""The prompts of a run as token ids, the same on every peer. Knows no reward and no network."""

from pathlib import Path
from typing import Any

from echo_p2p.errors import ConfigError, ModelError
from echo_p2p.models import decode, encode_prompt, load_tokenizer, model_folder, tokenizer_hash
from echo_p2p.rl.tasks import Task, load_task
from echo_protocols.run import RunManifest, TaskSpec


class Prompts:
    """A run's task and tokenizer. Synchronous: used from worker threads."""

    def __init__(self, task: Task, tokenizer: Any, model_path: Path) -> None:
        self.task = task
        self.model_path = model_path
        self._tokenizer = tokenizer

    def ids(self, index: int) -> tuple[int, ...]:
        """The token ids that the model continues."""
        return tuple(encode_prompt(self._tokenizer, self.task.prompt(index)))

    def text(self, tokens: tuple[int, ...]) -> str:
        """What an answer says."""
        return decode(self._tokenizer, list(tokens))


def open_task(spec: TaskSpec, prompts: int) -> Task:
    """The task of a run that asks for so many prompts. Raises ConfigError if there is none, or not so many."""
    task = load_task(spec.name, spec.seed, **spec.settings)
    if task.size < prompts:
        raise ConfigError(f"task {task.name} has {task.size} prompts, the run asks for {prompts}.")
    return task


def load_prompts(manifest: RunManifest, folder: Path | None = None) -> Prompts:
    """Load what a manifest names, the tokenizer from `folder` (default: of the built-in or hub model of that name).

    Raises ConfigError for an unknown task, ModelError for another tokenizer.
    """
    task = open_task(manifest.task, manifest.prompts)
    path = model_folder(manifest.model) if folder is None else folder
    if bytes.fromhex(tokenizer_hash(str(path))) != manifest.tokenizer_hash:
        raise ModelError(
            f"the tokenizer of {manifest.model} here differs from the run's; get the revision that the run names."
        )
    return Prompts(task, load_tokenizer(str(path)), path)
