"""Whether this machine can be part of a swarm's network: its bootstraps, its clock, and who can dial it.

It is tried as a node would: by one of a throwaway identity at the node's port, which asks the bootstraps to dial it
back. While the node of this home runs, that one is asked how it is reached.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import trio

from echo_node.charts import bytes_text, count_text
from echo_node.machine_check import Check
from echo_node.state import NodeState
from echo_node.status import REACH_WORDS
from echo_p2p.config import NodeConfig
from echo_p2p.errors import EchoError, NetError
from echo_p2p.identity import generate
from echo_p2p.net.hive import HiveNode, HiveSettings, open_hive
from echo_p2p.net.reach import Finding, Heard, Reach, ask_dial_back, conclude, ports_of, said_reach

CLOCK_MAX_S = 3.0
"""How far apart the clocks of two peers may be: the record table refuses more."""

RELAY_MIN_BYTES = 1 << 30
_DEADLINE_S = 45.0
_JOIN_DEADLINE_S = 15.0
_SLOT_DEADLINE_S = 6.0
_POLL_S = 0.2


def check_network(config: NodeConfig, running: NodeState | None) -> Iterator[Check]:
    """Bootstraps, clock and reach; takes seconds."""
    if not config.network.peers:
        other = "another" if config.role == "bootstrap" else "a"
        for name in ("bootstrap", "clock"):
            cure = f"Give --peer with the address of {other} bootstrap."
            yield Check(name=name, ok=None, says="nobody to ask", cure=cure)
        yield check_reach(_finding_of(running), config, _said_by(running))
        return
    try:
        asked = trio.run(_ask, config, running)
    except (EchoError, ExceptionGroup) as error:
        yield Check(name="bootstrap", ok=False, says=f"the network does not come up: {error}", cure="See above.")
        return
    yield check_bootstraps(asked, config.network.peers)
    yield check_clock(asked.heard)
    yield check_relays(asked.limits)
    yield check_reach(asked.found if running is None else _finding_of(running), config, _said_by(running))


class Asked:
    """What the bootstraps said. `silent` has the reason of each that did not answer."""

    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}
        self.silent: dict[str, str] = {}
        self.limits: dict[str, int | None] = {}
        self.found = Finding()


async def _ask(config: NodeConfig, running: NodeState | None) -> Asked:
    settings = HiveSettings(
        role="volunteer",
        listen=(f"/ip4/{config.network.host}/tcp/{config.network.port if running is None else 0}",),
        announce=config.network.announce,
        initial_peers=config.network.peers,
    )
    asked = Asked()
    with trio.move_on_after(_DEADLINE_S):
        async with open_hive(generate(), settings) as node:
            await _settle(node)
            ports = ports_of(await node.visible_addresses())
            for peer in _peers_of(config.network.peers):
                try:
                    asked.heard[peer] = await ask_dial_back(node, peer, ports)
                except NetError as error:
                    asked.silent[peer] = str(error)
            asked.limits = node.relay_limits
            asked.found = conclude((each.answer for each in asked.heard.values()), relayed=bool(asked.limits))
    return asked


async def _settle(node: HiveNode) -> None:
    """Wait for a bootstrap, not for ever: whoever does not let us in may still say why; then for a relay's slot."""
    with trio.move_on_after(_JOIN_DEADLINE_S):
        await node.wait_joined()
    with trio.move_on_after(_SLOT_DEADLINE_S):
        while node.needs_relay and not node.relay_limits:  # noqa: ASYNC110 (what is waited for is a relay's state)
            await trio.sleep(_POLL_S)


def _peers_of(addresses: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(address.rpartition("/p2p/")[2] for address in addresses))


def check_bootstraps(asked: Asked, addresses: Sequence[str]) -> Check:
    """Whether any bootstrap answers."""
    count = len(_peers_of(addresses))
    says = f"{len(asked.heard)} of {count_text(count, 'bootstrap')} answered"
    if asked.heard:
        return Check(name="bootstrap", ok=True, says=says)
    why = " ".join("; ".join(asked.silent.values()).split()) or f"nobody answers at {', '.join(addresses)}"
    cure = "See that it runs, that the address is the one it prints, and that no firewall is between."
    return Check(name="bootstrap", ok=False, says=why, cure=cure)


def check_clock(heard: Mapping[str, Heard]) -> Check:
    """Whether our clock agrees with those of the bootstraps; with several, with the nearest."""
    if not heard:
        return Check(name="clock", ok=None, says="no bootstrap said what time it is")
    ahead_s = min((each.clock_ahead_s for each in heard.values()), key=abs)
    way = "behind" if ahead_s > 0 else "ahead of"
    says = f"{abs(ahead_s):.1f} s {way} the bootstrap's; less than {CLOCK_MAX_S:g} s is needed"
    cure = "" if abs(ahead_s) < CLOCK_MAX_S else "Set it by the network, on Linux: timedatectl set-ntp true."
    return Check(name="clock", ok=not cure, says=says, cure=cure)


def check_relays(limits: Mapping[str, int | None]) -> Check:
    """Whether there is a relay that carries as much as it is asked to."""
    if not limits:
        return Check(name="relay", ok=None, says="none gave this machine a slot")
    least = min((limit for limit in limits.values() if limit is not None), default=None)
    if least is not None and least < RELAY_MIN_BYTES:
        says = f"a relay carries only {bytes_text(least)} a connection"
        return Check(name="relay", ok=False, says=says, cure="Whoever runs that bootstrap should restart it.")
    return Check(name="relay", ok=True, says=f"a slot at {count_text(len(limits), 'relay')}")


def check_reach(found: Finding, config: NodeConfig, said: str = "") -> Check:
    """Who can dial this machine; a trainer and a bootstrap have to be dialled directly. `said`: what a node says."""
    ok = {"public": True, "relayed": config.role == "inference", "none": False, "unknown": None}[found.reach]
    words = REACH_WORDS[said_reach(found.reach, found.addresses)]
    at = f" It answers at {', '.join(found.addresses)}." if found.addresses else ""
    cure = ""
    if ok is False:
        port = config.network.port or "of your choice (--port)"
        cure = f"Forward TCP port {port} on the router to this machine, and open it in the firewall."
    return Check(name="reach", ok=ok, says=REACH_WORDS.get(said, words) + at, cure=cure)


def _said_by(running: NodeState | None) -> str:
    return next((peer.reach_text for peer in running.peers if peer.ours), "") if running is not None else ""


def _finding_of(running: NodeState | None) -> Finding:
    """What the running node says of its own reach."""
    own = next((peer.reach for peer in running.peers if peer.ours), "") if running is not None else ""
    reaches: tuple[Reach, ...] = get_args(Reach)
    return next((Finding(reach) for reach in reaches if reach == own), Finding())
