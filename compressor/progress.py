"""Report progress: the library reports, the command line draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One line of progress."""

    def advance(self, amount: int = 1) -> None:
        """Report that ``amount`` more units are done."""


class Reporter(Protocol):
    """Receiver of progress and notes."""

    def task(self, name: str, total: int) -> AbstractContextManager[Task]:
        """Begin a task of ``total`` units, which ends with the ``with`` block."""

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
