"""The head of a chain at work: makes groups with whatever ring is open, and finishes what a ring left unfinished.

A group outlives the ring that it began in: whoever makes it waits for the next one, and goes on there with the tokens
so far. Knows no reward, no engine, no way to fetch weights and no way to deliver a group.
"""

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from echo_node.places import write_whole
from echo_node.prompts import Prompts
from echo_p2p.chain.answerer import Answerer
from echo_p2p.chain.driver import ChainDriver
from echo_p2p.chain.group import GroupRequest, SoFar
from echo_p2p.chain.link import ChainBroken, GroupBroken
from echo_p2p.errors import ChainError, EchoError, WeightsError
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_p2p.weights.fetch import Replica
from echo_protocols.envelope import ROLLOUT
from echo_protocols.rollout import RolloutGroup, Slot
from echo_protocols.run import RunManifest
from echo_protocols.sync import may_generate
from echo_protocols.uniform import Place, group_id, prompt_index
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

SWITCH_TIMEOUT_S = 60.0
RETRY_S = 1.0

Fit = Callable[[Answerer, SoFar | None], Awaitable[SoFar | None]]
"""Makes a ring ready for a group, and says what of its tokens may stay.

Raises GroupDropped, ChainError, WeightsError.
"""


class GroupDropped(EchoError):
    """A group that no ring can finish any more within the run's rules; nothing of it is delivered."""


class Counter:
    """Numbers a worker's groups from 0, over restarts: a number is on disk before it is used. Safe between threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._next = int(path.read_text()) if path.exists() else 0
        except (OSError, ValueError) as error:
            raise EchoError(
                f"the counter {path} can't be read ({error}); restore it, or move identity.key away to get a new one"
            ) from error

    def take(self) -> int:
        """The next number. Raises EchoError if it can't be noted."""
        with self._lock:
            number = self._next
            try:
                write_whole(self._path, str(number + 1).encode())
            except OSError as error:
                raise EchoError(f"the counter {self._path} can't be written ({error}); free some disk space") from error
            self._next = number + 1
        return number


class Head:
    """Makes groups for as long as a peer serves a run, with one ring after the other.

    `made` and `dropped` count groups that were finished and that no ring could finish in time; `resumed` counts how
    often one went on in another ring.
    """

    def __init__(self, presence: Presence, run: Run, prompts: Prompts, counter: Counter) -> None:
        self.made = self.resumed = self.dropped = 0
        self.driver: Answerer | None = None
        self._presence = presence
        self._run = run
        self._prompts = prompts
        self._counter = counter
        self._switching = trio.Lock()
        self._news = trio.Event()

    @contextmanager
    def using(self, driver: Answerer) -> Iterator[None]:
        """Make groups with the ring meanwhile."""
        self.driver = driver
        self._notify()
        try:
            yield
        finally:
            self.driver = None
            self._notify()

    async def ring(self) -> Answerer:
        """The ring at hand, once there is one that works."""
        while self.driver is None or self.driver.failed.is_set():
            await self._news.wait()
        return self.driver

    async def changed(self) -> None:
        """Return when a ring comes or goes, or has another version."""
        await self._news.wait()

    async def make(self, latest: Callable[[], PolicyVersion | None]) -> RolloutGroup:
        """The group of our next counter, begun by whatever version is at hand.

        Raises GroupDropped when a ring failed, and what was there when the next one opened is too old, by the `latest`
        version, to be trained on. Raises ChainError for a group that the ring can't hold.
        """

        async def fit(driver: Answerer, so_far: SoFar | None) -> SoFar | None:
            if so_far and not all(may_generate(each, latest(), max_lag) for each in so_far.versions):
                self.dropped += 1
                raise GroupDropped(f"a group of {so_far.token_count} tokens is older than the run allows")
            return so_far

        max_lag = self._run.manifest.max_lag
        return await self._make(None, fit)

    async def answer(self, slot: Slot, version: PolicyVersion) -> RolloutGroup:
        """The group of a slot, all of it by `version`. Raises ChainError, WeightsError."""

        async def fit(driver: Answerer, so_far: SoFar | None) -> SoFar | None:
            await self.switch(driver, version)
            return so_far if so_far and so_far.versions <= {version} else None

        return await self._make(slot, fit)

    async def _make(self, slot: Slot | None, fit: Fit) -> RolloutGroup:
        manifest = self._run.manifest
        counter = await trio.to_thread.run_sync(self._counter.take)
        place: Place = ("slot", slot.step, slot.slot) if slot else (self._presence.identity.peer_id, counter)
        index = prompt_index(manifest.randomness(), place, manifest.prompts)
        prompt = await trio.to_thread.run_sync(self._prompts.ids, index)
        request = group_request(manifest, place, prompt)
        so_far: SoFar | None = None
        while True:
            driver = await self.ring()
            try:
                so_far = await fit(driver, so_far)
                samples = await driver.generate(request, None, so_far)
            except ChainBroken as error:
                so_far = error.so_far if isinstance(error, GroupBroken) else so_far
                self.resumed += 1
                continue
            except ChainError:
                self.dropped += so_far is not None
                raise
            self.made += 1
            return RolloutGroup(
                counter=counter,
                prompt_index=index,
                slot=slot,
                samples=samples,
                sampling_hash=manifest.sampling.hash(),
                engine=driver.engine,
            )

    def seal(self, group: RolloutGroup) -> bytes:
        """A group, signed."""
        return self._presence.sealer.seal(ROLLOUT, self._run.run_id, group, time.time())

    async def switch(self, driver: Answerer, version: PolicyVersion) -> None:
        """Have the whole ring at `version`; no-op when it is. Raises WeightsError, ChainError."""
        async with self._switching:
            if driver.version != version:
                await driver.switch(version, SWITCH_TIMEOUT_S)
                self._notify()

    async def keep_switched(self, driver: Answerer, replica: Replica) -> None:
        """Switch as soon as a release is staged, until the ring fails."""
        while True:
            staged = await replica.newer_than(driver.version)
            try:
                await self.switch(driver, staged)
            except WeightsError as error:
                log.warning("the chain stays at version %s: %s", driver.version, error)
                await trio.sleep(RETRY_S)
            except ChainError:
                return  # said by whoever waits for the driver's failure

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()


async def bring_together(driver: ChainDriver, replica: Replica) -> None:
    """Have all stops of a ring that was just opened at one version: the newest among them, or what came since.

    Raises ChainError.
    """
    wanted = max(driver.versions)
    while set(driver.versions) != {wanted}:
        try:
            return await driver.switch(wanted, SWITCH_TIMEOUT_S)
        except WeightsError as error:
            log.warning("the stops of the chain are at different versions: %s", error)
            with trio.move_on_after(RETRY_S):
                wanted = await replica.newer_than(wanted)


def group_request(manifest: RunManifest, place: Place, prompt: tuple[int, ...]) -> GroupRequest:
    """What a chain is asked for the group at `place`; the co-located baseline asks its own for the same."""
    return GroupRequest(
        group_id=group_id(manifest.randomness(), place),
        run_seed=manifest.randomness(),
        prompt=prompt,
        samples=manifest.group_size,
        sampling=manifest.sampling,
        stop_tokens=frozenset(manifest.stop_tokens),
    )
