"""A peer that is killed at any instant of fetching and applying never serves weights that are not the release's."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from echo_p2p.tensors import Bits
from echo_p2p.weights.codec import content_hash
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.values import PolicyVersion

KILLS, RELEASES, STORE_BYTES = 20, 200, 2**26

FOLLOWER = '''
"""Follow releases one by one, from wherever the last process got to; note the hash of what is live at each."""
import os, sys
from pathlib import Path
import msgspec, numpy as np, trio
from echo_p2p.tensors import updated
from echo_p2p.weights.codec import content_hash
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.store import Store
from echo_protocols.release import Release

served = Path(sys.argv[1]), Path(sys.argv[2])
trainer, own = (Store(folder, 2**26) for folder in served)
live = dict(np.load(served[0] / "base.npz"))
sealed = [bytes.fromhex(line) for line in (served[0] / "releases").read_text().split()]
log = (served[1] / "log").open("a+")
log.seek(0)
lines = [line for line in log.read().split("\\n")]

class Stage:
    def apply(self, updates):
        for name, update in updates.items():
            if update.index is None:
                live[name][...] = update.values
            else:
                live[name].reshape(-1)[update.index] = update.values

async def lookup(hash):
    return msgspec.msgpack.decode(trainer.get(hash), type=Release)

async def fetch(chunk):
    await trio.sleep(0.001)  # a link
    return trainer.get(chunk.hash)

async def main():
    replica = Replica({name: bits.copy() for name, bits in live.items()}, own)
    for hash in sealed[len(lines) - 1:]:
        release = await lookup(hash)
        await replica.stage(release, lookup, fetch)
        replica.switch(release.version, Stage())
        print(release.version.step, content_hash(live).hex(), file=log, flush=True)
        os.fsync(log.fileno())
        print(release.version.step, flush=True)

trio.run(main)
'''


def published(folder: Path) -> list[str]:
    """The releases of a run in a trainer's folder; the content of each version."""
    chance = np.random.default_rng(1)
    store = Store(folder, STORE_BYTES)
    publisher = Publisher(store, snapshot_every=20, keep=RELEASES)
    tensors: dict[str, Bits] = {
        f"model.layers.{layer}.weight": chance.integers(0, 2**16, (100, 300), np.uint16) for layer in range(4)
    }
    np.savez(folder / "base.npz", **tensors)
    sealed, contents = [], []
    for step in range(RELEASES):
        release = publisher.publish(PolicyVersion(epoch=0, step=step), tensors)
        hash = store.put(msgspec.msgpack.encode(release))
        publisher.sealed(hash)
        sealed.append(hash.hex())
        contents.append(content_hash(tensors).hex())
        tensors = {n: bits + (chance.random(bits.shape) < 0.01).astype(np.uint16) for n, bits in tensors.items()}
    (folder / "releases").write_text("\n".join(sealed))
    return contents


@pytest.mark.slow
def test_whenever_a_peer_is_killed_what_it_serves_is_a_release(tmp_path: Path) -> None:
    trainer, peer = tmp_path / "trainer", tmp_path / "peer"
    contents = published(trainer)
    peer.mkdir()
    chance = random.Random(7)

    def follow(versions: int, then_s: float) -> None:
        """Run the peer over so many versions, and a moment longer."""
        with subprocess.Popen([sys.executable, "-c", FOLLOWER, str(trainer), str(peer)], stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            for _ in range(versions):
                assert run.stdout.readline()
            try:
                run.wait(timeout=then_s)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)

    for _ in range(KILLS):
        follow(chance.randrange(5), chance.uniform(0.0, 0.05))
        lines = (peer / "log").read_text().split("\n")[:-1] if (peer / "log").exists() else []
        assert lines == [f"{step} {content}" for step, content in enumerate(contents[: len(lines)])]
        assert len(lines) < RELEASES, "the peer was through before it was killed often enough"
        store = Store(peer, STORE_BYTES)
        assert all(store.get(hash) is not None for hash in store.hashes())
        assert not list((peer / "arriving").iterdir())
    follow(0, 300.0)
    assert (peer / "log").read_text().split("\n")[:-1] == [f"{step} {content}" for step, content in enumerate(contents)]
