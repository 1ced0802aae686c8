"""The nodes of a demo as they say themselves, asked over HTTP, and shown on a terminal or as lines. Starts no node."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from echo_node.fleet import NodeProcess
from echo_node.runlog import read_config, read_steps, state_from_log
from echo_node.screen import DemoView, NodeStatus, death_lines, progress_line, render
from echo_node.status import decode_state, fetch_state, read_whereabouts
from echo_p2p.errors import ConfigError, EchoError, TrainerError, Unreachable

POLL_S = 0.5
LOG_EVERY_S = 5.0


class Watch:
    """What is known of the nodes, as they say themselves. Holds one state a node: the last.

    `failure` is why the demo can't go on, if so; `stopping` is set by whoever ends it.
    """

    def __init__(self, limit_s: float) -> None:
        self.stopping = False
        self._limit_s = limit_s
        self._started = trio.current_time()
        self._nodes: dict[str, NodeStatus] = {}
        self.failure: EchoError | None = None

    def view(self) -> DemoView:
        """The picture of this moment."""
        elapsed = trio.current_time() - self._started
        return DemoView(tuple(self._nodes.values()), elapsed, self._limit_s, self.stopping)

    async def follow(self, node: NodeProcess) -> None:
        """Ask one node for its state until it ends."""
        self._nodes[node.name] = NodeStatus(node.name)
        while node.ended is None:
            with suppress(ConfigError, Unreachable):  # not up yet, busy, or just leaving
                where = read_whereabouts(node.home)
                content = await trio.to_thread.run_sync(fetch_state, where.http, 4.0, abandon_on_cancel=True)
                self._nodes[node.name] = replace(self._nodes[node.name], state=decode_state(content))
            await trio.sleep(POLL_S)
        self._has_ended(node)

    async def follow_log(self, node: NodeProcess) -> None:
        """The same for a trainer that serves no state: read the log of its run."""
        self._nodes[node.name] = NodeStatus(node.name)
        while node.ended is None:
            if config := await trio.to_thread.run_sync(read_config, node.home):
                steps = await trio.to_thread.run_sync(read_steps, node.home)
                state = state_from_log(node.name, steps, config)
                self._nodes[node.name] = replace(self._nodes[node.name], state=state)
            await trio.sleep(POLL_S)
        self._has_ended(node)

    def _has_ended(self, node: NodeProcess) -> None:
        self._nodes[node.name] = replace(self._nodes[node.name], ended=node.ended, last_line=node.last_line())

    async def until_done(self, node: NodeProcess) -> None:
        """Return when this node has done its steps or ended; an end in failure is kept for `failure`."""
        while node.ended is None:
            state = status.state if (status := self._nodes.get(node.name)) else None
            if state is not None and state.trainer is not None and state.trainer.done:
                return
            await trio.sleep(POLL_S)
        if node.ended != 0:
            said = node.last_line() or "it said nothing"
            self.failure = TrainerError(f"the demo's {node.name} ended (status {node.ended}): {said}")


@asynccontextmanager
async def showing(watch: Watch, progress: Console) -> AsyncIterator[None]:
    """The live screen on a terminal, else a line now and then; the last picture stays."""
    async with trio.open_nursery() as nursery:
        if progress.is_terminal:
            with Live(console=progress, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

                def paint() -> None:
                    live.update(render(watch.view()), refresh=True)

                nursery.start_soon(_repeat, paint, POLL_S)
                yield
                paint()
        else:
            nursery.start_soon(_repeat, _Lines(watch, progress).write, LOG_EVERY_S)
            yield
        nursery.cancel_scope.cancel()


class _Lines:
    """The screen as lines, for a log; a node's death is said once."""

    def __init__(self, watch: Watch, progress: Console) -> None:
        self._watch = watch
        self._progress = progress
        self._said: set[str] = set()

    def write(self) -> None:
        """One line of progress, and one for each node that died since the last."""
        view = self._watch.view()
        for line in [*(line for line in death_lines(view) if line not in self._said), progress_line(view)]:
            self._progress.print(Text(line), soft_wrap=True)
        self._said.update(death_lines(view))


async def _repeat(action: Callable[[], None], every_s: float) -> None:
    while True:
        action()
        await trio.sleep(every_s)
