"""The engine's process between two steps: takes what the node asks, and steps while there is something to draw.

Knows no vllm: whatever batches continuously can be the `Core`. Weights change only while it is held, which is between
two steps, so every token is of one version, and the node hears which.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.live_weights import LiveWeights
from echo_p2p.chain.vllm_wire import (
    Apply,
    Array,
    Ask,
    Done,
    Drawn,
    Drop,
    Failed,
    Go,
    Hold,
    Load,
    Message,
    Read,
    Ready,
    Token,
    WorkerPipe,
    updates_of,
)
from echo_p2p.errors import EchoError, ModelError, WeightsError
from echo_protocols.values import PolicyVersion

logger = logging.getLogger(__name__)

Begun = Mapping[int, tuple[int, ...]]
"""Samples that are to grow, and the tokens that each one has already."""


class Core(Protocol):
    """An engine that holds the whole model."""

    engine: str
    """Fingerprint of what computes: backend, its version, dtype."""
    weights: LiveWeights

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks of keys and values there are, and positions of each."""

    @property
    def busy(self) -> bool:
        """Whether there are answers that grow or wait."""

    def add(self, number: int, request: GroupRequest, begun: Begun) -> None:
        """Let these answers to a prompt grow."""

    def drop(self, number: int) -> None:
        """End them; unknown numbers are no error."""

    def renew(self, version: PolicyVersion) -> None:
        """The weights are of `version` now: answers that have begun keep their KV, prompts are read anew."""

    def step(self) -> list[Token]:
        """A token more for as many answers as there is room for; none while prompts are read."""


def serve(pipe: WorkerPipe, load_core: Callable[[Load], Core]) -> None:
    """The life of an engine's process: load what the node asks for, then serve it until it is gone."""
    try:
        load, _ = pipe.receive()
        assert isinstance(load, Load)
        core = load_core(load)
        blocks, block = core.blocks
        pipe.send(Ready(engine=core.engine, blocks=blocks, block=block))
        Loop(pipe, core).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except EchoError as error:
        pipe.send(Failed(text=str(error), unfit=isinstance(error, ModelError)))
    except Exception as error:  # whatever an engine raises ends its process, and the node hears why
        logger.exception("the engine failed")
        pipe.send(Failed(text=f"{type(error).__name__}: {error}"[:2000]))


class Loop:
    """Held until the first `Go`, which says what version the weights are."""

    def __init__(self, pipe: WorkerPipe, core: Core) -> None:
        self._pipe = pipe
        self._core = core
        self._version: PolicyVersion | None = None
        self._held = True

    def run(self) -> None:
        """Serve until the node is gone (EOFError, OSError), or the engine fails: whatever it raises."""
        while True:
            if self._held or not self._core.busy or self._pipe.waiting():
                self._take(*self._pipe.receive())
                continue
            started = time.perf_counter()
            drawn = self._core.step()
            busy_s = time.perf_counter() - started
            assert self._version is not None
            self._pipe.send(Drawn(version=self._version, tokens=tuple(drawn), busy_s=busy_s))

    def _take(self, message: Message, arrays: list[Array]) -> None:
        match message:
            case Ask():
                self._core.add(message.number, request_of(message), dict(message.begun))
            case Drop():
                self._core.drop(message.number)
            case Hold():
                self._held = True
                self._pipe.send(Done())
            case Go():
                if message.version != self._version:
                    self._core.renew(message.version)
                self._version, self._held = message.version, False
                self._pipe.send(Done())
            case Read():
                tensors = self._core.weights.tensors()
                self._pipe.send(Done(names=tuple(tensors)), list(tensors.values()))
            case Apply():
                self._pipe.send(Done(fault=self._apply(message, arrays)))
            case _:
                raise ValueError(f"a node does not send {type(message).__name__}")

    def _apply(self, message: Apply, arrays: list[Array]) -> str:
        """What is wrong with the updates, if anything is."""
        if not self._held:
            return "weights change only while the engine is held"
        try:
            self._core.weights.apply(updates_of(message, arrays))
        except WeightsError as error:
            return str(error)
        return ""


def request_of(ask: Ask) -> GroupRequest:
    """The request as the node had it."""
    return GroupRequest(
        group_id=ask.group_id,
        run_seed=ask.run_seed,
        prompt=ask.prompt,
        samples=ask.samples,
        sampling=ask.sampling,
        stop_tokens=ask.stop_tokens,
    )
