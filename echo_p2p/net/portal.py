"""The bridge from a trio task to one asyncio loop in a thread of its own. Knows no vendor.

Coroutines cross once for each call; nothing that moves bytes in bulk should. The thread lives as long as the portal,
so a child process started on it may be tied to it.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, TypeVarTuple

import trio

from echo_p2p.errors import NetError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

JOIN_DEADLINE_S = 5.0
CANCEL_DEADLINE_S = 2.0


class Portal:
    """Runs coroutines on the asyncio loop. Made by `open_portal`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Await `function(*args)` on the asyncio loop; cancelling this cancels it there, and waits for that briefly."""
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()

        async def run() -> T:
            return await function(*args)

        if self._loop.is_closed():
            raise NetError("the network's background loop is closed; open the node again")
        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        future.add_done_callback(lambda _: _wake(token, done))
        try:
            await done.wait()
        except trio.Cancelled:
            future.cancel()
            with trio.move_on_after(CANCEL_DEADLINE_S, shield=True):
                await done.wait()
            raise
        if future.cancelled():
            raise NetError("the network's background loop is closing; open the node again")
        return future.result()


def _wake(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    try:
        token.run_sync_soon(done.set)
    except trio.RunFinishedError:
        logger.debug("a call to the asyncio loop ended after its trio run")


@asynccontextmanager
async def open_portal(name: str = "asyncio") -> AsyncIterator[Portal]:
    """A portal to a fresh loop; on leaving, its tasks are cancelled, it stops, and its thread is joined."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run_loop, args=(loop,), name=name, daemon=True)
    thread.start()
    try:
        yield Portal(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(thread.join, JOIN_DEADLINE_S)
        if thread.is_alive():
            logger.warning("the thread %s did not end within %.0f s", name, JOIN_DEADLINE_S)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_DEADLINE_S)
