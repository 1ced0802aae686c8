"""Whether a canary is believed: it has to come out as it did before. Pure; `canary` says what it is, and may miss."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echo_p2p.chain.group import Floats, Integers
from echo_protocols.values import PolicyVersion

_LONGEST = 64
"""Tokens of a call that a stage remembers, whoever asks."""

_FLOAT32, _HALF = 1e-4, 2e-2
"""How far apart log-probabilities of one canary may be, by what computes."""

_REMEMBERED = 16
"""Calls whose outputs a stage keeps; the one not made for longest makes room."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a canary has drawn: `tokens` and their `logprobs`, all by one version; `tolerance` is that of its ring."""

    version: PolicyVersion
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float = _FLOAT32


Reference = Callable[[PolicyVersion], Seen | None]
"""What other engines have seen at a version, if anybody knows: of this run, for all chains read the same."""


def tolerance_of(engine: str) -> float:
    """How far apart log-probabilities of one canary may be, relative to the larger of 1 and themselves.

    A lane of the same rows repeats its bits on the engines that we know; the rest is for kernels that add up in another
    order: 1e-4 of what float32 makes, 2e-2 in 16 bits.
    """
    return _FLOAT32 if all("float32" in stage for stage in engine.split("+")) else _HALF


def disagreement(seen: Seen, expected: Seen, tolerance: float) -> str | None:
    """Why they can't both be right; None if they agree. One token may differ, whose uniform lay at an edge."""
    same = [ours == theirs for ours, theirs in zip(seen.tokens, expected.tokens, strict=True)]
    if same.count(False) > 1:
        return f"{same.count(False)} of {len(same)} tokens of a canary are others than before"
    pairs = zip(seen.logprobs, expected.logprobs, strict=True)
    apart = max(abs(a - b) / max(1.0, abs(b)) for (a, b), equal in zip(pairs, same, strict=True) if equal)
    if apart > tolerance:
        return f"log-probabilities of a canary are apart by {apart:.1e}, which may be {tolerance:.0e}"
    return None


class Judge:
    """Compares each canary with the first one of its version, and that with the reference if there is one.

    There is none where 16 bits compute, here or there: other kernels than the reference's miss many edges then.
    """

    def __init__(self, reference: Reference | None = None) -> None:
        self.baseline: Seen | None = None
        self._reference = reference

    def fault(self, seen: Seen) -> str | None:
        """Why a canary is not believed; None when it is."""
        if self.baseline is not None and self.baseline.version == seen.version:
            return disagreement(seen, self.baseline, seen.tolerance)
        known = self._reference(seen.version) if self._reference else None
        exact = known is not None and max(seen.tolerance, known.tolerance) <= _FLOAT32
        if known is not None and exact and (fault := disagreement(seen, known, 10 * _FLOAT32)) is not None:
            return f"{fault}, at another chain"
        self.baseline = seen
        return None


def name_of(before: bytes, version: PolicyVersion, inputs: Integers | Floats) -> bytes:
    """Names what rows have read when all of them read `before`, and then by `version` these (rows, length, …).

    b"" if that is long.
    """
    if inputs.shape[0] * inputs.shape[1] > _LONGEST:
        return b""
    return hashlib.blake2b(before + str(version).encode() + inputs.tobytes(), digest_size=32).digest()


class Remembered:
    """What a stage made of canaries, at its version: what was read alike must give the same outputs again.

    So a stage that went bad names itself, also to rings that it did not serve when it was well.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._outputs: OrderedDict[bytes, Floats] = OrderedDict()

    def forget(self) -> None:
        """The weights have changed."""
        self._outputs.clear()

    def fault(self, read: bytes, outputs: Floats) -> str | None:
        """Why these outputs of what was `read` can't be right; None when they may be."""
        if read not in self._outputs:
            self._outputs[read] = outputs.copy()
            if len(self._outputs) > _REMEMBERED:
                self._outputs.popitem(last=False)
        self._outputs.move_to_end(read)
        expected = self._outputs[read]
        apart = float(np.sqrt(np.square(outputs - expected).mean()))
        if apart <= self._tolerance * max(float(np.sqrt(np.square(expected).mean())), 1e-9):  # else also if no number
            return None
        return f"the stage makes other outputs of a canary than before, apart by {apart:.1e}: load it anew"
