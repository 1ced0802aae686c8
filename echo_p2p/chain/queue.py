"""The groups that a chain has been asked for: waiting, read, growing. Knows no stage.

Prompts are read in the order in which they came, as far as there is room for all answers and not far ahead of the
lanes; answers begin in the order in which their prompts were read.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import trio

from echo_p2p.chain.answerer import OnToken
from echo_p2p.chain.group import Answers, GroupRequest
from echo_protocols.values import PolicyVersion


@dataclass(slots=True, eq=False)
class Group:
    """One request on its way. `dropped` once nobody waits for it.

    Of the tokens of each answer, so many were `given` by another ring, and so many are `proven`.
    """

    request: GroupRequest
    answers: Answers
    readings: tuple["Reading", ...] = ()
    done: trio.Event = field(default_factory=trio.Event)
    dropped: bool = False
    on_token: OnToken | None = None
    given: tuple[int, ...] = ()
    proven: tuple[int, ...] = ()

    def position(self, sample: int) -> int:
        """Where the newest token of an answer stands."""
        return len(self.request.prompt) + self.answers.length(sample) - 1


@dataclass(slots=True, eq=False)
class Reading:
    """Tokens to be read for some answers of a group, which then begin from them: its prompt for those without tokens,
    prompt and tokens so far for one that another ring has begun. `version` computed the last logits.

    `begun` of the answers have been given to a lane, `joined` of them are in it or have been, `left` are not finished.
    """

    group: Group
    number: int
    tokens: tuple[int, ...]
    samples: tuple[int, ...]
    drawn: int = 0  # of `tokens`, so many are the answer's
    version: PolicyVersion | None = None
    begun: int = 0
    joined: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.samples)

    @property
    def room(self) -> int:
        """Positions that it may take, those that its answers grow from included."""
        return len(self.tokens) + len(self.samples) * self.group.request.positions

    @property
    def joining(self) -> bool:
        """Whether answers are on their way into a lane, for which what was read has to stay."""
        return self.begun > self.joined


def readings_of(group: Group, numbers: Iterator[int]) -> tuple[Reading, ...]:
    """What has to be read for the unfinished answers of a group."""
    prompt, answers = group.request.prompt, group.answers
    going = [sample for sample in answers.unfinished if answers.length(sample)]
    found = [
        Reading(group, next(numbers), prompt + answers.tokens(sample), (sample,), answers.length(sample))
        for sample in going
    ]
    if new := tuple(sample for sample in answers.unfinished if not answers.length(sample)):
        found.append(Reading(group, next(numbers), prompt, new))
    return tuple(found)


class Queue:
    """`room` bounds the positions of all readings and of what grows from them, `ahead` the readings that are held: from
    `to_read` until they have `ended`, as a stage has a lane for each."""

    def __init__(self, room: int, ahead: int) -> None:
        self.room = room
        self._left = room
        self._ahead = ahead
        self._unread: deque[Reading] = deque()
        self._ready: deque[Reading] = deque()
        self._changed = trio.Event()

    def widen(self, room: int) -> None:
        """Set the room before anything has taken some."""
        self.room = self._left = room

    def add(self, group: Group) -> None:
        """A new request."""
        self._unread.extend(group.readings)
        self._wake()

    def drop(self, reading: Reading) -> bool:
        """Nobody waits for its group any more; whether what was read was held for answers to come."""
        self._wake()
        if reading in self._unread:
            self._unread.remove(reading)
        elif reading in self._ready:
            self._ready.remove(reading)
            return True
        return False

    def to_read(self) -> Reading | None:
        """The next to be read, which takes its room until `free`."""
        if not self._unread or not self._ahead or self._unread[0].room > self._left:
            return None
        reading = self._unread.popleft()
        self._left -= reading.room
        self._ahead -= 1
        return reading

    def read(self, reading: Reading) -> None:
        """It is read."""
        self._ready.append(reading)
        self._wake()

    def ended(self) -> None:
        """A reading is held no longer: all its answers have joined a lane, or nobody waits for them."""
        self._ahead += 1
        self._wake()

    def to_begin(self, free: int, *, whole: bool) -> list[tuple[Reading, tuple[int, ...]]]:
        """Readings and samples of them to begin in `free` rows; with `whole`, all of one reading."""
        found: list[tuple[Reading, tuple[int, ...]]] = []
        while self._ready and free and not (whole and found):
            reading = self._ready[0]
            most = len(reading.samples)
            end = most if whole else min(most, reading.begun + free)
            samples = reading.samples[reading.begun : end]
            reading.begun, free = end, free - len(samples)
            found.append((reading, samples))
            if end == most:
                self._ready.popleft()
        return found

    def free(self, reading: Reading) -> None:
        """Its room can be taken again."""
        self._left += reading.room
        self._wake()

    async def changed(self) -> None:
        """Return when there may be something else to do."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
