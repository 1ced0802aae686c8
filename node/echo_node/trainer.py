"""The trainer role: one run, from its manifest to its last step. Composes; every part is elsewhere."""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import trio
from msgspec import UNSET

from echo_node.board import Board
from echo_node.course import Course
from echo_node.herald import Herald
from echo_node.leader import lead
from echo_node.learner import Learner
from echo_node.places import Places, write_whole
from echo_node.plans import missing, workload_for
from echo_node.prompts import load_prompts
from echo_node.pull_gather import PullGather
from echo_p2p.chain.shape import model_shape
from echo_p2p.config import NodeConfig, dump_config
from echo_p2p.models import resolve_model, stop_tokens, tokenizer_hash
from echo_p2p.models.files import offered, small_files
from echo_p2p.models.layout import tensor_shapes
from echo_p2p.models.naming import run_name
from echo_p2p.net.blobs import serve_blobs
from echo_p2p.net.uplink import Uplink
from echo_p2p.rl.algorithms import step_size
from echo_p2p.rl.buffer import ReplayBuffer
from echo_p2p.rl.trainer import Trainer
from echo_p2p.spread.announce import Announcer
from echo_p2p.spread.holdings import Holdings
from echo_p2p.spread.seeding import Seeding
from echo_p2p.swarm import Run
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.run import RunManifest

log = logging.getLogger(__name__)


def make_manifest(config: NodeConfig, trainer: str) -> RunManifest:
    """The manifest that a configuration describes, with this peer as its trainer. Raises ModelError, ConfigError."""
    run = config.run
    path = resolve_model(run.model)
    shape = model_shape(path)
    return RunManifest(
        swarm=config.swarm,
        model=run_name(run.model),
        tokenizer_hash=bytes.fromhex(tokenizer_hash(run.model)),
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        stop_tokens=stop_tokens(run.model),
        task=run.task,
        algorithm=run.algorithm,
        sampling=run.sampling,
        protocol=run.protocol,
        max_lag=0 if run.protocol == "sequential" else run.max_lag,
        group_size=run.group_size,
        groups_per_step=run.groups_per_step,
        prompts=run.prompts,
        trainers=(trainer,),
        admission=run.admission,
        seed=run.seed,
        model_files=offered(small_files(path, tensor_shapes(path))) or UNSET,
    )


def keep_model_files(store: Store, path: Path) -> None:
    """Hold what the manifest offers of the model in `path` as long as we live. Raises ModelError, WeightsError."""
    store.pin("model", [store.put(content) for content in small_files(path, tensor_shapes(path)).values()])


def load_engine(config: NodeConfig) -> Trainer:
    """The training engine, on the configured device."""
    import torch

    from echo_p2p.rl.verl_trainer import VerlTrainer

    run, device = config.run, config.trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return VerlTrainer(
        resolve_model(run.model),
        run.algorithm,
        seed=run.seed,
        sampling=run.sampling,
        device=device,
        micro_batch_rows=config.trainer.micro_batch_rows,
    )


def open_learner(config: NodeConfig, manifest: RunManifest, folder: Path, store: Store) -> tuple[Learner, Publisher]:
    """Load everything that learning needs; seconds of work for a worker thread."""
    write_whole(folder / "config.json", dump_config(config))
    write_whole(folder / "manifest.json", msgspec.json.encode(manifest))
    publisher = Publisher(store, snapshot_every=config.trainer.snapshot_every, keep=config.trainer.keep_releases)
    learner = Learner(
        folder,
        engine=load_engine(config),
        publisher=publisher,
        prompts=load_prompts(manifest, resolve_model(config.run.model)),
        config=config.trainer,
        size=step_size(manifest.algorithm, manifest.groups_per_step),
    )
    return learner, publisher


async def serve_store(
    board: Board, store: Store, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Upload what the store holds, about once: peers pass it on. Until cancelled."""
    streams, refused = board.presence.hive, board.presence.border.refused
    announcer = Announcer(streams, Holdings(store.__contains__, Seeding()), refused=refused)
    uplink = Uplink(board.config.trainer.upload_bytes_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(announcer.serve)
        serve = partial(serve_blobs, streams, store.get, refused=refused, uplink=uplink, watcher=announcer)
        await nursery.start(serve)
        task_status.started()


async def run_trainer(board: Board, places: Places) -> None:
    """Train until the configured number of steps is done, or until cancelled; then write a last checkpoint."""
    config, presence = board.config, board.presence
    manifest = await trio.to_thread.run_sync(make_manifest, config, presence.identity.peer_id)
    model = await trio.to_thread.run_sync(resolve_model, config.run.model)
    run = Run(manifest, manifest.run_id(), presence.identity.peer_id, 0.0, model)
    folder = places.run(run.run_id)
    log.info("run %s: loading %s from %s, and the training engine", run.run_id.hex()[:12], manifest.model, model)
    presence.swarm.join(run)
    presence.say(run_id=run.run_id)
    with ExitStack() as stack:
        store = Store(folder / "blobs", config.trainer.store_bytes)
        await trio.to_thread.run_sync(keep_model_files, store, model)
        learner, publisher = await trio.to_thread.run_sync(open_learner, config, manifest, folder, store)
        course = Course(board, run, learner, Herald(presence, run, store, publisher))
        if manifest.protocol == "async":
            bounds = config.trainer
            buffer = ReplayBuffer(
                folder / "buffer.sqlite", max_groups=bounds.buffer_groups, max_bytes=bounds.buffer_bytes
            )
            course.use_buffer(stack.enter_context(buffer))
        else:
            course.gather = PullGather(presence, run, learner, deadline_s=config.trainer.pull_deadline_s)
        course.lacking = partial(missing, presence, run, workload_for(run))
        board.trainer, board.refused = course.view, course.refused
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_store, board, store)
            nursery.start_soon(course.herald.run)
            await presence.swarm.publish_run(manifest)
            nursery.start_soon(lead, presence, run, course.standing)
            try:
                await course.run(nursery)
            finally:
                with trio.CancelScope(shield=True):
                    await course.checkpoint()
            nursery.cancel_scope.cancel()
