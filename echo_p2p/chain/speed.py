"""How fast this device computes a model: measured on a few layers of it, as a run would use them. Knows no file.

A step of a span takes `step_s` whatever it holds, and more for each layer, each token of it, and the output matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Final

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from echo_p2p.chain.sampler import draw
from echo_p2p.chain.stage import Stage
from echo_protocols.run import Sampling
from echo_protocols.values import Name, Span

BUDGET_S: Final = 5.0
"""Of computing, all in all; a device that is far too slow for that is measured by single steps."""

REPEATS_MAX: Final = 7
PROMPT_PART: Final = 64
"""Tokens of the parts that a prompt is read in here: small, for the sake of slow devices."""

_ROWS_MAX = 64
_LAYERS_MAX = 3
_SHARE_S = BUDGET_S / 10  # of the steps of one kind of one layer; there are two kinds, and five layers at most
_SCALE = np.float32(0.05)  # of hidden inputs
Integers = NDArray[np.int32]

_LEAST_S = 1e-7  # what a layer takes at least: clocks are coarse

_Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is computed: `rows` answers at once, each `positions` long at most, drawn by `sampling`.

    The model has `layers` layers, of which the device holds `room`.
    """

    rows: int
    positions: int
    layers: int
    room: int
    hidden: int
    vocabulary: int
    sampling: Sampling


class Speed(Struct, frozen=True, kw_only=True):
    """Seconds, at `rows` rows of one token: of a step whatever it holds, of each layer, and of the output matrix.

    `token_s` is the part of `layer_s` that grows with the tokens of a step, for one. `head_s` includes the drawing; it
    is 0.0 while unmeasured.
    """

    rows: Annotated[int, Meta(ge=1, le=65536)]
    engine: Name
    layer_s: Annotated[float, Meta(gt=0.0, le=1e6)]
    step_s: _Seconds = 0.0
    head_s: _Seconds = 0.0
    token_s: _Seconds = 0.0

    @property
    def value_bytes(self) -> int:
        """What a weight takes."""
        return value_bytes(self.engine)

    def layers_per_s(self, layers: int) -> float:
        """Layers × tokens a second in a span of `layers`."""
        return self.rows / self._share_s(layers)

    def head_layers(self, layers: int) -> float:
        """The time of the output matrix in layers, those of a span of `layers`."""
        return self.head_s / self._share_s(layers)

    def expected_s(self, span: Span, *, steps: int, rows: int, tokens: int) -> float:
        """What steps of a span would take on a device that is as fast as it was: `rows` are of all steps together."""
        fixed_s = max(0.0, self.layer_s - self.rows * self.token_s)
        head_s = self.head_s * rows / self.rows if span.last else 0.0
        return steps * self.step_s + len(span) * (steps * fixed_s + tokens * self.token_s) + head_s

    def _share_s(self, layers: int) -> float:
        return self.layer_s + self.step_s / max(1, layers)


def value_bytes(engine: str) -> int:
    """Bytes that a weight takes in an engine of this fingerprint."""
    return 4 if engine.endswith("float32") else 2


def probed_spans(layers: int, room: int) -> tuple[Span, Span | None, Span | None]:
    """What is measured: a layer in the middle, that and the next ones, the last one with the output matrix."""
    middle = (layers - 1) // 2
    several = min(middle + min(_LAYERS_MAX, room), layers - 1)
    return (
        Span(start=middle, end=middle + 1, layers=layers),
        Span(start=middle, end=several, layers=layers) if several > middle + 1 else None,
        Span(start=layers - 1, end=layers, layers=layers) if layers > 1 else None,
    )


def measure_speed(load: Callable[[Span], Stage], batch: Batch, *, clock: Callable[[], float]) -> Speed:
    """Load spans and time steps of them, those of a run: prompts read in parts, then a token a row.

    `clock` gives seconds. Blocks; raises what `load` and the stage raise. Nothing more is loaded once `BUDGET_S` of
    computing have passed.
    """
    trial = _Trial(batch, clock)
    spans = probed_spans(batch.layers, batch.room)
    one, several, last = [trial.time(load(span)) if span and not trial.late else None for span in spans]
    assert one is not None
    more_s = several.decode_s - one.decode_s if several is not None else 0.0
    layer_s = more_s / (several.layers - 1) if several is not None and more_s > 0.0 else one.decode_s
    layer_s = max(_LEAST_S, min(layer_s, one.decode_s))
    by_token_s = (one.prompt_s - one.decode_s) / (trial.part - trial.rows) if trial.part != trial.rows else 0.0
    usual = trial.usual
    return Speed(
        rows=trial.rows,
        engine=trial.engine,
        layer_s=usual * layer_s,
        step_s=usual * max(0.0, one.decode_s - layer_s),
        head_s=usual * max(0.0, last.decode_s - one.decode_s) if last is not None else 0.0,
        token_s=usual * min(max(0.0, by_token_s), layer_s / trial.rows),
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of the fastest step of a span of `layers`: of a part of a prompt, and of a token a row.

    The fastest can be told apart: what else the machine does is more than a layer takes.
    """

    layers: int
    prompt_s: float
    decode_s: float


class _Trial:
    """Times stages, all of them with as many steps as the first one had time for."""

    def __init__(self, batch: Batch, clock: Callable[[], float]) -> None:
        self.engine = ""
        self.rows = min(batch.rows, _ROWS_MAX)
        self.part = max(1, min(PROMPT_PART, batch.positions // 4))
        self._batch = batch
        self._clock = clock
        self._spent_s = 0.0
        self._parts = self._repeats = 0  # not known yet
        self._slower: list[float] = []
        self._draws = np.random.default_rng(0)

    @property
    def late(self) -> bool:
        """Whether the budget is spent."""
        return self._spent_s > BUDGET_S

    @property
    def usual(self) -> float:
        """How many times the fastest step the usual one takes."""
        return median(self._slower)

    def time(self, stage: Stage) -> _Taken:
        """Read a prompt in lane 1, let rows of lane 2 begin with it, and go on with these."""
        self.engine = stage.engine
        at, rows = 0, np.arange(self.rows, dtype=np.int32)

        def read() -> float:
            nonlocal at
            at += self.part
            return self._step(stage, 1, rows[:1], at - self.part, self.part)

        def decode() -> float:
            nonlocal at
            at += 1
            return self._step(stage, 2, rows, at - 1, 1)

        half = self._batch.positions // 2  # a prompt, or an answer half grown
        reading = self._repeat(read, self._parts, max(1, half // self.part - 1))
        stage.join(2, rows, 1)
        growing = self._repeat(decode, self._repeats, min(REPEATS_MAX, self._batch.positions - at - 1))
        self._parts, self._repeats = len(reading), len(growing)
        for lane in (1, 2):
            stage.close(lane)
        self._slower += [median(taken) / max(_LEAST_S, min(taken)) for taken in (reading, growing)]
        return _Taken(len(stage.span), min(reading), min(growing))

    def _repeat(self, step: Callable[[], float], times: int, most: int) -> list[float]:
        """The first step warms up, and does not count; the second one says how many there is time for."""
        step()
        taken = [step()]
        times = times or max(1, min(most, int(_SHARE_S / max(taken[0], _LEAST_S))))
        return taken + [step() for _ in range(times - 1)]

    def _step(self, stage: Stage, lane: int, rows: Integers, position: int, length: int) -> float:
        batch, shape = self._batch, (len(rows), length)
        inputs = (
            self._draws.integers(0, batch.vocabulary, shape, dtype=np.int32)
            if stage.span.first
            else self._draws.standard_normal((*shape, batch.hidden), np.float32) * _SCALE
        )
        began_at = self._clock()
        outputs = stage.forward(lane, rows, np.full(len(rows), position, np.int32), inputs)
        if stage.span.last and length == 1:
            draw(outputs, np.full(len(rows), 0.5), batch.sampling)
        taken_s = self._clock() - began_at
        self._spent_s += taken_s
        return taken_s
