"""Tells followers of what we have, over `/echo/holders/1`, as soon as we have it. Knows no blob's bytes.

A follower is a peer with such a stream to us; a second stream of it takes the place of the first. What a peer may ask
is bounded, and how often: who asks faster is heard later. When there are too many, the one that is there for longest
of those that never came for anything is let go.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import trio
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, NetError
from echo_p2p.net.base import Stream, Streams
from echo_p2p.spread.holdings import Holdings
from echo_p2p.spread.seeding import Announcements
from echo_p2p.spread.wire import FRAME_BYTES_MAX, HASHES_MAX, PREFIX_BYTES, SILENCE_MAX_S, Have, Want
from echo_protocols import names
from echo_protocols.values import decode, encode

log = logging.getLogger(__name__)

MAX_STREAMS = 128
_ROOM_STREAMS = 8  # always free for newcomers, while any follower is useless
_FRAMES_S = 50.0
_BURST_S = 2.0
_SEND_DEADLINE_S = 20.0
_TICK_S = 0.25


@dataclass(slots=True, eq=False)
class _Follower:
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    untold: dict[bytes, None] = field(default_factory=dict)
    later: dict[bytes, None] = field(default_factory=dict)
    news: trio.Event = field(default_factory=trio.Event)
    came: bool = False  # for a blob


class Announcer:
    """Serves the announcements of one peer, and is the `Watcher` of the blobs that it serves."""

    def __init__(self, streams: Streams, holdings: Holdings, *, refused: Counter[str] | None = None) -> None:
        self._streams = streams
        self._holdings = holdings
        self._refused = Counter[str]() if refused is None else refused
        self._followers: dict[str, _Follower] = {}
        self._waiting = trio.Event()

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve followers until cancelled; started once it can be dialled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick)
            await self._streams.serve(
                names.HOLDERS,
                self._follow,
                max_frame_bytes=FRAME_BYTES_MAX,
                max_streams=MAX_STREAMS,
                task_status=task_status,
            )

    def gained(self, hash: bytes) -> None:
        """We have another blob, which can be served from now on."""
        self._tell(self._holdings.gained(hash, trio.current_time()))

    def asked(self, peer: str, hash: bytes) -> None:
        """As `Watcher.asked`."""
        if follower := self._followers.get(peer):
            follower.came = True
        self._holdings.asked(peer, hash, trio.current_time())

    def began(self, peer: str, hash: bytes, size_bytes: int) -> None:
        """As `Watcher.began`."""
        self._holdings.began(peer, hash, size_bytes, trio.current_time())

    def ended(self, peer: str, hash: bytes, *, whole: bool) -> None:
        """As `Watcher.ended`."""
        self._tell(self._holdings.ended(peer, hash, whole, trio.current_time()))

    def _tell(self, announcements: Announcements) -> None:
        for peer, hash in announcements:
            follower = self._followers[peer]
            follower.untold[hash] = None
            follower.news.set()
        if self._holdings.waiting:
            self._waiting.set()

    async def _follow(self, stream: Stream) -> None:
        if before := self._followers.get(stream.peer):
            before.scope.cancel()
        elif len(self._followers) >= MAX_STREAMS - _ROOM_STREAMS:
            self._make_room()
        follower = self._followers[stream.peer] = _Follower()
        self._holdings.joined(stream.peer, trio.current_time())
        try:
            with follower.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._speak, stream, follower)
                    await self._listen(stream, follower)
                    nursery.cancel_scope.cancel()
        finally:
            if self._followers.get(stream.peer) is follower:
                del self._followers[stream.peer]
                self._tell(self._holdings.left(stream.peer, trio.current_time()))

    def _make_room(self) -> None:
        useless = (each for each in self._followers.values() if not each.came and not each.scope.cancel_called)
        for follower in islice(useless, 1):
            follower.scope.cancel()

    async def _listen(self, stream: Stream, follower: _Follower) -> None:
        heard_until = float("-inf")  # what was said is worth our time until then
        try:
            while True:
                with trio.fail_after(SILENCE_MAX_S):
                    frame = await stream.receive()
                want, now = decode(frame, Want), trio.current_time()
                self._tell(self._holdings.changed(stream.peer, want.added, want.dropped, now))
                later = self._holdings.later(stream.peer, want.added)
                follower.later |= dict.fromkeys(hash[:PREFIX_BYTES] for hash in later)
                if follower.later or not (want.added or want.dropped):
                    follower.news.set()
                heard_until = max(heard_until, now - _BURST_S) + 1 / _FRAMES_S
                if heard_until > now:
                    await trio.sleep_until(heard_until)
        except msgspec.DecodeError as error:
            self._refused["malformed"] += 1
            log.debug("follower %s is let go: %s", stream.peer, error)
        except FrameTooLarge:
            self._refused["oversized"] += 1
        except (NetError, trio.TooSlowError) as error:
            log.debug("follower %s is gone: %s", stream.peer, error)

    async def _speak(self, stream: Stream, follower: _Follower) -> None:
        try:
            while True:
                await follower.news.wait()
                follower.news = trio.Event()
                hashes, later = tuple(follower.untold), tuple(follower.later)
                follower.untold.clear()
                follower.later.clear()
                for start in range(0, max(1, len(hashes), len(later)), HASHES_MAX):
                    end = start + HASHES_MAX
                    with trio.fail_after(_SEND_DEADLINE_S):
                        await stream.send(encode(Have(hashes[start:end], later[start:end])))
        except (NetError, trio.TooSlowError) as error:
            log.debug("follower %s hears no more: %s", stream.peer, error)
            follower.scope.cancel()

    async def _tick(self) -> None:
        """Let the holdings know that time passes, while that may change anything."""
        while True:
            await self._waiting.wait()
            await trio.sleep(_TICK_S)
            self._tell(self._holdings.passed(trio.current_time()))
            if not self._holdings.waiting:
                self._waiting = trio.Event()
