"""The inference role: find the run, say what this device can hold, and serve whatever span the plan gives it."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import trio

from echo_node.board import Board
from echo_node.feed import Feed
from echo_node.measure import follow_speed, measured, told
from echo_node.model_files import open_model
from echo_node.places import Places
from echo_node.produce import Counter
from echo_node.prompts import Prompts, load_prompts
from echo_node.run_model import RunModel
from echo_node.serve import Service
from echo_node.ways import keep_measuring_ways
from echo_p2p.chain.engines import free_where_it_computes, this_machine
from echo_p2p.chain.fit import layers_on, refusal
from echo_p2p.chain.pricing import Device
from echo_p2p.chain.workload import workload_of
from echo_p2p.config import InferenceConfig
from echo_p2p.errors import ChainError, ConfigError, ModelError, NetError, RemoteError, WeightsError
from echo_p2p.net.blobs import serve_blobs
from echo_p2p.net.uplink import Uplink
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run, Swarm
from echo_p2p.weights.store import Store
from echo_protocols.peer import Capacity
from echo_protocols.run import RunManifest
from echo_protocols.values import Span

log = logging.getLogger(__name__)

_SERVE_AGAIN_S = 1.0
_ASK_AGAIN_S = 3.0


async def run_inference(board: Board, places: Places) -> None:
    """Serve one run after the other until cancelled. Raises ModelError when this device can't hold a layer."""
    if hasattr(os, "nice"):
        os.nice(board.config.inference.nice)
    joined = await _find_run(board, places)
    while True:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve_run, board, places, joined)
            while (following := successor(joined.run, board.presence.swarm.runs)) is None:
                await board.presence.swarm.changed()
            log.info("the trainer of run %s has begun another", joined.run.run_id.hex()[:12])
            nursery.cancel_scope.cancel()
        joined = await _join_first(board, places, [following]) or await _find_run(board, places)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A run that can be served: its model's small files are here."""

    run: Run
    model: RunModel
    prompts: Prompts
    store: Store


async def _serve_run(board: Board, places: Places, joined: _Joined) -> None:
    presence, config = board.presence, board.config.inference
    run, store = joined.run, joined.store
    log.info("run %s: %s, task %s", run.run_id.hex()[:12], run.manifest.model, run.manifest.task.name)
    presence.swarm.join(run)
    capacity = await trio.to_thread.run_sync(measure_capacity, config, run.manifest, joined.model.folder)
    folder = places.run(run.run_id)
    speed = await trio.to_thread.run_sync(
        measured, config, run.manifest, joined.model, folder, capacity.max_layers, abandon_on_cancel=True
    )
    capacity = told(capacity, speed, run.manifest.layers)
    if speed is None:
        log.info("how fast this device computes is not known before it serves; the plan takes it for a usual one")
    else:
        log.info("this device computes %.0f layers × tokens a second", capacity.layers_per_s)
    feed = Feed(presence, run, store)
    service = Service(board, run, joined.model, joined.prompts, feed, store, Counter(folder / "counter"))
    presence.figures, presence.busy = service.figures, service.busy
    board.inference, board.refused = service.view, service.refused
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        await nursery.start(
            partial(
                serve_blobs,
                presence.hive,
                store.get,
                refused=presence.border.refused,
                uplink=Uplink(config.upload_bytes_s),
                watcher=feed.announcer,
            )
        )
        presence.say(run_id=run.run_id, capacity=capacity, span=None)
        nursery.start_soon(service.run)
        nursery.start_soon(keep_measuring_ways, presence)
        if speed is not None:
            nursery.start_soon(follow_speed, presence, service, speed, run.manifest.layers)
        await _follow_plan(presence, service)


async def _follow_plan(presence: Presence, service: Service) -> None:
    """Hold one span after the other until cancelled."""
    while True:
        span = span_of(presence)
        presence.say(span=span)
        if span is None:
            log.info("no chain needs this peer yet; waiting for a plan")
            while span_of(presence) is None:
                await presence.swarm.changed()
            continue
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_serving, service, span)
            while span_of(presence) == span:
                await presence.swarm.changed()
            log.info("the plan has changed; leaving span %s", span)
            nursery.cancel_scope.cancel()


async def _keep_serving(service: Service, span: Span) -> None:
    """Hold a span until cancelled; what the network does to it is no reason to leave the swarm."""
    while True:
        try:
            await service.serve(span)
        except* (NetError, WeightsError, ChainError) as failures:
            log.warning("span %s failed (%s); serving it again", span, failures.exceptions[0])
        await trio.sleep(_SERVE_AGAIN_S)


def span_of(presence: Presence) -> Span | None:
    """What the latest plan wants this peer to hold."""
    plan = presence.swarm.plan
    return plan.span_of(presence.identity.peer_id) if plan else None


def measure_capacity(config: InferenceConfig, manifest: RunManifest, path: Path) -> Capacity:
    """What this device can hold of the run's model, in `path`. Raises ModelError when not even a layer fits."""
    work = workload_of(path, manifest)
    free = free_where_it_computes(config.device, this_machine(), psutil.virtual_memory().available)
    device = Device(max_layers=work.layers, memory_bytes=int(free * config.memory_share))
    layers = layers_on(device, work)
    if layers == 0:
        share = config.memory_share
        raise ModelError(refusal(work, manifest.model, free_bytes=free, share=share, value_bytes=device.value_bytes))
    return Capacity(
        max_layers=min(layers, config.max_layers or layers),
        memory_bytes=device.memory_bytes,
        device="cpu" if config.device == "auto" else config.device,
    )


def successor(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run that the owner of `run` has begun in its place, if any. Nobody else can put an end to a run."""
    if any(each.run_id == run.run_id for each in runs):
        return None
    return next((each for each in runs if each.owner == run.owner), None)


def candidates(swarm: Swarm, owner: str, told: Collection[str]) -> list[Run]:
    """The runs of live trainers, and those whose trainer is away while others take part; only `owner`'s if named.

    First those with a live trainer, then of peers that we were told of, then the oldest: who publishes a run says when
    it began, so the order is worth little among strangers.
    """
    members = swarm.members
    led = {peer for peer, member in members.items() if member.record.role == "trainer"}
    served = {member.record.run_id for member in members.values() if member.record.role == "inference"}
    going_on = [run for run in swarm.runs if (run.owner in led or run.run_id in served) and owner in ("", run.owner)]
    return sorted(going_on, key=lambda run: (run.owner not in led, run.owner not in told))


async def _find_run(board: Board, places: Places) -> _Joined:
    """A run of this swarm that goes on, and that we can serve. Raises ModelError, ConfigError if there is none."""
    swarm, config = board.presence.swarm, board.config
    log.info("looking for a run in swarm %s", swarm.name)
    told = {address.rpartition("/p2p/")[2] for address in config.network.peers}
    while True:
        while not (found := candidates(swarm, config.inference.owner, told)):
            await swarm.changed()
        if len(found) > 1:
            log.warning(
                "swarm %s has %d runs; taking that of trainer %s: choose another with --set inference.owner=PEER",
                swarm.name, len(found), found[0].owner,
            )  # fmt: skip
        if joined := await _join_first(board, places, found):
            return joined
        await trio.sleep(_ASK_AGAIN_S)


async def _join_first(board: Board, places: Places, runs: Sequence[Run]) -> _Joined | None:
    """The first of some runs that can be served; None if there is none now, but may be one later.

    Raises ModelError, ConfigError if none can be served at all.
    """
    faults: list[ModelError | ConfigError] = []
    for run in runs:
        try:
            return await _join(board, places, run)
        except (ModelError, ConfigError) as error:
            faults.append(error)
            if len(faults) < len(runs):  # else it is raised
                log.warning("run %s of %s can't be served: %s", run.run_id.hex()[:12], run.owner, error)
        except (WeightsError, NetError, RemoteError) as error:
            log.warning("the files of run %s can't be had yet: %s", run.run_id.hex()[:12], error)
    if len(faults) == len(runs):
        raise faults[-1]
    return None


async def _join(board: Board, places: Places, run: Run) -> _Joined:
    folder, config, presence = places.run(run.run_id), board.config.inference, board.presence
    store = await trio.to_thread.run_sync(Store, folder / "blobs", config.store_bytes)
    model = await open_model(run, presence.swarm, presence.hive, folder / "model", store, config.model)
    model.check_engine(config.engine)
    return _Joined(run, model, await trio.to_thread.run_sync(load_prompts, run.manifest, model.folder), store)
