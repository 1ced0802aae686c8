"""Numbers and foreign text as short strings for a terminal. Knows no state document and no screen library.

Names, devices and notes come from other peers: `plain` makes them harmless before anything is shown.
"""

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def plain(text: str, limit: int = 80) -> str:
    """`text` without control characters (a peer must not drive our terminal), cut to `limit` characters."""
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:limit])
    return shown if len(text) <= limit else f"{shown[:-1]}…"


def short_peer(peer: str) -> str:
    """The part of a PeerID that tells it from others: its end, since all Ed25519 PeerIDs begin alike."""
    return plain(peer if len(peer) <= 10 else f"…{peer[-6:]}")


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value with up to `window` − 1 values before it."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def sparkline(values: Sequence[float], width: int = 40, low: float | None = None, high: float | None = None) -> str:
    """At most `width` blocks, each the mean of an equal share of `values`. The scale is theirs unless given."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    parts = [finite[start:end] for start, end in itertools.pairwise(edges)]
    means = [sum(part) / len(part) for part in parts]
    floor = min(means) if low is None else low
    reach = (max(means) if high is None else high) - floor
    if reach <= 0.0:
        return _BLOCKS[0] * count
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[max(0, min(top, round((mean - floor) / reach * top)))] for mean in means)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` characters; something above zero is never drawn as nothing."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * (max(1, filled) if share > 0.0 else 0)


def bytes_text(size_bytes: float) -> str:
    """Decimal units, three digits: `412 B`, `1.04 MB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000.0
    return f"{size:.3g} TB"


def duration_text(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def count_text(count: int, noun: str) -> str:
    """`1 peer`, `3 peers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
