"""What a stage keeps of one chain: prompts that are read, and lanes of rows that grow from them. Pure; knows no engine.

Everything that the chain's predecessor says is checked here against what it said before. It was to check the same
before it passed it on, so what is wrong is its own fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_p2p.chain.group import Floats
from echo_p2p.chain.link import ChainLimits, broken
from echo_protocols.hop import BeginPrompt, Join
from echo_protocols.values import PolicyVersion


@dataclass(slots=True)
class Prompt:
    """A prompt in the stage's lane `cache`. `logits` are of its last position so far, at the last stage."""

    order: BeginPrompt
    cache: int
    step: int = 0
    read: int = 0
    logits: Floats | None = None  # (1, vocabulary)
    version: PolicyVersion | None = None  # that computed them
    samples: set[int] = field(default_factory=set)  # that have begun
    canary: bytes = b""  # names what it has read, of a canary


@dataclass(slots=True)
class Row:
    """An answer: of which prompt and sample, the next position that it reads, and the next that is drawn."""

    order: BeginPrompt
    sample: int
    position: int
    drawn: int
    canary: bytes  # names what it has begun from, of a canary


@dataclass(slots=True)
class Lane:
    """Rows that are computed together, in the stage's lane `cache`."""

    cache: int
    step: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    longest: int = 0  # positions of the longest row


class Book:
    """The prompts and lanes of one chain at one peer, by the numbers that the head gave them."""

    def __init__(self, peer: str, limits: ChainLimits, predecessor: str | None = None) -> None:
        self.prompts: dict[int, Prompt] = {}
        self.lanes: dict[int, Lane] = {}
        self._peer = peer
        self._blamed = predecessor or peer
        self._limits = limits

    @property
    def caches(self) -> list[int]:
        """The stage's lanes of all."""
        return [prompt.cache for prompt in self.prompts.values()] + [lane.cache for lane in self.lanes.values()]

    def begin(self, order: BeginPrompt, cache: int) -> None:
        """A prompt is to be read into the stage's lane `cache`. Raises ChainBroken."""
        if order.lane in self.prompts or order.lane in self.lanes:
            raise broken("bad-lane", f"lane {order.lane} began twice", self._blamed)
        if order.samples > self._limits.rows or order.positions > self._limits.positions:
            most = f"{self._limits.rows} of {self._limits.positions}"
            text = f"{order.samples} answers of {order.positions} positions are over the {most} of this stage"
            raise broken("lane-too-large", text, self._peer)
        self.prompts[order.lane] = Prompt(order, cache)

    def read(self, number: int, step: int, rows: Sequence[int], positions: Sequence[int], length: int) -> Prompt:
        """The next part of a prompt. Raises ChainBroken."""
        prompt = self.prompts[number]
        self._check_step(prompt.step, step)
        if list(rows) != [0] or list(positions) != [prompt.read]:
            raise broken("bad-rows", f"a prompt has row 0, and goes on at {prompt.read}", self._blamed)
        if prompt.read + length > prompt.order.positions:
            raise broken("bad-rows", f"a prompt is longer than its {prompt.order.positions} positions", self._blamed)
        if prompt.samples:
            raise broken("bad-rows", "a prompt goes on that answers have begun from", self._blamed)
        self._check_held(length)
        prompt.step += 1
        prompt.read += length
        return prompt

    def join(self, frame: Join) -> tuple[Prompt, Lane | None]:
        """The prompt that rows begin from, and the lane that they join, None if `open` has to make it first.

        Raises ChainBroken.
        """
        prompt, lane = self.prompts.get(frame.prompt), self.lanes.get(frame.lane)
        if prompt is None or frame.lane in self.prompts:
            raise broken("bad-lane", f"rows can't begin in lane {frame.lane} from {frame.prompt}", self._blamed)
        self._check_step(lane.step if lane else 0, frame.step)
        rows, samples = set(frame.rows), set(frame.samples)
        held = lane.rows.keys() if lane else set[int]()
        if len(rows) != len(frame.rows) or rows & held or len(held) + len(rows) > self._limits.rows:
            raise broken("bad-rows", f"rows join that are in lane {frame.lane} already, or are too many", self._blamed)
        order = prompt.order
        if len(samples) != len(frame.rows) or len(frame.samples) != len(frame.rows) or samples & prompt.samples:
            raise broken("bad-rows", "rows join that are no samples of their own", self._blamed)
        if max(samples) >= order.samples or not order.drawn < prompt.read < order.positions:
            raise broken("bad-rows", "rows join that their prompt has not", self._blamed)
        longest = max(lane.longest if lane else 0, prompt.read)
        self._check_held((len(held) + len(rows)) * longest - (len(held) * lane.longest if lane else 0))
        return prompt, lane

    def joined(self, frame: Join, cache: int) -> None:
        """Rows have joined, in the stage's lane `cache`."""
        prompt = self.prompts[frame.prompt]
        lane = self.lanes.setdefault(frame.lane, Lane(cache))
        lane.step += 1
        lane.longest = max(lane.longest, prompt.read)
        prompt.samples.update(frame.samples)
        for row, sample in zip(frame.rows, frame.samples, strict=True):
            lane.rows[row] = Row(prompt.order, sample, prompt.read, prompt.order.drawn, prompt.canary)

    def decode(self, number: int, step: int, rows: Sequence[int], positions: Sequence[int], length: int) -> Lane:
        """One more token of some rows of a lane; the others leave. Raises ChainBroken."""
        lane = self.lanes.get(number)
        if lane is None:
            raise broken("bad-lane", f"lane {number} is not known", self._blamed)
        self._check_step(lane.step, step)
        named = dict.fromkeys(rows)
        if length != 1 or len(named) != len(rows) or not named.keys() <= lane.rows.keys():
            raise broken(
                "bad-rows", f"rows of lane {number} go on that are not in it, or not by one token", self._blamed
            )
        if any(lane.rows[row].position != position for row, position in zip(rows, positions, strict=True)):
            raise broken("bad-rows", "a row came at a position that is not its next", self._blamed)
        if any(lane.rows[row].position >= lane.rows[row].order.positions for row in rows):
            raise broken("bad-rows", "a row is longer than the positions of its group", self._blamed)
        lane.step += 1
        lane.rows = {row: lane.rows[row] for row in rows}
        for row in lane.rows.values():
            row.position += 1
            row.drawn += 1
        lane.longest = max(row.position for row in lane.rows.values())
        self._check_held(0)
        return lane

    def end(self, number: int) -> int:
        """Forget a prompt or a lane; the stage's lane that it was in. Raises ChainBroken."""
        kept: Prompt | Lane | None = self.prompts.pop(number, None) or self.lanes.pop(number, None)
        if kept is None:
            raise broken("bad-lane", f"lane {number} ended but is not known", self._blamed)
        return kept.cache

    def _check_held(self, more: int) -> None:
        held = sum(prompt.read for prompt in self.prompts.values())
        held += sum(len(lane.rows) * lane.longest for lane in self.lanes.values())
        if held + more > self._limits.held:
            text = f"{held + more} positions are more than the {self._limits.held} that this stage has memory for"
            raise broken("no-room", text, self._blamed)

    def _check_step(self, due: int, step: int) -> None:
        if step != due:
            raise broken("bad-rows", f"step {step} came where step {due} was due", self._blamed)
