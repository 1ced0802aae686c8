"""What a device says of its speed: measured as it will serve, kept, followed, and what the plan makes of it."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
from numpy.typing import NDArray

from echo_node.measure import SPEED_FILE, STALE_S, Subject, measured, recalled, speed_for, subject_of, told
from echo_node.plans import device_of
from echo_node.run_model import RunModel, contents_nearby, look_nearby
from echo_node.slow_stage import SlowStage
from echo_p2p.chain.drift import NOTABLE, WINDOW_S, Drift
from echo_p2p.chain.host import HostStatistics, StageHost
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.plan import plan
from echo_p2p.chain.pricing import Workload
from echo_p2p.chain.speed import BUDGET_S, Batch, Speed, measure_speed, probed_spans
from echo_p2p.config import InferenceConfig
from echo_p2p.errors import ChainError, ModelError
from echo_protocols.peer import Capacity
from echo_protocols.run import RunManifest, Sampling
from echo_protocols.values import PolicyVersion, Span, decode, encode

V0 = PolicyVersion(epoch=0, step=0)
BATCH = Batch(rows=8, positions=512, layers=12, room=12, hidden=16, vocabulary=32, sampling=Sampling())


class Clock:
    """Seconds that pass only where a stage says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(MemoryStage):
    """A stage that takes the time it is told to: of a step, and of each layer, its tokens, and the output matrix."""

    def __init__(self, span: Span, clock: Clock, *, step_s: float, layer_s: float, token_s: float, head_s: float):
        super().__init__(span)
        self._clock = clock
        self._figures = step_s, layer_s, token_s, head_s
        self.forwards = 0

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        step_s, layer_s, token_s, head_s = self._figures
        self.forwards += 1
        tokens = inputs.shape[0] * inputs.shape[1]
        self._clock.now += step_s + len(self.span) * (layer_s + tokens * token_s) + head_s * self.span.last
        if self.forwards == 1:  # kernels are built, memory is taken
            self._clock.now += 10 * layer_s
        return super().forward(lane, rows, positions, inputs)


def loader(clock: Clock, times: float = 1.0) -> tuple[Callable[[Span], Timed], list[Timed]]:
    stages: list[Timed] = []

    def load(span: Span) -> Timed:
        clock.now += 1000.0  # loading is no computing
        figures = {"step_s": 0.002, "layer_s": 0.001, "token_s": 0.0001, "head_s": 0.004}
        stages.append(Timed(span, clock, **{name: value * times for name, value in figures.items()}))
        return stages[-1]

    return load, stages


def test_each_part_of_a_step_is_told_apart():
    clock = Clock()
    load, stages = loader(clock)
    speed = measure_speed(load, BATCH, clock=clock)
    assert [str(stage.span) for stage in stages] == ["5:6/12", "5:8/12", "11:12/12"]
    assert speed.rows == 8
    assert speed.engine == "memory-float32"
    assert speed.value_bytes == 4
    assert speed.layer_s == pytest.approx(0.001 + 8 * 0.0001)
    assert speed.step_s == pytest.approx(0.002)
    assert speed.token_s == pytest.approx(0.0001)
    assert speed.head_s == pytest.approx(0.004)
    assert speed.layers_per_s(12) == pytest.approx(8 / (0.0018 + 0.002 / 12))
    assert speed.head_layers(12) == pytest.approx(0.004 / (0.0018 + 0.002 / 12))
    assert all(not stage.lanes for stage in stages)


def test_what_else_the_machine_does_is_no_layers_fault():
    clock, draws = Clock(), np.random.default_rng(1)

    class Shared(Timed):
        def forward(self, lane, rows, positions, inputs):
            if self.forwards % 3:
                clock.now += 0.01 * draws.random()
            return super().forward(lane, rows, positions, inputs)

    figures = {"step_s": 0.02, "layer_s": 0.001, "token_s": 0.0001, "head_s": 0.004}
    speed = measure_speed(lambda span: Shared(span, clock, **figures), BATCH, clock=clock)
    assert speed.step_s / speed.layer_s == pytest.approx(0.02 / 0.0018)
    assert 0.0018 < speed.layer_s < 0.0018 * 1.5


def test_what_steps_should_take_adds_up():
    speed = Speed(rows=8, engine="x-bfloat16", layer_s=0.0018, step_s=0.002, head_s=0.004, token_s=0.0001)
    assert speed.value_bytes == 2
    middle, end = Span(start=2, end=5, layers=12), Span(start=9, end=12, layers=12)
    decode = 10 * (0.002 + 3 * 0.0018)
    assert speed.expected_s(middle, steps=10, rows=80, tokens=80) == pytest.approx(decode)
    assert speed.expected_s(end, steps=10, rows=80, tokens=80) == pytest.approx(decode + 10 * 0.004)
    prompt = 0.002 + 3 * (0.001 + 256 * 0.0001)
    assert speed.expected_s(middle, steps=1, rows=1, tokens=256) == pytest.approx(prompt)


def test_a_very_slow_device_is_measured_by_few_steps():
    clock = Clock()
    load, stages = loader(clock, times=1000.0)
    speed = measure_speed(load, BATCH, clock=clock)
    assert [stage.forwards for stage in stages] == [4]  # a prompt's part and a token a row, each once to warm up
    assert clock.now - 1000.0 * len(stages) > BUDGET_S
    assert speed.layer_s == pytest.approx(1000 * (0.002 + 0.001 + 8 * 0.0001))
    assert speed.head_s == 0.0


def test_measuring_keeps_to_its_budget_where_it_can():
    for times in (0.01, 1.0, 20.0):
        clock = Clock()
        load, stages = loader(clock, times)
        measure_speed(load, BATCH, clock=clock)
        assert len(stages) == 3
        assert clock.now - 3000.0 < 2 * BUDGET_S


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("room", [1, 2, 40])
def test_no_more_is_loaded_than_the_device_holds(layers: int, room: int):
    spans = [span for span in probed_spans(layers, room) if span is not None]
    assert all(len(span) <= room and span.layers == layers for span in spans)
    assert layers == 1 or spans[-1] == Span(start=layers - 1, end=layers, layers=layers)
    assert all(not span.last for span in spans[:-1])


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("positions", [6, 20, 64, 512])
def test_small_models_and_short_answers_are_measured_too(layers: int, positions: int):
    batch = Batch(
        rows=3, positions=positions, layers=layers, room=layers, hidden=16, vocabulary=32, sampling=Sampling()
    )

    class Short(MemoryStage):
        def forward(self, lane, rows, positions_, inputs):
            assert positions_[0] + inputs.shape[1] <= positions
            return super().forward(lane, rows, positions_, inputs)

    assert measure_speed(Short, batch, clock=time.perf_counter).layer_s > 0.0


def manifest(**changes: object) -> RunManifest:
    given = {
        "swarm": "s", "model": "tiny", "tokenizer_hash": bytes(32), "layers": 4, "vocabulary": 100,
        "trainers": ("A" * 44,),
    }  # fmt: skip
    return RunManifest(**(given | changes))


def test_a_speed_is_kept_for_a_week_and_for_what_it_was_measured_of(tmp_path: Path):
    clock, path = Clock(), tmp_path / "run" / SPEED_FILE
    asked = subject_of(InferenceConfig(), manifest())

    def again(subject: Subject, now: float) -> int:
        load, stages = loader(clock)
        assert speed_for(path, subject, load, BATCH, now=now, clock=clock) is not None
        return len(stages)

    assert again(asked, 1e9) == 3
    assert again(asked, 1e9 + STALE_S - 1) == 0
    assert again(asked, 1e9 + STALE_S) == 3
    assert again(asked, 1e9) == 3  # a clock that was ahead
    for other in (
        subject_of(InferenceConfig(), manifest(model="another")),
        subject_of(InferenceConfig(engine="torch"), manifest(model="another")),
        subject_of(InferenceConfig(engine="torch", device="cpu"), manifest(model="another")),
        subject_of(InferenceConfig(engine="torch", device="cpu", lane_rows=64), manifest(model="another")),
        subject_of(InferenceConfig(engine="torch", slowdown_s=0.1), manifest(model="another")),
    ):
        assert again(other, 1e9) == 3
        assert again(other, 1e9) == 0
    for damaged in (b"", b"{}", path.read_bytes().replace(b'"layer_s":0', b'"layer_s":-0')):
        path.write_bytes(damaged)
        assert recalled(path, other, 1e9) is None


def test_what_can_not_be_measured_is_not_said_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def fail(span: Span) -> MemoryStage:
        raise ModelError("no such layer")

    class Failing(MemoryStage):
        def join(self, lane, rows, source):
            raise ChainError("no")

    asked = subject_of(InferenceConfig(), manifest())
    for load in (fail, Failing):
        assert speed_for(tmp_path / SPEED_FILE, asked, load, BATCH, now=1.0, clock=time.perf_counter) is None
    assert caplog.text.count("was not measured") == 2
    plain = Capacity(max_layers=3)
    assert told(plain, None, 4) is plain


def test_the_plan_gives_the_slower_of_two_real_peers_fewer_layers(tmp_path: Path):
    run = manifest()
    nearby = look_nearby(run, "")
    model = RunModel(run, nearby, tmp_path / "model", contents_nearby(run, nearby, tmp_path))
    capacities = {}
    for peer, slowdown_s in (("slow", 0.05), ("fast", 0.0)):
        config = InferenceConfig(max_layers=3, slowdown_s=slowdown_s, engine="torch", device="cpu")
        speed = measured(config, run, model, tmp_path / peer, room=3)
        assert speed is not None
        assert (tmp_path / peer / SPEED_FILE).exists()
        capacities[peer] = told(Capacity(max_layers=3), speed, run.layers)
    assert capacities["slow"].layers_per_s < capacities["fast"].layers_per_s / 2
    assert all(decode(encode(capacity), Capacity) == capacity for capacity in capacities.values())
    made = plan({peer: device_of(capacity) for peer, capacity in capacities.items()}, Workload(layers=4, rows=8))
    (chain,) = made.chains
    assert {stop.peer: len(stop.span) for stop in chain} == {"slow": 1, "fast": 3}


def test_a_slow_stage_counts_once_a_step_however_many_layers():
    clock = Clock()
    load, _ = loader(clock)

    class Slow(SlowStage):
        def forward(self, lane, rows, positions, inputs):
            clock.now += 0.03
            return super().forward(lane, rows, positions, inputs)

    speed = measure_speed(lambda span: Slow(load(span), 0.0), BATCH, clock=clock)
    assert speed.step_s == pytest.approx(0.032)
    assert speed.layer_s == pytest.approx(0.0018)
    few, many = (told(Capacity(max_layers=n), speed, 12) for n in (2, 99))
    assert few.layers_per_s == pytest.approx(8 / (0.0018 + 0.016))
    assert many.layers_per_s == pytest.approx(8 / (0.0018 + 0.032 / 12))


def test_what_no_record_takes_is_not_said():
    instant = Speed(rows=65536, engine="x", layer_s=1e-9, head_s=1e6)
    capacity = told(Capacity(max_layers=1), instant, 4)
    assert decode(encode(capacity), Capacity) == capacity


@pytest.mark.parametrize("field", ["layers_per_s", "head_layers", "memory_bytes", "max_layers"])
@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1.0, -1, 1e300])
def test_a_capacity_that_is_no_number_is_refused_at_the_border(field: str, lie: float):
    with pytest.raises(msgspec.DecodeError):
        decode(encode({"max_layers": 4, field: lie}), Capacity)


SPEED = Speed(rows=8, engine="x", layer_s=0.002, step_s=0.001, head_s=0.004, token_s=0.0001)
SPAN = Span(start=8, end=12, layers=12)


def after(steps: int, factor: float, span: Span = SPAN, before: HostStatistics | None = None) -> HostStatistics:
    """What a stage has done in all, after steps that took `factor` times what was measured."""
    busy_s = factor * SPEED.expected_s(span, steps=steps, rows=8 * steps, tokens=8 * steps)
    done = [0, 0, 0, 0.0] if before is None else [before.steps, before.rows, before.tokens, before.busy_s]
    return HostStatistics(
        version=V0, lanes=1, switches=0, refused={},
        steps=int(done[0]) + steps, rows=int(done[1]) + 8 * steps, tokens=int(done[2]) + 8 * steps,
        busy_s=done[3] + busy_s,
    )  # fmt: skip


class Followed:
    """A drift, and a stage that goes on in windows."""

    def __init__(self) -> None:
        self.drift = Drift(SPEED)
        self.now = 0.0
        self.work = after(0, 1.0)
        self.drift.note(SPAN, self.work, self.now)

    def serve(self, *factors: float, steps: int = 100) -> list[float]:
        """What is said after each window of steps that took so many times what was measured."""
        said = []
        for factor in factors:
            self.now += WINDOW_S
            self.work = after(steps, factor, before=self.work)
            self.drift.note(SPAN, self.work, self.now)
            said.append(round(self.drift.factor, 3))
        return said


def test_a_machine_that_gets_slower_says_so_after_a_while_and_then_again_when_it_is_fast():
    followed = Followed()
    assert followed.serve(*[1.0 + NOTABLE * 0.9] * 20) == [1.0] * 20
    assert followed.serve(*[2.0] * 8)[-1] == 2.0
    assert followed.serve(*[1.0] * 12)[-1] == 1.0


def test_a_few_slow_windows_are_no_slower_machine():
    followed = Followed()
    assert followed.serve(*[1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0] * 4) == [1.0] * 28


def test_a_machine_that_was_busy_when_it_was_measured_says_that_it_is_faster():
    assert Followed().serve(*[0.5] * 5) == [1.0] * 4 + [0.5]


def test_too_few_steps_and_idle_time_say_nothing_and_a_new_stage_begins_anew():
    followed = Followed()
    assert followed.serve(*[5.0] * 5, steps=1) == [1.0] * 5
    assert followed.serve(*[5.0] * 20, steps=0) == [1.0] * 20
    assert followed.serve(*[3.0] * 4)[-1] == 1.0
    for span in (Span(start=4, end=8, layers=12), SPAN):
        assert not followed.drift.note(span, after(5, 3.0, span), followed.now)
    followed.work = after(5, 3.0)
    assert followed.serve(*[1.0] * 9) == [1.0] * 9
    assert followed.serve(*[1e9] * 9)[-1] == 100.0


def test_a_host_counts_the_tokens_that_it_computes():
    async def main() -> None:
        span = Span(start=0, end=2, layers=2)
        host = StageHost("peer", MemoryStage(span), MemoryWeights({}), V0)
        lane, rows = host.begin(), np.zeros(1, np.int32)
        for position, length in ((0, 5), (5, 1)):
            tokens = np.zeros((1, length), np.int32)
            with await host.turns.begin() as turn:
                await host.forward(turn, lane, rows, rows + position, tokens, lambda outputs: outputs)
        figures = host.statistics
        assert (figures.steps, figures.rows, figures.tokens) == (2, 2, 6)
        assert host.running_s == 0.0

    trio.run(main)
