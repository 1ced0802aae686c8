"""Arrays of a step as frames, and back. Pure: knows no stream and no stage."""

import math

import numpy as np

from echo_p2p.chain.group import Drawn, Floats, Integers
from echo_protocols.hop import Forward, Tokens
from echo_protocols.values import PolicyVersion


def to_forward(
    lane: int, step: int, version: PolicyVersion, *, rows: Integers, positions: Integers, hidden: Floats
) -> Forward:
    """Hidden states (rows, length, hidden), without a copy; in half the bytes if they are bf16 values anyway."""
    states = np.ascontiguousarray(hidden, "<f4")
    bits = states.view("<u4")
    halves = not (bits & np.uint32(0xFFFF)).any()
    payload = (bits >> np.uint32(16)).astype("<u2") if halves else states
    return Forward(
        lane=lane,
        step=step,
        version=version,
        length=states.shape[1],
        width=states.shape[2],
        rows=rows.astype("<i4").tobytes(),
        positions=positions.astype("<i4").tobytes(),
        payload=payload.data.cast("B"),
        halves=halves,
    )


def from_forward(frame: Forward) -> tuple[Integers, Integers, Floats]:
    """Rows (rows,), positions (rows,) and hidden states (rows, length, hidden)."""
    rows, positions = np.frombuffer(frame.rows, "<i4"), np.frombuffer(frame.positions, "<i4")
    if frame.halves:
        states = (np.frombuffer(frame.payload, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    else:
        states = np.frombuffer(frame.payload, "<f4")
    return rows, positions, states.reshape(len(rows), frame.length, frame.width)


def is_finite(values: Floats) -> bool:
    """Whether none of the values is NaN or infinite."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass without a copy; a sum of squares that overflows says nothing yet.
        return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())


def to_tokens(lane: int, drawn: Drawn) -> Tokens:
    """What the last stage has drawn."""
    return Tokens(
        lane=lane,
        step=drawn.step,
        version=drawn.version,
        rows=drawn.rows.astype("<i4").tobytes(),
        tokens=drawn.tokens.astype("<i4").tobytes(),
        logprobs=drawn.logprobs.astype("<f4").tobytes(),
    )


def from_tokens(frame: Tokens) -> Drawn:
    """What the last stage says that it has drawn."""
    return Drawn(
        step=frame.step,
        version=frame.version,
        rows=np.frombuffer(frame.rows, "<i4"),
        tokens=np.frombuffer(frame.tokens, "<i4"),
        logprobs=np.frombuffer(frame.logprobs, "<f4"),
    )
