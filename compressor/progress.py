"""Report progress: the library reports, the command line draws."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TextIO

_EVERY_S = 60.0


class Task(Protocol):
    """One line of progress."""

    def advance(self, amount: int = 1) -> None:
        """Report that ``amount`` more units are done."""


class Reporter(Protocol):
    """Receiver of progress and notes."""

    def task(self, name: str, total: int) -> AbstractContextManager[Task]:
        """Begin a task of ``total`` units, which ends with the ``with`` block."""

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Take the plan's estimate of the tasks to come, by name."""

    def note(self, text: str) -> None:
        """Show one line to the user that is not an error."""


class Silent:
    """Reporter that discards everything."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Task]:
        """Begin a task that is not shown."""
        yield self

    def advance(self, amount: int = 1) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Do nothing."""


class LogReporter:
    """Reporter for logs: a line at the begin and at the end of each task, and one every minute between.

    Each begins with the seconds since the reporter was made.  ::

        compressor.compress(model, recipe, "bundle", reporter=compressor.LogReporter())

    Args:
        stream: where the lines go; None takes stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._began = stream or sys.stderr, time.monotonic()
        self._expected: dict[str, float] = {}  # of tasks to come, in their order
        self._since = self._began  # the first of them is to begin, or began

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Task]:
        """Begin a task; its lines are written until the block ends."""
        count, here = f" ({total} steps)" if total > 1 else "", self._expected.get(name)
        self._forget_before(name)
        expected = "" if here is None else f", takes about {duration(here)}"
        if self._expected:
            expected += f"{',' if here is None else ';'} the whole run ends in about {duration(self._rest())}"
        self._write(f"{name}{count} begins{expected}")
        began, task, ended = time.monotonic(), _Count(total), threading.Event()

        def remind() -> None:
            while not ended.wait(_EVERY_S):
                self._write(f"{name}: {task.state(time.monotonic() - began, here)}")

        threading.Thread(target=remind, name="compressor-log", daemon=True).start()
        try:
            yield task
        finally:
            ended.set()
        if self._expected.pop(name, None) is not None:
            self._since = time.monotonic()
        self._write(f"{name} took {duration(time.monotonic() - began)}")

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Name from now on how long each task and the whole run are to take."""
        self._expected, self._since = dict(seconds), time.monotonic()

    def _forget_before(self, name: str) -> None:
        """Drop what was to come before a task that begins: passes of several tasks, whose names are others."""
        if name in self._expected:
            names = list(self._expected)
            self._expected = {one: self._expected[one] for one in names[names.index(name) :]}
            self._since = time.monotonic()

    def _rest(self) -> float:
        """Return the seconds that are left of the whole run."""
        first, *others = self._expected.values()
        return max(0.0, first - (time.monotonic() - self._since)) + sum(others)

    def note(self, text: str) -> None:
        """Write a line."""
        self._write(f"note: {text}")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more; the work goes on
            print(f"[{time.monotonic() - self._began:7.1f} s] {text}", file=self._stream, flush=True)


class _Count:
    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def advance(self, amount: int = 1) -> None:
        self._done += amount

    def state(self, seconds: float, expected: float | None) -> str:
        """Say how far the task is, and how long it will go on."""
        if self._done:
            left: float | None = seconds / self._done * (self._total - self._done)
        else:
            left = None if expected is None else expected - seconds
        far = f"{self._done} of {self._total}" if self._total > 1 else f"goes on since {duration(seconds)}"
        if left is None:
            return far
        return f"{far}, about {duration(left)} left" if left > 0 else f"{far}, longer than expected"


def duration(seconds: float) -> str:
    """Write a duration in two units."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
