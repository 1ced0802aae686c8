"""From a policy's bits back to those of earlier versions, by what has changed since. Knows no release and no blob.

For skip patches: instead of models as they were, the old values of what has changed since are kept. Changes of one
version after the other become one, without any model in between.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Generic, TypeVar

import numpy as np

from echo_p2p.errors import WeightsError
from echo_p2p.tensors import SPARSE_SHARE, Bits, TensorUpdate, merged, updated
from echo_p2p.weights.changes import Change

T = TypeVar("T")


class Rewind:
    """The way back, over some number of versions, from the bits of some tensors. Empty: they are the same."""

    def __init__(self) -> None:
        self._undo: dict[str, TensorUpdate] = {}  # by tensor: the older values

    def changed(self, changes: Mapping[str, Change]) -> None:
        """The tensors have gone one version on."""
        newer = {name: TensorUpdate(change.index, change.before) for name, change in changes.items()}
        self._follow(newer, {name: change.old for name, change in changes.items()})

    def then(self, later: "Rewind", tensors: Mapping[str, Bits]) -> None:
        """Go on by what `later` goes back over, from its start on; `tensors` are those of now."""
        self._follow(later._undo, tensors)

    def _follow(self, newer: Mapping[str, TensorUpdate], tensors: Mapping[str, Bits]) -> None:
        for name, update in newer.items():
            undo = merged(update, self._undo[name]) if name in self._undo else update
            size = tensors[name].size
            if undo.index is not None and undo.index.size > SPARSE_SHARE * size:  # the whole takes less memory
                undo = TensorUpdate(None, updated(tensors[name].reshape(-1), undo))
            self._undo[name] = undo

    def changes(self, tensors: Mapping[str, Bits]) -> tuple[dict[str, Bits], list[Change]]:
        """Some tensors of now as they were, and how they have changed since, in order of the names."""
        older: dict[str, Bits] = {}
        changes: list[Change] = []
        for name in sorted(tensors):
            new = tensors[name].reshape(-1)
            undo = self._undo.get(name, TensorUpdate(np.empty(0, np.int64), new[:0]))
            old = updated(new, undo)
            index = np.arange(new.size) if undo.index is None else undo.index
            index = index[old[index] != new[index]]  # what went there and back is no change
            changes.append(Change(old, index, old[index], new[index]))
            older[name] = old.reshape(tensors[name].shape)
        return older, changes


@dataclass(slots=True)
class Window(Generic[T]):
    """So many versions from `start` on: how to go back over them, and the least bytes that lead over them."""

    length: int
    start: T | None = None
    rewind: Rewind = field(default_factory=Rewind)
    size_bytes: int = 0


class Windows(Generic[T]):
    """The windows that skip patches lead over, of lengths that divide one another: one of each is open at a time."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Raises WeightsError for lengths that don't divide one another."""
        if any(longer % shorter or longer <= shorter for shorter, longer in pairwise((1, *lengths))):
            raise WeightsError(f"skips of {tuple(lengths)} versions: each must be a multiple of the one before it")
        self._windows = [Window[T](length) for length in lengths]
        self._versions = 0

    def restart(self) -> None:
        """Forget everything: what comes next has nothing before it."""
        self._windows = [Window[T](window.length) for window in self._windows]
        self._versions = 0

    def changed(self, changes: Mapping[str, Change]) -> None:
        """Some tensors have gone one version on."""
        if self._windows:
            self._windows[0].rewind.changed(changes)

    def ending(self, patch_bytes: int, tensors: Mapping[str, Bits]) -> Iterator[Window[T]]:
        """The windows that end at the version that all tensors have come to, by a patch of so many bytes.

        Short ones first. Who finds a shorter way over one sets its `size_bytes` before the next is taken.
        """
        self._versions += 1
        if self._windows:
            self._windows[0].size_bytes += patch_bytes
        for window, longer in zip_longest(self._windows, self._windows[1:]):
            if self._versions % window.length:
                return
            yield window
            if longer is not None:
                longer.rewind.then(window.rewind, tensors)
                longer.size_bytes += window.size_bytes

    def reached(self, version: T) -> None:
        """`version` is out: windows begin there whose length divides the number of versions so far."""
        for place, window in enumerate(self._windows):
            if self._versions % window.length == 0:
                self._windows[place] = Window(window.length, version)
