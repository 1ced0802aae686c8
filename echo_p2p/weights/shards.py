"""Changes of a policy that is spread over several ranks: each rank compares its own shard, one place joins them.

A shard of a tensor is a contiguous run of its flat values (as FSDP2 cuts them, along the first dimension). What ranks
send to the publisher is in proportion to what changed, not to the model. Knows no process group and no blob.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_p2p.errors import BaseMismatch
from echo_p2p.tensors import Bits, changed_values, layout
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
        flat = {name: bits.reshape(-1) for name, bits in shards.items()}
        if layout(flat) != layout(self._retained):
            raise BaseMismatch("the shards have other names or sizes than at the start; publish a snapshot instead")
        found: dict[str, ShardChange] = {}
        for name, bits in flat.items():
            index, _, after = changed_values(self._retained[name], bits)
            self._retained[name][index] = after
            found[name] = ShardChange(self._starts[name], index, after)
        return found


def joined(base: Mapping[str, Bits], ranks: Sequence[Mapping[str, ShardChange]]) -> dict[str, Change]:
    """The change of each tensor of `base`, from those of all ranks.

    Raises BaseMismatch if a shard is of no tensor of the base, of other values, lies outside or over another one.
    """
    if unknown := {name for rank in ranks for name in rank} - base.keys():
        raise BaseMismatch(f"a rank speaks of {min(unknown)!r}, which the published model has not")
    changes: dict[str, Change] = {}
    for name, bits in base.items():
        old = bits.reshape(-1)
        shards = sorted((rank[name] for rank in ranks if name in rank), key=lambda shard: shard.start)
        index = np.concatenate([np.empty(0, np.int64), *(shard.start + shard.index for shard in shards)])
        if index.size and (int(index[0]) < 0 or int(index[-1]) >= old.size or (np.diff(index) <= 0).any()):
            raise BaseMismatch(f"the shards of {name!r} overlap, or lie outside its {old.size} values")
        if any(shard.after.dtype != old.dtype or shard.after.shape != shard.index.shape for shard in shards):
            raise BaseMismatch(f"the shards of {name!r} hold other values than {old.dtype}, or not one a position")
        after = np.concatenate([old[:0], *(shard.after for shard in shards)])
        differ = old[index] != after
        index, after = index[differ], after[differ]
        changes[name] = Change(old, index, old[index], after)
    return changes
