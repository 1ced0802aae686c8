"""The head of a chain at work: groups made all the time and gossiped (asynchronous), or made on call (sequential).

Knows no reward, no engine and no way to fetch weights.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from echo_node.feed import Feed
from echo_node.places import write_whole
from echo_node.prompts import Prompts
from echo_p2p.chain.answerer import Answerer
from echo_p2p.chain.group import GroupRequest
from echo_p2p.errors import ChainError, EchoError, FrameTooLarge, NetError, StreamClosed, WeightsError
from echo_p2p.net.base import GOSSIP_MAX_BYTES, Stream
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import LARGE_ROLLOUT, PULL, ROLLOUT, Refusal
from echo_protocols.rollout import LargeRollout, RolloutGroup, Slot
from echo_protocols.run import RunManifest
from echo_protocols.sync import PullReply, PullRequest, may_generate
from echo_protocols.uniform import Place, group_id, prompt_index
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

SWITCH_TIMEOUT_S = 60.0
_PULL_IDLE_S = 20.0
_SEND_DEADLINE_S = 30.0
_RETRY_S = 1.0


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
    """Makes groups with one chain. `made` counts them; `activity` says in words what it does."""

    def __init__(
        self,
        presence: Presence,
        run: Run,
        prompts: Prompts,
        driver: Answerer,
        counter: Counter,
        store: Store,
    ) -> None:
        self.made = 0
        self._presence = presence
        self._run = run
        self._prompts = prompts
        self._driver = driver
        self._counter = counter
        self._store = store
        self._switching = trio.Lock()
        self._switched = trio.Event()

    async def make(self, slot: Slot | None) -> RolloutGroup:
        """One group: of a slot, or of our own next counter. Raises ChainError."""
        manifest = self._run.manifest
        counter = await trio.to_thread.run_sync(self._counter.take)
        place: Place = ("slot", slot.step, slot.slot) if slot else (self._presence.identity.peer_id, counter)
        index = prompt_index(manifest.randomness(), place, manifest.prompts)
        prompt = await trio.to_thread.run_sync(self._prompts.ids, index)
        samples = await self._driver.generate(group_request(manifest, place, prompt))
        self.made += 1
        return RolloutGroup(
            counter=counter,
            prompt_index=index,
            slot=slot,
            samples=samples,
            sampling_hash=manifest.sampling.hash(),
            engine=self._driver.engine,
        )

    def seal(self, group: RolloutGroup) -> bytes:
        """A group, signed."""
        return self._presence.sealer.seal(ROLLOUT, self._run.run_id, group, time.time())

    async def switch(self, version: PolicyVersion) -> None:
        """Have the whole ring at `version`; no-op when it is. Raises WeightsError, ChainError."""
        async with self._switching:
            if self._driver.version != version:
                await self._driver.switch(version, SWITCH_TIMEOUT_S)
                self._switched.set()
                self._switched = trio.Event()

    # -- asynchronous -----------------------------------------------------------------------------------------------

    async def push_for_ever(self, feed: Feed, replica: Replica, on_stall: Callable[[bool], None]) -> None:
        """Generate on all lanes while the lag allows it, a group more for each; switch as soon as a release is staged.

        Goes idle when the chain fails: `Answerer.failed` says so.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_switched, replica)
            for _ in range(self._driver.groups_at_once(self._run.manifest.group_size)):
                nursery.start_soon(self._push, feed, on_stall)

    async def _keep_switched(self, replica: Replica) -> None:
        while True:
            staged = await replica.newer_than(self._driver.version)
            try:
                await self.switch(staged)
            except WeightsError as error:
                log.warning("the chain stays at version %s: %s", self._driver.version, error)
                await trio.sleep(_RETRY_S)
            except ChainError:
                return  # said by whoever waits for the driver's failure

    async def _push(self, feed: Feed, on_stall: Callable[[bool], None]) -> None:
        max_lag = self._run.manifest.max_lag
        while True:
            if not may_generate(self._driver.version, feed.version, max_lag):
                on_stall(True)
                await self._switched.wait()
                continue
            on_stall(False)
            try:
                group = await self.make(None)
            except ChainError:
                return
            try:
                await self._publish(self.seal(group))
            except (NetError, WeightsError) as error:
                log.warning("a group of %d tokens could not be published: %s", group.token_count, error)

    async def _publish(self, sealed: bytes) -> None:
        presence, swarm = self._presence, self._presence.swarm.name
        if len(sealed) <= GOSSIP_MAX_BYTES:
            await presence.gossip.publish(names.rollout_topic(swarm), sealed)
            return
        hash = await trio.to_thread.run_sync(self._store.put, sealed)
        pointer = LargeRollout(blob=hash, size_bytes=len(sealed))
        message = presence.sealer.seal(LARGE_ROLLOUT, self._run.run_id, pointer, time.time())
        await presence.gossip.publish(names.large_rollout_topic(swarm), message)

    # -- sequential -------------------------------------------------------------------------------------------------

    async def answer_pulls(self) -> None:
        """Serve the trainers' calls until cancelled."""
        await self._presence.hive.serve(names.PULL, self._on_pull, max_frame_bytes=PULL.max_bytes + 512, max_streams=8)

    async def _on_pull(self, stream: Stream) -> None:
        border = self._presence.border
        try:
            with trio.fail_after(_PULL_IDLE_S):
                data = await stream.receive()
        except (NetError, trio.TooSlowError) as error:
            border.refuse("oversized" if isinstance(error, FrameTooLarge) else "no-request", stream.peer)
            log.debug("%s asked for nothing: %s", stream.peer, error)
            return
        opened = border.open(data, PULL, self._run.run_id, time.time(), once=True)
        if isinstance(opened, Refusal):
            return await self._fail(stream, opened.reason)
        if opened.signer not in self._run.manifest.trainers:
            border.refuse("not-a-trainer", opened.signer)
            return await self._fail(stream, "only the run's trainers may call for rollouts")
        try:
            await self._answer(stream, opened.payload)
        except (ChainError, WeightsError) as error:
            await self._fail(stream, str(error))
        except NetError as error:
            log.info("the trainer left before all its slots were answered: %s", error)

    async def _answer(self, stream: Stream, request: PullRequest) -> None:
        await self.switch(request.version)
        failures: list[EchoError] = []
        sending = trio.Lock()

        async def answer(slot: Slot) -> None:
            try:
                reply = PullReply(group=self.seal(await self.make(slot)))
                async with sending:
                    await _send(stream, reply)
            except (ChainError, NetError) as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for slot in request.slots:
                nursery.start_soon(answer, slot)
        if failures:
            raise failures[0]

    async def _fail(self, stream: Stream, reason: str) -> None:
        try:
            await _send(stream, PullReply(failure=reason[:1024]))
        except NetError as error:
            log.debug("a caller left before it heard of the failure: %s", error)


async def _send(stream: Stream, reply: PullReply) -> None:
    """Raises StreamClosed, also for a caller that takes nothing."""
    with trio.move_on_after(_SEND_DEADLINE_S):
        await stream.send(msgspec.msgpack.encode(reply))
        return
    raise StreamClosed(f"{stream.peer} took no answer for {_SEND_DEADLINE_S:g} s")


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
