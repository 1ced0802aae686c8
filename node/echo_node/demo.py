"""A whole swarm on this machine: starts the nodes as a user would, watches them over HTTP, sums up, leaves nothing.

Knows the nodes only from outside: their command line, their `node.json`, their state document and their run log.
"""

import re
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
import trio
from rich.console import Console

from echo_node.fleet import NODE_COMMAND, Fleet, NodeProcess
from echo_node.runlog import read_config, read_steps
from echo_node.summary import Summary, render_summary, summarise
from echo_node.watch import Watch, showing
from echo_p2p.errors import ConfigError, Unreachable
from echo_p2p.net.scratch import PREFIX, scratch_folder

INTERRUPTED = 130
SECONDS = 150.0
STEPS_SECONDS_MAX = 900.0
BOOTSTRAP_DEADLINE_S = 60.0

_JOIN_LINE = re.compile(r"^echo-node join .*--peer\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to show. `slow` is seconds a decode step for one peer; `peers` says which inference peers take part."""

    protocol: Literal["sequential", "async"] = "async"
    seconds: float | None = None
    steps: int | None = None
    seed: int = 1
    co_located: bool = False
    slow: float = 0.0
    json_path: Path | None = None
    keep: bool = False
    home: Path | None = None
    settings: tuple[str, ...] = ()
    peers: Literal["all", "chain", "whole"] = "all"

    @property
    def limit_s(self) -> float:
        """When the nodes are asked to end, in seconds after the start."""
        if self.seconds is not None:
            return self.seconds
        return SECONDS if self.steps is None else STEPS_SECONDS_MAX


@dataclass(frozen=True, slots=True)
class Played:
    """A demo that came to its end."""

    summary: Summary
    names: dict[str, str]
    interrupted: bool


def run_demo(options: DemoOptions, *, command: Sequence[str] = NODE_COMMAND, drain_s: float = 12.0) -> int:
    """Play, print the summary on stdout, write it if asked; the exit status. Raises EchoError if the run failed."""
    if options.json_path is not None and not options.json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json_path}: its folder does not exist; make it first.")
    progress = Console(stderr=True, highlight=False)
    with _root_of(options, progress) as root:
        played = trio.run(partial(play, options, root, command=command, drain_s=drain_s, progress=progress))
    Console(highlight=False).print(render_summary(played.summary, played.names), soft_wrap=True)
    if options.json_path is not None:
        options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(played.summary), indent=2) + b"\n")
    return INTERRUPTED if played.interrupted else 0


@contextmanager
def _root_of(options: DemoOptions, progress: Console) -> Iterator[Path]:
    """The folder of the nodes' folders, which is kept if that is wanted, or if anything goes wrong."""
    said = "The nodes' folders are in {}."
    if options.home is not None:
        try:
            yield options.home
        finally:
            progress.print(said.format(options.home), soft_wrap=True, markup=False)
        return
    with scratch_folder(f"{PREFIX}demo-") as scratch:
        if options.keep:
            scratch.keep()
        try:
            yield scratch.path
        except BaseException:
            scratch.keep()
            raise
        finally:
            if scratch.kept:
                progress.print(said.format(scratch.path), soft_wrap=True, markup=False)


async def play(
    options: DemoOptions,
    root: Path,
    *,
    progress: Console,
    command: Sequence[str] = NODE_COMMAND,
    drain_s: float = 12.0,
) -> Played:
    """Run the nodes under `root` until time or steps are up, a signal comes, or the trainer fails (TrainerError)."""
    fleet = Fleet(root, command=command, drain_s=drain_s)
    watch = Watch(options.limit_s)
    interrupted = False
    async with showing(watch, progress), fleet, trio.open_nursery() as nursery:

        async def stop_on_signal() -> None:
            nonlocal interrupted
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    interrupted = interrupted or number == signal.SIGINT
                    if watch.stopping:
                        fleet.hurry()  # asked twice
                    running.cancel()

        nursery.start_soon(stop_on_signal)
        with trio.move_on_after(options.limit_s) as running:
            await (_co_located(fleet, watch, options) if options.co_located else _swarm(fleet, watch, options))
        watch.stopping = True
        ending = await fleet.end()
        nursery.cancel_scope.cancel()
    if watch.failure is not None and not interrupted:
        raise watch.failure
    home = root / ("co-located" if options.co_located else "trainer")
    steps = await trio.to_thread.run_sync(read_steps, home)
    config = await trio.to_thread.run_sync(read_config, home)
    view = watch.view()
    summary = summarise(steps, config.run if config else None, view.states, ending.orphans)
    return Played(summary, view.names, interrupted)


async def _swarm(fleet: Fleet, watch: Watch, options: DemoOptions) -> None:
    """Start the nodes, the trainer first after the bootstrap, then watch them until the trainer is done or dead."""
    shared = ["--swarm", f"demo-{secrets.token_hex(4)}", "--host", "127.0.0.1", *_settings(options)]
    async with trio.open_nursery() as nursery:

        def launch(name: str, *arguments: str) -> NodeProcess:
            node = fleet.launch(name, arguments)
            nursery.start_soon(watch.follow, node)
            return node

        try:
            shared += ["--peer", await join_address(launch("bootstrap", "bootstrap", *shared))]
        except Unreachable as error:
            watch.failure = error
            nursery.cancel_scope.cancel()
            return
        config = _write_config(fleet.root)
        trainer = launch("trainer", "join", "--role", "trainer", "--config", str(config), *shared, *_run_flags(options))
        for name, *limits in _inference_nodes(options):
            launch(name, "join", "--role", "inference", *limits, *shared)
        await watch.until_done(trainer)
        nursery.cancel_scope.cancel()


async def _co_located(fleet: Fleet, watch: Watch, options: DemoOptions) -> None:
    config = _write_config(fleet.root)
    flags = ["--set", f"run.protocol={options.protocol}", "--set", f"run.seed={options.seed}", *_settings(options)]
    steps = [] if options.steps is None else ["--steps", str(options.steps)]
    node = fleet.launch("co-located", ["co-located", "--config", str(config), *flags, *steps])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.follow_log, node)
        await watch.until_done(node)
        nursery.cancel_scope.cancel()


def _inference_nodes(options: DemoOptions) -> list[tuple[str, ...]]:
    """Name and own flags of each inference node."""
    slow = ("--slowdown", str(options.slow)) if options.slow else ()
    chain = [("chain-a", "--max-layers", "2"), ("chain-b", "--max-layers", "2")]
    match options.peers:
        case "all":
            return [*chain, ("whole", *slow)]
        case "chain":
            return [chain[0], (*chain[1], *slow)]
        case "whole":
            return [("whole", *slow)]


def _run_flags(options: DemoOptions) -> list[str]:
    flags = ["--protocol", options.protocol, "--set", f"run.seed={options.seed}"]
    return flags if options.steps is None else [*flags, "--steps", str(options.steps)]


def _settings(options: DemoOptions) -> list[str]:
    return [part for setting in options.settings for part in ("--set", setting)]


def _write_config(root: Path) -> Path:
    path = root / "demo.toml"
    root.mkdir(parents=True, exist_ok=True)
    path.write_bytes(resources.files("echo_node").joinpath("demo.toml").read_bytes())
    return path


async def join_address(bootstrap: NodeProcess, deadline_s: float = BOOTSTRAP_DEADLINE_S) -> str:
    """The address in the line that a bootstrap prints for the next machine. Raises Unreachable."""
    with trio.move_on_after(deadline_s):
        while bootstrap.ended is None:
            if found := _JOIN_LINE.search(bootstrap.output()):
                return found.group(1)
            await trio.sleep(0.1)
        raise Unreachable(f"the demo's bootstrap ended (status {bootstrap.ended}): {bootstrap.last_line()}")
    raise Unreachable(f"the demo's bootstrap printed no address within {deadline_s:g} s; its output: {bootstrap.log}")
