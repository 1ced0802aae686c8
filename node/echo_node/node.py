"""One node: brings network, HTTP port and role up, and takes them down on a signal. Knows no role's work."""

import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable

import trio

from echo_node.api import bind, build_app, serve_http
from echo_node.board import SOFTWARE, Board, join_line
from echo_node.logs import Journal
from echo_node.places import Places, only_node, whereabouts
from echo_node.progress import showing
from echo_node.prompts import open_task
from echo_node.run_model import named_folder
from echo_node.state import Whereabouts
from echo_p2p.config import NodeConfig
from echo_p2p.errors import ConfigError
from echo_p2p.identity import load_or_create
from echo_p2p.models import resolve_model
from echo_p2p.presence import open_presence
from echo_protocols.peer import RoleRecord

log = logging.getLogger(__name__)

INTERRUPTED = 130

_Role = Callable[[Board, Places], Awaitable[None]]


def run_node(config: NodeConfig, places: Places, journal: Journal, *, announce: Callable[[str], None]) -> int:
    """Run until the role is done or a signal comes; the exit status. `announce` gets the line for the next machine."""
    check_start(config)
    with only_node(places):
        return trio.run(_run, config, _load_role(config.role), places, journal, announce)


def check_start(config: NodeConfig) -> None:
    """What can be known to fail before anything heavy is loaded. Raises ConfigError, ModelError."""
    network = config.network
    if config.role == "inference" and not network.peers:
        raise ConfigError("an inference peer needs a swarm to join: give --peer with the address of a bootstrap.")
    for flag, port in (("--port", network.port), ("--gossip-port", network.gossip_port)):
        if port:
            _check_free(network.host, port, flag)
    bind(network.http_host, network.http_port).close()
    if config.inference.model and config.role == "inference":
        named_folder(config.inference.model)
    if config.role == "trainer":
        open_task(config.run.task, config.run.prompts)
        with showing(f"fetching {config.run.model}") as report:
            resolve_model(config.run.model, report)


def _check_free(host: str, port: int, flag: str) -> None:
    # the network stacks share a port that is taken, or say nothing: so look first
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as after a restart, but no second listener
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} can't be used ({error.strerror}); choose another with {flag}."
            ) from error


async def _run(
    config: NodeConfig, role: _Role, places: Places, journal: Journal, announce: Callable[[str], None]
) -> int:
    status = 0
    async with trio.open_nursery() as nursery:

        async def drain_on_signal() -> None:
            nonlocal status
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    log.info("%s: leaving the swarm", signal.Signals(number).name)
                    status = INTERRUPTED if number == signal.SIGINT else 0
                    nursery.cancel_scope.cancel()

        nursery.start_soon(drain_on_signal)
        await _live(config, role, places, journal, announce)
        nursery.cancel_scope.cancel()
    return status


async def _live(
    config: NodeConfig, role: _Role, places: Places, journal: Journal, announce: Callable[[str], None]
) -> None:
    identity = await trio.to_thread.run_sync(load_or_create, places.identity)
    record = RoleRecord(role=config.role, software=SOFTWARE)
    async with (
        open_presence(identity, swarm=config.swarm, network=config.network, record=record) as presence,
        trio.open_nursery() as nursery,
    ):
        board = Board(config, presence, journal)
        host = config.network.http_host
        port = await nursery.start(serve_http, build_app(board.state, board.desk), host, config.network.http_port)
        here = Whereabouts(
            pid=os.getpid(),
            peer=identity.peer_id,
            role=config.role,
            swarm=config.swarm,
            http=f"http://{host}:{port}",
            daemon_pid=presence.hive.daemon_pid,
        )
        with whereabouts(places, here):
            log.info("%s %s of swarm %s, page at %s", config.role, identity.peer_id, config.swarm, here.http)
            announce(join_line(presence, config.inference.owner))
            await role(board, places)
        nursery.cancel_scope.cancel()


def _load_role(name: str) -> _Role:
    """Import what a role needs: seconds of work, done before the network is up."""
    match name:
        case "trainer":
            from echo_node.trainer import run_trainer

            return run_trainer
        case "inference":
            from echo_node.inference import run_inference

            return run_inference
        case _:
            from echo_bootstrap.server import run_bootstrap

            return lambda board, _: run_bootstrap(board.presence)
