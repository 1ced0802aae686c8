"""What an inference peer does for one run: holds the span that the plan gives it, and drives the ring that it heads.

A ring that fails, or whose neighbours change, is opened again; the span stays loaded, and groups under way go on.
"""

import logging
from collections import Counter as Tally
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import trio

from echo_node.accuse import Accuser
from echo_node.board import Board
from echo_node.chat_desk import Voice
from echo_node.feed import Feed
from echo_node.holding import Holding, Terms, hold
from echo_node.produce import Counter, Head, bring_together
from echo_node.prompts import Prompts
from echo_node.pulls import Pulls
from echo_node.push import Pusher
from echo_node.rate import Rate
from echo_node.run_model import RunModel
from echo_node.state import Activity, InferenceView
from echo_node.whole import answer_alone
from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.host import HostStatistics
from echo_p2p.chain.link import GARBAGE, ChainBroken
from echo_p2p.chain.ring import Ring, lanes_for, opening_fault
from echo_p2p.chain.troubles import Troubles
from echo_p2p.chain.verdict import Seen
from echo_p2p.chain.vllm_engine import VllmEngine
from echo_p2p.errors import ChainError
from echo_p2p.swarm import Run
from echo_p2p.weights.store import Store
from echo_protocols.hop import Failure, Open
from echo_protocols.peer import Plan, Stop
from echo_protocols.values import PolicyVersion, Span

log = logging.getLogger(__name__)

_REOPEN_S = 0.5
_ENDS_MAX = 2
_CANARIES_MAX = 4

_End = tuple[tuple[Stop, ...], int, Failure, str | None]


class Service:
    """Serves a run, a span at a time, and says how it goes."""

    def __init__(
        self, board: Board, run: Run, model: RunModel, prompts: Prompts, feed: Feed, store: Store, counter: Counter
    ) -> None:
        self._board = board
        self._presence = board.presence
        self._run = run
        self._prompts = prompts
        self._head = Head(board.presence, run, prompts, counter)
        self._pusher = Pusher(board.presence, run, self._head, feed, store)
        self._pulls = Pulls(board.presence, run, self._head)
        self._accuser = Accuser(board.presence, run)
        self._ends, self._ended_chains = trio.open_memory_channel[_End](_ENDS_MAX)
        self._terms = Terms(
            board=board, run=run, model=model, feed=feed, store=store,
            allow=self._allow, ended=self._ended, engaged=lambda: bool(self._chain()),
        )  # fmt: skip
        self._span: Span | None = None
        self._holding: Holding | None = None
        self._engine: VllmEngine | None = None
        self._canaries: dict[PolicyVersion, Seen] = {}
        self._refused_before: Tally[str] = Tally()
        self._rate = Rate()
        self._troubles = Troubles()

    async def run(self) -> None:
        """Deliver groups, from whatever ring is open, and look into those that fail, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pusher.run if self._run.manifest.protocol == "async" else self._pulls.run)
            async for end in self._ended_chains:
                await self._accuser.look_into(*end)

    async def serve(self, span: Span) -> None:
        """Hold a span until cancelled. Raises ModelError, NetError, WeightsError, ChainError."""
        self._refused_before = Tally(self.refused())
        self._span, self._holding, self._rate = span, None, Rate()
        try:
            await answer_alone(span, self._terms, self._head, self._chain, self._answers_with)
            async with hold(span, self._terms) as self._holding:
                self._presence.swarm.announce()  # that we are ready
                while not self._holding.host.corrupt:
                    chain = self._chain()
                    if chain and chain[0].peer == self._presence.identity.peer_id:
                        await self._drive_while_planned(chain, self._holding)
                    else:
                        await self._presence.swarm.changed()
            raise ChainError(f"the stage of span {span} computes otherwise than it did")
        finally:
            self._span, self._holding, self._engine = None, None, None

    def _answers_with(self, engine: VllmEngine) -> None:
        self._engine = engine

    # -- what others are told -----------------------------------------------------------------------------------------

    def view(self) -> InferenceView:
        """What the state document says of the serving."""
        chain, holding = self._chain(), self._holding
        view = InferenceView(
            span=str(self._span) if self._span else None,
            chain=tuple(stop.peer for stop in chain),
            head=bool(chain) and chain[0].peer == self._presence.identity.peer_id,
            activity=self._activity(),
            groups=self._head.made,
            resumed=self._head.resumed,
            dropped=self._head.dropped,
        )
        if (engine := self._engine) is not None:
            version, tokens, switches = engine.version, engine.statistics.tokens, engine.statistics.switches
        elif holding is not None:
            statistics = holding.host.statistics
            version, tokens, switches = holding.host.version, statistics.rows, statistics.switches
        else:
            return view
        self._rate.note(tokens)
        return msgspec.structs.replace(
            view, version=str(version), tokens=tokens, tokens_per_s=self._rate.per_s, switches=switches
        )

    def figures(self) -> dict[str, object]:
        """What the role record says of the serving."""
        serving = self._engine or (self._holding.host if self._holding else None)
        return {"version": serving.version if serving else None, "tokens_per_s": self.view().tokens_per_s}

    def busy(self) -> float:
        """The age of the step that is being computed, in seconds; 0.0 if there is none."""
        return self._holding.host.running_s if self._holding else 0.0

    def work(self) -> tuple[Span, HostStatistics] | None:
        """The span that is held, and what its stage has done so far."""
        return (self._holding.span, self._holding.host.statistics) if self._holding else None

    def refused(self) -> Mapping[str, int]:
        """What streams of chains were refused for, since this node began to serve."""
        return self._refused_before + (self._holding.host.refused if self._holding else Tally())

    def _activity(self) -> Activity:
        if self._span is None:
            return "waiting"
        if self._holding is None and self._engine is None:
            return "fetching"
        if self._head.driver is not None:
            return "stalled by lag" if self._pusher.stalled else "generating"
        return "serving" if self._chain() else "standing by"

    # -- the ring -----------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan | None:
        return self._presence.swarm.plan

    def _chain(self) -> tuple[Stop, ...]:
        """Our chain in the plan, if it has us serve the span that we hold."""
        plan, peer = self._plan(), self._presence.identity.peer_id
        chain = plan.chain_of(peer) if plan else None
        return chain if chain and any((stop.peer, stop.span) == (peer, self._span) for stop in chain) else ()

    def _allow(self, peer: str, opening: Open) -> str | None:
        """Only the plan's predecessor may feed us, for this run."""
        plan = self._plan()
        if plan is None or opening.plan > plan.number:
            self._presence.swarm.look_again()  # perhaps it knows a plan that we don't
        return "there is no plan yet" if plan is None else opening_fault(opening, plan, self._run.run_id)

    def _ended(self, opening: Open, failure: Failure, told_by: str | None) -> None:
        """A chain that goes through us has ended."""
        self._presence.swarm.look_again()
        self._presence.swarm.wake()
        with suppress(trio.WouldBlock):  # what fails faster than it is looked into says nothing new
            self._ends.send_nowait((opening.route, opening.plan, failure, told_by))

    async def _drive_while_planned(self, chain: tuple[Stop, ...], holding: Holding) -> None:
        """Keep the ring of a chain open and working while it is the plan's; one that fails is opened again."""
        async with trio.open_nursery() as nursery:

            async def keep_driving() -> None:
                while not holding.host.corrupt:
                    await self._drive(chain, holding)
                    await trio.sleep(_REOPEN_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(keep_driving)
            while self._chain() == chain:
                if self._head.driver is None:
                    self._presence.swarm.look_again()
                await self._presence.swarm.changed(_REOPEN_S)
            log.info("the plan has another chain for us, or none")
            nursery.cancel_scope.cancel()

    async def _drive(self, chain: tuple[Stop, ...], holding: Holding) -> None:
        """Open the ring, and make groups until it fails."""
        plan = self._plan()
        config, manifest = self._board.config.inference, self._run.manifest
        exclusive = manifest.protocol == "sequential"
        lanes, rows = lanes_for(
            len(chain),
            lanes=config.lanes,
            rows=max(config.lane_rows, manifest.group_size),
            rows_max=holding.host.limits.rows,
            exclusive=exclusive,
        )
        ring = Ring(
            chain,
            self._run.run_id,
            plan=plan.number if plan else 0,
            lanes=lanes,
            rows=rows,
            exclusive=exclusive,
            vocabulary=manifest.vocabulary,
        )
        opening = Open(route=chain, run_id=self._run.run_id, plan=ring.plan, lanes=ring.lane_count)
        try:
            async with open_chain(ring, holding.host, holding.server, reference=self._canaries.get) as driver:
                self._troubles.over()
                log.info("chain of %d is open", len(chain))
                with suppress(ChainBroken):  # which is the driver's fault then
                    await bring_together(driver, holding.replica)
                    voice = Voice(driver, manifest, self._prompts.model_path)
                    try:
                        with self._head.using(driver), self._board.desk.lend(voice):
                            await self._work(driver, holding)
                    finally:
                        self._remember(driver)
                fault, told_by = driver.fault, driver.told_by
        except ChainBroken as error:
            fault, told_by = error, chain[1].peer if len(chain) > 1 else None
            if error.failure.peer == told_by:
                told_by = None
        except ChainError as error:
            self._troubles.say(error)
            fault, told_by = None, None
        if fault is not None:
            self._troubles.say(fault)
            self._ended(opening, fault.failure, told_by)

    def _remember(self, driver: ChainDriver) -> None:
        """What a ring of ours that worked saw, of the last few versions: the next ones have to see the same."""
        garbage = driver.fault is not None and driver.fault.failure.reason == GARBAGE
        if driver.canary is not None and not garbage:
            self._canaries.setdefault(driver.canary.version, driver.canary)
            self._canaries = dict(sorted(self._canaries.items())[-_CANARIES_MAX:])

    async def _work(self, driver: ChainDriver, holding: Holding) -> None:
        async with trio.open_nursery() as nursery:
            if self._run.manifest.protocol == "async":
                nursery.start_soon(self._head.keep_switched, driver, holding.replica)
            await driver.failed.wait()
            nursery.cancel_scope.cancel()
