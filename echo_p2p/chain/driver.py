"""The head of a chain: turns prompts into finished groups, and switches the ring's version between two steps.

Knows no task, no reward and no trainer. A ring of one stage is driven without any network. A ring that fails fails
whole: groups in flight raise ChainError, `failed` is set, and whoever opened the chain opens another.
"""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import trio

from echo_p2p.chain.answerer import ChainStatistics, GroupBounds, OnToken
from echo_p2p.chain.canary import LANES
from echo_p2p.chain.group import GroupRequest, SoFar
from echo_p2p.chain.growth import Growth
from echo_p2p.chain.head import RingHead
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainBroken
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.server import ChainServer
from echo_p2p.chain.verdict import Judge, Reference, Seen
from echo_p2p.errors import ChainError, WeightsError
from echo_protocols.hop import Prepare, Switch
from echo_protocols.rollout import Sample
from echo_protocols.values import PolicyVersion


def open_chain(
    ring: Ring,
    host: StageHost,
    server: ChainServer | None = None,
    *,
    canary: bool = True,
    reference: Reference | None = None,
) -> "ChainDriver":
    """The driver of a ring whose first stop is this peer: `async with open_chain(…) as driver`.

    Entering raises ChainError when a stage refuses or can't be reached. `server` must be serving; a ring of one
    needs none. With a `canary`, groups are delivered when one that began behind them has agreed with the first of its
    version, and this with the `reference`, if that knows the version.
    """
    if ring.route[0].peer != host.peer or ring.route[0].span != host.stage.span:
        raise ChainError(f"a chain is opened by its first stop; {host.peer} with {host.stage.span} is not it")
    if len(ring.route) > 1 and server is None:
        raise ChainError("a chain of several stops needs a ChainServer to close its ring")
    if host.corrupt:
        raise ChainError(f"the stage of {host.peer} computes otherwise than it did: load it anew")
    if ring.lane_count + (LANES if canary else 0) >= host.limits.lanes:
        raise ChainError(
            f"{ring.lane_count} lanes and a prompt are more than the {host.limits.lanes} lanes that this host holds"
        )
    return ChainDriver(ring, host, server, Judge(reference) if canary else None)


class ChainDriver:
    """Owns a ring while its context is open. All methods may be called concurrently."""

    def __init__(self, ring: Ring, host: StageHost, server: ChainServer | None, judge: Judge | None) -> None:
        self.ring = ring
        self.host = host
        self._head = RingHead(ring, server, host.limits)
        self._growth = Growth(ring, host, self._head, judge)
        self._judge = judge
        self._switching = trio.Lock()
        self._stack = AsyncExitStack()
        self._switches = 0

    @property
    def version(self) -> PolicyVersion:
        """The version that the next step of every stage will have."""
        return self.host.version

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The version of each stop when the ring was closed; a `switch` brings together what is apart."""
        return self._head.versions or (self.host.version,)

    @property
    def engine(self) -> str:
        """Fingerprint of what computes, stage by stage."""
        return self._head.engine or self.host.stage.engine

    @property
    def canary(self) -> Seen | None:
        """The first canary of the newest version that had one: a `reference` for other chains of the run."""
        return self._judge.baseline if self._judge else None

    @property
    def failed(self) -> trio.Event:
        """Set as soon as the chain has failed or is closed."""
        return self._head.failed

    @property
    def fault(self) -> ChainBroken | None:
        """Why, once it has."""
        return ChainBroken(self._head.failure) if self._head.failure else None

    @property
    def told_by(self) -> str | None:
        """The neighbour in the ring that told of the fault; None if it was found here."""
        return self._head.told_by

    @property
    def statistics(self) -> ChainStatistics:
        """Figures so far."""
        grown = self._growth
        return ChainStatistics(
            groups=grown.groups,
            tokens=grown.tokens,
            steps=grown.steps,
            switches=self._switches,
            lanes=grown.lanes,
            busy_s=self.host.statistics.busy_s,
        )

    @property
    def bounds(self) -> GroupBounds:
        """The largest group that `generate` takes."""
        limits = self.host.limits
        return GroupBounds(samples=min(self.ring.rows, limits.rows), positions=limits.positions)

    def groups_at_once(self, group_size: int) -> int:
        """One more for each lane than grow in it."""
        return self.ring.lane_count * (1 + self.ring.rows // group_size)

    async def generate(
        self, request: GroupRequest, on_token: OnToken | None = None, so_far: SoFar | None = None
    ) -> tuple[Sample, ...]:
        """Answer one prompt; waits while there is no room. Never a part of a group; `on_token` hears it grow.

        Raises GroupBroken when the chain fails; its `so_far`, given here to the driver of another ring, spares what
        was drawn: the answers come out as if the first ring had gone on. Raises ChainError for a request, or a so_far,
        that this ring can't serve: one that it could never hold; tokens of a newer version than it has, or in an
        exclusive ring of any other.
        """
        return await self._growth.answer(request, on_token, so_far)

    async def switch(self, version: PolicyVersion, timeout_s: float) -> None:
        """Stage `version` at every stop, then have all later steps computed by it.

        Raises WeightsError when a stop can't stage it in time; the chain then goes on as it is. Raises ChainError
        when the chain fails.
        """
        with self._head.until_failure():
            async with self._switching:
                await self._prepare(version, timeout_s)
                await self._growth.proofs.prove()
                async with self.host.turns.alone() as turn:
                    # Applied here but not announced, a version would split the ring: not to be cancelled between.
                    with trio.CancelScope(shield=True):
                        await self.host.switch(turn, version)
                        self._head.send(Switch(version=version))
                self._switches += 1
                self._growth.proofs.begin()

    async def __aenter__(self) -> Self:
        await self._head.__aenter__()
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(self._growth.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The caller's exception stays outside of the nursery, which would wrap it.
        try:
            await self._stack.aclose()
        finally:
            try:
                await self._head.__aexit__(kind, error, trace)
            finally:
                self._growth.leave()
                with trio.CancelScope(shield=True):
                    await self.host.free()

    async def _prepare(self, version: PolicyVersion, timeout_s: float) -> None:
        try:
            with trio.fail_after(timeout_s), self._head.preparing(version) as returned:
                self._head.send(Prepare(version=version, timeout_s=timeout_s))
                await self.host.prepare(version, timeout_s)
                await self._head.prepared(returned)
        except trio.TooSlowError:
            raise WeightsError(f"version {version} was not staged by all stops in {timeout_s:g} s") from None
