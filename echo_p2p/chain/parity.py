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
_LENGTHS = (24, 1, 1)  # a prefill, a step of all rows, a step after one of them has left
_SCALE = 0.05  # of hidden inputs: so small that outputs are mostly what the layer adds


def check_parity(candidate: Loader, reference: Loader, model_path: Path, span: Span) -> float:
    """The worst disagreement over `probed_layers` of the span. Raises ModelError if it is more than tolerated."""
    hidden, vocabulary = model_shape(model_path).hidden, model_shape(model_path).vocabulary
    worst = 0.0
    for layer in probed_layers(model_path, span):
        alone = Span(start=layer, end=layer + 1, layers=span.layers)
        try:
            engine, outputs = _run(candidate(model_path, alone), hidden, vocabulary)
        except ChainError as error:
            raise ModelError(f"layer {layer} of {model_path.name} fails ({error}): choose --engine torch") from error
        reference_engine, expected = _run(reference(model_path, alone), hidden, vocabulary)
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


def _run(stage: Stage, hidden: int, vocabulary: int) -> tuple[str, list[NDArray[np.float32]]]:
    draws = np.random.default_rng(0)
    rows, position, outputs = np.arange(_ROWS, dtype=np.int32), 0, []
    for call, length in enumerate(_LENGTHS):
        shape = (_ROWS, length)
        inputs = (
            draws.integers(0, vocabulary, shape, dtype=np.int32)
            if stage.span.first
            else draws.standard_normal((*shape, hidden), np.float32) * np.float32(_SCALE)
        )
        here = rows[1:] if call == len(_LENGTHS) - 1 else rows
        outputs.append(stage.forward(0, here, np.full(len(here), position, np.int32), inputs[rows.searchsorted(here)]))
        position += length
    stage.close(0)
    return stage.engine, outputs
