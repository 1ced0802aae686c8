"""How a node of a role takes part in the network, and what that means in the daemon's own terms. Knows no vendor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Role = Literal["bootstrap", "trainer", "volunteer"]

# A relay that is meant to carry the traffic of volunteers, not to help them to a first handshake.
_RELAY_FLAGS = (
    "-relayTimeLimit=24h",
    "-relayDataLimit=1099511627776",
    "-relayMaxCircuits=256",
    "-relayMaxReservations=1024",
)
# Without it a volunteer looks for random relays for minutes before it asks the ones it was given.
_VOLUNTEER_FLAGS = ("-relayDiscovery=0",)
# On one thread it is more often than not the relay with the limits above that wins (`net.hive` checks).
_BOOTSTRAP_ENVIRONMENT = ("GOMAXPROCS=1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiveSettings:
    """How a node takes part.

    A bootstrap and a trainer are public full members; a bootstrap also relays, and waits for nobody. A volunteer may
    be behind NAT: it stores nothing for others, speaks TCP only, and is reached through its relays if need be.
    """

    role: Role
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    trusted_relays: tuple[str, ...] = ()  # of a volunteer; its initial peers if empty
    join_check_s: float = 5.0  # how often to look whether the bootstraps are still in touch


def daemon_arguments(settings: HiveSettings, key_path: Path) -> dict[str, Any]:
    """Arguments of hivemind's `P2P.create`."""
    volunteer = settings.role == "volunteer"
    return {
        "identity_path": str(key_path),
        "check_if_identity_free": False,  # it understands RSA keys only
        "host_maddrs": list(settings.listen),
        "announce_maddrs": list(settings.announce) or None,
        "dht_mode": "client" if volunteer else "server",
        # Told that it is private, a volunteer takes its relay slot at once instead of after some 15 s of tests; whoever
        # can dial it directly still does.
        "force_reachability": "private" if volunteer else "public",
        "auto_nat": True,
        "nat_port_map": volunteer and not is_local(settings),
        "use_relay": True,
        "use_auto_relay": volunteer,
        "trusted_relays": list(settings.trusted_relays or settings.initial_peers) if volunteer else None,
    }


def relays_of(settings: HiveSettings) -> tuple[str, ...]:
    """The relays that this node needs a slot at; none on one machine alone, where everybody can dial everybody."""
    if settings.role != "volunteer" or is_local(settings):
        return ()
    return settings.trusted_relays or settings.initial_peers


def is_local(settings: HiveSettings) -> bool:
    """Whether nobody outside this machine can dial the node."""
    return all("/127.0.0.1/" in address or "/::1/" in address for address in settings.listen)


def daemon_flags(settings: HiveSettings) -> tuple[str, ...]:
    """Flags beyond what hivemind sets."""
    return {"bootstrap": _RELAY_FLAGS, "trainer": (), "volunteer": _VOLUNTEER_FLAGS}[settings.role]


def daemon_environment(settings: HiveSettings) -> tuple[str, ...]:
    """`NAME=VALUE` settings of the daemon's environment."""
    return _BOOTSTRAP_ENVIRONMENT if settings.role == "bootstrap" else ()
