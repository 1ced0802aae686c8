"""The run manifest: what the owner of a run decides, signed. Its hash is the run id. Knows no peer and no clock."""

import hashlib
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from echo_protocols.values import Hash, Name, PeerId, canonical

Protocol = Literal["sequential", "async"]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
_Ratio = Annotated[float, Meta(ge=0.0, le=1e6)]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Clip = Annotated[float, Meta(gt=0.0, lt=1.0)]
_Rate = Annotated[float, Meta(gt=0.0, le=1.0)]

MAX_GROUP_TOKENS = 2**20
"""Tokens of all answers of one group: so that the largest group fits into its envelope."""

MODEL_FILES_MAX_BYTES = 128 << 20
"""Of all files of a model but its weights."""

ModelFileName = Literal[
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "echo_tensors.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
]
"""The files of a model that peers give each other: data that is read, never code. `echo_tensors.json` is Echo's own."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How answers are drawn. Truncation (top_k, then top_p) follows the temperature; 0 and 1.0 switch them off."""

    temperature: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_new_tokens: Annotated[int, Meta(ge=1, le=131_072)] = 32

    def hash(self) -> bytes:
        """32 bytes that name these parameters."""
        return hashlib.blake2b(canonical(self), digest_size=32, person=b"echo/sampling/1").digest()


def check_group_tokens(group_size: int, sampling: Sampling) -> None:
    """Raises ValueError if a group could be over MAX_GROUP_TOKENS."""
    if group_size * sampling.max_new_tokens > MAX_GROUP_TOKENS:
        raise ValueError(
            f"{group_size} answers of {sampling.max_new_tokens} tokens are over {MAX_GROUP_TOKENS} tokens a group; "
            "lower group_size or sampling.max_new_tokens"
        )


class TaskSpec(Struct, frozen=True, kw_only=True):
    """Which prompts, from which seed. Only tasks that ship with the software: no code comes from a manifest."""

    name: Name = "sokoban"
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 1
    settings: Annotated[dict[Name, str | int | float | bool], Meta(max_length=32)] = {}


class Divergence(Struct, frozen=True, kw_only=True):
    """What the divergence (KL) from the run's first policy counts, as changes to the algorithm's own settings."""

    place: Literal["none", "loss", "reward"] | UnsetType = UNSET
    estimator: Literal["k1", "k2", "k3"] | UnsetType = UNSET
    coefficient: _Ratio | UnsetType = UNSET


class Critic(Struct, frozen=True, kw_only=True):
    """How the value model learns and is used, as changes to the algorithm's own settings."""

    learning_rate: _Rate | UnsetType = UNSET
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31)] | UnsetType = UNSET
    """Steps at the beginning in which the policy waits for the critic."""
    value_clip: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    gamma: _Share | UnsetType = UNSET
    gae_lambda: _Share | UnsetType = UNSET


class Overlong(Struct, frozen=True, kw_only=True):
    """What becomes of answers near the longest length, as changes to the algorithm's own settings."""

    buffer: _Share | UnsetType = UNSET
    """Share of the longest length, at its end, in which the reward is lowered more and more; 0: nowhere."""
    penalty: _Ratio | UnsetType = UNSET
    """By how much the reward of a longest answer is lowered."""
    filter: bool | UnsetType = UNSET
    """Whether answers that were cut off have no part in the loss."""


class Algorithm(Struct, frozen=True, kw_only=True):
    """The update rule, by name, and its settings. Learning rates and clips as verl names them.

    A field that is not set (UNSET; it isn't written either) is what the algorithm of that name says.
    """

    # No more than 15 fields in a struct that leaves some out: with more, msgspec writes the longer header of a map.
    name: Name = "grpo"
    learning_rate: _Rate = 1e-6
    clip_ratio: _Clip | UnsetType = UNSET
    correction: Literal["none", "icepop", "tis"] = "tis"
    correction_bounds: tuple[_Ratio, _Ratio] = (0.5, 5.0)
    grad_clip: Annotated[float, Meta(gt=0.0, le=1e12)] = 1.0
    weight_decay: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    clip_ratio_high: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """The upper side of the clip, where it is not `clip_ratio` too."""
    loss_aggregation: LossAggregation | UnsetType = UNSET
    dynamic_sampling: bool | UnsetType = UNSET
    """Whether groups of equal rewards are passed over when a step's batch is gathered."""
    rejection_k3: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """Answers whose mean k3 divergence, policy against behaviour, is above are rejected; not set: none is."""
    mini_batches: Annotated[int, Meta(ge=1, le=1024)] | UnsetType = UNSET
    """Optimiser steps that a batch is cut into. The first starts from the policy that ratios are of: no clip acts."""
    kl: Divergence | UnsetType = UNSET
    critic: Critic | UnsetType = UNSET
    overlong: Overlong | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.correction_bounds[0] > self.correction_bounds[1]:
            raise ValueError(f"correction_bounds {self.correction_bounds} are the wrong way round")


class Admission(Struct, frozen=True, kw_only=True):
    """Which workers' rollouts a run takes: everybody's but `banned`, or only those in `allowed`."""

    allowed: Annotated[tuple[PeerId, ...], Meta(max_length=120)] | None = None
    banned: Annotated[tuple[PeerId, ...], Meta(max_length=120)] = ()

    def admits(self, worker: str) -> bool:
        """Whether rollouts of this worker are taken."""
        return worker not in self.banned and (self.allowed is None or worker in self.allowed)


class ModelFile(Struct, frozen=True, kw_only=True, array_like=True):
    """A file of the model that is no weights, as a blob. Its name is one of a few, so it leads out of no folder."""

    name: ModelFileName
    hash: Hash
    size_bytes: Annotated[int, Meta(ge=0, le=64 << 20)]


ModelFiles = Annotated[tuple[ModelFile, ...], Meta(min_length=2, max_length=16)]


def check_model_files(files: tuple[ModelFile, ...]) -> None:
    """Raises ValueError unless the files stand in order, none twice, with what a plan needs, and are not too large."""
    names = [file.name for file in files]
    if names != sorted(set(names)):
        raise ValueError("the files of the model are not in the order of their names, or one is named twice")
    if not {"config.json", "echo_tensors.json"} <= set(names):
        raise ValueError("the files of the model lack config.json or echo_tensors.json")
    if sum(file.size_bytes for file in files) > MODEL_FILES_MAX_BYTES:
        raise ValueError(f"the files of the model are over {MODEL_FILES_MAX_BYTES} bytes together")


class RunManifest(Struct, frozen=True, kw_only=True):
    """Everything that two peers must agree on to take part in one run."""

    swarm: Name
    model: Name
    tokenizer_hash: Hash
    layers: Annotated[int, Meta(ge=1, le=65536)]
    vocabulary: Annotated[int, Meta(ge=2, le=10_000_000)]
    stop_tokens: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=16)] = ()
    task: TaskSpec = TaskSpec()
    algorithm: Algorithm = Algorithm()
    sampling: Sampling = Sampling()
    protocol: Protocol = "async"
    max_lag: Annotated[int, Meta(ge=0, le=1024)] = 4
    group_size: Annotated[int, Meta(ge=2, le=1024)] = 8
    groups_per_step: Annotated[int, Meta(ge=1, le=65536)] = 8
    prompts: Annotated[int, Meta(ge=1, le=2**40)] = 1_000_000
    trainers: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=16)]
    admission: Admission = Admission()
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 1
    model_files: ModelFiles | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_group_tokens(self.group_size, self.sampling)
        if self.model_files is not UNSET:
            check_model_files(self.model_files)

    def randomness(self) -> bytes:
        """The 32 bytes that decide prompts and draws: a function of `seed` alone, so that runs can be compared."""
        return hashlib.blake2b(b"%d" % self.seed, digest_size=32, person=b"echo/seed/1").digest()

    def run_id(self) -> bytes:
        """32 bytes that name the run."""
        return hashlib.blake2b(canonical(self), digest_size=32, person=b"echo/run/1").digest()
