"""A place for few at a time that nobody can hold against others: whoever has had one for longest makes room.

For what an honest client is done with in moments, where anybody may have as many identities as he likes. Knows no
stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class Newest:
    """At most `most` places."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[trio.CancelScope, None] = {}  # oldest first

    @contextmanager
    def place(self) -> Iterator[trio.CancelScope]:
        """Have a place meanwhile. What is waited for inside is cancelled (`cancelled_caught`) if newer ones need it."""
        if len(self._taken) >= self._most:
            oldest = next(iter(self._taken))
            del self._taken[oldest]
            oldest.cancel()
        with trio.CancelScope() as scope:
            self._taken[scope] = None
            try:
                yield scope
            finally:
                self._taken.pop(scope, None)
