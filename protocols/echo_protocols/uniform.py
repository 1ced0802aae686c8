"""Public randomness: which prompt a worker gets, and the uniform that decides each token. Pure.

Nobody picks their luck: everything is a hash of the run's seed and of the group's place in the run. A place is
`("slot", step, slot)` in the sequential protocol and `(worker, counter)` in the asynchronous one.
"""

import hashlib
import struct
from collections.abc import Sequence

Place = tuple[str, int, int] | tuple[str, int]

_TO_UNIT = 2.0**-53


def group_id(run_seed: bytes, place: Place) -> bytes:
    """32 bytes that name a group by its place in the run."""
    digest = hashlib.blake2b(run_seed, digest_size=32, person=b"echo/group/1")
    for item in place:
        data = item.encode() if isinstance(item, str) else struct.pack(">Q", item)
        digest.update(struct.pack(">I", len(data)) + data)
    return digest.digest()


def prompt_index(run_seed: bytes, place: Place, prompts: int) -> int:
    """The prompt, in [0, prompts), that the group at `place` answers."""
    digest = hashlib.blake2b(group_id(run_seed, place), digest_size=16, person=b"echo/prompt/1").digest()
    return int.from_bytes(digest, "big") % prompts


def uniform(run_seed: bytes, group: bytes, sample: int, position: int) -> float:
    """The u in (0, 1) that draws token `position` of answer `sample` by inverse CDF in token-id order.

    53 bits, never 0 or 1: (k + 1/2) / 2^53 rounded into the open interval.
    """
    data = group + struct.pack(">QQ", sample, position)
    digest = hashlib.blake2b(data, digest_size=8, key=run_seed[:32], person=b"echo/uniform/1").digest()
    return min(((int.from_bytes(digest, "big") >> 11) + 0.5) * _TO_UNIT, 1.0 - _TO_UNIT)


def uniforms(run_seed: bytes, group: bytes, samples: Sequence[int], position: int) -> list[float]:
    """`uniform` of several answers at one position."""
    return [uniform(run_seed, group, sample, position) for sample in samples]
