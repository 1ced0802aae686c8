"""A whole model in vLLM, as what answers prompts: the `Answerer` of a peer that needs no chain. Knows no task.

vLLM batches continuously; here is only what must be true of the answers: never a part of a group, each token of one
version, and no more asked for than there is room for, so that vLLM never drops what an answer has read.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

import trio

from echo_p2p.chain.answerer import ChainStatistics, GroupBounds, OnToken
from echo_p2p.chain.group import Answers, GroupRequest, SoFar
from echo_p2p.chain.link import ChainBroken, GroupBroken, broken
from echo_p2p.chain.shape import span_bytes
from echo_p2p.chain.vllm_process import EngineProcess
from echo_p2p.chain.vllm_wire import Ask, Drawn, Drop, Load
from echo_p2p.chain.workload import cache_bytes, longest_sequence
from echo_p2p.errors import ChainError, EchoError, ModelError, WeightsError
from echo_p2p.tensors import TensorUpdate
from echo_protocols.rollout import Sample
from echo_protocols.values import PolicyVersion, Span

POSITIONS = 8192
"""Of the longest answer that is taken, where there is memory."""

BLOCK = 128
"""Positions of a block on a CPU."""


class Changing(Protocol):
    """What updates are applied to."""

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change weights in place."""


class Releases(Protocol):
    """Where the next version comes from: `Weights`, for what is no stage."""

    async def prepare(self, version: PolicyVersion) -> None:
        """Return once `version` is staged. Raises WeightsError, NetError."""

    def switch(self, version: PolicyVersion, stage: Changing) -> None:
        """Apply a staged version, in a thread. Raises WeightsError."""


@dataclass(slots=True, eq=False)
class _Group:
    answers: Answers
    on_token: OnToken | None
    ended: trio.Event = field(default_factory=trio.Event)


class VllmEngine:
    """Answers with a loaded engine while that lives; `begin` says at which version. Satisfies `Answerer`."""

    def __init__(self, process: EngineProcess, weights: Releases, bounds: GroupBounds) -> None:
        self.bounds = bounds
        self.version = PolicyVersion(epoch=0, step=0)
        self._process = process
        self._weights = weights
        self._groups: dict[int, _Group] = {}
        self._numbers = count(1)
        self._room = Room(process.ready.blocks)
        self._switching = trio.Lock()
        self._grown = self._tokens = self._steps = self._switches = 0
        self._busy_s = 0.0
        process.on_drawn, process.due = self._take, lambda: bool(self._groups)

    @property
    def engine(self) -> str:
        """Fingerprint of what computes: `vllm-0.32.0-cpu-float32`."""
        return self._process.ready.engine

    @property
    def failed(self) -> trio.Event:
        """Set as soon as the process has failed or is closed."""
        return self._process.failed

    @property
    def fault(self) -> ChainBroken | None:
        """Why, once it has."""
        return self._process.fault

    @property
    def statistics(self) -> ChainStatistics:
        """Figures so far; `lanes` are the groups that grow."""
        return ChainStatistics(
            groups=self._grown,
            tokens=self._tokens,
            steps=self._steps,
            switches=self._switches,
            lanes=len(self._groups),
            busy_s=self._busy_s,
        )

    def groups_at_once(self, group_size: int) -> int:
        """One more than its rows are enough for."""
        return 1 + max(1, self.bounds.samples // group_size)

    async def begin(self, version: PolicyVersion) -> None:
        """Put the first version in place and let it draw. Raises WeightsError, ChainError."""
        await trio.to_thread.run_sync(self._weights.switch, version, self._process)
        await self._process.go(version)
        self.version = version

    async def generate(
        self, request: GroupRequest, on_token: OnToken | None = None, so_far: SoFar | None = None
    ) -> tuple[Sample, ...]:
        """Answer one prompt; waits while there is no room. Never a part of a group; `on_token` hears it grow.

        Raises GroupBroken when the engine fails; its `so_far`, given to the next one or to a chain, spares what was
        drawn. Raises ChainError for a request, or a so_far, that this engine can't serve.
        """
        blocks = self._blocks_of(request)
        if so_far is not None:
            self._check(request, so_far)
        group = _Group(Answers(request, so_far), on_token)
        if not group.answers.finished:
            await self._grow(request, group, blocks)
        if not group.answers.finished:
            fault = self.fault or broken("engine", "the group was given up")
            raise GroupBroken(fault.failure, group.answers.so_far(group.answers.lengths))
        self._grown += 1
        return group.answers.samples()

    async def _grow(self, request: GroupRequest, group: _Group, blocks: int) -> None:
        """Return when it is finished, or the engine has failed."""
        await self._room.take(blocks)
        number = next(self._numbers)
        self._groups[number] = group
        try:
            with suppress(ChainBroken):  # whose reason is this engine's fault then
                self._process.post(_ask(number, request, group.answers))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_after, self.failed, nursery.cancel_scope)
                await group.ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            del self._groups[number]
            self._room.free(blocks)
            if not group.answers.finished and self.fault is None:
                self._process.post(Drop(number=number))

    def _check(self, request: GroupRequest, so_far: SoFar) -> None:
        if (fault := so_far.fault(request)) is not None:
            raise ChainError(fault)
        if any(theirs > self.version for theirs in so_far.versions):
            raise ChainError(
                f"tokens so far are of a newer version than {self.version}, and versions only grow: switch first"
            )

    async def switch(self, version: PolicyVersion, timeout_s: float) -> None:
        """Have all later tokens drawn by `version`. Answers that grow keep the KV that they have read.

        Raises WeightsError when it can't be staged in time, and goes on as it is. Raises ChainError when it fails.
        """
        async with self._switching:
            if version < self.version:
                raise WeightsError(f"version {version} is older than this engine's {self.version}; versions only grow")
            try:
                with trio.fail_after(timeout_s):
                    await self._weights.prepare(version)
            except trio.TooSlowError:
                raise WeightsError(f"version {version} was not staged in {timeout_s:g} s") from None
            if version == self.version:
                return
            with trio.CancelScope(shield=True):  # held, or half-way between two versions, it must not stay
                await self._process.hold()
                try:
                    await trio.to_thread.run_sync(self._weights.switch, version, self._process)
                except EchoError as error:
                    self._process.fail(f"version {version} could not be put in place: {error}")
                    raise ChainError(f"the vllm engine is between two versions: {error}") from error
                await self._process.go(version)
            self.version = version
            self._switches += 1

    def _blocks_of(self, request: GroupRequest) -> int:
        """Blocks of KV that it may take. Raises ChainError."""
        if not request.prompt or request.samples < 1:
            raise ChainError("a group has a prompt of at least one token and at least one sample")
        if request.samples > self.bounds.samples or request.positions > self.bounds.positions:
            raise ChainError(
                f"{request.samples} samples of up to {request.positions} positions are more than this engine takes "
                f"({self.bounds.samples} of {self.bounds.positions}): ask for less"
            )
        ready = self._process.ready
        blocks = request.samples * -(-request.positions // ready.block)
        if blocks > ready.blocks:
            raise ChainError(f"the answers may take {blocks} blocks of KV, and this engine has {ready.blocks}")
        return blocks

    def _take(self, drawn: Drawn) -> None:
        self._steps += 1
        self._busy_s += drawn.busy_s
        for number, sample, token, logprob in drawn.tokens:
            self._tokens += 1
            if (group := self._groups.get(number)) is None:
                continue
            if group.on_token is not None:
                group.on_token(sample, token, drawn.version)
            group.answers.take(sample, token, logprob, drawn.version)
            if group.answers.finished:
                group.ended.set()


def load_for(
    model_path: Path, span: Span, *, device: str, rows: int, positions: int, memory_bytes: int, memory_share: float
) -> Load:
    """What to ask a process for: `rows` answers at a time, as long as the memory lets the longest one be.

    On a CPU `memory_bytes` are for weights, keys and values together. Raises ModelError if `positions` don't fit.
    """
    longest = min(longest_sequence(model_path), max(positions, POSITIONS))
    kv_bytes = 0
    if device == "cpu":
        left = memory_bytes - span_bytes(model_path, span)
        room = max(0, left) // cache_bytes(model_path, span, 1, 4)
        longest = min(longest, room // BLOCK * BLOCK)
        if longest < min(positions, longest_sequence(model_path)):
            raise ModelError(
                f"{memory_bytes >> 20} MiB hold the weights of {model_path.name} and {longest} positions of an answer, "
                f"which may have {positions}: free memory, or raise inference.memory_share"
            )
        wanted = (rows + 1) * -(-longest // BLOCK) * BLOCK
        kv_bytes = cache_bytes(model_path, span, min(room, wanted), 4)
    return Load(
        model=str(model_path),
        device=device,
        rows=rows,
        positions=longest,
        kv_bytes=kv_bytes,
        memory_share=memory_share,
    )


class Room:
    """Blocks of KV, given in the order in which they are asked for."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._entry = trio.Lock()
        self._freed = trio.Event()

    async def take(self, blocks: int) -> None:
        """Return once they are there, or are not needed any more."""
        async with self._entry:
            while blocks > self._left:
                self._freed = trio.Event()
                await self._freed.wait()
            self._left -= blocks

    def free(self, blocks: int) -> None:
        """Give them back."""
        self._left += blocks
        self._freed.set()


async def cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    """End a scope when something has happened."""
    await event.wait()
    scope.cancel()


def _ask(number: int, request: GroupRequest, answers: Answers) -> Ask:
    return Ask(
        number=number,
        group_id=request.group_id,
        run_seed=request.run_seed,
        prompt=request.prompt,
        samples=request.samples,
        sampling=request.sampling,
        stop_tokens=request.stop_tokens,
        begun=tuple((sample, answers.tokens(sample)) for sample in answers.unfinished),
    )
