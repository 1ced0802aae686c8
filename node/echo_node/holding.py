"""A span that a peer holds: its stage, kept at the newest version, and served to the chains that the plan allows.

Lives as long as the span stays, whatever becomes of the neighbours. Knows no group and no way to open a ring.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import psutil
import trio
from msgspec import UNSET

from echo_node.board import Board
from echo_node.feed import Feed
from echo_node.progress import cancellable, showing
from echo_node.run_model import RunModel
from echo_node.slow_stage import SlowStage
from echo_p2p.chain.engines import free_where_it_computes, load_engine, this_machine
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.pricing import Device
from echo_p2p.chain.server import Allow, ChainServer, Ended
from echo_p2p.chain.speed import value_bytes
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.verdict import Remembered
from echo_p2p.chain.workload import PROMPT_POSITIONS, cache_room, workload_of
from echo_p2p.errors import EchoError, ModelError
from echo_p2p.swarm import Run
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.store import Store
from echo_protocols.values import PolicyVersion, Span

log = logging.getLogger(__name__)

_SPOILT_MAX = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """A span that is loaded, staged and served."""

    span: Span
    host: StageHost
    server: ChainServer
    replica: Replica


@dataclass(frozen=True, slots=True)
class Prepared:
    """A span that is loaded and staged, and not served yet."""

    stage: Stage
    replica: Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a span is held: where versions come from, who may open a chain through it, and who hears of a chain's end."""

    board: Board
    run: Run
    model: RunModel
    feed: Feed
    store: Store
    allow: Allow
    ended: Ended
    engaged: Callable[[], bool]
    spoilt: dict[tuple[Span, PolicyVersion], Remembered] = field(default_factory=dict)
    """What stages that went bad had made of canaries: loaded anew, they have to make the same. The last eight."""
    prepared: dict[Span, Prepared] = field(default_factory=dict)
    """What is loaded beside the span that is held: one span at most."""


@asynccontextmanager
async def hold(span: Span, terms: Terms) -> AsyncIterator[Holding]:
    """Load a span and bring it to the newest version; served meanwhile. Raises ModelError, WeightsError, ChainError.

    While no chain of the plan needs it, as `terms.engaged` says, it follows the releases by itself: it is ready then.
    """
    ready = terms.prepared.pop(span, None)
    stage = ready.stage if ready else await _load(span, terms)
    presence = terms.board.presence
    async with trio.open_nursery() as nursery:
        if ready:
            presence.say(prepared=UNSET)
            nursery.start_soon(terms.feed.keep_staged, ready.replica)
        replica = ready.replica if ready else await _newest(stage, terms, nursery)
        version = replica.applied
        assert version is not None
        log.info("holding span %s at version %s", span, version)
        limits = await trio.to_thread.run_sync(_limits, stage, terms)
        host = StageHost(presence.identity.peer_id, stage, replica, version, limits=limits)
        host.canaries = terms.spoilt.get((span, version), host.canaries)
        server = ChainServer(presence.hive, host, terms.allow, terms.ended)
        await nursery.start(server.serve)
        nursery.start_soon(_follow, host, replica, terms)
        nursery.start_soon(keep_preparing, terms)
        try:
            yield Holding(span, host, server, replica)
        finally:
            if host.corrupt:
                terms.spoilt[span, host.version] = host.canaries
                for oldest in list(terms.spoilt)[:-_SPOILT_MAX]:
                    del terms.spoilt[oldest]
        nursery.cancel_scope.cancel()


async def _follow(host: StageHost, replica: Replica, terms: Terms) -> None:
    """Apply versions as they come while nobody else says when. Raises ChainError."""
    while True:
        version = await replica.newer_than(host.version)
        if terms.engaged():
            await terms.board.presence.swarm.changed()
            continue
        async with host.turns.alone() as turn:
            if not terms.engaged():
                await host.switch(turn, version)


async def _newest(stage: Stage, terms: Terms, nursery: trio.Nursery) -> Replica:
    """Bring a stage to the newest version; its replica is kept staged from now on. Raises WeightsError."""
    initial = await trio.to_thread.run_sync(stage.tensors)
    with showing(f"weights of span {stage.span} from peers") as report:
        replica = Replica(initial, terms.store, report=report)
        nursery.start_soon(terms.feed.keep_staged, replica)
        version = await replica.newer_than(None)
    await trio.to_thread.run_sync(replica.switch, version, stage)
    return replica


async def keep_preparing(terms: Terms) -> None:
    """Have loaded what the plan says that we are to hold next, until cancelled; what is held now goes on meanwhile."""
    presence = terms.board.presence
    own = presence.identity.peer_id
    while True:
        plan = presence.swarm.plan
        coming = plan.upcoming_of(own) if plan else None
        wanted = {coming, plan.span_of(own) if plan else None}
        for span in terms.prepared.keys() - wanted:
            del terms.prepared[span]
            presence.say(prepared=UNSET)
        if coming is None or coming in terms.prepared:
            await presence.swarm.changed()
            continue
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_prepare, coming, terms)
            while presence.swarm.plan == plan or (
                presence.swarm.plan and presence.swarm.plan.upcoming_of(own) == coming
            ):
                await presence.swarm.changed()
            nursery.cancel_scope.cancel()


async def _prepare(span: Span, terms: Terms) -> None:
    """Load a span and keep it at the newest version. A device without room for two leaves it."""
    presence = terms.board.presence
    try:
        await trio.to_thread.run_sync(_check_room, span, terms)
        async with trio.open_nursery() as nursery:
            stage = await _load(span, terms)
            replica = await _newest(stage, terms, nursery)
            log.info("prepared span %s at version %s", span, replica.applied)
            terms.prepared[span] = Prepared(stage, replica)
            presence.say(prepared=span)
            while True:
                version = await replica.newer_than(replica.applied)
                await trio.to_thread.run_sync(replica.switch, version, stage)
    except* EchoError as failures:
        log.warning("span %s can't be prepared (%s); it is loaded when its turn comes", span, failures.exceptions[0])


def _check_room(span: Span, terms: Terms) -> None:
    """Raises ModelError if the memory that is left has no room for a second span."""
    work = workload_of(terms.model.folder, terms.run.manifest)
    memory = int(psutil.virtual_memory().available * terms.board.config.inference.memory_share)
    room = work.room(Device(max_layers=work.layers, memory_bytes=memory), first=span.first, last=span.last)
    if room < len(span):
        raise ModelError(f"{memory >> 20} MiB are left, room for {room} more layers")


async def _load(span: Span, terms: Terms) -> Stage:
    config, model = terms.board.config.inference, terms.model
    with showing(f"fetching weights of span {span}") as report:
        origin = await trio.to_thread.run_sync(model.bring_weights, span, cancellable(report))
    stage: Stage = await trio.to_thread.run_sync(
        lambda: load_engine(config.engine, model.folder, span, device=config.device, weights=origin != "peers")
    )
    log.info(
        "loaded span %s of %s into %s, answers of up to %d tokens",
        span, terms.run.manifest.model, stage.engine, terms.run.manifest.sampling.max_new_tokens,
    )  # fmt: skip
    return SlowStage(stage, config.slowdown_s) if config.slowdown_s else stage


def _limits(stage: Stage, terms: Terms) -> ChainLimits:
    """As many positions as the memory that is left has room for. Raises ModelError if that is too few to begin."""
    config = terms.board.config.inference
    free = free_where_it_computes(config.device, this_machine(), psutil.virtual_memory().available)
    memory = int(free * config.memory_share)
    room = cache_room(terms.model.folder, stage.span, memory, value_bytes(stage.engine))
    manifest = terms.run.manifest
    least = (manifest.group_size + 1) * (PROMPT_POSITIONS + manifest.sampling.max_new_tokens)
    if room < least:
        raise ModelError(
            f"{memory >> 20} MiB are left for keys and values of span {stage.span}, {room} positions; one group may"
            f" take {least}: free memory, raise inference.memory_share, or serve fewer layers (--max-layers)."
        )
    # A head that counts honestly has rows of one lane of about the same length: twice the room is beyond it.
    held = max(2 * room, cache_room(terms.model.folder, stage.span, free, value_bytes(stage.engine)))
    return replace(ChainLimits(), room=min(room, 2**40), held=min(held, 2**41))
