"""Addresses of peers, and whether one answers at all. Knows no vendor and no protocol above TCP.

Both stacks remember failed dials and then refuse to try again for a while, longer each time; so a peer that was away
is knocked at with a plain TCP connection first, and dialled when it opens.
"""

import ipaddress
import re
from collections.abc import Iterator

import trio

from echo_p2p.errors import ConfigError

PROBE_TIMEOUT_S = 3.0

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 15.0

_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\Z")
_HOST_PROTOCOLS = ("ip4", "ip6", "dns4", "dns6", "dns")


def split_address(address: str) -> tuple[str, str]:
    """`/ip4/…/tcp/…/p2p/PEER` as (`/ip4/…/tcp/…`, PEER). Raises ConfigError if the PeerID is missing."""
    transport, separator, peer = address.rpartition("/p2p/")
    if not separator or not transport.startswith("/") or not peer or "/" in peer:
        raise ConfigError(
            f"the address {address!r} does not name a peer; it must look like /ip4/1.2.3.4/tcp/4001/p2p/12D3…"
        )
    return transport, peer


def tcp_endpoint(address: str) -> tuple[str, int] | None:
    """Host and port to knock at, or None if the address does not begin with a plain TCP endpoint."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in _HOST_PROTOCOLS or parts[3] != "tcp" or not parts[4].isdigit():
        return None
    return parts[2], int(parts[4])


async def answers(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether something accepts TCP at `address`; an address that can't be knocked at counts as answering."""
    endpoint = tcp_endpoint(address)
    if endpoint is None:
        return True
    with trio.move_on_after(timeout_s):
        try:
            connection = await trio.open_tcp_stream(*endpoint)
        except OSError:
            return False
        await trio.aclose_forcefully(connection)
        return True
    return False


def dialable(address: str, peer: str) -> bool:
    """Whether an address that a peer gave names that peer, at a plain TCP endpoint."""
    parts = address.split("/")
    if len(parts) != 7 or parts[0] or parts[3] != "tcp" or parts[5:] != ["p2p", peer]:
        return False
    kind, host, port = parts[1], parts[2], parts[4]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return False
    try:
        match kind:
            case "ip4":
                ipaddress.IPv4Address(host)
            case "ip6":
                ipaddress.IPv6Address(host)
            case _:
                return kind in ("dns", "dns4", "dns6") and _HOST_NAME.match(host) is not None
    except ValueError:
        return False
    return True


def backoff_s() -> Iterator[float]:
    """Seconds to wait after each failure in a row: 1, 2, 4, 8, 15, 15, …"""
    delay_s = BACKOFF_FIRST_S
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, BACKOFF_MAX_S)
