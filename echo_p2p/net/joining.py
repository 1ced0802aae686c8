"""Keeping in touch with the bootstraps of a swarm. Knows neither the daemon nor the table that it is handed."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from echo_p2p.errors import NetError
from echo_p2p.net.dialing import BACKOFF_FIRST_S, answers, backoff_s, split_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What joining needs from the stack below. `knows` and `greet` take a PeerID, `connect` also its addresses."""

    connected: Callable[[], Awaitable[list[str]]]
    connect: Callable[[str, list[str]], Awaitable[None]]
    knows: Callable[[str], Awaitable[bool]]
    greet: Callable[[str], Awaitable[bool]]


async def wait_for_any(addresses: tuple[str, ...]) -> None:
    """Wait until something answers at one of `addresses`; says so while nothing does. Put a deadline around it."""
    for delay_s in backoff_s():
        for address in addresses:
            if await answers(split_address(address)[0]):
                return
        _say_unreachable(addresses, delay_s)
        await trio.sleep(delay_s)


def _say_unreachable(addresses: tuple[str, ...], delay_s: float) -> None:
    logger.warning("no bootstrap reachable at %s, trying again in %.0f s", ", ".join(addresses), delay_s)


class Bootstraps:
    """The bootstraps at `addresses` (`/ip4/…/tcp/…/p2p/…`), looked after every `check_s` seconds."""

    def __init__(self, addresses: tuple[str, ...], check_s: float, joining: Joining) -> None:
        self._addresses = addresses
        self._check_s = check_s
        self._joining = joining
        self._reached: frozenset[str] = frozenset()
        self._joined = trio.Event()
        self._answered = False  # at the last look, by somebody who may not have let us in

    @property
    def reached(self) -> frozenset[str]:
        """PeerIDs of those that were in touch at the last look; empty: cut off, and trying again."""
        return self._reached

    async def wait_joined(self) -> None:
        """Wait until one of them has let us in, once; at once if there are none to ask."""
        await self._joined.wait()

    async def keep_joined(self) -> None:
        """Join through any that answers, for ever: one that went away is joined again when it is back."""
        delays_s = backoff_s()
        while True:
            self._answered = False
            self._note(await self._reach())
            if self._reached or not self._addresses:
                self._joined.set()
                delays_s = backoff_s()
                await trio.sleep(self._check_s)
            elif self._answered:
                await trio.sleep(BACKOFF_FIRST_S)
            else:
                delay_s = next(delays_s)
                _say_unreachable(self._addresses, delay_s)
                await trio.sleep(delay_s)

    def _note(self, reached: frozenset[str]) -> None:
        for peer in self._reached - reached:
            logger.warning("lost bootstrap %s; going on with the peers we know", peer)
        for peer in reached - self._reached:
            logger.info("joined through bootstrap %s", peer)
        self._reached = reached

    async def _reach(self) -> frozenset[str]:
        try:
            connected = set(await self._joining.connected())
        except NetError as error:  # if the daemon is gone, whoever watches it says so
            logger.warning("can't look for bootstraps: %s", error)
            return frozenset()
        reached = set()
        for address in self._addresses:
            transport, peer = split_address(address)
            known = peer in connected and await self._joining.knows(peer)
            if known or await self._join(peer, transport):
                reached.add(peer)
        return frozenset(reached)

    async def _join(self, peer: str, transport: str) -> bool:
        if not await answers(transport):
            return False
        self._answered = True
        try:
            await self._joining.connect(peer, [transport])
            return await self._joining.greet(peer)
        except NetError as error:
            # The daemon itself waits for some seconds before it dials again where nobody answered before.
            level = logging.DEBUG if "dial backoff" in str(error) else logging.WARNING
            logger.log(level, "bootstrap %s answers but does not let us in yet: %s", peer, error)
            return False
