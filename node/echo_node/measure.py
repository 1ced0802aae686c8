"""What this device is worth to a run: measured at the start, kept in the run's folder, and followed while it serves."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio
from msgspec import Struct

from echo_node.places import write_whole
from echo_node.run_model import RunModel
from echo_node.serve import Service
from echo_node.slow_stage import SlowStage
from echo_p2p.chain.drift import WINDOW_S, Drift
from echo_p2p.chain.engines import load_engine
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.speed import Batch, Speed, measure_speed
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.workload import workload_of
from echo_p2p.config import InferenceConfig
from echo_p2p.presence import Presence
from echo_protocols.peer import Capacity
from echo_protocols.run import RunManifest
from echo_protocols.values import Span

log = logging.getLogger(__name__)

SPEED_FILE = "speed.json"
STALE_S = 7 * 24 * 3600.0

_RATE_MAX, _HEAD_MAX = 1e12, 65536.0  # what a record takes


class Subject(Struct, frozen=True, kw_only=True):
    """What a speed is of."""

    model: str
    layers: int
    engine: str
    device: str
    rows: int
    slowdown_s: float


class Kept(Struct, frozen=True, kw_only=True):
    """A speed on disk, with the Unix time of its measuring."""

    subject: Subject
    at: float
    speed: Speed


def subject_of(config: InferenceConfig, manifest: RunManifest) -> Subject:
    """What has to be measured for a run."""
    return Subject(
        model=manifest.model,
        layers=manifest.layers,
        engine=config.engine,
        device=config.device,
        rows=max(config.lane_rows, manifest.group_size),
        slowdown_s=config.slowdown_s,
    )


def recalled(path: Path, subject: Subject, now: float) -> Speed | None:
    """The speed in a file, if it is of this subject and not of more than a week ago. `now` is in Unix seconds."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        log.debug("no speed in %s: %s", path, error)
        return None
    return kept.speed if kept.subject == subject and 0.0 <= now - kept.at < STALE_S else None


def stage_loader(config: InferenceConfig, model: RunModel) -> Callable[[Span], Stage]:
    """Loads spans as they will be served; with weights only if they are here, as nothing is fetched to be measured."""
    folder, here = (model.folder, False) if model.local is None else (model.local, True)

    def load(span: Span) -> Stage:
        stage = load_engine(config.engine, folder, span, device=config.device, weights=here)
        return SlowStage(stage, config.slowdown_s) if config.slowdown_s else stage

    return load


def speed_for(
    path: Path, subject: Subject, load: Callable[[Span], Stage], batch: Batch, *, now: float, clock: Callable[[], float]
) -> Speed | None:
    """The speed in a file, or measured and written there; None if it can't be measured. Blocks."""
    if (known := recalled(path, subject, now)) is not None:
        return known
    try:
        speed = measure_speed(load, batch, clock=clock)
        write_whole(path, msgspec.json.encode(Kept(subject=subject, at=now, speed=speed)))
    except Exception as error:  # whatever an engine or a disk does: a peer that is not measured counts as a usual one
        log.warning("the speed of this device was not measured (%s); serving without", error)
        log.debug("measuring failed", exc_info=True)
        return None
    return speed


def measured(config: InferenceConfig, manifest: RunManifest, model: RunModel, folder: Path, room: int) -> Speed | None:
    """The speed of this device for a run whose folder is `folder`; `room` layers fit. Blocks for seconds."""
    work, shape, subject = workload_of(model.folder, manifest), model_shape(model.folder), subject_of(config, manifest)
    batch = Batch(
        rows=subject.rows,
        positions=work.positions,
        layers=manifest.layers,
        room=room,
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        sampling=manifest.sampling,
    )
    load = stage_loader(config, model)
    return speed_for(folder / SPEED_FILE, subject, load, batch, now=time.time(), clock=time.perf_counter)


def told(capacity: Capacity, speed: Speed | None, layers: int, factor: float = 1.0) -> Capacity:
    """A capacity with the figures of a speed, for a model of `layers` layers, `factor` times slower than measured."""
    if speed is None:
        return capacity
    held = min(capacity.max_layers, layers)
    return msgspec.structs.replace(
        capacity,
        layers_per_s=min(_RATE_MAX, speed.layers_per_s(held) / factor),
        head_layers=min(_HEAD_MAX, speed.head_layers(held)),
        value_bytes=speed.value_bytes,
    )


async def follow_speed(presence: Presence, service: Service, speed: Speed, layers: int) -> None:
    """Say so when serving turns out slower or faster than was said; until cancelled."""
    drift = Drift(speed)
    while True:
        await trio.sleep(WINDOW_S / 2)
        work, capacity = service.work(), presence.record.capacity
        if work is None or capacity is None or not drift.note(*work, trio.current_time()):
            continue
        log.info("steps take %.2f times what was measured at the start", drift.factor)
        presence.say(capacity=told(capacity, speed, layers, drift.factor))
