"""The C++ runner as tests call it, and what it says."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

POSITIONS = 300
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # a full tile of 16 tokens, and a rest

Runner = Callable[..., subprocess.CompletedProcess[str]]
"""``runner(bundle, ids, *arguments)`` is the finished process."""


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def ids_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.split(",")]


def figures(done: subprocess.CompletedProcess[str], kind: str = "lookup") -> list[float]:
    """Return acceptance, tokens of a verification, verifications, tokens drafted, accepted, and plain steps.

    Args:
        kind: a pattern of the kind's name, and of what is said of it.
    """
    words = (
        f"{kind}: acceptance N, N tokens a verification, N verifications, N tokens drafted, N accepted, N plain steps, "
        "N tokens/s"
    )
    found = re.fullmatch(words.replace("N", r"([\d.]+)") + "\n", done.stderr)
    assert found, done.stderr
    return [float(figure) for figure in found.groups()[:6]]
