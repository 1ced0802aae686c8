"""A peer that holds the whole model in vLLM: what it asks its engine for, and how it begins. Knows no ring."""

from pathlib import Path

import psutil
import trio

from echo_p2p.chain.answerer import GroupBounds
from echo_p2p.chain.engines import this_machine, vllm_device
from echo_p2p.chain.vllm_engine import VllmEngine, load_for
from echo_p2p.chain.vllm_process import EngineProcess
from echo_p2p.chain.vllm_wire import Load
from echo_p2p.chain.workload import PROMPT_POSITIONS
from echo_p2p.config import InferenceConfig
from echo_p2p.errors import ChainError
from echo_p2p.weights.fetch import Replica
from echo_protocols.run import RunManifest
from echo_protocols.values import Span

ROWS_MAX = 256


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


async def open_whole(process: EngineProcess, load: Load, replica: Replica) -> VllmEngine:
    """An engine at the newest release, as soon as there is one. Raises WeightsError, ChainError."""
    engine = VllmEngine(process, replica, GroupBounds(samples=load.rows, positions=load.positions))
    async with trio.open_nursery() as nursery:

        async def leave_when_failed() -> None:
            await process.failed.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave_when_failed)
        await engine.begin(await replica.newer_than(None))
        nursery.cancel_scope.cancel()
        return engine
    raise engine.fault or ChainError("the vllm engine was closed")
