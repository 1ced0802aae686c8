"""The inference role: find the run, say what this device can hold, and serve whatever span the plan gives it."""

import logging
import os

import psutil
import trio

from echo_node.board import Board
from echo_node.feed import Feed
from echo_node.places import Places
from echo_node.produce import Counter
from echo_node.prompts import load_prompts
from echo_node.serve import Assignment, Service
from echo_p2p.chain.shape import layers_that_fit, model_shape
from echo_p2p.config import InferenceConfig
from echo_p2p.errors import ModelError
from echo_p2p.models import resolve_model
from echo_p2p.net.blobs import serve_blobs
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_p2p.weights.store import Store
from echo_protocols.peer import Capacity
from echo_protocols.run import RunManifest

log = logging.getLogger(__name__)


async def run_inference(board: Board, places: Places) -> None:
    """Serve until cancelled. Raises ModelError when this device can't hold a layer."""
    presence, config = board.presence, board.config.inference
    if hasattr(os, "nice"):
        os.nice(config.nice)
    run = await _find_run(presence)
    log.info("run %s: %s, task %s", run.run_id.hex()[:12], run.manifest.model, run.manifest.task.name)
    presence.swarm.join(run)
    prompts = await trio.to_thread.run_sync(load_prompts, run.manifest)
    capacity = await trio.to_thread.run_sync(measure_capacity, config, run.manifest)
    folder = places.run(run.run_id)
    store = await trio.to_thread.run_sync(Store, folder / "blobs", config.store_bytes)
    feed = Feed(presence, run, store)
    service = Service(board, run, prompts, feed, store, Counter(folder / "counter"))
    board.inference = service.view
    presence.say(run_id=run.run_id, capacity=capacity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        await nursery.start(serve_blobs, presence.hive, store.get)
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
            nursery.start_soon(service.serve, assignment)
            while assignment_of(presence) == assignment:
                await presence.swarm.changed()
            log.info("the plan has changed; leaving span %s", assignment.span)
            nursery.cancel_scope.cancel()


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


async def _find_run(presence: Presence) -> Run:
    """The oldest run of this swarm with a live trainer."""
    swarm = presence.swarm
    log.info("looking for a run in swarm %s", swarm.name)
    while True:
        for run in swarm.runs:
            if run.owner in swarm.members:
                return run
        await swarm.changed()
