"""Errors that are meant for the user; the class sets the exit code of the ``compress`` command."""

from __future__ import annotations

import errno
from typing import Any, ClassVar


class CompressorError(Exception):
    """Error whose message says where, what, why, and what to do about it."""

    exit_code: ClassVar[int] = 1


class UsageError(CompressorError):
    """A command, an argument or a name that does not exist or makes no sense."""

    exit_code: ClassVar[int] = 2


class UnknownFormatError(UsageError):
    """A name that is not read as a format."""


class RecipeError(UsageError):
    """A recipe, or a data specification, that cannot be carried out as written."""


class DriftError(UsageError):
    """A run that would not repeat a locked one; the message names what has changed since."""


class GateError(CompressorError):
    """A failed gate of the recipe: the result is not as good as was asked for.

    Attributes:
        outcome: the run's result nevertheless, a :class:`compressor.report.outcome.Outcome`.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, outcome: Any = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class VerificationError(CompressorError):
    """A failed check of the graph, the kernels or the bundle."""

    exit_code: ClassVar[int] = 4


class CaptureError(UsageError):
    """A model that cannot be turned into a graph, or whose operators have no kernels."""


class ModelFileError(CaptureError):
    """A model file that cannot be read, or that asks for what is not served."""


class ToolchainError(CompressorError):
    """A tool outside Python (a C++ compiler, a linker) that is missing or failed."""


class ResourceError(CompressorError):
    """Too little memory or disk on this machine for the run; the message names the setting that would help."""

    exit_code: ClassVar[int] = 5


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the system's errors of a disk that is full."""


def failed_write(error: OSError, message: str) -> CompressorError:
    """Return the error to raise for one of the system while writing; of its own class where there is no room."""
    return (ResourceError if error.errno in NO_ROOM else CompressorError)(message)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return int(getattr(error, "exit_code", 130))
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in NO_ROOM):
        return ResourceError.exit_code
    return int(getattr(error, "exit_code", 1))


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first line of an error's message that is not blank; ``otherwise``, or the class's name, if all are."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__ if otherwise is None else otherwise)
