"""A node's HTTP port: dashboard, state, metrics, health, chat. Reads the state document; knows nothing of who fills it.

The port answers only to names that it was told (DNS rebinding: a web page whose own name resolves to 127.0.0.1 must
not read it), sends no CORS header, and the dashboard may load nothing from elsewhere.
"""

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from importlib import resources

import hypercorn
import msgspec
import trio
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from echo_node.chat import CHAT_TIMEOUT_S, Chats, Models
from echo_node.chat_desk import Desk
from echo_node.metrics import StateCollector
from echo_node.state import NodeState
from echo_p2p.errors import ConfigError

logger = logging.getLogger(__name__)

ReadState = Callable[[], NodeState]

_UNREAD_MS = 30_000
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"0.0.0.0", "::"})
_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_DASHBOARD_HEADERS = {
    **_NO_STORE,
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


def build_app(read_state: ReadState, desk: Desk | None = None) -> Starlette:
    """The application behind the port. `read_state` is called for each request, on the loop, and must not block.

    With a `desk` one can talk to the policy.
    """
    dashboard = resources.files("echo_node").joinpath("dashboard.html").read_text(encoding="utf-8")
    registry = CollectorRegistry()
    registry.register(StateCollector(read_state))

    async def show_dashboard(request: Request) -> Response:
        return HTMLResponse(dashboard, headers=_DASHBOARD_HEADERS)

    async def show_state(request: Request) -> Response:
        return Response(msgspec.json.encode(read_state()), media_type="application/json", headers=_NO_STORE)

    async def show_metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={**_NO_STORE, "Content-Type": CONTENT_TYPE_LATEST})

    async def show_health(request: Request) -> Response:
        state = read_state()
        document = {"healthy": is_healthy(state), "note": state.network_note}
        status = 200 if is_healthy(state) else 503
        return Response(msgspec.json.encode(document), status, media_type="application/json", headers=_NO_STORE)

    return Starlette(
        routes=[
            Route("/", show_dashboard),
            Route("/state", show_state),
            Route("/metrics", show_metrics),
            Route("/health", show_health),
            *(_chat_routes(desk) if desk else ()),
        ]
    )


def _chat_routes(desk: Desk) -> tuple[Route, ...]:
    models, chats = Route("/v1/models", Models(desk)), Route("/v1/chat/completions", Chats(desk), methods=["POST"])
    return models, chats


def is_healthy(state: NodeState) -> bool:
    """Whether the node can do its work: a bootstrap by running, any other by being connected to its swarm."""
    return state.role == "bootstrap" or state.connected


def host_is_ours(header: str, host: str) -> bool:
    """Whether a `Host` header names this machine, for a port that listens on `host`.

    On a wildcard address any IP literal will do: rebinding needs a name.
    """
    name = _host_name(header)
    if name in _LOCAL_NAMES or name == host.lower().strip("[]"):
        return bool(name)
    return host in _WILDCARDS and _is_address(name)


def guard_host(app: ASGIApp, host: str) -> ASGIApp:
    """`app`, behind the check of the `Host` header."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            header = Headers(scope=scope).get("host", "")
            if not host_is_ours(header, host):
                logger.debug("refused a request for the host %.80r: it is not this node's name", header)
                refusal = PlainTextResponse("This node answers to localhost and to its own address only.\n", 403)
                await refusal(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


async def serve_http(
    app: ASGIApp, host: str, port: int, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; reports the port once it listens (port 0: the system's choice). Raises ConfigError."""
    with bind(host, port) as listener:
        actual_port: int = listener.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(_serve_listener, guard_host(app, host), listener)
            task_status.started(actual_port)


async def _serve_listener(
    app: ASGIApp, listener: socket.socket, *, task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED
) -> None:
    """Each connection by itself: hypercorn's own loop ends all of them when one client leaves at the wrong moment."""
    settings, context = _settings(), WorkerContext(None)
    wrapped = wrap_app(app, settings.wsgi_max_body_size, "asgi")

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await TCPServer(wrapped, settings, context, ConnectionState({}), stream)
        except Exception as error:  # a task boundary: whatever a client provokes costs it its own connection
            logger.debug("a connection of the HTTP port failed", exc_info=error)

    own = trio.socket.fromfd(listener.fileno(), listener.family, listener.type, listener.proto)
    await trio.serve_listeners(serve, [trio.SocketListener(own)], task_status=task_status)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether a record is of more than a client that left while it was answered, which hypercorn logs at length."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, trio.BusyResourceError | trio.BrokenResourceError | trio.ClosedResourceError)


def _settings() -> hypercorn.Config:
    server_log = logging.getLogger(f"{__name__}.server")
    server_log.setLevel(logging.WARNING)  # hypercorn announces each start by itself
    server_log.filters[:] = [_is_our_fault]
    settings = hypercorn.Config()
    settings.accesslog = None
    settings.errorlog = server_log
    settings.include_server_header = False
    settings.read_timeout = int(CHAT_TIMEOUT_S) + 60  # a client that waits for an answer sends nothing
    return settings


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises ConfigError, with the flag that cures it."""
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"`network.http_host` {host!r} is not an address of this machine; use 127.0.0.1.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two programs share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # hypercorn shields its sends: who reads nothing must be cut off below
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        listener.bind(address)
        listener.listen()  # now, since two bound sockets may share a port until one of them listens
    except OSError as error:
        listener.close()
        raise ConfigError(_bind_sentence(error, host, port)) from error
    return listener


def _bind_sentence(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"HTTP port {port} on {host} is taken by another program; "
            "choose another with --http-port (0 lets the system choose)."
        )
    if error.errno == errno.EACCES:
        return f"HTTP port {port} needs more rights than this user has; choose one above 1023 with --http-port."
    return f"can't listen on {host}, HTTP port {port}: {error.strerror}; check `network.http_host` and --http-port."


def _host_name(header: str) -> str:
    """The name in a `Host` header, lower case, without port and brackets; empty if it is not one."""
    value = header.strip().lower()
    if value.startswith("["):
        name, _, rest = value[1:].partition("]")
        return name if rest == "" or rest.startswith(":") else ""
    name, _, port = value.partition(":")
    return name if port == "" or port.isdigit() else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
