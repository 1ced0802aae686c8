"""One release to many peers, from a trainer with a slow uplink: `python tests/bench/weights_spread.py --json FILE`.

Every peer runs the real exchange, announcements and blob server over the in-memory network. Ideal is the time in which
the trainer's uplink carries the release once. The two figures that are judged are measured in real time; the others,
which show how they grow with the peers, in virtual time.
"""

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import trio
import trio.testing

from echo_p2p.errors import NetError, RemoteError
from echo_p2p.net.blobs import blob_hash, receive_blob, serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.spread.announce import Announcer
from echo_p2p.spread.exchange import Exchange
from echo_p2p.spread.holdings import Holdings
from echo_p2p.spread.seeding import Seeding

TRAINER = "trainer"
UPLINK_BYTES_S = 100_000.0
RELEASE_BYTES = 1_000_000
DEADLINE_S = 3600.0

JOIN_S = 5.0
"""Peers are there, and know each other, before the release is out."""


@dataclass(slots=True)
class Peer:
    """A peer with its blobs in memory."""

    name: str
    network: MemoryNetwork
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    seeding: Seeding | None = None
    announcer: Announcer = field(init=False)
    exchange: Exchange = field(init=False)

    def __post_init__(self) -> None:
        node = self.network.node(self.name)
        self.announcer = Announcer(node, Holdings(self.blobs.__contains__, self.seeding))
        self.exchange = Exchange(
            node,
            keep=self._keep,
            kept=self.announcer.gained,
            report=lambda reason, peer: None,
            seed=int.from_bytes(blob_hash(self.name.encode())[:4], "big"),
        )

    async def _keep(self, blob: bytes) -> bool:
        self.blobs[blob_hash(blob)] = blob
        return True

    async def serve(self, nursery: trio.Nursery) -> None:
        """Serve blobs and announcements, and fetch, in the nursery."""
        node = self.network.node(self.name)
        await nursery.start(partial(serve_blobs, node, self.blobs.get, watcher=self.announcer, in_thread=False))
        await nursery.start(self.announcer.serve)
        nursery.start_soon(self.exchange.run)

    async def fetch_all(self, chunks: Sequence[tuple[bytes, int]]) -> None:
        """Fetch a release, all chunks at once."""
        async with trio.open_nursery() as nursery:
            for hash, size_bytes in chunks:
                nursery.start_soon(self.exchange.fetch, hash, size_bytes)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds until the last peer had all, and what the trainer sent, over the release and its ideal time."""

    over_ideal: float
    copies: float


def chunk_sizes_of_a_release() -> list[int]:
    """32 chunks, one of them a fifth of the release."""
    rest = (RELEASE_BYTES - RELEASE_BYTES // 5) // 31
    return [RELEASE_BYTES // 5] + [rest] * 31


def make_chunks(sizes: Sequence[int]) -> dict[bytes, bytes]:
    """Blobs of these sizes, by hash."""
    source = random.Random(7)
    return {blob_hash(blob): blob for blob in (source.randbytes(size) for size in sizes)}


def network_of(peers: int, *, all_slow: bool) -> MemoryNetwork:
    """A network where the trainer's uplink, or everybody's, is slow."""
    slow = [TRAINER, *(f"peer-{index}" for index in range(peers))] if all_slow else [TRAINER]
    return MemoryNetwork(delay_s=0.02, uplink_bytes_s=dict.fromkeys(slow, UPLINK_BYTES_S))


async def spread(peers: int, sizes: Sequence[int], all_slow: bool = False) -> Spread:
    """Spread a release from peer to peer."""
    network, chunks = network_of(peers, all_slow=all_slow), make_chunks(sizes)
    swarm = [Peer(f"peer-{index}", network) for index in range(peers)]
    trainer = Peer(TRAINER, network, dict(chunks), Seeding())
    names = [peer.name for peer in swarm]
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for peer in (trainer, *swarm):
                await peer.serve(nursery)
            for index, peer in enumerate(swarm):
                others = [name for name in names if name != peer.name]
                random.Random(index).shuffle(others)
                peer.exchange.meet([TRAINER], others)
            await trio.sleep(JOIN_S)
            before, began_at = network.sent_bytes[TRAINER], trio.current_time()
            async with trio.open_nursery() as fetching:
                for peer in swarm:
                    fetching.start_soon(peer.fetch_all, [(hash, len(blob)) for hash, blob in chunks.items()])
            took_s, sent = trio.current_time() - began_at, network.sent_bytes[TRAINER] - before
            nursery.cancel_scope.cancel()
    assert all(peer.blobs.keys() == chunks.keys() for peer in swarm)
    return Spread(took_s * UPLINK_BYTES_S / sum(sizes), sent / sum(sizes))


async def one_to_many(peers: int, sizes: Sequence[int]) -> Spread:
    """The reference: everybody fetches every chunk from the trainer."""
    network, chunks = network_of(peers, all_slow=False), make_chunks(sizes)

    async def fetch_all(name: str) -> None:
        for hash, blob in chunks.items():
            received = bytearray()
            while len(received) < len(blob):  # the trainer is busy at times
                with contextlib.suppress(RemoteError, NetError):
                    await receive_blob(network.node(name), TRAINER, hash, len(blob), received)

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_blobs, network.node(TRAINER), chunks.get, in_thread=False))
            began_at = trio.current_time()
            async with trio.open_nursery() as fetching:
                for index in range(peers):
                    fetching.start_soon(fetch_all, f"peer-{index}")
            took_s = trio.current_time() - began_at
            nursery.cancel_scope.cancel()
    return Spread(took_s * UPLINK_BYTES_S / sum(sizes), network.sent_bytes[TRAINER] / sum(sizes))


def in_virtual_time(measure: Callable[..., object], *args: object) -> Spread:
    """Run a measurement on a clock that jumps over waits."""
    return trio.run(measure, *args, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[no-any-return,arg-type]


def spread_figures(chunk_sizes: Sequence[int] | None = None) -> dict[str, float]:
    """The figures, for a release of chunks of these sizes (bytes)."""
    sizes = list(chunk_sizes or chunk_sizes_of_a_release())
    began_at = time.perf_counter()
    judged: Spread = trio.run(spread, 32, sizes)
    figures = {
        "spread_over_ideal_32": judged.over_ideal,
        "trainer_upload_copies": judged.copies,
        "spread_seconds": time.perf_counter() - began_at - JOIN_S,
    }
    for peers in (8, 16, 32, 64):
        found = in_virtual_time(spread, peers, sizes)
        figures |= {f"virtual_over_ideal_{peers}": found.over_ideal, f"virtual_copies_{peers}": found.copies}
        all_slow = in_virtual_time(spread, peers, sizes, True)
        figures |= {f"all_slow_over_ideal_{peers}": all_slow.over_ideal, f"all_slow_copies_{peers}": all_slow.copies}
    for peers in (8, 32):
        figures[f"one_to_many_over_ideal_{peers}"] = in_virtual_time(one_to_many, peers, sizes).over_ideal
    return figures


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
def main(file: Path | None) -> None:
    """Measure how a release spreads."""
    text = json.dumps(spread_figures(), indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
