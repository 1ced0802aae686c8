"""Whether an engine computes a model as the reference does: single layers of a span, on fixed inputs, at start-up.

One layer of one engine is in memory at a time. Knows no engine: each is a function that loads a span.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.stage import Stage
from echo_p2p.errors import ChainError, ModelError
from echo_p2p.models.layout import tensor_entries
from echo_protocols.values import Span

Loader = Callable[[Path, Span], Stage]

TOLERANCES = {"float32": 2e-3, "bfloat16": 5e-2}
"""What `disagreement` may be, by the precision that the engine computes in; the reference has float32.

Measured on SmolLM2: at most 3e-6 and 2e-2 in layers that are right, 0.02 to 1.1 with a wrong base of the rotation.
"""

_ROWS = 3
_LENGTHS = (24, 1)  # a prefill, and a step of all rows; then one leaves, and one comes that has read less
_SHORT = 7
_SCALE = 0.05  # of hidden inputs: so small that outputs are mostly what the layer adds


def check_parity(candidate: Loader, reference: Loader, model_path: Path, span: Span) -> float:
    """The worst disagreement over `probed_layers` of the span. Raises ModelError if it is more than tolerated."""
    hidden, vocabulary = model_shape(model_path).hidden, model_shape(model_path).vocabulary
    worst = 0.0
    for layer in probed_layers(model_path, span):
        alone = Span(start=layer, end=layer + 1, layers=span.layers)
        try:
            engine, outputs = _run(candidate(model_path, alone), hidden, vocabulary, apart=False)
        except ChainError as error:
            raise ModelError(f"layer {layer} of {model_path.name} fails ({error}): choose --engine torch") from error
        reference_engine, expected = _run(reference(model_path, alone), hidden, vocabulary, apart=True)
        apart = disagreement(outputs, expected)
        tolerance = TOLERANCES[engine.rpartition("-")[2]]
        if not apart <= tolerance:  # also if it is no number
            raise ModelError(
                f"{engine} computes layer {layer} of {model_path.name} otherwise than {reference_engine} "
                f"(apart by {apart:.1e}, tolerated {tolerance:.0e}): choose --engine torch"
            )
        worst = max(worst, apart)
    return worst


def probed_layers(model_path: Path, span: Span) -> list[int]:
    """The first and the last layer of the span, and the first of each kind: with the same tensors and settings."""
    config = json.loads((model_path / "config.json").read_text())
    settings = [v for v in config.values() if isinstance(v, list) and len(v) == span.layers]
    tensors: dict[int, set[str]] = {i: set() for i in range(span.layers)}
    for name in tensor_entries(model_path):
        _, layers, rest = name.partition(".layers.")
        if layers:
            number, _, kind = rest.partition(".")
            tensors.setdefault(int(number), set()).add(kind)
    first: dict[object, int] = {}
    for i in range(span.start, span.end):
        first.setdefault((frozenset(tensors[i]), *(str(setting[i]) for setting in settings)), i)
    return sorted({*first.values(), span.end - 1})


def disagreement(outputs: Iterable[NDArray[np.float32]], expected: Iterable[NDArray[np.float32]]) -> float:
    """How far the outputs of a call are apart, in the worst call: root mean square, over the spread of the expected."""
    pairs = zip(outputs, expected, strict=True)
    return float(np.max([np.sqrt(np.square(ours - theirs).mean()) / theirs.std() for ours, theirs in pairs]))


def _run(stage: Stage, hidden: int, vocabulary: int, *, apart: bool) -> tuple[str, list[NDArray[np.float32]]]:
    """The engine, and what comes of fixed calls; at last of rows at two positions, in one lane if it may and can be."""
    draws, rows = np.random.default_rng(0), np.arange(_ROWS, dtype=np.int32)

    def inputs(count: int, length: int) -> NDArray[np.int32] | NDArray[np.float32]:
        if stage.span.first:
            return draws.integers(0, vocabulary, (count, length), dtype=np.int32)
        return draws.standard_normal((count, length, hidden), np.float32) * np.float32(_SCALE)

    positions, outputs = np.zeros(_ROWS, np.int32), []
    for length in _LENGTHS:
        outputs.append(stage.forward(0, rows, positions, inputs(_ROWS, length)))
        positions = positions + np.int32(length)
    outputs.append(stage.forward(1, rows[:1], np.zeros(1, np.int32), inputs(1, _SHORT)))
    rows, positions, newest = rows + 1, np.append(positions[1:], np.int32(_SHORT)), inputs(_ROWS, 1)
    if stage.ragged and not apart:
        stage.join(0, rows[-1:], 1)
        outputs.append(stage.forward(0, rows, positions, newest))
    else:
        older = stage.forward(0, rows[:-1], positions[:-1], newest[:-1])
        outputs.append(np.concatenate([older, stage.forward(1, rows[:1] * 0, positions[-1:], newest[-1:])]))
    for lane in (0, 1):
        stage.close(lane)
    return stage.engine, outputs
