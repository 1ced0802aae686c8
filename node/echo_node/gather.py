"""Where a trainer's batches come from: the seam, and what a group must pass whichever way it came.

Knows no engine, no release and no version: lag is for those who hold the lineage.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from echo_node.learning import Graded
from echo_p2p.presence import Presence
from echo_p2p.rl.algorithms import StepSize, missing
from echo_p2p.swarm import Run
from echo_protocols.envelope import ROLLOUT, Opened, Refusal
from echo_protocols.rollout import RolloutGroup, group_fault
from echo_protocols.run import RunManifest

LOGPROB_MIN = -200.0
"""No draw has a probability below e^-200: a smaller log-probability is made up, to spoil the figures of a step."""


class Gather(Protocol):
    """A source of batches."""

    async def run(self) -> None:
        """Receive in the background until cancelled."""

    async def next_batch(self) -> Sequence[Graded]:
        """All groups that are looked at for the learner's next step, in the order to train in."""

    def refused(self) -> Mapping[str, int]:
        """What was admitted but never trained on, by reason."""


async def enough(size: StepSize, ask: Callable[[int, int], Awaitable[Sequence[Graded]]]) -> list[Graded]:
    """Groups from `ask(first, count)` until so many vary as a step trains on, or its bound is reached.

    What is asked for depends on the answers alone, not on their order or their makers: any way to sample ends alike.
    """
    batch: list[Graded] = []
    while more := missing([graded.varies for graded in batch], size):
        batch += await ask(len(batch), more)
    return batch


def check_group(presence: Presence, run: Run, data: bytes, *, once: bool) -> Opened[RolloutGroup] | Refusal:
    """Everything about a sealed group that needs no version: envelope, admission, shape, prompt."""
    border = presence.border
    opened = border.open(data, ROLLOUT, run.run_id, time.time(), once=once)
    if isinstance(opened, Refusal):
        return opened
    if not run.manifest.admission.admits(opened.signer):
        return border.refuse("not-admitted", opened.signer)
    if (fault := group_fault(opened.payload, opened.signer, run.manifest)) is not None:
        return border.refuse(fault, opened.signer)
    if min(min(sample.logprobs) for sample in opened.payload.samples) < LOGPROB_MIN:
        return border.refuse("logprob", opened.signer)
    return opened


def largest_group_bytes(manifest: RunManifest) -> int:
    """No sealed group of a run is larger: 14 bytes a token and log-probability, 1,024 segments a sample."""
    return manifest.group_size * (manifest.sampling.max_new_tokens * 14 + 1024 * 16) + 8192
