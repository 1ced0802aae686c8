"""Where chats find the chain that this peer heads: whoever drives one lends it. Knows no HTTP and no role."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from echo_node.chat_wire import Ask, Bounds, Fault, group_of, invalid
from echo_p2p.chain.answerer import Answerer
from echo_p2p.chain.group import GroupRequest
from echo_p2p.errors import ModelError
from echo_p2p.models import decode, encode_chat, load_tokenizer, longest_sequence
from echo_protocols.peer import Plan
from echo_protocols.run import RunManifest

CHATS_MAX = 4


@dataclass(frozen=True, slots=True)
class Language:
    """A model's tokenizer, and the longest sequence that it takes."""

    tokenizer: Any
    longest: int

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say."""
        return decode(self.tokenizer, list(tokens))


class Voice:
    """A chain that is open, and the tokenizer of its model, which is loaded when somebody first talks."""

    def __init__(self, driver: Answerer, manifest: RunManifest, model_path: Path) -> None:
        self.driver = driver
        self.manifest = manifest
        self._model_path = model_path
        self._language: Language | None = None
        self._loading = trio.Lock()

    async def language(self) -> Language:
        """Text to tokens and back. Raises ModelError."""
        async with self._loading:
            if self._language is None:
                self._language = await trio.to_thread.run_sync(self._load)
            return self._language

    async def group_of(self, ask: Ask) -> GroupRequest | Fault:
        """What the chain is asked for."""
        language = await self.language()
        try:
            prompt = await trio.to_thread.run_sync(encode_chat, language.tokenizer, ask.turns)
        except ModelError as error:
            return invalid(str(error))
        largest = self.driver.bounds
        bounds = Bounds(samples=largest.samples, positions=min(largest.positions, language.longest))
        return group_of(ask, tuple(prompt), self.manifest, bounds)

    def _load(self) -> Language:
        reference = str(self._model_path)
        return Language(load_tokenizer(reference), longest_sequence(reference))


class Desk:
    """Takes chats while a chain is lent, up to CHATS_MAX at a time. `elsewhere` says where to go when none is."""

    def __init__(self, elsewhere: Callable[[], str]) -> None:
        self.voice: Voice | None = None
        self.seats = trio.Semaphore(CHATS_MAX)
        self._elsewhere = elsewhere

    @contextmanager
    def lend(self, voice: Voice) -> Iterator[None]:
        """Take chats meanwhile."""
        self.voice = voice
        try:
            yield
        finally:
            self.voice = None

    def closed(self) -> Fault:
        """Why there is no chain to talk to."""
        return Fault(status=503, message=self._elsewhere(), code="no_chain")


def elsewhere(plan: Plan | None, peer: str) -> str:
    """A sentence for whoever wants to talk to a peer that drives no chain."""
    if plan is None or not plan.chains:
        return "This peer knows of no chain: ask a peer that serves a run, or wait until a trainer publishes a plan."
    chain = plan.chain_of(peer)
    if chain is None:
        heads = ", ".join(each[0].peer for each in plan.chains[:8])
        return f"This peer drives no chain; ask at the HTTP port of a peer that heads one: {heads}."
    if chain[0].peer == peer:
        return "This peer's chain is not open at the moment: try again in a few seconds."
    return f"This peer is a later stage of its chain; ask at the HTTP port of the chain's head, peer {chain[0].peer}."
