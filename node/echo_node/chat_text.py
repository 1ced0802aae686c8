"""One answer's text while its tokens come: whole characters only, and nothing from a stop string on. Pure."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no character yet


class Words:
    """Text of one answer. What it has given out is never taken back; `stopped` once a stop string has come."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        # Decoding from a few tokens before keeps the space that some decoders take away from a text's beginning.
        self._before = 0
        self._read = 0
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        text = self._fresh()
        if text.endswith(_INCOMPLETE):
            return ""
        self._before, self._read = self._read, len(self._tokens)
        return self._until_stop(text)

    def end(self) -> str:
        """What was held back, when no token follows."""
        text = self._until_stop(self._fresh())
        rest, self._held = self._held, ""
        self._read = len(self._tokens)
        return text if self.stopped else text + rest

    def _fresh(self) -> str:
        known = self._decode(self._tokens[self._before : self._read])
        return self._decode(self._tokens[self._before :])[len(known) :]

    def _until_stop(self, text: str) -> str:
        """Of what was held and `text`: all up to a stop string, or to what may become one."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]


def _begun(text: str, stop: str) -> int:
    """Letters at the end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
