"""Show progress on stderr: bars on a terminal, lines in a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from compressor.cli import signals
from compressor.progress import LogReporter, Reporter, Task, duration


@contextmanager
def progress() -> Iterator[Reporter]:
    """Progress bars with elapsed and remaining time; lines with both where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Interruptible(LogReporter())
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[expected]}"),
    )
    with Progress(*columns, console=console) as bars:
        yield _Interruptible(_Bars(bars))


class _Interruptible:
    """A reporter that notices a signal whose exception was lost."""

    def __init__(self, shown: Reporter) -> None:
        self._shown = shown
        self.note, self.expect = shown.note, shown.expect

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Task]:
        signals.check()
        try:
            with self._shown.task(name, total) as task:
                yield _InterruptibleTask(task)
        finally:
            signals.check()


class _InterruptibleTask:
    def __init__(self, task: Task) -> None:
        self._task = task

    def advance(self, amount: int = 1) -> None:
        signals.check()
        self._task.advance(amount)


class _Bars:
    """A :class:`compressor.progress.Reporter` that draws bars."""

    def __init__(self, bars: Progress) -> None:
        self._bars, self._expected = bars, dict[str, float]()

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Task]:
        expected = f"of about {duration(self._expected[name])}" if name in self._expected else ""
        task = self._bars.add_task(name, total=total, expected=expected)
        yield _Bar(self._bars, task)

    def expect(self, seconds: Mapping[str, float]) -> None:
        self._expected = dict(seconds)

    def note(self, text: str) -> None:
        self._bars.console.print(f"note: {text}", highlight=False, markup=False)


class _Bar:
    def __init__(self, bars: Progress, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)
