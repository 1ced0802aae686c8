"""Versions whose updates are at hand but not in the live stage yet. Knows not where they come from.

Versions are added from trio, and switched to from whatever thread runs the stage. Bounded: beyond `MAX_STAGED`
versions the two oldest become one, and can then only be switched to together.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import trio

from echo_p2p.errors import WeightsError
from echo_p2p.tensors import TensorUpdate, merged_all
from echo_protocols.values import PolicyVersion

MAX_STAGED = 4


class Changeable(Protocol):
    """What updates are applied to: a stage."""

    def apply(self, updates: Mapping[str, TensorUpdate]) -> None:
        """Change weights in place."""


@dataclass(frozen=True, slots=True)
class _Version:
    version: PolicyVersion
    updates: Mapping[str, TensorUpdate]


class StagedUpdates:
    """What waits for the switch. `applied` is the version of the live stage, None if that is unknown."""

    def __init__(self, applied: PolicyVersion | None, timeout_s: float) -> None:
        self.applied = applied
        self._timeout_s = timeout_s
        self._newest = applied
        self._waiting: tuple[_Version, ...] = ()  # oldest first; replaced, never changed
        self._switching = threading.Lock()
        self._changed = trio.Event()

    def available(self) -> tuple[PolicyVersion, ...]:
        """Versions that can be switched to, oldest first."""
        return tuple(waiting.version for waiting in self._waiting)

    async def add(self, version: PolicyVersion, updates: Mapping[str, TensorUpdate]) -> None:
        """Add a version, newer than all before, by what it changes against the newest."""
        await trio.to_thread.run_sync(self._add, _Version(version, updates))
        self._newest = version
        self._changed.set()
        self._changed = trio.Event()

    def _add(self, added: _Version) -> None:
        with self._switching:
            waiting = (*self._waiting, added)
            if len(waiting) > MAX_STAGED:
                first, then, *rest = waiting
                waiting = (_Version(then.version, merged_all(first.updates, then.updates)), *rest)
            self._waiting = waiting

    async def wait_for(self, version: PolicyVersion) -> None:
        """Return once `version` can be switched to.

        Raises WeightsError if it was superseded before it came, or doesn't come before the deadline.
        """
        with trio.move_on_after(self._timeout_s):
            while version != self.applied and version not in self.available():
                if self._newest is not None and version < self._newest:
                    raise WeightsError(f"version {version} can't be had any more: {self._newest} is staged")
                await self._changed.wait()
            return
        raise WeightsError(f"version {version} was not staged within {self._timeout_s:g} s")

    async def newer_than(self, version: PolicyVersion | None) -> PolicyVersion:
        """The newest version that can be switched to, once it is newer than `version`."""
        while True:
            newest = max(self.available(), default=None)
            if newest is not None and (version is None or newest > version):
                return newest
            await self._changed.wait()

    def switch(self, version: PolicyVersion, stage: Changeable) -> None:
        """Apply what is staged up to `version`, in order, and drop it. Raises WeightsError if it isn't staged.

        Updates hold values, not differences: after an error of the stage the switch can be tried again.
        """
        with self._switching:
            if version == self.applied:
                return
            due = [waiting for waiting in self._waiting if waiting.version <= version]
            if not due or due[-1].version != version:
                raise WeightsError(f"version {version} is not staged; the stage stays at {self.applied}")
            for waiting in due:
                if waiting.updates:
                    stage.apply(waiting.updates)
            self._waiting = self._waiting[len(due) :]
            self.applied = version
