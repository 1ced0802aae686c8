"""What an answer's length does to its reward. Pure; knows no engine and no task."""

from dataclasses import replace

from echo_p2p.rl.trainer import TrainingRow


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), in [-1, 0]; all in tokens.

    None up to `longest - buffer`, then falling evenly to -1 at `longest`.
    """
    over = length - (longest - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if length > longest else -over / buffer


def shape_overlong(
    rows: tuple[TrainingRow, ...], *, longest: int, share: float, factor: float
) -> tuple[TrainingRow, ...]:
    """The rows with `factor` times the punishment in their rewards; its buffer is that share of the longest answer."""
    buffer = round(share * longest)
    if buffer == 0 or factor == 0.0:
        return rows
    return tuple(
        replace(row, reward=row.reward + factor * overlong_penalty(len(row.response), longest, buffer)) for row in rows
    )
