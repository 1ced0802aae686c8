"""Slots at relays (libp2p circuit relay v2): asks for them, keeps them, and reads what a relay will carry.

The daemon asks a relay for a slot once; when that relay restarts, the slot is gone and it does not ask again for an
hour. So the slots are asked for from here too. A relay keeps them by peer, whoever on the peer's side has asked, and
the relayed connections end in the daemon as ever. Knows no record and no stream of ours.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from echo_p2p import protobuf
from echo_p2p.errors import NetError, Unreachable
from echo_p2p.net.daemon import Daemon, read_message
from echo_p2p.net.dialing import answers, split_address

logger = logging.getLogger(__name__)

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
TIMEOUT_S = 5.0

CHECK_EVERY_S = 2.0
RENEW_EVERY_S = 20.0
GRACE_S = 45.0
"""How long a relay may be away before we say so: it restarts in seconds, and nobody should plan around that."""

_TYPE, _LIMIT, _STATUS = 1, 4, 5  # fields of HopMessage
_RESERVE, _STATUS_OK = 0, 100
_LIMIT_DATA = 2


async def relay_limit_bytes(daemon: Daemon, relay: str) -> int | None:
    """Reserve a slot: bytes that `relay` lets through each way of one connection; None: no limit. Raises NetError."""
    connection = await daemon.dial(relay, HOP_PROTOCOL, TIMEOUT_S)
    request = protobuf.encode((_TYPE, _RESERVE))
    try:
        with trio.fail_after(TIMEOUT_S):
            await connection.send_all(protobuf.encode_varint(len(request)) + request)
            answer = await read_message(connection)
        return limit_in(answer)
    except (trio.TooSlowError, trio.BrokenResourceError, ValueError) as error:
        raise Unreachable(f"relay {relay} did not say its limit: {error!r}") from error
    finally:
        await trio.aclose_forcefully(connection)


def limit_in(answer: bytes) -> int | None:
    """The data limit in an answer to a reservation. Raises NetError if it was refused, ValueError if malformed."""
    status = protobuf.int_field(answer, _STATUS)
    if status != _STATUS_OK:
        raise NetError(f"the relay refused a reservation (status {status})")
    limits = protobuf.bytes_fields(answer, _LIMIT)
    data = [value for limit in limits for number, value in protobuf.decode(limit) if number == _LIMIT_DATA]
    return data[-1] if data and isinstance(data[-1], int) and data[-1] > 0 else None


class RelaySlots:
    """Slots at the relays at `addresses` (`/ip4/…/tcp/…/p2p/…`), taken again when they may be gone.

    `connected` names the peers that we have connections with; `connect` makes one; `reserve` takes PeerIDs.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        connected: Callable[[], Awaitable[list[str]]],
        connect: Callable[[str, list[str]], Awaitable[None]],
        reserve: Callable[[str], Awaitable[int | None]],
    ) -> None:
        self._relays: dict[str, list[str]] = {}
        for address in addresses:
            transport, peer = split_address(address)
            self._relays.setdefault(peer, []).append(transport)
        self._connected = connected
        self._connect = connect
        self._reserve = reserve
        self._taken_at: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self.limits: dict[str, int | None] = {}
        """Bytes a connection may carry at each relay that we have a slot at (or lost one lately); None: no limit."""

    @property
    def wanted(self) -> bool:
        """Whether there is any relay to look after."""
        return bool(self._relays)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where we can be dialled through the relays that we have a slot at, without our own `/p2p/…` behind."""
        return tuple(
            f"{transport}/p2p/{peer}/p2p-circuit"
            for peer, transports in self._relays.items()
            if peer in self.limits
            for transport in transports
        )

    async def keep(self) -> None:
        """The background task: hold a slot at each relay, for ever."""
        while True:
            try:
                connected = frozenset(await self._connected())
            except NetError as error:  # if the daemon is gone, whoever watches it says so
                logger.debug("can't look after relays: %s", error)
                connected = frozenset()
            async with trio.open_nursery() as nursery:
                for peer in self._relays:
                    nursery.start_soon(self._look_after, peer, peer in connected)
            await trio.sleep(CHECK_EVERY_S)

    async def _look_after(self, peer: str, connected: bool) -> None:
        if not connected:
            self._taken_at.pop(peer, None)  # a relay forgets whoever loses touch
        taken_at = self._taken_at.get(peer)
        if taken_at is not None and trio.current_time() - taken_at < RENEW_EVERY_S:
            return
        try:
            await self._take(peer, connected)
        except NetError as error:
            logger.debug("no slot at relay %s: %s", peer, error)
            self._miss(peer, error)

    def _miss(self, peer: str, error: NetError) -> None:
        self._taken_at.pop(peer, None)
        now = trio.current_time()
        if peer not in self._missing_since:
            self._missing_since[peer] = now
            if peer in self.limits:
                logger.warning("lost the slot at relay %s (%s); asking for it again", peer, error)
        if now - self._missing_since[peer] >= GRACE_S:
            self.limits.pop(peer, None)

    async def _take(self, peer: str, connected: bool) -> None:
        if not connected:
            open_at = [transport for transport in self._relays[peer] if await answers(transport)]
            if not open_at:
                raise Unreachable(f"relay {peer} does not answer")
            await self._connect(peer, open_at)
        limit = await self._reserve(peer)
        if peer not in self.limits or peer in self._missing_since:
            logger.info("has a slot at relay %s", peer)
        self._missing_since.pop(peer, None)
        self.limits[peer] = limit
        self._taken_at[peer] = trio.current_time()
