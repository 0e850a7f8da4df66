"""Report progress: the command line draws it, the library only reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One line of progress."""

    def advance(self, amount: int = 1) -> None:
        """``amount`` more units are done."""


class Reporter(Protocol):
    """Where progress goes; the command line draws it, the library only reports."""

    def task(self, name: str, total: int) -> AbstractContextManager[Task]:
        """A task of ``total`` units, which ends with the ``with`` block."""

    def note(self, text: str) -> None:
        """One line for the user that is not an error."""


class Silent:
    """The reporter that says nothing."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Task]:
        """A task that nobody sees."""
        yield self

    def advance(self, amount: int = 1) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
