"""What becomes of a run whose trainer is not heard, in words. Pure: the age of its last word is passed in."""

from typing import Final

from echo_node.charts import duration_text
from echo_p2p.swarm import RENEW_EVERY_S, RUN_TTL_S

SILENT_S: Final = 2 * RENEW_EVERY_S + 5.0
"""From here on a trainer counts as silent: it has missed two renewals of its record."""


def silence_note(age_s: float, *, left: bool) -> str:
    """What to say of a trainer whose last signed word is so old; empty while all is well. `left`: it said farewell."""
    if not left and age_s < SILENT_S:
        return ""
    since = duration_text(age_s)
    what = f"Trainer left {since} ago" if left else f"Trainer silent for {since}: it has stopped, or lost its network"
    if age_s < RUN_TTL_S:
        return f"{what}. Nothing is trained until it is back; peers keep their layers, and go on with it then."
    return f"{what}. Its run has expired for who joins now; peers that are here go on with it if it comes back."
