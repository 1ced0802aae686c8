"""A whole model that a peer holds in vLLM: loaded, kept at the newest version, and answering while the plan says so.

Knows no ring, and no plan but for the chain that it is told.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import trio

from echo_node.chat_desk import Voice
from echo_node.holding import Terms
from echo_node.produce import Head
from echo_node.progress import cancellable, showing
from echo_p2p.chain.answerer import GroupBounds
from echo_p2p.chain.engines import takes_vllm, this_machine, vllm_device
from echo_p2p.chain.vllm_engine import VllmEngine, cancel_after, load_for
from echo_p2p.chain.vllm_process import open_process
from echo_p2p.chain.vllm_wire import Load
from echo_p2p.chain.workload import PROMPT_POSITIONS
from echo_p2p.config import InferenceConfig
from echo_p2p.errors import ChainError, ModelError
from echo_p2p.weights.fetch import Replica
from echo_protocols.peer import Stop
from echo_protocols.run import RunManifest
from echo_protocols.values import Span

log = logging.getLogger(__name__)

ROWS_MAX = 256


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that answers, and the versions that it can switch to."""

    engine: VllmEngine
    replica: Replica


async def answer_alone(
    span: Span,
    terms: Terms,
    head: Head,
    chain: Callable[[], tuple[Stop, ...]],
    ready: Callable[[VllmEngine], None],
) -> None:
    """Hold a whole model in vLLM and answer with it, if that is what is wanted; else return, as if it can't be had.

    `chain` says whether the plan has us answer, `ready` hears of the engine. Raises ModelError if only vLLM was wanted,
    and ChainError once it has failed.
    """
    config = terms.board.config.inference
    if config.slowdown_s or not takes_vllm(config.engine, config.device, this_machine(), span):
        return
    try:
        async with hold_whole(span, terms) as whole:
            ready(whole.engine)
            terms.board.presence.swarm.announce()  # that we are ready
            await _answer(whole, terms, head, chain)
    except ModelError as error:
        if config.engine == "vllm":
            raise
        log.warning("%s; taking torch instead", error)
        return
    raise whole.engine.fault or ChainError("the vllm engine was closed")


async def _answer(whole: WholeModel, terms: Terms, head: Head, chain: Callable[[], tuple[Stop, ...]]) -> None:
    """Make groups, and take chats, while the plan has us do so; follow the releases meanwhile. Until it fails."""
    swarm, manifest = terms.board.presence.swarm, terms.run.manifest
    voice = Voice(whole.engine, manifest, terms.model.folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_after, whole.engine.failed, nursery.cancel_scope)
        while True:
            ours = chain()
            async with trio.open_nursery() as meanwhile:
                if manifest.protocol == "async" or not ours:  # else the trainer says when
                    meanwhile.start_soon(head.keep_switched, whole.engine, whole.replica)
                with ExitStack() as stack:
                    if ours:
                        log.info("answering with the whole model")
                        stack.enter_context(head.using(whole.engine))
                        stack.enter_context(terms.board.desk.lend(voice))
                    while chain() == ours:
                        await swarm.changed()
                meanwhile.cancel_scope.cancel()


@asynccontextmanager
async def hold_whole(span: Span, terms: Terms) -> AsyncIterator[WholeModel]:
    """Load the model and bring it to the newest version. Raises ModelError, WeightsError, ChainError."""
    config, model = terms.board.config.inference, terms.model
    with showing(f"fetching weights of span {span}") as report:
        origin = await trio.to_thread.run_sync(model.bring_weights, span, cancellable(report))
    if origin == "peers":
        raise ModelError(
            "--engine vllm proves itself on the model's own weights, and they are not here: "
            "name a folder that has them with inference.model, or choose --engine torch"
        )
    load = await trio.to_thread.run_sync(load_of, config, terms.run.manifest, model.folder, span)
    async with open_process(load) as process:
        initial = await trio.to_thread.run_sync(process.tensors)
        async with trio.open_nursery() as nursery:
            with showing(f"weights of span {span} from peers") as report:
                replica = Replica(initial, terms.store, report=report)
                nursery.start_soon(terms.feed.keep_staged, replica)
                engine = VllmEngine(process, replica, GroupBounds(samples=load.rows, positions=load.positions))
                await _begin(engine, replica)
            log.info("holding %s at version %s in %s", terms.run.manifest.model, engine.version, engine.engine)
            yield WholeModel(engine, replica)
            nursery.cancel_scope.cancel()


async def _begin(engine: VllmEngine, replica: Replica) -> None:
    """Put the newest release in place, as soon as there is one."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_after, engine.failed, nursery.cancel_scope)
        await engine.begin(await replica.newer_than(None))
        nursery.cancel_scope.cancel()
    if engine.failed.is_set():
        raise engine.fault or ChainError("the vllm engine was closed")


def load_of(config: InferenceConfig, manifest: RunManifest, model_path: Path, span: Span) -> Load:
    """As many rows as the lanes of a ring would have, in the share of memory that the peer gives. Raises ModelError."""
    rows = config.lanes * max(config.lane_rows, manifest.group_size)
    return load_for(
        model_path,
        span,
        device=vllm_device(config.device, this_machine()),
        rows=max(manifest.group_size, min(ROWS_MAX, rows)),
        positions=PROMPT_POSITIONS + manifest.sampling.max_new_tokens,
        memory_bytes=int(psutil.virtual_memory().available * config.memory_share),
        memory_share=config.memory_share,
    )
