"""Changes of a policy that is spread over several ranks: each rank compares its own shard, one place joins them.

A shard of a tensor is a contiguous run of its flat values (as FSDP2 cuts them, along the first dimension). What ranks
send to the publisher is in proportion to what changed, not to the model. Knows no process group and no blob.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import BaseMismatch
from echo_p2p.tensors import Bits, changed_values
from echo_p2p.weights.changes import Change


@dataclass(frozen=True, slots=True)
class ShardChange:
    """What changed in one rank's values of a tensor, which start at flat position `start`."""

    start: int
    index: NDArray[np.int64]  # (changed,), ascending, inside the shard
    after: Bits  # (changed,)


class ShardDiff:
    """One rank's retained copy of its shards."""

    def __init__(self, shards: Mapping[str, tuple[int, Bits]]) -> None:
        """`shards`: of each tensor that this rank has values of, where they start and what they are."""
        self._starts = {name: start for name, (start, _) in shards.items()}
        self._retained = {name: bits.reshape(-1).copy() for name, (_, bits) in shards.items()}

    def changes(self, shards: Mapping[str, Bits]) -> dict[str, ShardChange]:
        """What has changed since the last call. Raises BaseMismatch if the shards are not those of the start."""
        if _sizes(shards) != _sizes(self._retained):
            raise BaseMismatch("the shards have other names or sizes than at the start; publish a snapshot instead")
        found: dict[str, ShardChange] = {}
        for name, bits in shards.items():
            index, _, after = changed_values(self._retained[name], bits.reshape(-1))
            self._retained[name][index] = after
            found[name] = ShardChange(self._starts[name], index, after)
        return found


def joined(base: Mapping[str, Bits], ranks: Sequence[Mapping[str, ShardChange]]) -> dict[str, Change]:
    """The change of each tensor of `base`, from those of all ranks. Raises BaseMismatch if shards lie outside it."""
    changes: dict[str, Change] = {}
    for name, bits in base.items():
        old = bits.reshape(-1)
        shards = sorted((rank[name] for rank in ranks if name in rank), key=lambda shard: shard.start)
        index = np.concatenate([np.empty(0, np.int64), *(shard.start + shard.index for shard in shards)])
        if index.size and (int(index[-1]) >= old.size or (np.diff(index) <= 0).any()):
            raise BaseMismatch(f"the shards of {name!r} overlap, or lie outside its {old.size} values")
        after = np.concatenate([old[:0], *(shard.after for shard in shards)])
        changes[name] = Change(old, index, old[index], after)
    return changes


def _sizes(tensors: Mapping[str, Bits]) -> dict[str, int]:
    return {name: bits.size for name, bits in tensors.items()}
