"""The C++ runner as tests call it, and what it says."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressor_runtime.speculation.counts import Speculation

POSITIONS = 300
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # a full tile of 16 tokens, and a rest

KINDS = [
    *(("packed", kind) for kind in ("lookup", "recycle", "heads", "auto")),
    *(("drafting", kind) for kind in ("planes", "self", "sparse", "auto")),
    *(("exit", kind) for kind in ("exit", "auto")),
]
"""Bundles of ``tests/native/conftest.py``, and kinds of drafts that they serve."""
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 3}

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


def texts_of(done: subprocess.CompletedProcess[str]) -> list[list[int]]:
    assert done.returncode == 0, done.stderr
    return [[int(token) for token in line.split(",") if token] for line in done.stdout.splitlines()]


def beside(prompts: list[list[int]]) -> list[str]:
    """Return the arguments that have the runner continue these prompts too."""
    return [word for ids in prompts for word in ("--ids", ",".join(map(str, ids)))]


def stated(counts: Speculation) -> list[float]:
    """Return Python's figures in the order of :func:`figures`."""
    rates = [round(counts.acceptance, 2), round(counts.tokens_per_verification, 2)]
    return [*rates, counts.verifications, counts.drafted, counts.accepted, counts.steps]


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
