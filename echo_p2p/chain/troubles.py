"""The troubles of chains in the log: each once, until a chain is open again, and calmly what passes by itself."""

import logging
from typing import Final

from echo_p2p.chain.link import LOADING, ChainBroken
from echo_p2p.errors import ChainError

log = logging.getLogger(__name__)

NOBODYS: Final = frozenset(
    {"closed", "left", "superseded", "not-allowed", "unknown-chain", "wrong-span", "not-in-route", "not-predecessor"}
)
"""Reasons of a plan that has changed, or is not known everywhere yet."""


class Troubles:
    """What was said of a peer's chains. Whoever tries again twice a second says the same of it once."""

    def __init__(self) -> None:
        self._said = ""

    def say(self, error: ChainError) -> None:
        """A chain has ended, or can't be opened."""
        level, words = how_said(error)
        log.log(logging.DEBUG if words == self._said else level, "%s", words)
        self._said = words

    def over(self) -> None:
        """A chain is open: what comes now is new."""
        self._said = ""


def how_said(error: ChainError) -> tuple[int, str]:
    """The level and the words of a trouble."""
    if not isinstance(error, ChainBroken):
        return logging.WARNING, f"the chain can't be opened: {error}"
    reason, peer = error.failure.reason, error.failure.peer
    if reason == LOADING:
        return logging.INFO, f"waiting for {peer or 'a peer of the chain'} to load its layers"
    return logging.INFO if reason in NOBODYS else logging.WARNING, str(error)
