"""The process that an engine runs in, as its node sees it: started, spoken to, and ended. Knows no vllm and no group.

One that fails fails whole: `failed` is set, whoever waits for a reply hears why, and whoever opened it opens another.
"""

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from echo_p2p.chain.link import ChainBroken, broken
from echo_p2p.chain.vllm_wire import (
    Apply,
    Array,
    Done,
    Drawn,
    Failed,
    Go,
    Hold,
    Load,
    NodePipe,
    Read,
    Ready,
    ToWorker,
    apply_message,
)
from echo_p2p.errors import ChainError, ModelError, WeightsError
from echo_p2p.net import leash
from echo_p2p.tensors import Bits, TensorUpdate
from echo_protocols.values import PolicyVersion

LOAD_TIMEOUT_S = 1800.0
STALL_S = 120.0
"""How long an engine may be silent while something is due from it."""

_LEAVE_S = 5.0
_QUEUED_MAX = 4096

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""The engine in one process and thread, with the model runner that we know; no telemetry, no download."""

OnDrawn = Callable[[Drawn], None]


def start_process(end: socket.socket) -> Callable[[], None]:
    """Start an engine's process at the other end of a socket, which dies with this node; what ends it."""
    settings = [f"{name}={value}" for name, value in _SETTINGS.items()]
    program = [sys.executable, "-m", "echo_p2p.chain.vllm_core", str(end.fileno())]
    process = subprocess.Popen(
        [sys.executable, "-I", str(leash.__file__), str(os.getpid()), *settings, "--", *program],
        pass_fds=(end.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=2,
    )

    def stop() -> None:
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return stop


class EngineProcess:
    """An engine that is loaded. Its `tensors` and `apply` are for threads that trio started, as those of a stage."""

    def __init__(self, pipe: NodePipe) -> None:
        self.failed = trio.Event()
        self._reason: str | None = None
        self.ready = Ready(engine="", blocks=0, block=1)
        self.on_drawn: OnDrawn = lambda _: None
        self.due: Callable[[], bool] = lambda: False
        self._pipe = pipe
        self._outbox, self._outgoing = trio.open_memory_channel[tuple[ToWorker, Sequence[Array]]](_QUEUED_MAX)
        self._calling = trio.Lock()
        self._replies: list[tuple[Done, list[Array]]] = []
        self._replied = trio.Event()
        self._patience = trio.CancelScope()

    @property
    def fault(self) -> ChainBroken | None:
        """Why it has failed, once it has."""
        return None if self._reason is None else broken("engine", f"the vllm engine has failed: {self._reason}")

    def post(self, message: ToWorker, arrays: Sequence[Array] = ()) -> None:
        """Send in due course. Raises ChainError when the engine has failed or takes nothing."""
        if self._reason is None:
            try:
                self._outbox.send_nowait((message, arrays))
            except trio.WouldBlock:
                self.fail(f"it has taken none of {_QUEUED_MAX} messages")
        if (fault := self.fault) is not None:
            raise fault
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + STALL_S)

    def fail(self, reason: str) -> None:
        """Nothing comes any more; the first reason stays."""
        self._reason = self._reason or reason
        self.failed.set()
        self._replied.set()
        self._patience.cancel()

    async def hold(self) -> None:
        """Return once no step is being computed, and none will be until `go`. Raises ChainError."""
        await self._call(Hold())

    async def go(self, version: PolicyVersion) -> None:
        """All weights of `version` are in place. Raises ChainError."""
        await self._call(Go(version=version))

    def tensors(self) -> Mapping[str, Bits]:
        """All tensors by global name, as bf16 bits. Raises ChainError."""
        done, arrays = trio.from_thread.run(self._call, Read())
        return dict(zip(done.names, arrays, strict=True))

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change weights in place while it is held. Raises WeightsError before anything changes, ChainError."""
        done, _ = trio.from_thread.run(self._call, *apply_message(updates))
        if done.fault:
            raise WeightsError(done.fault)

    async def _call(self, message: Hold | Go | Read | Apply, arrays: Sequence[Array] = ()) -> tuple[Done, list[Array]]:
        async with self._calling:
            self._replied = trio.Event()
            self.post(message, arrays)
            await self._replied.wait()
            if (fault := self.fault) is not None:
                raise fault
            return self._replies.pop()

    async def load(self, load: Load) -> None:
        """Wait until it holds the model. Raises ModelError when it never will, ChainError."""
        try:
            with trio.fail_after(LOAD_TIMEOUT_S):
                await self._pipe.send(load)
                message, _ = await self._pipe.receive()
        except trio.TooSlowError:
            raise ChainError(f"the vllm engine did not load {load.model} in {LOAD_TIMEOUT_S:g} s") from None
        except (EOFError, OSError, trio.BrokenResourceError) as error:
            raise ModelError(
                f"the vllm engine ended while it loaded {load.model}: its log above says why; or choose --engine torch"
            ) from error
        if isinstance(message, Failed):
            raise ModelError(message.text) if message.unfit else ChainError(f"vllm failed: {message.text}")
        assert isinstance(message, Ready)
        self.ready = message

    async def run(self) -> None:
        """Carry messages until it has failed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            try:
                await self._listen()
            except (EOFError, OSError, trio.ClosedResourceError) as error:
                self.fail(f"its process has ended ({error})")
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """The other end ends, too."""
        self._pipe.close()

    async def _send(self) -> None:
        try:
            async for message, arrays in self._outgoing:
                await self._pipe.send(message, arrays)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.fail(f"its process has ended ({error})")

    async def _listen(self) -> None:
        while not self.failed.is_set():
            with trio.CancelScope() as self._patience:
                if self.due() or self._calling.locked():
                    self._patience.deadline = trio.current_time() + STALL_S
                self._take(*await self._pipe.receive())
            if self._patience.cancelled_caught:
                self.fail(f"it has been silent for {STALL_S:g} s")

    def _take(self, message: object, arrays: list[Array]) -> None:
        match message:
            case Drawn():
                self.on_drawn(message)
            case Done():
                self._replies.append((message, arrays))
                self._replied.set()
            case Failed():
                self.fail(message.text)
            case _:
                self.fail(f"it said {type(message).__name__}")


@asynccontextmanager
async def open_process(
    load: Load, start: Callable[[socket.socket], Callable[[], None]] = start_process
) -> AsyncIterator[EngineProcess]:
    """Start an engine and load its model; leaving ends it. Raises ModelError, ChainError."""
    ours, theirs = socket.socketpair()
    with theirs:
        stop = start(theirs)
    process, stack = EngineProcess(NodePipe(ours)), AsyncExitStack()
    try:
        await process.load(load)
        # The caller's exception stays outside of the nursery, which would wrap it.
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(process.run)
        yield process
    finally:
        process.fail("it was closed")
        try:
            await stack.aclose()
        finally:  # also when it is cancelled there
            process.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(stop)
