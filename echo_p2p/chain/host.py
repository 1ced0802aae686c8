"""A peer's one stage and the queue of its work, shared by driver and server. Knows no stream and no ring.

Forward steps and weight switches are computed one at a time, in worker threads, in the order of `turns`.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from echo_p2p.chain.group import Floats, Integers
from echo_p2p.chain.link import GARBAGE, ChainBroken, ChainLimits, broken
from echo_p2p.chain.pace import Pace
from echo_p2p.chain.stage import Stage, Weights
from echo_p2p.chain.turns import Turn, Turns
from echo_p2p.chain.verdict import Remembered, tolerance_of
from echo_p2p.errors import EchoError, NetError, WeightsError
from echo_protocols.values import PolicyVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REASONS_MAX = 64

_TIMES_USUAL = 6.0
"""What a step is given before the stage counts as stalled."""


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """What a stage has done. `busy_s` is time in the stage's own code, `refused` counts frames and chains by reason.

    `tokens` are those that were computed, prompts included; `rows` counts a part of a prompt as one.
    """

    version: PolicyVersion
    lanes: int
    steps: int
    rows: int
    tokens: int
    switches: int
    busy_s: float
    refused: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Work:
    """Work in its thread or next to it; its time runs from when nothing before it runs."""

    timeout_s: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def begin(self) -> None:
        if self.scope.deadline == math.inf:
            self.scope.deadline = trio.current_time() + self.timeout_s


class StageHost:
    """Owns a stage. A turn lasts from the start of a step until its frame is queued: frames leave in step order."""

    def __init__(
        self,
        peer: str,
        stage: Stage,
        weights: Weights,
        version: PolicyVersion,
        *,
        limits: ChainLimits | None = None,
    ) -> None:
        self.peer = peer
        self.stage = stage
        self.version = version
        self.width: int | None = None  # of the states that it reads, once it has read some
        self.limits = limits or ChainLimits()
        self.turns = Turns()
        self.refused: Counter[str] = Counter()
        self._weights = weights
        self._staging = trio.Lock()
        self._lanes: set[int] = set()
        self._lanes_begun = 0
        self._discarded: list[int] = []
        self._steps = self._rows = self._tokens = self._switches = 0
        self._busy_s = 0.0
        self.canaries = Remembered(tolerance_of(stage.engine))
        """What the stage made of canaries; one that was loaded anew may be given what it made before."""
        self.corrupt = False
        self._pace = Pace(self.limits.patience_s, self.limits.hop_timeout_s, _TIMES_USUAL)
        self._works: deque[_Work] = deque()
        self._running_since: float | None = None

    def count_refusal(self, reason: str) -> None:
        """Count a fault by its reason; reasons may come from other peers, so at most 64 are told apart."""
        known = reason in self.refused or len(self.refused) < _REASONS_MAX
        self.refused[reason if known else "other"] += 1

    @property
    def statistics(self) -> HostStatistics:
        """Figures so far."""
        return HostStatistics(
            version=self.version,
            lanes=len(self._lanes),
            steps=self._steps,
            rows=self._rows,
            tokens=self._tokens,
            switches=self._switches,
            busy_s=self._busy_s,
            refused=dict(self.refused),
        )

    @property
    def running_s(self) -> float:
        """How long the stage has been at what it computes now, also if nobody waits for it any more; 0 when it rests.

        May be asked from any thread.
        """
        since = self._running_since
        return 0.0 if since is None else time.perf_counter() - since

    def begin(self) -> int:
        """The number of a new lane of the stage. Raises ChainBroken when that is one too many."""
        if len(self._lanes) >= self.limits.lanes:
            raise broken("too-many-lanes", f"this stage holds {self.limits.lanes} lanes", self.peer)
        self._lanes_begun += 1
        self._lanes.add(self._lanes_begun)
        return self._lanes_begun

    def discard(self, lane: int) -> None:
        """Free a lane before the next step, or in `free`."""
        self._lanes.discard(lane)
        self._discarded.append(lane)

    async def free(self) -> None:
        """Free discarded lanes now, or with the next step if the stage is stuck."""
        try:
            with await self.turns.begin() as turn:
                await self._in_thread(turn, self._close_discarded, self._pace.bound_s(1))
        except ChainBroken as error:
            logger.warning("the lanes of a chain could not be freed yet: %s", error)

    async def forward(
        self,
        turn: Turn,
        lane: int,
        rows: Integers,
        positions: Integers,
        inputs: Integers | Floats,
        finish: Callable[[Floats], T],
    ) -> T:
        """What `finish` makes of the stage's outputs, in the stage's thread.

        Raises ChainBroken when the engine fails or exceeds the hop's deadline.
        """
        length = inputs.shape[1]

        def work() -> T:
            self._tokens += inputs.shape[0] * length
            return finish(self.stage.forward(lane, rows, positions, inputs))

        return await self._step(turn, lane, len(rows), length, work)

    async def join(self, turn: Turn, lane: int, rows: Integers, source: int, finish: Callable[[], T]) -> T:
        """Let rows begin with what another lane has read; then `finish`. Raises ChainBroken."""

        def work() -> T:
            self.stage.join(lane, rows, source)
            return finish()

        return await self._step(turn, lane, len(rows), 1, work)

    def check_canary(self, read: bytes, outputs: Floats) -> None:
        """Compare what came of a canary with what came before of what was `read` alike; in the stage's thread.

        Raises ChainBroken; then the stage is `corrupt`, and serves no chain any more.
        """
        if (fault := self.canaries.fault(read, outputs)) is not None:
            self.corrupt = True
            raise broken(GARBAGE, fault, self.peer)

    async def _step(self, turn: Turn, lane: int, rows: int, length: int, compute: Callable[[], T]) -> T:
        taken_s = 0.0

        def work() -> T:
            nonlocal taken_s
            self._close_discarded(but=lane)
            started = time.perf_counter()
            try:
                return compute()
            finally:
                taken_s = time.perf_counter() - started
                self._busy_s += taken_s
                self._steps += 1
                self._rows += rows

        result = await self._in_thread(turn, work, self._pace.bound_s(rows * length))
        self._pace.learn(rows * length, taken_s)
        return result

    async def prepare(self, version: PolicyVersion, timeout_s: float) -> None:
        """Stage a version while steps go on. Raises WeightsError."""
        if version < self.version:
            raise WeightsError(f"version {version} is older than this stage's {self.version}; versions only grow")
        try:
            with trio.fail_after(timeout_s):
                async with self._staging:
                    if version != self.version:
                        await self._weights.prepare(version)
        except trio.TooSlowError:
            raise WeightsError(f"version {version} could not be staged in {timeout_s:g} s") from None
        except NetError as error:
            raise WeightsError(f"version {version} could not be fetched: {error}") from error

    async def switch(self, turn: Turn, version: PolicyVersion) -> None:
        """Apply a staged version, in a turn alone; the next step is the first that it computes. Raises ChainBroken."""

        def work() -> None:
            if version != self.version:
                self._weights.switch(version, self.stage)
                self.version = version
                self.canaries.forget()
                self._switches += 1

        await self._in_thread(turn, work, self.limits.hop_timeout_s)

    def _close_discarded(self, but: int | None = None) -> None:
        """`but` is the lane of a step that was cancelled before its thread came this far: it is closed after it."""
        due = [number for number in self._discarded if number != but]
        for number in due:
            self._discarded.remove(number)
            self.stage.close(number)

    async def _in_thread(self, turn: Turn, compute: Callable[[], T], timeout_s: float) -> T:
        def work() -> T:
            self._running_since = time.perf_counter()
            try:
                return compute()
            finally:
                self._running_since = None

        own = _Work(timeout_s)
        self._works.append(own)
        self._works[0].begin()
        try:
            with own.scope:
                return await turn.run(work)
            raise broken("stalled", f"the stage did not finish in {timeout_s:.3g} s", self.peer)
        except ChainBroken:
            raise
        except EchoError as error:
            raise broken("engine", str(error), self.peer) from error
        except Exception as error:  # whatever an engine raises is a fault of this chain, not of the node
            logger.exception("the stage of %s failed", self.peer)
            raise broken("engine", f"{type(error).__name__}: {error}", self.peer) from error
        finally:
            self._works.remove(own)
            if self._works:
                self._works[0].begin()
