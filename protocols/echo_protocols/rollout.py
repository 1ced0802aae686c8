"""Rollout groups: G answers to one prompt, and the checks that need nothing but the group and the manifest.

The prompt itself and the reward never travel: the trainer makes both from the prompt index.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from echo_protocols.run import RunManifest
from echo_protocols.uniform import prompt_index
from echo_protocols.values import Count, Hash, Name, PolicyVersion

Finish = Literal["stop", "length"]


class Segment(Struct, frozen=True, kw_only=True, array_like=True):
    """From token `start` (included) on, the tokens were computed by `version`."""

    start: Count
    version: PolicyVersion


class Sample(Struct, frozen=True, kw_only=True):
    """One answer: token ids, and the log-probability of each under the distribution that it was drawn from."""

    tokens: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(min_length=1, max_length=131_072)]
    logprobs: Annotated[tuple[float, ...], Meta(min_length=1, max_length=131_072)]
    finish: Finish
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=1024)]


class Slot(Struct, frozen=True, kw_only=True, array_like=True):
    """A group's place in the sequential protocol: the trainer's step, and the position in that step's batch."""

    step: Count
    slot: Count


class RolloutGroup(Struct, frozen=True, kw_only=True):
    """What one worker made of one prompt.

    `counter` numbers the worker's groups from 0 without gaps. In the asynchronous protocol it decides the prompt;
    in the sequential one `slot` does.
    """

    counter: Count
    prompt_index: Count
    slot: Slot | None = None
    samples: Annotated[tuple[Sample, ...], Meta(min_length=1, max_length=1024)]
    sampling_hash: Hash
    engine: Name

    @property
    def oldest(self) -> PolicyVersion:
        """The oldest version that any token of the group was computed by: the one that lag is counted from."""
        return min(segment.version for sample in self.samples for segment in sample.segments)

    @property
    def newest(self) -> PolicyVersion:
        """The newest version that any token of the group was computed by."""
        return max(segment.version for sample in self.samples for segment in sample.segments)

    @property
    def token_count(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.tokens) for sample in self.samples)


class LargeRollout(Struct, frozen=True, kw_only=True):
    """Says that a sealed group lies as a blob at its worker."""

    blob: Hash
    size_bytes: Annotated[int, Meta(ge=1, le=16 << 20)]


def group_fault(group: RolloutGroup, worker: str, manifest: RunManifest) -> str | None:
    """Why a group can't belong to this run, as a reason to count; None when it can. Versions are not looked at."""
    if len(group.samples) != manifest.group_size:
        return "group-size"
    if group.sampling_hash != manifest.sampling.hash():
        return "sampling"
    if (group.slot is None) == (manifest.protocol == "sequential"):
        return "wrong-protocol"
    place = ("slot", group.slot.step, group.slot.slot) if group.slot else (worker, group.counter)
    if group.prompt_index != prompt_index(manifest.randomness(), place, manifest.prompts):
        return "prompt-index"
    for sample in group.samples:
        if (fault := sample_fault(sample, manifest)) is not None:
            return fault
    return None


def sample_fault(sample: Sample, manifest: RunManifest) -> str | None:
    """Why one sample is malformed, as a reason to count; None when it isn't."""
    length = len(sample.tokens)
    if length != len(sample.logprobs) or length > manifest.sampling.max_new_tokens:
        return "length"
    if max(sample.tokens) >= manifest.vocabulary:
        return "token-range"
    if not all(math.isfinite(value) and value <= 0.0 for value in sample.logprobs):
        return "logprob"
    if not _ends_well(sample, manifest):
        return "finish"
    starts = [segment.start for segment in sample.segments]
    versions = [segment.version for segment in sample.segments]
    if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= length or versions != sorted(set(versions)):
        return "segments"
    return None


def _ends_well(sample: Sample, manifest: RunManifest) -> bool:
    """Whether the answer ends where it must: at the first stop token, or at the longest length without one."""
    stop = frozenset(manifest.stop_tokens)
    if sample.finish == "stop":
        return sample.tokens[-1] in stop and stop.isdisjoint(sample.tokens[:-1])
    return len(sample.tokens) == manifest.sampling.max_new_tokens and stop.isdisjoint(sample.tokens)
