"""The groups that a chain has been asked for: waiting, read, growing. Knows no stage.

Prompts are read in the order in which they came, as far as there is room for all answers and not far ahead of the
lanes; answers begin in the order in which their prompts were read.
"""

from collections import deque
from dataclasses import dataclass, field

import trio

from echo_p2p.chain.answerer import OnToken
from echo_p2p.chain.group import Answers, GroupRequest
from echo_protocols.values import PolicyVersion


@dataclass(slots=True, eq=False)
class Group:
    """One request on its way. `version` computed the last logits of its prompt.

    `begun` of its answers have been given to a lane, `joined` of them are in it or have been.
    """

    request: GroupRequest
    number: int  # of its prompt
    answers: Answers
    done: trio.Event = field(default_factory=trio.Event)
    version: PolicyVersion | None = None
    begun: int = 0
    joined: int = 0
    dropped: bool = False
    on_token: OnToken | None = None

    @property
    def room(self) -> int:
        """Positions that it may take, those of the prompt that its answers grow from included."""
        return len(self.request.prompt) + self.request.samples * self.request.positions

    @property
    def joining(self) -> bool:
        """Whether answers are on their way into a lane, for which the prompt has to stay."""
        return self.begun > self.joined

    def position(self, sample: int) -> int:
        """Where the newest token of an answer stands."""
        return len(self.request.prompt) + self.answers.length(sample) - 1


class Queue:
    """`room` bounds the positions of all groups that are read or grow, `ahead` the prompts that are held."""

    def __init__(self, room: int, ahead: int) -> None:
        self.room = room
        self._left = room
        self._ahead = ahead
        self._unread: deque[Group] = deque()
        self._ready: deque[Group] = deque()
        self._changed = trio.Event()

    def widen(self, room: int) -> None:
        """Set the room before anything has taken some."""
        self.room = self._left = room

    def add(self, group: Group) -> None:
        """A new request."""
        self._unread.append(group)
        self._wake()

    def drop(self, group: Group) -> bool:
        """Nobody waits for it any more; whether its prompt was held for answers to come."""
        group.dropped = True
        self._wake()
        if group in self._unread:
            self._unread.remove(group)
        elif group in self._ready:
            self._ready.remove(group)
            self._ahead += 1
            return True
        return False

    def to_read(self) -> Group | None:
        """The next group to be read, which takes its room until `free`."""
        if not self._unread or not self._ahead or self._unread[0].room > self._left:
            return None
        group = self._unread.popleft()
        self._left -= group.room
        self._ahead -= 1
        return group

    def read(self, group: Group) -> None:
        """Its prompt is read."""
        self._ready.append(group)
        self._wake()

    def not_read(self) -> None:
        """A group was dropped while it was read."""
        self._ahead += 1
        self._wake()

    def to_begin(self, free: int, *, whole: bool) -> list[tuple[Group, range]]:
        """Groups and samples of them to begin in `free` rows; with `whole`, all of one group."""
        found: list[tuple[Group, range]] = []
        while self._ready and free and not (whole and found):
            group = self._ready[0]
            end = group.request.samples if whole else min(group.request.samples, group.begun + free)
            samples = range(group.begun, end)
            group.begun, free = end, free - len(samples)
            found.append((group, samples))
            if end == group.request.samples:
                self._ready.popleft()
                self._ahead += 1
                self._wake()
        return found

    def free(self, group: Group) -> None:
        """Its room can be taken again."""
        self._left += group.room
        self._wake()

    async def changed(self) -> None:
        """Return when there may be something else to do."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
