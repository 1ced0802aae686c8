"""How far a peer is: round trips, bytes a second, and for how long the step has run that it computes.

The answer comes from the peer's own event loop, so it also says that this one is alive. Knows no stage and no plan.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Annotated, Final

import msgspec
import trio
from msgspec import Meta, Struct
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, NetError
from echo_p2p.net.base import Stream, Streams
from echo_p2p.net.newest import Newest
from echo_p2p.net.reach import Allowance
from echo_protocols import names
from echo_protocols.values import decode, encode

log = logging.getLogger(__name__)

PADDING_MAX_BYTES: Final = 256 * 1024
BUSY_MAX_S: Final = 1e6
REQUESTS_OF_A_STREAM: Final = 16
STREAMS_MAX: Final = 32
"""At a time: one more ends the oldest, which an honest peer's is not for long."""

STREAMS_A_MINUTE: Final = 120
"""Of one peer."""

PADDED_A_MINUTE: Final = 4
"""Of one peer; of all together sixty times as many."""

_PADDED_A_MINUTE_OF_ALL = 60 * PADDED_A_MINUTE
_PEERS_MAX = 1024
_IDLE_S = 20.0
_TRIPS = 4
_PADDINGS = (32 * 1024, PADDING_MAX_BYTES)  # a slow link is known by the first
_PADDING_SLOW_S = 1.0
_LEAST_SHARE = 1 / 8  # of the time until an answer that counts as sending: a round trip is never the same twice

_Token = Annotated[bytes, Meta(min_length=8, max_length=8)]


class Request(Struct, frozen=True, array_like=True):
    """`token` is random, so that nobody can answer before he was asked."""

    token: _Token
    padding: Annotated[bytes, Meta(max_length=PADDING_MAX_BYTES)] = b""


class Reply(Struct, frozen=True, array_like=True):
    """`busy_s` is the age of the step that is being computed, 0.0 if there is none."""

    token: _Token
    busy_s: Annotated[float, Meta(ge=0.0, le=BUSY_MAX_S)] = 0.0


@dataclass(frozen=True, slots=True)
class Pong:
    """Seconds one way, the age of the step that the peer computes (0.0: none), and bytes a second to it (0.0: unknown).

    `latency_s` is half of the shortest of a few round trips.
    """

    latency_s: float
    busy_s: float = 0.0
    bytes_s: float = 0.0


async def ping(streams: Streams, peer: str, timeout_s: float, *, padded: bool = False) -> Pong | None:
    """What `peer` answers; None if it doesn't, or not by the rules.

    `padded` measures bytes a second too, by 288 KiB, and takes up to twice `timeout_s`; a peer answers that seldom.
    """
    try:
        with trio.move_on_after(timeout_s) as scope:
            async with streams.open(peer, names.PING, timeout_s=timeout_s) as stream:
                trips = [await _round_trip(stream, b"") for _ in range(_TRIPS)]
                least_s = min(took_s for took_s, _ in trips)
                scope.deadline = inf
                bytes_s = await _rate(stream, least_s, timeout_s) if padded else 0.0
                return Pong(least_s / 2, trips[-1][1].busy_s, bytes_s)
        log.debug("peer %s did not answer a ping within %g s", peer, timeout_s)
    except (NetError, msgspec.DecodeError) as error:
        log.debug("peer %s did not answer a ping: %s", peer, error)
    return None


async def _rate(stream: Stream, round_trip_s: float, timeout_s: float) -> float:
    """Bytes a second to the peer; 0.0 if it takes none now. Raises DecodeError."""
    best = 0.0
    try:
        with trio.move_on_after(timeout_s):
            for size_bytes in _PADDINGS:
                took_s, _ = await _round_trip(stream, secrets.token_bytes(size_bytes))
                best = max(best, size_bytes / max(took_s - round_trip_s, took_s * _LEAST_SHARE, 1e-6))
                if took_s > _PADDING_SLOW_S:
                    break
    except NetError as error:
        log.debug("peer %s takes no padding: %s", stream.peer, error)
    return best


async def _round_trip(stream: Stream, padding: bytes) -> tuple[float, Reply]:
    """Seconds until the answer, and it. Raises NetError, DecodeError."""
    request = Request(secrets.token_bytes(8), padding)
    data = encode(request)
    began_at = trio.current_time()
    await stream.send(data)
    reply = decode(await stream.receive(), Reply)
    if reply.token != request.token:
        raise msgspec.DecodeError("it is the answer to another request")
    return trio.current_time() - began_at, reply


async def serve_ping(
    streams: Streams,
    busy: Callable[[], float],
    *,
    refused: Counter[str] | None = None,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled. `busy` gives the age of the step being computed; `refused` counts what is no request."""
    counts = Counter[str]() if refused is None else refused
    bounds, newest = _Bounds(), Newest(STREAMS_MAX)

    async def handle(stream: Stream) -> None:
        try:
            with newest.place() as scope:
                counts[await _answer(stream, busy, bounds)] += 1
            if scope.cancelled_caught:
                counts["too-many"] += 1
        except msgspec.DecodeError:
            counts["malformed"] += 1
        except FrameTooLarge:
            counts["oversized"] += 1
        except trio.TooSlowError:
            counts["too-slow"] += 1
        except NetError as error:  # it has what it wanted
            log.debug("pings of %s ended: %s", stream.peer, error)

    await streams.serve(
        names.PING, handle, max_frame_bytes=PADDING_MAX_BYTES + 64, max_streams=2 * STREAMS_MAX, task_status=task_status
    )


class _Bounds:
    """What is answered at most. `now` is in seconds."""

    def __init__(self) -> None:
        self._streams = Allowance(STREAMS_A_MINUTE, keys_max=_PEERS_MAX)
        self._padded = Allowance(PADDED_A_MINUTE, keys_max=_PEERS_MAX)
        self._padded_of_all = Allowance(_PADDED_A_MINUTE_OF_ALL)

    def stream(self, peer: str, now: float) -> bool:
        return self._streams.take(peer, now)

    def padded(self, peer: str, now: float) -> bool:
        return self._padded.take(peer, now) and self._padded_of_all.take("", now)


async def _answer(stream: Stream, busy: Callable[[], float], bounds: _Bounds) -> str:
    """Answer one request after the other; why that ends. Raises NetError, DecodeError, TooSlowError."""
    if not bounds.stream(stream.peer, trio.current_time()):
        return "too-many"
    for _ in range(REQUESTS_OF_A_STREAM):
        with trio.fail_after(_IDLE_S):
            request = decode(await stream.receive(), Request)
            if request.padding and not bounds.padded(stream.peer, trio.current_time()):
                return "too-many"
            busy_s = max(0.0, min(busy(), BUSY_MAX_S))
            await stream.send(encode(Reply(request.token, busy_s)))
    return "too-many"
