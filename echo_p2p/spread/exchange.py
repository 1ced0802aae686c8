"""Fetches blobs from whoever announces them, many at a time, and says what has come. Knows no weights and no store.

A wish is told to the neighbours; as soon as one of them has the blob, it is fetched, the rarest first. A transfer that
breaks off, stalls or trickles while another peer has the blob too goes on there from where it stopped.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import trio

from echo_p2p.errors import CorruptChunk, NetError, RemoteError, Unreachable
from echo_p2p.net.base import Streams
from echo_p2p.net.blobs import checked_blob, receive_blob
from echo_p2p.spread.arrival import Arrival, ExchangeSettings, ExchangeStatistics, Rates, deadline_of
from echo_p2p.spread.blame import guilty, suspects_of
from echo_p2p.spread.leftovers import Leftovers
from echo_p2p.spread.neighbours import Neighbours
from echo_p2p.spread.picker import Picker
from echo_p2p.spread.wire import PREFIX_BYTES

log = logging.getLogger(__name__)

_TICK_S = 0.25


class Exchange:
    """The fetching side of one peer. `run` must be running for anything to come.

    What had come of a blob when it was given up is kept for the next time it is wanted.

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
        self._leftovers = Leftovers()
        self._generation = 0
        self._rates = Rates()
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
            self._generation += 1
            fetch = Arrival(self._picker.wish(hash, size_bytes), self._generation, trio.current_time())
            self._leftovers.give(fetch)
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
            if fetch.blob is None:
                self._leftovers.keep(fetch)
        fetch.scope.cancel()

    # -- what neighbours say: `Listener` ----------------------------------------------------------------------------

    def wanted(self) -> Mapping[bytes, int]:
        """As `Listener.wanted`: the largest first, since they take longest to spread."""
        fetches = sorted(self._fetches.values(), key=lambda fetch: -fetch.wish.size_bytes)
        return {fetch.wish.hash: fetch.generation for fetch in fetches}

    def heard(self, peer: str, hashes: Sequence[bytes], later: Collection[bytes]) -> None:
        """As `Listener.heard`; only trainers are believed that it will be had later."""
        news = [hash for hash in hashes if self._picker.announced(peer, hash)]
        for hash in news:
            self._fetches[hash].moved_at = trio.current_time()
        if later and peer in self._picker.last_choice:
            for hash, fetch in self._fetches.items():
                if hash[:PREFIX_BYTES] in later:
                    fetch.promised_by.add(peer)
        if news:
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
        if self._picker.is_banned(peer):
            return
        log.warning("%s is let go: %s", peer, reason)
        self._picker.ban(peer)
        for fetch in self._fetches.values():
            fetch.tainted |= peer in fetch.senders
            if fetch.tainted or fetch.wish.source == peer:
                fetch.scope.cancel()
        self._neighbours.shun(peer)
        self._report(reason, peer)

    def _begin(self) -> None:
        """Begin all transfers that can be."""
        now = trio.current_time()
        while self._nursery is not None and (wish := self._picker.choose(now)) is not None:
            fetch = self._fetches[wish.hash]
            assert wish.source is not None
            fetch.begin(wish.source, now)
            self._nursery.start_soon(self._transfer, fetch, wish.source)

    async def _transfer(self, fetch: Arrival, source: str) -> None:
        """One transfer from one source, to whatever end."""
        try:
            if await self._receive(fetch, source):
                await self._check(fetch, source)
        finally:
            self._picker.ended(fetch.wish)
        self._begin()

    async def _receive(self, fetch: Arrival, source: str) -> bool:
        """Whether all of it has come."""
        wish, before, began_at = fetch.wish, len(fetch.received), trio.current_time()
        frame_s = self._settings.frame_s
        try:
            with fetch.scope:
                await receive_blob(
                    self._streams, source, wish.hash, wish.size_bytes, fetch.received, exact=True, timeout_s=frame_s
                )
                took_s = trio.current_time() - began_at
                self._picker.took(source, took_s)
                self._rates.took(len(fetch.received) - before, took_s)
                return True
            if fetch.trickles:
                self._picker.slow(source)
            elif fetch.waiting and not fetch.tainted:  # it stalled; else nobody wants it, or it isn't to blame
                self._picker.failed(source, trio.current_time())
        except RemoteError as error:
            if error.reason == "offset":  # but the size is known
                self._lied(source, error)
            else:
                self._picker.refused(source, wish.hash, error.reason, trio.current_time())
        except NetError as error:
            log.debug("blob %s from %s: %s", wish.hash.hex()[:12], source, error)
            self.statistics.failures += 1
            self._picker.failed(source, trio.current_time())
        except CorruptChunk as error:
            self._lied(source, error)
        finally:
            fetch.came_from(source, before)
            fetch.tainted |= source in fetch.senders and self._picker.is_banned(source)
        return False

    async def _check(self, fetch: Arrival, source: str) -> None:
        try:
            data = await checked_blob(fetch.received, fetch.wish.hash, source)
        except CorruptChunk as error:
            await self._corrupt(fetch, source, error)
            return
        self._picker.delivered(source)
        self._picker.ended(fetch.wish)
        self._moved_at = trio.current_time()
        self.statistics.count(len(data), from_trainer=source in self._picker.last_choice)
        fetch.blob = data
        fetch.here.set()
        self._end(fetch)
        self._begin()
        if await self._keep(data):
            self._kept(fetch.wish.hash)
        for sender in await guilty(data, fetch.suspects):
            self._ban(sender, "corrupt-blob")

    def _lied(self, source: str, error: CorruptChunk | RemoteError) -> None:
        """What it said is wrong, whatever others have sent."""
        log.warning("%s", error)
        self.statistics.corrupt += 1
        self._ban(source, "corrupt-blob")

    async def _corrupt(self, fetch: Arrival, source: str, error: CorruptChunk) -> None:
        """Ban the one who sent it; if several did, it is fetched anew from one, and then seen who it was."""
        if fetch.senders <= {source}:
            self._lied(source, error)
        else:
            self.statistics.corrupt += 1
            fetch.wish.doubted |= fetch.senders
            fetch.suspects += await suspects_of(fetch.received, tuple(fetch.parts))
        fetch.clear()

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
        if fetch.look(now, self._settings.judged_s, self._rates):
            self._moved_at = now
        stalls = now - fetch.silent_since >= self._settings.stall_s
        if fetch.wish.source and (stalls or fetch.trickles) and self._picker.has_other(fetch.wish, now):
            fetch.scope.cancel()
