"""Keep a run's JSON and JUnit files complete: each is written whole, also when the run fails or is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import CompressorError, UsageError, exit_code
from compressor.report.content import outcome_checks, outcome_content, write_report
from compressor.report.junit import write_junit

if TYPE_CHECKING:
    from compressor.report.outcome import Outcome


_UNFINISHED = "the run has not ended: it is under way, or it was killed"


class Recorder:
    """The files that a run leaves, from its beginning to its end; made by :func:`recording`."""

    def __init__(self, suite: str, junit: Path | None, report: Path | None) -> None:
        self._suite, self._junit, self._report = suite, junit, report
        self._began = time.monotonic()
        self._judged = False

    def begin(self, bundle: str | Path | None) -> None:
        """Write files that say that the run has not ended: they remain if the process is killed.

        Raises:
            UsageError: a file cannot be written, or would lie inside the bundle, which is replaced as a whole.
        """
        try:
            if bundle is not None:
                _check_outside(self._paths(), Path(bundle))
            self._write_error("Unfinished", _UNFINISHED, None)
        except UsageError:
            self._junit = self._report = None
            raise
        except CompressorError as error:
            for path in self._paths():
                path.unlink(missing_ok=True)
            self._junit = self._report = None
            raise UsageError(str(error)) from error

    def end(self, outcome: Outcome) -> None:
        """Write the outcome of the run, whether or not its gates hold.

        Raises:
            CompressorError: a file cannot be written.
        """
        self._judged = True
        if self._report is not None:
            write_report(self._report, outcome_content(outcome))
        if self._junit is not None:
            checks = outcome_checks(outcome)
            write_junit(self._junit, self._suite, outcome.gates, checks, seconds=time.monotonic() - self._began)

    def fail(self, error: BaseException) -> None:
        """Write the error that ended the run, unless its gates have been judged."""
        if self._judged:
            return
        try:
            self._write_error(type(error).__name__, str(error) or type(error).__name__, exit_code(error))
        except CompressorError as unwritten:
            raise type(unwritten)(f"{error}\n{unwritten}") from error

    def _write_error(self, kind: str, message: str, code: int | None) -> None:
        if self._report is not None:
            write_report(self._report, {"error": message, "error_type": kind, "exit_code": code})
        if self._junit is not None:
            write_junit(self._junit, self._suite, error=(kind, message), seconds=time.monotonic() - self._began)

    def _paths(self) -> list[Path]:
        return [path for path in (self._junit, self._report) if path is not None]


@contextmanager
def recording(
    suite: str, junit: Path | None, report: Path | None, bundle: str | Path | None = None
) -> Iterator[Recorder]:
    """Ensure that a JUnit and a JSON file tell how the block ended, also when it ends with an error.

    Args:
        suite: name of the JUnit test suite.
        bundle: where the bundle will be, if that is already known; see :meth:`Recorder.begin`.
    Raises:
        UsageError: raised before the block if one of the files cannot be written; then neither is.
    """
    if junit is not None and report is not None and os.path.realpath(junit) == os.path.realpath(report):
        raise UsageError(f"{junit}: is named for both the JUnit file and the report; choose two names")
    paths = [path for path in (junit, report) if path is not None]
    for path in paths:
        _check_file(path)
    if bundle is not None:
        _check_outside(paths, Path(bundle))
    recorder = Recorder(suite, junit, report)
    try:
        yield recorder
    except BaseException as error:
        recorder.fail(error)
        raise


def _check_file(path: Path) -> None:
    is_loop = os.path.islink(os.path.realpath(path))  # of links
    if is_loop or path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path}: is not a file; choose another name")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written, {parent} is not a folder that you may write to")


def _check_outside(paths: Sequence[Path], bundle: Path) -> None:
    for path in paths:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(bundle)):
            raise UsageError(
                f"{path}: lies inside the bundle, {bundle}, which is made as a whole; choose another place"
            )
