"""Lines of the log: when a task, and the whole run, are to end."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from compressor import progress
from compressor.progress import LogReporter


def test_the_end_of_the_run_is_foreseen_at_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    out = io.StringIO()
    reporter = LogReporter(out)

    def run(name: str, seconds: float) -> str:
        """Run a task of so many seconds, and return what is said at its begin."""
        out.seek(0)
        out.truncate()
        with reporter.task(name, 3):
            now[0] += seconds
        return out.getvalue().splitlines()[0].partition("] ")[2]

    assert run("capture", 1) == "capture (3 steps) begins"
    reporter.expect({"start": 5.0, "search": 100.0, "distill": 50.0, "write": 2.0})
    assert run("fit", 30) == "fit (3 steps) begins, the whole run ends in about 2 min 37 s"
    assert run("score", 90) == "score (3 steps) begins, the whole run ends in about 2 min 32 s"
    assert run("distill", 60) == "distill (3 steps) begins, takes about 50 s; the whole run ends in about 52 s"
    assert run("write", 1) == "write (3 steps) begins, takes about 2.0 s; the whole run ends in about 2.0 s"
    assert run("more", 1) == "more (3 steps) begins"
