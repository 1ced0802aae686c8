"""Fetches blobs from whoever announces them, many at a time, and says what has come. Knows no weights and no store.

A wish is told to the neighbours; as soon as one of them has the blob, it is fetched, the rarest first. A transfer that
breaks off, or stalls while another peer has the blob too, goes on there from where it stopped.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence

import trio

from echo_p2p.errors import CorruptChunk, NetError, RemoteError, Unreachable
from echo_p2p.net.base import Streams
from echo_p2p.net.blobs import checked_blob, receive_blob
from echo_p2p.spread.arrival import Arrival, ExchangeSettings, ExchangeStatistics, deadline_of
from echo_p2p.spread.neighbours import Neighbours
from echo_p2p.spread.picker import Picker
from echo_p2p.spread.wire import PREFIX_BYTES

log = logging.getLogger(__name__)

_TICK_S = 0.25
_CUT_SHORT_MAX_BYTES = 2**28


class Exchange:
    """The fetching side of one peer. `run` must be running for anything to come.

    What had come of a blob when it was given up is kept for the next time it is wanted: up to 256 MiB, the oldest goes
    first.

    `keep` stores a blob that has come; when it returns whether the blob is kept, `kept` is told. `report` hears of
    peers that sent what is wrong, and why.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        keep: Callable[[bytes], Awaitable[bool]],
        kept: Callable[[bytes], None],
        report: Callable[[str, str], object],
        settings: ExchangeSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.statistics = ExchangeStatistics()
        self._streams = streams
        self._keep = keep
        self._kept = kept
        self._report = report
        self._settings = settings or ExchangeSettings()
        self._picker = Picker(self._settings.bounds, seed)
        self._neighbours = Neighbours(streams, self)
        self._fetches: dict[bytes, Arrival] = {}
        self._cut_short: OrderedDict[bytes, tuple[bytearray, set[str]]] = OrderedDict()
        self._nursery: trio.Nursery | None = None
        self._work = trio.Event()
        self._moved_at = 0.0

    async def run(self) -> None:
        """Fetch what is wanted until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                nursery.start_soon(self._neighbours.run)
                await self._watch()
            finally:
                self._nursery = None

    def meet(self, trainers: Sequence[str], others: Sequence[str]) -> None:
        """Who takes part: all trainers, and the other peers, those first that are likely to have what we want."""
        self._picker.last_choice = frozenset(trainers)
        self._neighbours.choose_from(trainers, others)

    async def fetch(self, hash: bytes, size_bytes: int) -> bytes:
        """The blob, once it is here; it is checked. Whoever asks for the same one shares it.

        Raises Unreachable when it was too long since anything of it came, or somebody new announced it.
        """
        fetch = self._fetches.get(hash)
        if fetch is None:
            fetch = Arrival(self._picker.wish(hash, size_bytes), trio.current_time())
            fetch.received, fetch.senders = self._cut_short.pop(hash, (bytearray(), set()))
            self._fetches[hash] = fetch
            self._neighbours.want(more=True)
            self._work.set()
        fetch.waiting += 1
        try:
            while fetch.blob is None:
                with trio.move_on_at(deadline_of(fetch, self._settings, self._moved_at)):
                    await fetch.here.wait()
                now = trio.current_time()
                if fetch.blob is None and now >= deadline_of(fetch, self._settings, self._moved_at):
                    raise Unreachable(
                        f"blob {hash.hex()[:12]}: {len(fetch.wish.holders)} of {len(self._neighbours.met)} neighbours "
                        f"announced it, and nothing came for {now - fetch.moved_at:.0f} s"
                    )
            return fetch.blob
        finally:
            fetch.waiting -= 1
            if not fetch.waiting and fetch.blob is None:
                self._end(fetch)

    def _end(self, fetch: Arrival) -> None:
        hash = fetch.wish.hash
        if self._fetches.get(hash) is fetch:
            del self._fetches[hash]
            self._picker.unwish(hash)
            self._neighbours.want(more=False)
            if fetch.blob is None and fetch.received:
                self._cut_short[hash] = (fetch.received, fetch.senders)
                while sum(len(received) for received, _ in self._cut_short.values()) > _CUT_SHORT_MAX_BYTES:
                    self._cut_short.popitem(last=False)
        fetch.scope.cancel()

    # -- what neighbours say: `Listener` ----------------------------------------------------------------------------

    def wanted(self) -> Collection[bytes]:
        """As `Listener.wanted`: the largest first, since they take longest to spread."""
        return sorted(self._fetches, key=lambda hash: -self._fetches[hash].wish.size_bytes)

    def heard(self, peer: str, hashes: Sequence[bytes], later: Collection[bytes]) -> None:
        """As `Listener.heard`; only trainers are believed that it will be had later."""
        for hash in hashes:
            if self._picker.announced(peer, hash):
                self._fetches[hash].moved_at = trio.current_time()
        if peer in self._picker.last_choice:
            for hash, fetch in self._fetches.items():
                if hash[:PREFIX_BYTES] in later:
                    fetch.promised_by.add(peer)
        self._begin()

    def gone(self, peer: str) -> None:
        """As `Listener.gone`."""
        self._picker.gone(peer)
        for fetch in self._fetches.values():
            fetch.promised_by.discard(peer)

    def misspoke(self, peer: str) -> None:
        """As `Listener.misspoke`."""
        self._ban(peer, "malformed")

    def _ban(self, peer: str, reason: str) -> None:
        log.warning("%s is let go: %s", peer, reason)
        self._picker.ban(peer)
        self._neighbours.shun(peer)
        self._report(reason, peer)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin all transfers that can be."""
        now = trio.current_time()
        while self._nursery is not None and (wish := self._picker.choose(now)) is not None:
            fetch = self._fetches[wish.hash]
            assert wish.source is not None
            fetch.scope, fetch.silent_since, fetch.seen_bytes = trio.CancelScope(), now, len(fetch.received)
            self._nursery.start_soon(self._transfer, fetch, wish.source)

    async def _transfer(self, fetch: Arrival, source: str) -> None:
        """One transfer from one source, to whatever end."""
        wish, before = fetch.wish, len(fetch.received)
        data: bytes | None = None
        try:
            with fetch.scope:
                frame_s = self._settings.frame_s
                await receive_blob(self._streams, source, wish.hash, wish.size_bytes, fetch.received, timeout_s=frame_s)
                fetch.senders.add(source)
                data = await checked_blob(fetch.received, wish.hash, source)
            if data is None and fetch.waiting:  # it stalled; else nobody wants it any more
                self._picker.failed(source, trio.current_time())
        except RemoteError as error:
            self._refused(fetch, source, error)
        except NetError as error:
            log.debug("blob %s from %s: %s", wish.hash.hex()[:12], source, error)
            self.statistics.failures += 1
            self._picker.failed(source, trio.current_time())
        except CorruptChunk as error:
            self._corrupt(fetch, source, error)
        finally:
            if len(fetch.received) > before:
                fetch.senders.add(source)
            self._picker.ended(wish)
        if data is not None:
            await self._arrived(fetch, source, data)
        self._begin()

    async def _arrived(self, fetch: Arrival, source: str, data: bytes) -> None:
        self._picker.delivered(source)
        self._moved_at = trio.current_time()
        self.statistics.blobs += 1
        self.statistics.bytes += len(data)
        self.statistics.from_trainers += source in self._picker.last_choice
        fetch.blob = data
        fetch.here.set()
        self._end(fetch)
        self._begin()
        if await self._keep(data):
            self._kept(fetch.wish.hash)

    def _refused(self, fetch: Arrival, source: str, error: RemoteError) -> None:
        now = trio.current_time()
        match error.reason:
            case "absent":
                self._picker.absent(source, fetch.wish.hash, now)
            case "offset":  # its blob is shorter than what others sent
                self._corrupt(fetch, source, CorruptChunk(str(error)))
            case "busy":
                self._picker.busy(source, now)
            case _:
                self._picker.failed(source, now)

    def _corrupt(self, fetch: Arrival, source: str, error: CorruptChunk) -> None:
        """Ban the one who sent it; if several did, nobody knows who it was, and it is fetched anew."""
        log.warning("%s", error)
        self.statistics.corrupt += 1
        if fetch.senders <= {source}:
            self._ban(source, "corrupt-blob")
        else:
            for sender in fetch.senders | {source}:
                self._picker.failed(sender, trio.current_time())
        fetch.received.clear()
        fetch.senders.clear()

    async def _watch(self) -> None:
        """While anything is wanted: find out what stalls, and begin with sources that may be asked again."""
        while True:
            await self._work.wait()
            while self._fetches:
                await trio.sleep(_TICK_S)
                now = trio.current_time()
                for fetch in self._fetches.values():
                    self._look_at(fetch, now)
                self._begin()
            self._work = trio.Event()

    def _look_at(self, fetch: Arrival, now: float) -> None:
        if len(fetch.received) != fetch.seen_bytes:
            fetch.seen_bytes = len(fetch.received)
            fetch.moved_at = fetch.silent_since = self._moved_at = now
            return
        silent_s = now - fetch.silent_since
        if fetch.wish.source and silent_s >= self._settings.stall_s and self._picker.has_other(fetch.wish, now):
            fetch.scope.cancel()
