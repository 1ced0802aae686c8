"""A stage's part of one chain: computes what the chain asks for and, at the last stage, draws. Knows no stream.

The head has one for its own stage, and every other stop one for the chain that it serves. The caller has
a turn of the host, and sends on what comes out before the turn ends.
"""

from collections.abc import Sequence

import numpy as np

from echo_p2p.chain.book import Book, Prompt, Row
from echo_p2p.chain.group import Drawn, Floats, Integers, nothing_drawn
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainBroken
from echo_p2p.chain.sampler import draw
from echo_p2p.chain.turns import Turn
from echo_p2p.chain.verdict import name_of
from echo_protocols.hop import CANARY, BeginPrompt, Join
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion


class Seat:
    """One chain at one host."""

    def __init__(self, host: StageHost, predecessor: str | None = None) -> None:
        self._host = host
        self._book = Book(host.peer, host.limits, predecessor)

    def begin(self, order: BeginPrompt) -> None:
        """A prompt is to be read. Raises ChainBroken."""
        cache = self._host.begin()
        try:
            self._book.begin(order, cache)
        except ChainBroken:
            self._host.discard(cache)
            raise

    def end(self, number: int) -> None:
        """Free a prompt or a lane. Raises ChainBroken."""
        self._host.discard(self._book.end(number))

    def leave(self) -> None:
        """Free everything."""
        for cache in self._book.caches:
            self._host.discard(cache)

    async def forward(
        self, turn: Turn, number: int, step: int, rows: Integers, positions: Integers, inputs: Integers | Floats
    ) -> Floats | Drawn:
        """Hidden states (rows, length, hidden) of a part of a prompt, or of a token a row; drawn, at the last stage.

        Raises ChainBroken.
        """
        length, named = inputs.shape[1], rows.tolist()
        if number in self._book.prompts:
            prompt = self._book.read(number, step, named, positions.tolist(), length)
            return await self._read(turn, prompt, step, rows, positions, inputs)
        lane = self._book.decode(number, step, named, positions.tolist(), length)
        version, last = self._host.version, self._host.stage.span.last
        growing = list(lane.rows.values())
        drawn = [row.drawn for row in growing]  # now: the next step may begin before this one's thread draws
        # Only the first token after one join: what rows have read since has no name.
        canary = name_of(growing[0].canary, version, inputs) if step == 1 and growing[0].canary else b""

        def finish(outputs: Floats) -> Floats | Drawn:
            if canary:
                self._host.check_canary(canary, outputs)
            return _draw(step, version, rows, growing, drawn, outputs) if last else outputs

        return await self._host.forward(turn, lane.cache, rows, positions, inputs, finish)

    async def join(self, turn: Turn, frame: Join) -> Drawn | None:
        """Let rows begin; at the last stage, with their first tokens. Raises ChainBroken."""
        prompt, lane = self._book.join(frame)
        cache = lane.cache if lane else self._host.begin()
        self._book.joined(frame, cache)  # so that it is freed with the chain, whatever comes
        rows = np.array(frame.rows, np.int32)
        growing = [self._book.lanes[frame.lane].rows[row] for row in frame.rows]
        drawn = [row.drawn for row in growing]

        def finish() -> Drawn | None:
            if prompt.logits is None or prompt.version is None:
                return None
            logits = np.repeat(prompt.logits, len(rows), axis=0)  # (rows, vocabulary)
            return _draw(frame.step, prompt.version, rows, growing, drawn, logits)

        return await self._host.join(turn, cache, rows, prompt.cache, finish)

    async def _read(
        self, turn: Turn, prompt: Prompt, step: int, rows: Integers, positions: Integers, inputs: Integers | Floats
    ) -> Floats | Drawn:
        version, last = self._host.version, self._host.stage.span.last
        read_alone = step == 0 and prompt.order.group_id == CANARY
        prompt.canary = canary = name_of(b"", version, inputs) if read_alone else b""

        def finish(outputs: Floats) -> Floats | Drawn:
            if canary:
                self._host.check_canary(canary, outputs)
            if not last:
                return outputs
            prompt.logits, prompt.version = outputs, version
            return nothing_drawn(step, version)

        return await self._host.forward(turn, prompt.cache, rows, positions, inputs, finish)


def _draw(
    step: int, version: PolicyVersion, rows: Integers, growing: Sequence[Row], drawn: Sequence[int], logits: Floats
) -> Drawn:
    """A token for each row, its number `drawn`, by its own group's sampling and uniform."""
    tokens, logprobs = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
    for sampling in dict.fromkeys(row.order.sampling for row in growing):
        places = [place for place, row in enumerate(growing) if row.order.sampling == sampling]
        chosen = [(growing[place].order, growing[place].sample, drawn[place]) for place in places]
        u = [uniform(order.run_seed, order.group_id, sample, number) for order, sample, number in chosen]
        tokens[places], logprobs[places] = draw(logits[places], np.array(u, np.float64), sampling)
    return Drawn(step=step, version=version, rows=rows, tokens=tokens, logprobs=logprobs)
