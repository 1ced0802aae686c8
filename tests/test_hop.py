"""Frames of a chain: they come back as they went, and no bytes do harm."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_protocols.hop import (
    BadFrame,
    Beat,
    BeginPrompt,
    EndLane,
    Failure,
    Forward,
    Frame,
    Join,
    Open,
    Prepare,
    Switch,
    Tokens,
    decode,
    encode,
)
from echo_protocols.peer import Stop
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

PEERS = tuple(letter * 44 for letter in "ABC")
CHAIN = bytes(range(16))
VERSION = PolicyVersion(epoch=1, step=7)

numbers = st.integers(0, 2**32 - 1)
versions = st.builds(PolicyVersion, epoch=st.integers(0, 2**31), step=st.integers(0, 2**31))
keys = st.binary(min_size=1, max_size=64)
texts = st.text(max_size=100)
few = st.lists(st.integers(0, 4095), min_size=1, max_size=4).map(tuple)


def route(*ends: int) -> tuple[Stop, ...]:
    starts = (0, *ends[:-1])
    spans = (Span(start=start, end=end, layers=ends[-1]) for start, end in zip(starts, ends, strict=True))
    return tuple(Stop(peer=peer, span=span) for peer, span in zip(PEERS, spans, strict=False))


OPEN = Open(route=route(2, 3, 6), run_id=bytes(32), plan=3, lanes=4, versions=(VERSION,), engines=("torch",))


@st.composite
def forwards(draw: st.DrawFn) -> Forward:
    rows, length, width = (draw(st.integers(1, 4)) for _ in range(3))
    halves = draw(st.booleans())
    states = (2 if halves else 4) * length * width * rows
    return Forward(
        lane=draw(numbers),
        step=draw(numbers),
        version=draw(versions),
        length=length,
        width=width,
        rows=draw(st.binary(min_size=4 * rows, max_size=4 * rows)),
        positions=draw(st.binary(min_size=4 * rows, max_size=4 * rows)),
        payload=draw(st.binary(min_size=states, max_size=states)),
        halves=halves,
    )


@st.composite
def drawn_tokens(draw: st.DrawFn) -> Tokens:
    rows = draw(st.integers(0, 4))
    arrays = [draw(st.binary(min_size=4 * rows, max_size=4 * rows)) for _ in range(3)]
    return Tokens(
        lane=draw(numbers),
        step=draw(numbers),
        version=draw(versions),
        rows=arrays[0],
        tokens=arrays[1],
        logprobs=arrays[2],
    )


frames = st.one_of(
    st.just(OPEN),
    st.builds(
        BeginPrompt,
        lane=numbers,
        group_id=keys,
        run_seed=keys,
        sampling=st.builds(Sampling, temperature=st.floats(0.1, 2.0), top_k=st.integers(0, 9)),
        samples=st.integers(1, 4096),
        positions=st.integers(1, 4096),
        drawn=st.integers(0, 4096),
    ),
    st.builds(Join, lane=numbers, prompt=numbers, step=numbers, rows=few, samples=few),
    st.builds(EndLane, lane=numbers),
    st.builds(Prepare, version=versions, timeout_s=st.floats(0.1, 100.0), fault=texts),
    st.builds(Switch, version=versions),
    st.builds(Beat, number=numbers),
    st.builds(Failure, reason=st.just("engine"), text=texts, peer=st.sampled_from([None, *PEERS])),
    forwards(),
    drawn_tokens(),
)


def joined(frame: Frame) -> bytes:
    return b"".join(encode(CHAIN, frame))


@given(frames)
def test_a_frame_comes_back_as_it_went(frame: Frame) -> None:
    assert decode(joined(frame)) == (CHAIN, frame)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(data)


@given(st.integers(0, 255), st.binary(max_size=200))
def test_arbitrary_bodies_raise_only_bad_frame(kind: int, body: bytes) -> None:
    with suppress(BadFrame):
        decode(b"eh" + bytes([1, kind]) + CHAIN + body)


@given(frames, st.data())
def test_a_truncated_or_padded_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = joined(frame)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadFrame):
        decode(whole[:cut])
    with pytest.raises(BadFrame):
        decode(whole + b"\0")


@given(frames, st.data())
def test_a_frame_with_a_flipped_byte_is_a_frame_or_bad(frame: Frame, data: st.DataObject) -> None:
    whole = bytearray(joined(frame))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(BadFrame):
        decode(bytes(whole))


def test_absurd_shapes_are_refused_by_their_head() -> None:
    frame = Forward(
        lane=1, step=0, version=VERSION, length=2**31, width=2**31, rows=bytes(4), positions=bytes(4), payload=b""
    )
    with pytest.raises(BadFrame, match="out of bounds"):
        decode(joined(frame))


def test_deeply_nested_bodies_are_refused() -> None:
    with pytest.raises(BadFrame):
        decode(b"eh" + bytes([1, 3]) + CHAIN + b"\x91" * 100_000)
    with pytest.raises(BadFrame):
        decode(b"eh" + bytes([1, 3]) + CHAIN + b"\x92\x01" + b"\x91" * 100_000)


@pytest.mark.parametrize("stops", [route(2, 3, 6)[1:], route(2, 3, 6)[::-1], route(2, 3, 6)[:2], route(3, 6) * 2])
def test_a_route_that_does_not_cover_the_layers_in_order_is_refused(stops: tuple[Stop, ...]) -> None:
    with pytest.raises(ValueError, match="chain"):
        Open(route=stops, run_id=bytes(32), plan=1, lanes=1)


def test_the_head_follows_the_last_stop() -> None:
    assert [OPEN.after(place).peer for place in range(3)] == [PEERS[1], PEERS[2], PEERS[0]]
    assert OPEN.place_of(PEERS[2]) == 2
    assert OPEN.place_of("D" * 44) is None


@pytest.mark.parametrize("reason", ["", "x" * 65, "stalled\n", "\x1b[2Jstalled"])
def test_a_reason_that_could_not_be_said_on_in_a_complaint_is_no_frame(reason: str) -> None:
    """Else who breaks chains with such a reason could not be accused: the leader would refuse the complaint."""
    data = b"".join(bytes(part) for part in encode(CHAIN, Failure(reason=reason)))
    with pytest.raises(BadFrame):
        decode(data)
