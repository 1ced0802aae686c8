"""The inference role: find the run, say what this device can hold, and serve whatever span the plan gives it."""

import logging
import os
from collections.abc import Collection, Sequence
from functools import partial

import psutil
import trio

from echo_node.board import Board
from echo_node.feed import Feed
from echo_node.measure import follow_speed, measured, told
from echo_node.places import Places
from echo_node.produce import Counter
from echo_node.prompts import Prompts, load_prompts
from echo_node.serve import Assignment, Service
from echo_node.ways import keep_measuring_ways
from echo_p2p.chain.shape import layers_that_fit, model_shape
from echo_p2p.config import InferenceConfig, NodeConfig
from echo_p2p.errors import ChainError, ConfigError, ModelError, NetError, WeightsError
from echo_p2p.models import resolve_model
from echo_p2p.net.blobs import serve_blobs
from echo_p2p.net.uplink import Uplink
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run, Swarm
from echo_p2p.weights.store import Store
from echo_protocols.peer import Capacity
from echo_protocols.run import RunManifest

log = logging.getLogger(__name__)

_SERVE_AGAIN_S = 1.0


async def run_inference(board: Board, places: Places) -> None:
    """Serve one run after the other until cancelled. Raises ModelError when this device can't hold a layer."""
    if hasattr(os, "nice"):
        os.nice(board.config.inference.nice)
    run, prompts = await _find_run(board.presence, board.config)
    while True:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve_run, board, places, run, prompts)
            while (following := successor(run, board.presence.swarm.runs)) is None:
                await board.presence.swarm.changed()
            log.info("the trainer of run %s has begun another", run.run_id.hex()[:12])
            nursery.cancel_scope.cancel()
        run, prompts = following, await trio.to_thread.run_sync(load_prompts, following.manifest)


async def _serve_run(board: Board, places: Places, run: Run, prompts: Prompts) -> None:
    presence, config = board.presence, board.config.inference
    log.info("run %s: %s, task %s", run.run_id.hex()[:12], run.manifest.model, run.manifest.task.name)
    presence.swarm.join(run)
    capacity = await trio.to_thread.run_sync(measure_capacity, config, run.manifest)
    folder = places.run(run.run_id)
    speed = await trio.to_thread.run_sync(
        measured, config, run.manifest, prompts.model_path, folder, capacity.max_layers, abandon_on_cancel=True
    )
    capacity = told(capacity, speed, run.manifest.layers)
    log.info("this device computes %.0f layers × tokens a second", capacity.layers_per_s)
    store = await trio.to_thread.run_sync(Store, folder / "blobs", config.store_bytes)
    feed = Feed(presence, run, store)
    service = Service(board, run, prompts, feed, store, Counter(folder / "counter"))
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
        nursery.start_soon(keep_measuring_ways, presence)
        if speed is not None:
            nursery.start_soon(follow_speed, presence, service, speed, run.manifest.layers)
        await _follow_plan(presence, service)


async def _follow_plan(presence: Presence, service: Service) -> None:
    """Serve one assignment after the other until cancelled."""
    while True:
        assignment = assignment_of(presence)
        presence.say(span=assignment.span if assignment else None)
        if assignment is None:
            log.info("no chain needs this peer yet; waiting for a plan")
            while assignment_of(presence) is None:
                await presence.swarm.changed()
            continue
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_serving, service, assignment)
            while assignment_of(presence) == assignment:
                await presence.swarm.changed()
            log.info("the plan has changed; leaving span %s", assignment.span)
            nursery.cancel_scope.cancel()


async def _keep_serving(service: Service, assignment: Assignment) -> None:
    """Serve one assignment until cancelled; what the network does to it is no reason to leave the swarm."""
    while True:
        try:
            await service.serve(assignment)
        except* (NetError, WeightsError, ChainError) as failures:
            log.warning("span %s failed (%s); serving it again", assignment.span, failures.exceptions[0])
        await trio.sleep(_SERVE_AGAIN_S)


def assignment_of(presence: Presence) -> Assignment | None:
    """What the latest plan wants of this peer."""
    plan, peer = presence.swarm.plan, presence.identity.peer_id
    chain = plan.chain_of(peer) if plan else None
    if chain is None:
        return None
    return Assignment(chain, next(stop.span for stop in chain if stop.peer == peer))


def measure_capacity(config: InferenceConfig, manifest: RunManifest) -> Capacity:
    """What this device can hold of the run's model. Raises ModelError when not even a layer fits."""
    path = resolve_model(manifest.model)
    memory = int(psutil.virtual_memory().available * config.memory_share)
    layers = layers_that_fit(path, memory)
    if layers == 0:
        raise ModelError(
            f"not one layer of {manifest.model} ({model_shape(path).size_bytes >> 20} MiB) fits into the "
            f"{memory >> 20} MiB that inference.memory_share={config.memory_share} allows; free memory or raise it."
        )
    return Capacity(
        max_layers=min(layers, config.max_layers or layers),
        memory_bytes=memory,
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


async def _find_run(presence: Presence, config: NodeConfig) -> tuple[Run, Prompts]:
    """A run of this swarm that goes on, and its prompts. Raises ModelError, ConfigError if we can serve none."""
    swarm = presence.swarm
    log.info("looking for a run in swarm %s", swarm.name)
    told = {address.rpartition("/p2p/")[2] for address in config.network.peers}
    while not (found := candidates(swarm, config.inference.owner, told)):
        await swarm.changed()
    if len(found) > 1:
        log.warning(
            "swarm %s has %d runs; taking that of trainer %s: choose another with --set inference.owner=PEER",
            swarm.name, len(found), found[0].owner,
        )  # fmt: skip
    for run in found[:-1]:
        try:
            return run, await trio.to_thread.run_sync(load_prompts, run.manifest)
        except (ModelError, ConfigError) as error:
            log.warning("run %s of %s can't be served: %s", run.run_id.hex()[:12], run.owner, error)
    return found[-1], await trio.to_thread.run_sync(load_prompts, found[-1].manifest)
