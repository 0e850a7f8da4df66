"""Draw points as text, and make the console that results go to."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

_NARROWEST = 72
"""Columns; in a narrower terminal lines are wrapped, which is easier to read than columns of three letters."""


def stdout_console() -> Console:
    """Return standard output; where it is not a terminal, wide enough for whole names."""
    if not sys.stdout.isatty():
        return Console(width=200)
    return Console(width=max(_NARROWEST, Console().width))


def plot(points: Sequence[tuple[float, float, str]], columns: int = 60, rows: int = 12) -> list[str]:
    """Draw points as lines of text, the origin of neither axis shown; of two in one place the last is seen.

    Args:
        points: across, up, and the character that stands there.
    """
    across, up = [point[0] for point in points], [point[1] for point in points]
    field = [[" "] * columns for _ in range(rows)]
    for x, y, mark in points:
        field[rows - 1 - _place(y, up, rows)][_place(x, across, columns)] = mark
    ends = {0: f"{max(up):.3g}", rows - 1: f"{min(up):.3g}"}
    lines = [f"{ends.get(row, ''):>9} |{''.join(line).rstrip()}" for row, line in enumerate(field)]
    least, most = f"{min(across):.4g}", f"{max(across):.4g}"
    return [*lines, f"{'':>9} '{'-' * columns}", f"{'':>11}{least}{most:>{columns - len(least)}}"]


def _place(value: float, among: Sequence[float], cells: int) -> int:
    spread = max(among) - min(among)
    return round((value - min(among)) / spread * (cells - 1)) if spread else 0
