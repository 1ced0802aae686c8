"""The small files of a run's model from its peers: asks whoever takes part, checks, keeps, and so passes on."""

import logging
import random
from pathlib import Path

import trio
from msgspec import UNSET

from echo_node.charts import bytes_text
from echo_node.run_model import RunModel, contents_nearby, look_nearby
from echo_p2p.net.absentees import Absentees
from echo_p2p.net.base import Streams
from echo_p2p.net.blobs import fetch_from_any
from echo_p2p.swarm import Run, Swarm
from echo_p2p.weights.store import Store

log = logging.getLogger(__name__)

PINS = "model"
_OTHERS_ASKED = 3


async def open_model(run: Run, swarm: Swarm, streams: Streams, folder: Path, store: Store, named: str) -> RunModel:
    """The model of a run, its small files brought into `folder`; `named` is the folder that the user gave, or empty.

    What came before a failure is kept in the store. Raises ModelError, WeightsError if the store has no room, and
    NetError or RemoteError if no peer gives a file.
    """
    manifest = run.manifest
    nearby = await trio.to_thread.run_sync(look_nearby, manifest, named)
    contents = await trio.to_thread.run_sync(contents_nearby, manifest, nearby, folder)
    files = () if manifest.model_files is UNSET else manifest.model_files
    store.pin(PINS, [file.hash for file in files])
    missing = [file for file in files if file.name not in contents]
    if missing:
        total = sum(file.size_bytes for file in missing)
        log.info("fetching %d files of %s, %s, from peers", len(missing), manifest.model, bytes_text(total))
    absentees = Absentees()
    for file in files:
        content = contents.get(file.name) or await trio.to_thread.run_sync(store.get, file.hash)
        if content is None:
            content = await fetch_from_any(
                streams, _holders(run, swarm), file.hash, file.size_bytes, exact=True, absentees=absentees
            )
        contents[file.name] = content
        await trio.to_thread.run_sync(store.put, content)  # whoever comes next may ask us
    return await trio.to_thread.run_sync(RunModel, manifest, nearby, folder, contents)


def _holders(run: Run, swarm: Swarm) -> list[str]:
    """Some of those who serve the run, so that the trainers needn't send everything to everybody, then the trainers."""
    trainers = run.manifest.trainers
    others = [
        peer
        for peer, member in swarm.members.items()
        if member.record.run_id == run.run_id and peer not in trainers and peer != swarm.peer
    ]
    return [*random.sample(others, min(_OTHERS_ASKED, len(others))), *trainers]
