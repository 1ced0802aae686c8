"""Arrays of a step as frames, and back. Pure: knows no stream and no stage."""

import numpy as np

from echo_p2p.chain.group import Drawn, Floats, Integers
from echo_protocols.hop import Forward, Tokens
from echo_protocols.values import PolicyVersion


def to_forward(
    lane: int, step: int, version: PolicyVersion, *, rows: Integers, positions: Integers, hidden: Floats
) -> Forward:
    """Hidden states (rows, length, hidden); rows that are alike to the bit, as those of a prompt, travel once."""
    states = np.ascontiguousarray(hidden, "<f4")
    bits = states.view("<i4")
    shared = len(rows) > 1 and states.shape[1] > 1 and bool((bits == bits[:1]).all())
    return Forward(
        lane=lane,
        step=step,
        version=version,
        length=states.shape[1],
        width=states.shape[2],
        rows=rows.astype("<i4").tobytes(),
        positions=positions.astype("<i4").tobytes(),
        payload=(states[:1] if shared else states).data.cast("B"),
        shared=shared,
    )


def from_forward(frame: Forward) -> tuple[Integers, Integers, Floats]:
    """Rows (rows,), positions (rows,) and hidden states (rows, length, hidden)."""
    rows, positions = np.frombuffer(frame.rows, "<i4"), np.frombuffer(frame.positions, "<i4")
    hidden = np.frombuffer(frame.payload, "<f4").reshape(-1, frame.length, frame.width)
    return rows, positions, np.repeat(hidden, len(rows), axis=0) if frame.shared else hidden


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
