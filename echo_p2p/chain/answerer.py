"""The seam of whatever answers prompts with a policy that changes: a ring of stages, or an engine that holds it whole.

Knows neither. Who makes groups of rollouts and who answers chats see nothing else of a chain.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from echo_p2p.chain.group import GroupRequest, SoFar
from echo_p2p.chain.link import ChainBroken
from echo_protocols.rollout import Sample
from echo_protocols.values import PolicyVersion

OnToken = Callable[[int, int, PolicyVersion], None]
"""Hears of each token as it is drawn: which sample, the token, the version. Must neither block nor raise."""


@dataclass(frozen=True, slots=True)
class ChainStatistics:
    """What a chain has made. `lanes` are those that grow; `busy_s` is time in the head's own stage."""

    groups: int
    tokens: int
    steps: int
    switches: int
    lanes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """The largest group that is taken: answers, and positions of one answer with its prompt."""

    samples: int
    positions: int


class Answerer(Protocol):
    """Answers prompts; all methods may be called concurrently."""

    @property
    def version(self) -> PolicyVersion:
        """The version that the next step will have."""

    @property
    def engine(self) -> str:
        """Fingerprint of what computes."""

    @property
    def failed(self) -> trio.Event:
        """Set as soon as it has failed or is closed; then another one has to be opened."""

    @property
    def fault(self) -> ChainBroken | None:
        """Why, once it has."""

    @property
    def statistics(self) -> ChainStatistics:
        """Figures so far."""

    @property
    def bounds(self) -> GroupBounds:
        """The largest group that `generate` takes."""

    def groups_at_once(self, group_size: int) -> int:
        """How many groups to ask for at a time, so that it never waits for the next."""

    async def generate(
        self, request: GroupRequest, on_token: OnToken | None = None, so_far: SoFar | None = None
    ) -> tuple[Sample, ...]:
        """Answer one prompt; waits while there is no room. Never a part of a group.

        Raises GroupBroken when it fails, with what another one can go on with, given here as `so_far`. Raises
        ChainError for what it can't serve.
        """

    async def switch(self, version: PolicyVersion, timeout_s: float) -> None:
        """Have all later tokens drawn by `version`. Raises WeightsError if it can't be had in time, ChainError."""
