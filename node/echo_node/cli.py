"""The command line: the one place that reads flags and environment, prints answers and exits.

Heavy packages are imported by the command that needs them, so that `--help` answers at once.
"""

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from echo_p2p.config import NodeConfig, load_config
from echo_p2p.errors import ConfigError, EchoError
from echo_p2p.rl.algorithms import recipe_of

CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "ECHO", "show_default": True}


class _Sentences(click.Group):
    """Turns errors into one sentence on stderr and an exit status: 2 for the user's input, 1 for the rest."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before a node or a demo has taken the signal over
            ctx.exit(130)
        except (EchoError, ExceptionGroup) as raised:
            error = _innermost(raised)
            if ctx.params.get("verbose") or not isinstance(error, EchoError):
                traceback.print_exception(error)
            click.echo(f"echo-node: {error if isinstance(error, EchoError) else repr(error)}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)


def _innermost(error: BaseException) -> BaseException:
    # nurseries wrap what their tasks raise, level by level; the first cause is what a person needs
    return _innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


_option = functools.partial(click.option, show_envvar=True)


@click.group(cls=_Sentences, context_settings=CONTEXT)
@_option("--home", envvar="ECHO_HOME", help="Folder for everything of this node; else the platform's own places.")
@_option("-v", "--verbose", count=True, help="More on stderr; twice: the network packages too.")
@_option("-q", "--quiet", is_flag=True, help="Only warnings on stderr.")
@_option("--log-json", is_flag=True, help="Log lines as JSON.")
@click.version_option(package_name="echo-p2p")
@click.pass_context
def main(ctx: click.Context, home: str | None, verbose: int, quiet: bool, log_json: bool) -> None:
    """Echo: a swarm of ordinary devices that post-trains language models with reinforcement learning."""
    from echo_node.places import find_places

    ctx.obj = find_places(home)
    ctx.meta["verbosity"] = -1 if quiet else verbose
    ctx.meta["log_json"] = log_json


def _network_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        _option("--swarm", help="Name of the swarm; one swarm never hears another's.  [default: echo]"),
        _option("--peer", "peers", multiple=True, help="Address of a bootstrap: /ip4/…/tcp/…/p2p/12D3… (repeat)."),
        _option("--host", help="Address to listen on.  [default: 0.0.0.0]"),
        _option("--port", type=int, help="TCP port for streams and records; 0 takes a free one.  [default: 0]"),
        _option("--gossip-port", type=int, help="TCP port for gossip; 0 takes a free one.  [default: 0]"),
        _option("--announce", multiple=True, help="Address that others shall dial instead (repeat)."),
        _option("--http-port", type=int, help="Port of the local HTTP page; 0 takes a free one.  [default: 0]"),
        _option("--config", type=click.Path(path_type=Path), help="TOML file; flags win over it."),
        _option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key of the TOML, dotted."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def node_config(role: str, flags: dict[str, Any]) -> NodeConfig:
    """The configuration that a command's flags, over its file, add up to. Raises ConfigError."""
    given = {
        "role": role,
        "swarm": flags["swarm"],
        "network.peers": list(flags["peers"]) or None,
        "network.host": flags["host"],
        "network.port": flags["port"],
        "network.gossip_port": flags["gossip_port"],
        "network.announce": list(flags["announce"]) or None,
        "network.http_port": flags["http_port"],
        "run.model": flags.get("model"),
        "run.protocol": flags.get("protocol"),
        "trainer.steps": flags.get("steps"),
        "inference.max_layers": flags.get("max_layers"),
        "inference.engine": flags.get("engine"),
        "inference.slowdown_s": flags.get("slowdown"),
        "inference.owner": flags.get("owner"),
    }
    overrides: dict[str, object] = dict(_setting(text) for text in flags["settings"])
    overrides |= {key: value for key, value in given.items() if value is not None}
    return load_config(flags["config"], overrides)


def _setting(text: str) -> tuple[str, object]:
    import tomllib

    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {text}: write KEY=VALUE, as in --set run.max_lag=2.")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


@main.command()
@_network_options
@click.pass_context
def bootstrap(ctx: click.Context, /, **flags: Any) -> None:
    """Run a rendezvous: the first address that the others dial."""
    _run_node(ctx, node_config("bootstrap", flags))


@main.command()
@_option("--role", type=click.Choice(["inference", "trainer"]), required=True, help="What this machine gives.")
@_network_options
@_option("--model", help="Trainer: hub id (with @revision), folder, or `tiny`.  [default: tiny]")
@_option("--protocol", type=click.Choice(["sequential", "async"]), help="Trainer: how rollouts are synchronised.")
@_option("--steps", type=int, help="Trainer: stop after so many steps.")
@_option("--max-layers", type=int, help="Inference: serve at most so many layers.  [default: what fits]")
@_option(
    "--engine",
    metavar="[auto|torch|mlx|vllm]",
    help="Inference: what computes. auto: mlx on Apple silicon, vllm for whole models on a GPU, else torch.",
)
@_option("--owner", help="Inference: only serve runs of this PeerID.  [default: the oldest run that is found]")
@_option("--slowdown", type=float, help="Inference: seconds to wait after each decode step, for experiments.")
@click.pass_context
def join(ctx: click.Context, /, role: str, **flags: Any) -> None:
    """Join a swarm as an inference peer or a trainer."""
    from echo_p2p.chain.engines import engines_to_try, this_machine

    config = node_config(role, flags)
    if role == "inference":
        engines_to_try(config.inference.engine, config.inference.device, this_machine())
    else:
        recipe_of(config.run.algorithm)  # an unknown name is said before anything is loaded
    _run_node(ctx, config)


def _leave(status: int) -> NoReturn:
    """End at once: everything is closed, and to take torch and verl down module by module would need seconds more."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_node(ctx: click.Context, config: NodeConfig) -> None:
    from echo_node.logs import set_up_logging

    journal = set_up_logging(verbosity=ctx.meta["verbosity"], as_json=ctx.meta["log_json"])
    from echo_node.node import run_node

    _leave(run_node(config, ctx.obj, journal, announce=click.echo))


@main.command("co-located", hidden=True)
@_option("--config", type=click.Path(path_type=Path), help="TOML file.")
@_option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key of the TOML, dotted.")
@_option("--steps", type=int, help="Stop after so many steps.")
@click.pass_context
def co_located(ctx: click.Context, config: Path | None, settings: tuple[str, ...], steps: int | None) -> None:
    """The same run with trainer and sampler in one process and no network: the baseline of every comparison."""
    from echo_node.logs import set_up_logging

    set_up_logging(verbosity=ctx.meta["verbosity"], as_json=ctx.meta["log_json"])
    overrides = dict(_setting(text) for text in settings) | {"role": "trainer"}
    if steps is not None:
        overrides["trainer.steps"] = steps
    loaded = load_config(config, overrides)
    recipe_of(loaded.run.algorithm)
    from echo_node.co_located import run_co_located

    _leave(run_co_located(loaded, ctx.obj))


@main.command()
@_option("--protocol", type=click.Choice(["sequential", "async"]), default="async", help="How to synchronise.")
@_option("--seconds", type=click.FloatRange(min=1), help="Wall time before the nodes leave.  [default: 150]")
@_option("--steps", type=click.IntRange(min=1), help="End after so many steps instead.")
@_option("--peers", type=click.Choice(["all", "chain", "whole"]), default="all", help="Which inference peers.")
@_option("--seed", type=int, default=1, help="Seed of prompts, sampling and training.")
@_option("--co-located", is_flag=True, help="One process, no network: the baseline.")
@_option(
    "--slow", type=click.FloatRange(min=0), default=0.0, help="Slow one peer down by so many seconds a decode step."
)
@_option("--json", "json_path", type=click.Path(path_type=Path), help="Write the summary there.")
@_option("--keep", is_flag=True, help="Keep the folders of the nodes, and say where they are.")
@_option("--home", type=click.Path(path_type=Path), envvar=None, help="Make and keep the nodes' folders here.")
@_option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key of the run's TOML, dotted.")
def demo(json_path: Path | None, settings: tuple[str, ...], **options: Any) -> None:
    """Watch a whole swarm learn on this machine: five processes on loopback, over the real network stacks."""
    from echo_node.demo import DemoOptions, run_demo
    from echo_node.prompts import open_task

    config = load_config(None, dict(_setting(text) for text in settings))  # a wrong key is said here, not by a node
    recipe_of(config.run.algorithm)
    open_task(config.run.task, config.run.prompts)
    sys.exit(run_demo(DemoOptions(json_path=json_path, settings=settings, **options)))


@main.command()
@_option("--json", "as_json", is_flag=True, help="The document that GET /state serves.")
@click.pass_obj
def status(places: Any, as_json: bool) -> None:
    """What the node on this machine is doing."""
    from echo_node.status import print_status

    print_status(places, as_json=as_json)


@main.command()
@_option("--json", "as_json", is_flag=True, help="The document that GET /state serves.")
@click.pass_obj
def peers(places: Any, as_json: bool) -> None:
    """Who is in the swarm."""
    from echo_node.status import print_peers

    print_peers(places, as_json=as_json)


@main.command()
@_option("--role", type=click.Choice(["inference", "trainer", "bootstrap"]), default="inference", help="As what.")
@_network_options
@_option("--json", "as_json", is_flag=True, help="The checks as JSON.")
@click.pass_context
def doctor(ctx: click.Context, /, role: str, as_json: bool, **flags: Any) -> None:
    """Whether this machine can take part: port, clock, reach, device, memory, disk, versions; and what to do."""
    from echo_node.logs import set_up_logging

    set_up_logging(verbosity=ctx.meta["verbosity"], as_json=ctx.meta["log_json"])
    from echo_node.doctor import run_doctor

    _leave(run_doctor(node_config(role, flags), ctx.obj, as_json=as_json))


@main.command("id")
@_option("--json", "as_json", is_flag=True, help="As JSON, with the path of the key.")
@click.pass_obj
def show_id(places: Any, as_json: bool) -> None:
    """This node's PeerID; makes its key if there is none yet."""
    import json

    from echo_p2p.identity import load_or_create

    peer = load_or_create(places.identity).peer_id
    click.echo(json.dumps({"peer": peer, "identity": str(places.identity)}) if as_json else peer)
