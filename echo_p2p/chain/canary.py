"""A canary: a short prompt that a ring reads again and again, to notice that a stage's memory or kernels went bad.

It has a lane of its own, which changes nobody's tokens, and draws by fixed uniforms from known inputs. Weights that
change, noise in the states and swapped rows move its log-probabilities. Not found: what befalls only some rows, lanes
or tokens that are not its own, a cache that rots, and a stage that lies on purpose; the trainer's audits are for these.
Nor is what was wrong from a version's first canary on, unless a stage remembers better or a reference is given.
"""

import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from echo_p2p.chain.group import Answers, Drawn, GroupRequest
from echo_p2p.chain.head import RingHead
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.queue import Group, Reading
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.steps import Growing, Steps
from echo_p2p.chain.verdict import Seen, tolerance_of
from echo_protocols.hop import CANARY
from echo_protocols.run import Sampling

LANES = 2
"""What a canary takes of the lanes of each stage."""

_LENGTH = 12
_ROWS = 4
_TOKENS = 2  # of each row

_FEWEST_IDS = 16
"""Token ids that every model has: taken when the vocabulary is not known."""


class Canary:
    """Reads the canary of a run in one ring."""

    def __init__(self, ring: Ring, host: StageHost, at: Steps, head: RingHead, numbers: Iterator[int]) -> None:
        ids = _ids(ring.run_id, ring.vocabulary or _FEWEST_IDS, _LENGTH + min(host.limits.rows, _ROWS))
        self._fed = ids[_LENGTH:]
        self._request = GroupRequest(
            group_id=CANARY,
            run_seed=ring.run_id,
            prompt=ids[:_LENGTH],
            samples=len(self._fed),
            sampling=Sampling(max_new_tokens=_TOKENS),
            stop_tokens=frozenset(),
        )
        self._at = at
        self._head = head
        self._engine = host.stage.engine
        self._numbers = numbers

    @property
    def room(self) -> int:
        """Positions that it takes."""
        return _LENGTH + len(self._fed) * self._request.positions

    async def read(self) -> Seen | None:
        """What it draws now; None if the ring has switched meanwhile. Raises ChainBroken.

        Rows go on with known tokens, not with drawn ones: so an edge that is missed has no further effect, and nothing
        is waited for between the steps.
        """
        group = Group(self._request, Answers(self._request))
        samples = tuple(range(len(self._fed)))
        reading = Reading(group, next(self._numbers), self._request.prompt, samples, begun=len(samples))
        growing = [Growing(sample, reading, sample) for sample in samples]
        lane = next(self._numbers)
        self._at.begin(reading)
        with self._head.tokens_of(reading.number) as prompts, self._head.tokens_of(lane) as tokens:
            read = await self._at.read(reading, 0, 0, np.array(reading.tokens, np.int32)[None])
            reading.version = read.version
            joined = await self._at.join(lane, 0, growing)
            assert joined is not None
            self._at.end(reading.number)
            for sample in samples:
                group.answers.take(sample, self._fed[sample], 0.0, read.version)
            decoded = await self._at.decode(lane, 1, growing)
            await self._at.answer(read, prompts)
            drawn = [await self._at.answer(joined, tokens), await self._at.answer(decoded, tokens)]
            self._at.end(lane)
        return _seen(drawn, tolerance_of(self._head.engine or self._engine))


def _seen(drawn: list[Drawn], tolerance: float) -> Seen | None:
    if len({each.version for each in drawn}) > 1:
        return None
    tokens = tuple(token for each in drawn for token in each.tokens.tolist())
    logprobs = tuple(logprob for each in drawn for logprob in each.logprobs.tolist())
    return Seen(drawn[0].version, tokens, logprobs, tolerance)


def _ids(run_id: bytes, vocabulary: int, count: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(CANARY, key=run_id[:64], digest_size=64).digest()
    longer = b"".join(hashlib.blake2b(digest, salt=struct.pack(">Q", i)).digest() for i in range(1 + count // 8))
    return tuple(number % vocabulary for number in struct.unpack(f">{count}Q", longer[: 8 * count]))
