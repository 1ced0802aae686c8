"""One assignment of an inference peer: load the span, keep its weights current, serve the ring, drive it if head.

Composes a chain's parts with the feed of releases. A ring that fails is opened again; a new plan ends the assignment.
"""

import logging
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import psutil
import trio
from numpy.typing import NDArray

from echo_node.board import Board
from echo_node.chat_desk import Voice
from echo_node.feed import Feed
from echo_node.produce import Counter, Head
from echo_node.prompts import Prompts
from echo_node.state import InferenceView
from echo_p2p.chain.driver import open_chain
from echo_p2p.chain.engines import load_engine
from echo_p2p.chain.host import HostStatistics, StageHost
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.ring import Ring, opening_fault
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.speed import value_bytes
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.workload import PROMPT_POSITIONS, cache_room
from echo_p2p.errors import ChainError, ModelError
from echo_p2p.swarm import Run
from echo_p2p.tensors import Bits, TensorUpdate
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.store import Store
from echo_protocols.hop import Open
from echo_protocols.peer import Stop
from echo_protocols.values import Span

log = logging.getLogger(__name__)

_REOPEN_S = 1.0
_RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A chain of the plan, and this peer's span in it."""

    chain: tuple[Stop, ...]
    span: Span


class SlowStage:
    """A stage that waits after each step: a slow device, for experiments."""

    def __init__(self, stage: Stage, slowdown_s: float) -> None:
        self.span = stage.span
        self.engine = stage.engine
        self.ragged = stage.ragged
        self._stage = stage
        self._slowdown_s = slowdown_s

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """As `Stage.forward`, later."""
        outputs = self._stage.forward(lane, rows, positions, inputs)
        time.sleep(self._slowdown_s)
        return outputs

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        """As `Stage.join`."""
        self._stage.join(lane, rows, source)

    def close(self, lane: int) -> None:
        """As `Stage.close`."""
        self._stage.close(lane)

    def tensors(self) -> Mapping[str, Bits]:
        """As `Stage.tensors`."""
        return self._stage.tensors()

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """As `Stage.apply`."""
        self._stage.apply(updates)


class Service:
    """Serves assignments, one at a time, and says how it goes."""

    def __init__(self, board: Board, run: Run, prompts: Prompts, feed: Feed, store: Store, counter: Counter) -> None:
        self._board = board
        self._presence = board.presence
        self._run = run
        self._prompts = prompts
        self._feed = feed
        self._store = store
        self._counter = counter
        self._view = InferenceView(activity="waiting")
        self._host: StageHost | None = None
        self._refused_before: Tally[str] = Tally()
        self._groups = 0
        self._rate = _Rate()

    def view(self) -> InferenceView:
        """What the state document says of the serving."""
        host = self._host
        if host is None:
            return self._view
        statistics = host.statistics
        self._rate.note(statistics.rows)
        return msgspec.structs.replace(
            self._view,
            version=str(host.version),
            groups=self._groups,
            tokens=statistics.rows,
            tokens_per_s=self._rate.per_s,
            switches=statistics.switches,
        )

    def figures(self) -> dict[str, object]:
        """What the role record says of the serving."""
        view = self.view()
        return {"version": self._host.version if self._host else None, "tokens_per_s": view.tokens_per_s}

    def work(self) -> tuple[Span, HostStatistics] | None:
        """The span that is served, and what its stage has done so far."""
        return (self._host.stage.span, self._host.statistics) if self._host else None

    def busy(self) -> float:
        """The age of the step that is being computed, in seconds; 0.0 if there is none."""
        return self._host.running_s if self._host else 0.0

    def refused(self) -> Mapping[str, int]:
        """What streams of chains were refused for, since this node began to serve."""
        return self._refused_before + (self._host.refused if self._host else Tally())

    async def serve(self, assignment: Assignment) -> None:
        """Serve one assignment until cancelled. Raises ModelError."""
        head = assignment.chain[0].span == assignment.span
        peers = tuple(stop.peer for stop in assignment.chain)
        self._refused_before = Tally(self.refused())
        self._host, self._rate = None, _Rate()
        self._view = InferenceView(span=str(assignment.span), chain=peers, head=head, activity="fetching")
        stage = await self._load(assignment.span)
        initial = await trio.to_thread.run_sync(stage.tensors)
        replica = Replica(initial, self._store)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed.keep_staged, replica)
            version = await replica.newer_than(None)
            await trio.to_thread.run_sync(replica.switch, version, stage)
            log.info("serving span %s at version %s", assignment.span, version)
            limits = await trio.to_thread.run_sync(self._limits, stage)
            self._host = StageHost(self._presence.identity.peer_id, stage, replica, version, limits=limits)
            server = ChainServer(self._presence.hive, self._host, self._allow)
            await nursery.start(server.serve)
            self._view = msgspec.structs.replace(self._view, activity="serving")
            if head:
                await self._drive(assignment, server, replica)

    async def _load(self, span: Span) -> Stage:
        config = self._board.config.inference
        sampling = self._run.manifest.sampling
        stage: Stage = await trio.to_thread.run_sync(
            lambda: load_engine(config.engine, self._prompts.model_path, span, device=config.device)
        )
        log.info(
            "loaded span %s of %s into %s, answers of up to %d tokens",
            span, self._run.manifest.model, stage.engine, sampling.max_new_tokens,
        )  # fmt: skip
        return SlowStage(stage, config.slowdown_s) if config.slowdown_s else stage

    def _limits(self, stage: Stage) -> ChainLimits:
        """As many positions as the memory that is left has room for. Raises ModelError if that is too few to begin."""
        memory = int(psutil.virtual_memory().available * self._board.config.inference.memory_share)
        room = cache_room(self._prompts.model_path, stage.span, memory, value_bytes(stage.engine))
        manifest = self._run.manifest
        least = (manifest.group_size + 1) * (PROMPT_POSITIONS + manifest.sampling.max_new_tokens)
        if room < least:
            raise ModelError(
                f"{memory >> 20} MiB are left for keys and values of span {stage.span}, {room} positions; one group may"
                f" take {least}: free memory, raise inference.memory_share, or serve fewer layers (--max-layers)."
            )
        return replace(ChainLimits(), room=min(room, 2**40))

    def _allow(self, peer: str, opening: Open) -> str | None:
        """Only the plan's predecessor may feed us, for this run."""
        plan = self._presence.swarm.plan
        return "there is no plan yet" if plan is None else opening_fault(opening, plan, self._run.run_id)

    async def _drive(self, assignment: Assignment, server: ChainServer, replica: Replica) -> None:
        """Keep the ring open and working; one that fails is opened again."""
        assert self._host is not None
        config, manifest = self._board.config.inference, self._run.manifest
        ring = Ring(
            assignment.chain,
            self._run.run_id,
            lanes=max(config.lanes, len(assignment.chain)),
            rows=max(config.lane_rows, manifest.group_size),
            exclusive=manifest.protocol == "sequential",
        )
        while True:
            try:
                async with open_chain(ring, self._host, server) as driver:
                    log.info("chain of %d is open", len(assignment.chain))
                    head = Head(self._presence, self._run, self._prompts, driver, self._counter, self._store)
                    with self._board.desk.lend(Voice(driver, manifest, self._prompts.model_path)):
                        await self._work(head, driver.failed, replica)
                    log.warning("%s; opening it again", driver.fault)
            except ChainError as error:
                log.warning("%s; trying again in %.0f s", error, _REOPEN_S)
            await trio.sleep(_REOPEN_S)

    async def _work(self, head: Head, failed: trio.Event, replica: Replica) -> None:
        """Make groups until the chain fails."""

        def on_stall(stalled: bool) -> None:
            self._groups += head.made - counted[0]
            counted[0] = head.made
            activity = "stalled by lag" if stalled else "generating"
            self._view = msgspec.structs.replace(self._view, activity=activity)

        counted = [0]
        async with trio.open_nursery() as nursery:
            if self._run.manifest.protocol == "async":
                nursery.start_soon(head.push_for_ever, self._feed, replica, on_stall)
            else:
                nursery.start_soon(head.answer_pulls)
            await failed.wait()
            nursery.cancel_scope.cancel()


class _Rate:
    """Tokens a second over ten seconds or more, from totals noted now and then."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, int]] = deque(maxlen=100)

    def note(self, total: int) -> None:
        now = time.monotonic()
        while len(self._notes) > 1 and now - self._notes[1][0] > _RATE_WINDOW_S:
            self._notes.popleft()
        self._notes.append((now, total))

    @property
    def per_s(self) -> float:
        (first_at, first), (last_at, last) = self._notes[0], self._notes[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0
