"""Sequential delivery: a trainer calls for the groups of its slots, and gets each as it is finished. Knows no plan.

A call outlives a ring that fails, as long as another opens within the caller's patience.
"""

import logging
import time

import msgspec
import trio

from echo_node.produce import Head
from echo_p2p.errors import ChainError, EchoError, FrameTooLarge, NetError, StreamClosed, WeightsError
from echo_p2p.net.base import Stream
from echo_p2p.net.newest import Newest
from echo_p2p.presence import Presence
from echo_p2p.swarm import Run
from echo_protocols import names
from echo_protocols.envelope import PULL, Refusal
from echo_protocols.rollout import Slot
from echo_protocols.sync import PullReply, PullRequest

log = logging.getLogger(__name__)

NO_RING_S = 30.0
"""How long a call waits for a ring."""

_PULL_IDLE_S = 20.0
_SEND_DEADLINE_S = 30.0
_CALLS_MAX = 8  # that wait for their request, and that are answered
_CALL_MAX_BYTES = PULL.max_bytes + 512


class Pulls:
    """Answers the calls of a run's trainers with the ring at hand."""

    def __init__(self, presence: Presence, run: Run, head: Head) -> None:
        self._presence = presence
        self._run = run
        self._head = head
        self._calling = Newest(_CALLS_MAX)

    async def run(self) -> None:
        """Serve calls until cancelled."""
        streams = self._presence.hive
        await streams.serve(names.PULL, self._on_pull, max_frame_bytes=_CALL_MAX_BYTES, max_streams=2 * _CALLS_MAX)

    async def _on_pull(self, stream: Stream) -> None:
        border = self._presence.border
        try:
            with trio.fail_after(_PULL_IDLE_S), self._calling.place() as scope:
                data = await stream.receive()
        except (NetError, trio.TooSlowError) as error:
            border.refuse("oversized" if isinstance(error, FrameTooLarge) else "no-request", stream.peer)
            log.debug("%s asked for nothing: %s", stream.peer, error)
            return
        if scope.cancelled_caught:
            border.refuse("no-request", stream.peer)
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
        failures: list[EchoError] = []
        sending = trio.Lock()

        async def answer(slot: Slot) -> None:
            try:
                group = await self._head.answer(slot, request.version)
                async with sending:
                    await _send(stream, PullReply(group=self._head.seal(group)))
            except (ChainError, WeightsError, NetError) as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async def expect_ring() -> None:
            while True:
                with trio.move_on_after(NO_RING_S) as waited:
                    await self._head.ring()
                if waited.cancelled_caught:
                    failures.append(ChainError(f"no chain was open for {NO_RING_S:g} s"))
                    nursery.cancel_scope.cancel()
                await self._head.changed()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_ring)
            async with trio.open_nursery() as answering:
                for slot in request.slots:
                    answering.start_soon(answer, slot)
            nursery.cancel_scope.cancel()
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
