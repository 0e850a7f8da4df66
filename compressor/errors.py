"""Errors that are meant for the user; the class decides the exit code of the ``compress`` command."""

from __future__ import annotations

from typing import Any, ClassVar


class CompressorError(Exception):
    """Something went wrong that the message explains: where, what, why, and what to do about it."""

    exit_code: ClassVar[int] = 1


class UsageError(CompressorError):
    """A command, an argument or a name that does not exist or makes no sense."""

    exit_code: ClassVar[int] = 2


class RecipeError(UsageError):
    """A recipe, or a data specification, that cannot be carried out as written."""


class DriftError(UsageError):
    """A run that was to repeat a locked one would not: the message says what is no longer what it was."""


class GateError(CompressorError):
    """A gate of the recipe failed: the result is not as good as was asked for.

    Attributes:
        outcome: what the run gave nevertheless, a :class:`compressor.run.outcome.Outcome`.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, outcome: Any = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class VerificationError(CompressorError):
    """What was built does not do what it claims: the graph, the kernels or the bundle failed a check."""

    exit_code: ClassVar[int] = 4


class CaptureError(CompressorError):
    """The model could not be turned into a graph."""


class ToolchainError(CompressorError):
    """A tool outside Python (a C++ compiler, a linker) is missing or failed."""


class ResourceError(CompressorError):
    """This machine has too little memory or disk for the run; the message names the setting that would help."""

    exit_code: ClassVar[int] = 5


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first line of an error's message that is not blank; ``otherwise``, or the class's name, if all are."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__ if otherwise is None else otherwise)
