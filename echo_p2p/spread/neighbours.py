"""Streams to the few peers that tell us what they have: kept open, opened again elsewhere. Knows no transfer.

All trainers are followed, and of the other peers the first few that can be, in the order given; one that doesn't answer
is tried again later, each time after twice as long; a trainer sooner, when something more is wanted.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import msgspec
import trio

from echo_p2p.errors import FrameTooLarge, NetError, Unreachable
from echo_p2p.net.base import Stream, Streams
from echo_p2p.spread.wire import FRAME_BYTES_MAX, HASHES_MAX, KEEPALIVE_S, SILENCE_MAX_S, WANTED_MAX, Have, Want
from echo_protocols import names
from echo_protocols.values import decode, encode

log = logging.getLogger(__name__)

OTHERS_MAX = 8
TRAINERS_MAX = 16
_OPEN_S = 10.0
_SEND_DEADLINE_S = 20.0
_GATHER_S = 0.005
_GATHER_DROPPED_S = 0.25
_AGAIN_S = 1.0
_AGAIN_MAX_S = 20.0
_FRAMES_S = 200.0
_BURST_S = 2.0


class Listener(Protocol):
    """Whoever wants to know what neighbours have."""

    def wanted(self) -> Mapping[bytes, int]:
        """The hashes that are wanted now, the most urgent first, each with a number that is new if the wish is."""

    def heard(self, peer: str, hashes: Sequence[bytes], later: Collection[bytes]) -> None:
        """A neighbour has some of them; those that begin with one of `later` will be had later, it says."""

    def gone(self, peer: str) -> None:
        """A neighbour announces nothing any more."""

    def misspoke(self, peer: str) -> None:
        """A neighbour doesn't speak the protocol."""


@dataclass(slots=True, eq=False)
class _Neighbour:
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    news: trio.Event = field(default_factory=trio.Event)
    more: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Trouble:
    failures: int = 0
    last_at: float = 0.0
    again_at: float = 0.0


class Neighbours:
    """The neighbours of one peer. `run` must be running for any to be met."""

    def __init__(self, streams: Streams, listener: Listener) -> None:
        self._streams = streams
        self._listener = listener
        self._candidates: tuple[Sequence[str], Sequence[str]] = ((), ())
        self._met: dict[str, _Neighbour] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._shunned: set[str] = set()
        self._changed = trio.Event()

    @property
    def met(self) -> Collection[str]:
        """Those that there is, or may soon be, a stream to."""
        return self._met.keys()

    def choose_from(self, trainers: Sequence[str], others: Sequence[str]) -> None:
        """Who may be a neighbour from now on, the preferred ones first."""
        self._candidates = (trainers[:TRAINERS_MAX], others)
        known = {*trainers, *others}
        self._troubles = {peer: trouble for peer, trouble in self._troubles.items() if peer in known}
        self._shunned &= known
        self._changed.set()

    def shun(self, peer: str) -> None:
        """Have nothing to do with a peer, for as long as it is a candidate."""
        self._shunned.add(peer)
        self._changed.set()

    def want(self, *, more: bool) -> None:
        """What is wanted has changed; `more` is told at once, less by and by."""
        for neighbour in self._met.values():
            neighbour.news.set()
            if more:
                neighbour.more.set()
        for peer in self._candidates[0] if more else ():
            if (trouble := self._troubles.get(peer)) and trouble.again_at > trouble.last_at + _AGAIN_S:
                trouble.again_at = trouble.last_at + _AGAIN_S
                self._changed.set()

    async def run(self) -> None:
        """Keep the neighbours until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                chosen = self._choose(trio.current_time())
                for peer in [peer for peer in self._met if peer not in chosen]:
                    self._met.pop(peer).scope.cancel()
                for peer in chosen:
                    if peer not in self._met:
                        self._met[peer] = _Neighbour()
                        nursery.start_soon(self._keep, peer, self._met[peer])
                with trio.move_on_after(self._check_s(trio.current_time())):
                    await self._changed.wait()

    def _check_s(self, now: float) -> float:
        """How long until somebody may be tried again."""
        soonest = min(
            (each.again_at for each in self._troubles.values() if each.again_at > now), default=now + KEEPALIVE_S
        )
        return min(KEEPALIVE_S, soonest - now)

    def _choose(self, now: float) -> list[str]:
        trainers, others = self._candidates

        def usable(peer: str) -> bool:
            trouble = self._troubles.get(peer)
            return peer not in self._shunned and (trouble is None or peer in self._met or trouble.again_at <= now)

        return [*filter(usable, trainers), *[peer for peer in others if usable(peer)][:OTHERS_MAX]]

    async def _keep(self, peer: str, neighbour: _Neighbour) -> None:
        opened_at = trio.current_time()
        try:
            with neighbour.scope:
                await self._converse(peer, neighbour)
        finally:
            self._listener.gone(peer)
        if self._met.get(peer) is neighbour:
            del self._met[peer]
            now = trio.current_time()
            trouble = self._troubles.setdefault(peer, _Trouble())
            if now - opened_at > _AGAIN_MAX_S:
                trouble.failures = 0
            trouble.last_at = now
            trouble.again_at = now + min(_AGAIN_MAX_S, _AGAIN_S * 2 ** min(trouble.failures, 10))
            trouble.failures += 1
            self._changed.set()

    async def _converse(self, peer: str, neighbour: _Neighbour) -> None:
        try:
            async with (
                self._streams.open(peer, names.HOLDERS, timeout_s=_OPEN_S) as stream,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self._ask, stream, neighbour)
                await self._listen(stream)
                nursery.cancel_scope.cancel()
        except Unreachable as error:
            log.debug("%s tells us nothing: %s", peer, error)

    async def _listen(self, stream: Stream) -> None:
        heard_until = float("-inf")  # a flood is read slowly
        try:
            while True:
                with trio.fail_after(SILENCE_MAX_S):
                    frame = await stream.receive()
                if len(frame) > FRAME_BYTES_MAX:
                    raise FrameTooLarge(f"{stream.peer} announces {len(frame)} bytes of hashes")
                have = decode(frame, Have)
                self._listener.heard(stream.peer, have.hashes, set(have.later))
                now = trio.current_time()
                heard_until = max(heard_until, now - _BURST_S) + 1 / _FRAMES_S
                if heard_until > now:
                    await trio.sleep_until(heard_until)
        except (msgspec.DecodeError, FrameTooLarge):
            self._listener.misspoke(stream.peer)
        except (NetError, trio.TooSlowError) as error:
            log.debug("%s tells us nothing more: %s", stream.peer, error)

    async def _ask(self, stream: Stream, neighbour: _Neighbour) -> None:
        said: dict[bytes, int] = {}
        try:
            while True:
                neighbour.news, neighbour.more = trio.Event(), trio.Event()
                wanted = dict(islice(self._listener.wanted().items(), WANTED_MAX))
                dropped = tuple(hash for hash in said if said[hash] != wanted.get(hash))[:HASHES_MAX]
                for hash in dropped:
                    del said[hash]
                added = tuple(hash for hash in wanted if hash not in said)[:HASHES_MAX]
                with trio.fail_after(_SEND_DEADLINE_S):
                    await stream.send(encode(Want(added, dropped)))
                said |= {hash: wanted[hash] for hash in added}
                if len(added) < HASHES_MAX and len(dropped) < HASHES_MAX:
                    await _news(neighbour)
        except (NetError, trio.TooSlowError) as error:
            log.debug("%s can't be asked: %s", stream.peer, error)
            neighbour.scope.cancel()


async def _news(neighbour: _Neighbour) -> None:
    """Return when there is something to say: soon if more is wanted, after a while if less, or to keep the stream."""
    with trio.move_on_after(KEEPALIVE_S) as quiet:
        await neighbour.news.wait()
    if not quiet.cancelled_caught:
        with trio.move_on_after(_GATHER_DROPPED_S):
            await neighbour.more.wait()
            await trio.sleep(_GATHER_S)
