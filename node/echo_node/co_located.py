"""The baseline: trainer and sampler in one process, no network. The same run, learner, stage and driver as a swarm's.

Sampling and training take turns on the same device, as in a co-located verl run; every rollout has lag 0.
"""

import logging
import signal

import msgspec
import trio

from echo_node.gather import enough
from echo_node.learner import Learner
from echo_node.learning import Graded, grade
from echo_node.places import Places
from echo_node.produce import group_request
from echo_node.trainer import make_manifest, open_learner
from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.config import NodeConfig
from echo_p2p.identity import load_or_create
from echo_p2p.rl.algorithms import step_size
from echo_p2p.tensors import TensorUpdate
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.peer import Stop
from echo_protocols.release import Release
from echo_protocols.rollout import RolloutGroup, Slot
from echo_protocols.run import RunManifest
from echo_protocols.uniform import Place, prompt_index
from echo_protocols.values import PolicyVersion, Span

log = logging.getLogger(__name__)

_SWITCH_TIMEOUT_S = 60.0


def run_co_located(config: NodeConfig, places: Places) -> int:
    """Train the configured steps, or until a signal; the exit status."""
    return trio.run(_run, config, places)


async def _run(config: NodeConfig, places: Places) -> int:
    async with trio.open_nursery() as nursery:

        async def stop_on_signal() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    log.info("%s: stopping", signal.Signals(number).name)
                    nursery.cancel_scope.cancel()

        nursery.start_soon(stop_on_signal)
        await _train(config, places)
        nursery.cancel_scope.cancel()
    return 0


class _LiveWeights:
    """The engine's own weights, whole: what a swarm's peers get by patches."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def prepare(self, version: PolicyVersion) -> None:
        """Nothing has to arrive."""

    def switch(self, version: PolicyVersion, stage: Stage) -> None:
        """Put every tensor into the stage."""
        stage.apply({name: TensorUpdate(None, bits) for name, bits in self._learner.weights().items()})


async def _train(config: NodeConfig, places: Places) -> None:
    peer = (await trio.to_thread.run_sync(load_or_create, places.identity)).peer_id
    manifest = await trio.to_thread.run_sync(make_manifest, config, peer)
    folder = places.run(manifest.run_id())
    store = Store(folder / "blobs", config.trainer.store_bytes)
    learner, publisher = await trio.to_thread.run_sync(open_learner, config, manifest, folder, store)
    _keep(store, publisher, await trio.to_thread.run_sync(learner.first_release))
    span = Span(start=0, end=manifest.layers, layers=manifest.layers)
    stage = await trio.to_thread.run_sync(
        lambda: load_stage(learner.prompts.model_path, span, device=config.trainer.device)
    )
    weights = _LiveWeights(learner)
    await trio.to_thread.run_sync(weights.switch, learner.version, stage)
    host = StageHost(peer, stage, weights, learner.version)
    ring = Ring((Stop(peer=peer, span=span),), manifest.run_id(), lanes=1, rows=manifest.group_size, exclusive=True)
    size = step_size(manifest.algorithm, manifest.groups_per_step)
    async with open_chain(ring, host) as driver:
        while config.trainer.steps is None or learner.version.step < config.trainer.steps:
            started = trio.current_time()

            async def ask(first: int, count: int) -> list[Graded]:
                slots = [Slot(step=learner.version.step + 1, slot=slot) for slot in range(first, first + count)]
                return [await _answer(manifest, learner, driver, peer, slot) for slot in slots]

            batch = await enough(size, ask)
            waited_s = trio.current_time() - started
            learned = await trio.to_thread.run_sync(learner.learn, batch, waited_s)
            record, release = await trio.to_thread.run_sync(learner.publish, learned)
            _keep(store, publisher, release)
            await driver.switch(learner.version, _SWITCH_TIMEOUT_S)
            log.info("step %d: reward %.3f", record.step, record.reward_mean)


async def _answer(manifest: RunManifest, learner: Learner, driver: ChainDriver, peer: str, slot: Slot) -> Graded:
    place: Place = ("slot", slot.step, slot.slot)
    index = prompt_index(manifest.randomness(), place, manifest.prompts)
    prompt = learner.prompts.ids(index)
    samples = await driver.generate(group_request(manifest, place, prompt))
    group = RolloutGroup(
        counter=(slot.step - 1) * step_size(manifest.algorithm, manifest.groups_per_step).bound + slot.slot,
        prompt_index=index,
        slot=slot,
        samples=samples,
        sampling_hash=manifest.sampling.hash(),
        engine=driver.engine,
    )
    return await trio.to_thread.run_sync(grade, learner.prompts, peer, group)


def _keep(store: Store, publisher: Publisher, release: Release) -> None:
    """Releases are made as in a swarm, so that their sizes and hashes compare, but go nowhere."""
    publisher.sealed(store.put(msgspec.msgpack.encode(release)))
