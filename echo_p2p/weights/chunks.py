"""Brings chunks of releases into a store, checked by size and hash. Knows no release and no tensor."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial

import trio

from echo_p2p.errors import CorruptChunk, EchoError, WeightsError
from echo_p2p.net.blobs import blob_hash
from echo_p2p.weights.store import Store
from echo_protocols.release import Chunk

log = logging.getLogger(__name__)

_FETCH_ATTEMPTS = 2

FetchChunk = Callable[[Chunk], Awaitable[bytes]]
"""The chunk's blob, from whoever has it. Raises EchoError."""


class Chunks:
    """The chunks of one replica. `counts` is told of what comes, `report` of bytes that have come, and of all of them.

    `expect` begins a count of these bytes.
    """

    def __init__(self, store: Store, counts: Counter[str], report: Callable[[int, int], None]) -> None:
        self._store = store
        self._counts = counts
        self._report = report
        self._expected_bytes = self._arrived_bytes = 0

    def expect(self, chunks: Collection[Chunk]) -> None:
        """These are going to be brought."""
        self._arrived_bytes = 0
        self._expected_bytes = sum(chunk.size_bytes for chunk in chunks if chunk.hash not in self._store)

    async def bring(self, chunks: Sequence[Chunk], fetch: FetchChunk) -> dict[bytes, bytes]:
        """All into the store, at once; those that it has no room for are returned, by hash.

        Raises CorruptChunk, or what `fetch` raises.
        """
        spare: dict[bytes, bytes] = {}

        async def get(chunk: Chunk) -> None:
            if chunk.hash in self._store:
                self._counts["chunks_at_hand"] += 1
                return
            blob = await self._fetch(chunk, fetch)
            if chunk.hash not in self._store:
                spare[chunk.hash] = blob

        await all_of(partial(get, chunk) for chunk in chunks)
        return spare

    async def blob(self, chunk: Chunk, fetch: FetchChunk) -> bytes:
        """From the store; again from the network if it went bad there. Raises like `bring`."""
        held = await trio.to_thread.run_sync(self._store.get, chunk.hash)
        return await self._fetch(chunk, fetch) if held is None else held

    async def _fetch(self, chunk: Chunk, fetch: FetchChunk) -> bytes:
        for _ in range(_FETCH_ATTEMPTS):
            try:
                blob = await fetch(chunk)
                if len(blob) == chunk.size_bytes and await trio.to_thread.run_sync(blob_hash, blob) == chunk.hash:
                    break
            except CorruptChunk as error:
                log.warning("%s: %s", chunk.part, error)
            self._counts["corrupt_chunks"] += 1
        else:
            raise CorruptChunk(f"chunk {chunk.hash.hex()[:12]} of {chunk.part} arrived corrupt {_FETCH_ATTEMPTS} times")
        self._counts["chunks_fetched"] += 1
        self._counts["bytes_fetched"] += len(blob)
        self._arrived_bytes += len(blob)
        self._report(self._arrived_bytes, max(self._arrived_bytes, self._expected_bytes))
        try:
            await trio.to_thread.run_sync(self._store.put, blob)
        except WeightsError as error:
            log.warning("a chunk is used but not kept: %s", error)
        return blob


async def all_of(works: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Do all at once; the first EchoError ends the others and is raised."""
    failures: list[EchoError] = []

    async def guarded(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EchoError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for work in works:
            nursery.start_soon(guarded, work)
    if failures:
        raise failures[0]
