"""`echo-node doctor`: whether this machine can take part, check by check, and the cure for what fails. Knows no run."""

from collections.abc import Iterator

import click
import msgspec
import psutil
from msgspec import Struct

from echo_node import machine_check
from echo_node.machine_check import Check
from echo_node.network_check import check_network
from echo_node.places import Places
from echo_node.state import NodeState
from echo_node.status import decode_state, fetch_state, read_whereabouts
from echo_p2p.config import NodeConfig
from echo_p2p.errors import EchoError


class Report(Struct, frozen=True, kw_only=True):
    """What `doctor --json` prints."""

    healthy: bool
    checks: tuple[Check, ...]


def run_doctor(config: NodeConfig, places: Places, *, as_json: bool) -> int:
    """Look at everything and print it; the exit status: 1 if something is wrong."""
    checks: list[Check] = []
    for check in examine(config, places):
        checks.append(check)
        if not as_json:
            click.echo(line_of(check))
    report = Report(healthy=all(check.ok is not False for check in checks), checks=tuple(checks))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 0 if report.healthy else 1


def line_of(check: Check) -> str:
    """A check as a line or two."""
    mark = {True: "ok", False: "FAILED", None: "?"}[check.ok]
    return f"{mark:<7} {check.name:<13} {check.says}" + (f"\n{'':<22}{check.cure}" if check.cure else "")


def examine(config: NodeConfig, places: Places) -> Iterator[Check]:
    """All checks, the quick ones first."""
    yield from machine_check.versions()
    yield machine_check.memory(config, psutil.virtual_memory().available)
    yield machine_check.home(places)
    yield machine_check.disk(config, places)
    running = running_node(places)
    yield machine_check.port(config, running)
    yield machine_check.device(config)
    yield from check_network(config, running)


def running_node(places: Places) -> NodeState | None:
    """What the node of this home says of itself; None if none runs."""
    try:
        return decode_state(fetch_state(read_whereabouts(places.data).http))
    except EchoError:
        return None
