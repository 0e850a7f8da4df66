"""Format figures, and make the console that results go to."""

from __future__ import annotations

import sys

from rich.console import Console


def stdout_console() -> Console:
    """Return standard output; where it is not a terminal, wide enough for whole names."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def figure(value: float, form: str) -> str:
    """Write a number as text: bytes with a unit, anything else by its format."""
    if form != "bytes":
        return form.format(value)
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
