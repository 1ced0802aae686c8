"""One release to a few real nodes, each in its own network namespace, the trainer's uplink slowed by `tc … tbf`.

`python tests/bench/weights_spread_network.py --json FILE` as root, on Linux. Each node is a process with its own
daemon, joined to the others by one bridge; nothing of it can be reached from outside. Ideal is the time in which the
trainer's uplink carries the release once; what it sent is what the kernel counted, with all that the stacks add.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import click
import trio

from echo_p2p.identity import Identity, from_seed
from echo_p2p.net.blobs import blob_hash, serve_blobs
from echo_p2p.net.hive import HiveSettings, open_hive
from echo_p2p.spread.announce import Announcer
from echo_p2p.spread.exchange import Exchange
from echo_p2p.spread.holdings import Holdings
from echo_p2p.spread.seeding import Seeding

PORT = 4001
START_S = 120.0
SPREAD_S = 300.0
PREFIX = f"echo{os.getpid() % 10_000}"


def identity_of(index: int) -> Identity:
    """Of a node; the trainer is node 0."""
    return from_seed(bytes([index + 1]) * 32)


def host_of(index: int) -> str:
    """Where a node listens."""
    return f"10.77.0.{index + 1}"


def make_chunks(size_bytes: int, count: int = 32) -> dict[bytes, bytes]:
    """Blobs by hash: one is a fifth of the release, the others are alike."""
    source = random.Random(7)
    sizes = [size_bytes // 5] + [size_bytes * 4 // 5 // (count - 1)] * (count - 1)
    return {blob_hash(blob): blob for blob in (source.randbytes(size) for size in sizes)}


# -- a node: a process in its namespace --------------------------------------------------------------------------------


async def run_node(index: int, peers: int, size_bytes: int) -> None:
    """Say `ready` once up, fetch the release on a line of input, say `done SECONDS`, serve until the input ends."""
    chunks = make_chunks(size_bytes)
    blobs = dict(chunks) if index == 0 else {}
    settings = HiveSettings(role="trainer", listen=(f"/ip4/{host_of(index)}/tcp/{PORT}",))
    lines = aiter(trio.wrap_file(sys.stdin))
    async with open_hive(identity_of(index), settings) as hive, trio.open_nursery() as nursery:
        others = [other for other in range(peers + 1) if other != index]
        for other in others:
            hive.learn(identity_of(other).peer_id, [f"/ip4/{host_of(other)}/tcp/{PORT}"])
        announcer = Announcer(hive, Holdings(blobs.__contains__, Seeding() if index == 0 else None))

        async def keep(blob: bytes) -> bool:
            blobs[blob_hash(blob)] = blob
            return True

        exchange = Exchange(hive, keep=keep, kept=announcer.gained, report=lambda reason, peer: None, seed=index)
        await nursery.start(partial(serve_blobs, hive, blobs.get, watcher=announcer))
        await nursery.start(announcer.serve)
        click.echo("ready")
        await anext(lines)
        if index:
            nursery.start_soon(exchange.run)
            exchange.meet([identity_of(0).peer_id], [identity_of(other).peer_id for other in others if other])
        click.echo("met")
        await anext(lines)
        began_at = time.monotonic()
        if index:
            async with trio.open_nursery() as fetching:
                for hash, blob in chunks.items():
                    fetching.start_soon(exchange.fetch, hash, len(blob))
            assert blobs == chunks
        click.echo(f"done {time.monotonic() - began_at}")
        with contextlib.suppress(StopAsyncIteration):
            await anext(lines)
        nursery.cancel_scope.cancel()


# -- the namespaces ----------------------------------------------------------------------------------------------------


def configure(*words: str) -> str:
    """Run `ip` or `tc`."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


@contextmanager
def namespaces(count: int, uplink_bytes_s: int) -> Iterator[Sequence[str]]:
    """Namespaces on one bridge, which is in one more; what leaves the first is slowed."""
    hub, names = f"{PREFIX}-hub", [f"{PREFIX}-{index}" for index in range(count)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            configure("ip", "netns", "add", name)
            made.append(name)
        configure("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        configure("ip", "-n", hub, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            port = f"port{index}"
            configure("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            configure("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            configure("ip", "-n", name, "address", "add", f"{host_of(index)}/24", "dev", "eth0")
            configure("ip", "-n", name, "link", "set", "eth0", "up")
            configure("ip", "-n", name, "link", "set", "lo", "up")
        slow = ("rate", f"{8 * uplink_bytes_s}bit", "burst", "16kb", "latency", "400ms")
        configure("ip", "netns", "exec", names[0], "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow)
        yield names
    finally:
        for name in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                configure("ip", "netns", "del", name)


def sent_bytes(name: str) -> int:
    """What has left a namespace."""
    return int(configure("ip", "netns", "exec", name, "cat", "/sys/class/net/eth0/statistics/tx_bytes"))


@asynccontextmanager
async def node(name: str, index: int, peers: int, size_bytes: int) -> AsyncIterator[trio.Process]:
    """A node's process; gone when the context is left."""
    command = [sys.executable, __file__, "--node", str(index), "--peers", str(peers), "--size", str(size_bytes)]
    process = await trio.lowlevel.open_process(
        ["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None
            await process.stdin.aclose()
            with trio.move_on_after(15):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def answer_of(process: trio.Process) -> str:
    """The next line that a node says. Raises if it ends first."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        received = await process.stdout.receive_some(1)
        if not received:
            raise click.ClickException(f"a node ended with status {await process.wait()}")
        line += received
    return line.decode().strip()


async def tell_all(nodes: Sequence[trio.Process]) -> list[str]:
    """Let all nodes go on, and hear what they say then."""
    for each in nodes:
        assert each.stdin is not None
        await each.stdin.send_all(b"\n")
    return [await answer_of(each) for each in nodes]


async def measure(peers: int, size_bytes: int, uplink_bytes_s: int) -> dict[str, float]:
    """Spread a release over real nodes."""
    with namespaces(peers + 1, uplink_bytes_s) as names:
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(node(name, index, peers, size_bytes))
                for index, name in enumerate(names)
            ]
            with trio.fail_after(START_S):
                for each in nodes:
                    await answer_of(each)
                await tell_all(nodes)
                await trio.sleep(3.0)  # until they have met
            before = sent_bytes(names[0])
            with trio.fail_after(SPREAD_S):
                answers = await tell_all(nodes)
            sent = sent_bytes(names[0]) - before
    took_s = max(float(answer.removeprefix("done ")) for answer in answers)
    return {
        "peers": peers,
        "size_bytes": size_bytes,
        "uplink_bytes_s": uplink_bytes_s,
        "network_spread_over_ideal": took_s * uplink_bytes_s / size_bytes,
        "network_upload_copies": sent / size_bytes,
    }


@click.command()
@click.option("--peers", default=6, help="Peers beside the trainer.")
@click.option("--size", "size_bytes", default=4_000_000, help="Bytes of the release.")
@click.option("--uplink", "uplink_bytes_s", default=400_000, help="Bytes a second that leave the trainer.")
@click.option("--node", "index", type=int, hidden=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
def main(peers: int, size_bytes: int, uplink_bytes_s: int, index: int | None, file: Path | None) -> None:
    """Measure how a release spreads over real nodes behind a slow link."""
    if index is not None:
        trio.run(run_node, index, peers, size_bytes)
        return
    text = json.dumps(trio.run(measure, peers, size_bytes, uplink_bytes_s), indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
