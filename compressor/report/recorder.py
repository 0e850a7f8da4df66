"""What a run leaves for other programs: JSON, and JUnit XML for CI systems.  Either is whole, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressorError, UsageError

if TYPE_CHECKING:
    from compressor.recipe.gates import GateResult
    from compressor.run.job import Outcome

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even as a reference: https://www.w3.org/TR/xml/#charsets"""

_UNFINISHED = "the run has not ended: it is under way, or it was killed"


@dataclass(frozen=True)
class Check:
    """Something that is made sure of: by a run beside its gates, or of a bundle.

    Attributes:
        name: what is checked.
        passed: None where it could not be checked, or where its answer is no reason to fail.
        detail: what was found, or why it was not checked.
    """

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        result = {True: "passed", False: "FAILED", None: "not checked"}[self.passed]
        return f"{self.name}: {result}: {self.detail}"


def outcome_content(outcome: Outcome) -> dict[str, Any]:
    """What ``compress run --json`` prints, ``--report`` writes: every figure, and how each gate, pass and site went."""
    content = {
        "bundle": str(outcome.bundle),
        **outcome.metrics,
        "kernel_error": outcome.kernel_error,
        "gates": {result.gate.metric: result.passed for result in outcome.gates},
        "gate_results": [result.content() for result in outcome.gates],
        "sites": list(outcome.sites),
        "passes": list(outcome.stages),
        "schedules": list(outcome.schedules),
        "checks": [dataclasses.asdict(check) for check in outcome_checks(outcome)],
        "predictions": {
            name: {"predicted": predicted, "measured": measured} for name, predicted, measured, _ in outcome.predictions
        },
        "notes": [*outcome.remarks, *outcome.notes],
    }
    return {name: finite(value) for name, value in content.items()}


def finite(value: Any) -> Any:
    """The same data with numbers that JSON does not have as text: "inf", "-inf", "nan"."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def outcome_checks(outcome: Outcome) -> list[Check]:
    """What the run made sure of: a run that ends with an outcome has passed all of it."""
    error = outcome.kernel_error
    if error is None:
        kernels = Check("kernels against PyTorch", None, "not executed: this machine lacks the instruction set")
    else:
        kernels = Check("kernels against PyTorch", True, f"relative error {error:.1e}")
    checks = [kernels]
    if (independent := outcome.metrics.get("batch_independent")) is not None:
        found = "proven" if independent else "not proven; a gate `batch_independent: true` would fail"
        checks.append(Check("batch independence", True if independent else None, found))
    return [*checks, *outcome.checks]


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all.

    Raises:
        CompressorError: it cannot be written.
    """
    _replace(path, (json.dumps(finite(content), indent=2, default=str, allow_nan=False) + "\n").encode())


def write_junit(
    path: Path,
    suite: str,
    gates: Sequence[GateResult] = (),
    checks: Sequence[Check] = (),
    *,
    error: tuple[str, str] | None = None,
    seconds: float = 0.0,
) -> None:
    """Write JUnit XML with one test suite: a test case for each check and each gate; whole or not at all.

    Args:
        suite: the suite's name.
        error: class and message of what ended the run before its gates could be judged: one more test case.
        seconds: how long the run took.
    Raises:
        CompressorError: it cannot be written.
    """
    root = ET.Element("testsuite", {"name": _legal(suite)})
    for check in checks:
        case = _case(root, "checks", check.name)
        if check.passed is None:
            ET.SubElement(case, "skipped", {"message": _legal(check.detail)})
        elif not check.passed:
            _tell(case, "failure", "check", check.detail)
        else:
            ET.SubElement(case, "system-out").text = _legal(check.detail)
    for result in gates:
        case = _case(root, "gates", f"{result.gate.metric} {result.gate}")
        if result.passed:
            ET.SubElement(case, "system-out").text = _legal(str(result))
        else:
            _tell(case, "failure", "gate", str(result))
    if error is not None:
        _tell(_case(root, "run", "run"), "error", *error)
    counts = {"tests": len(root), **{f"{kind}s": len(root.findall(f"*/{kind}")) for kind in ("failure", "error")}}
    counts["skipped"] = len(root.findall("*/skipped"))
    for name, count in counts.items():
        root.set(name, str(count))
    root.set("time", f"{seconds:.3f}")
    _replace(path, ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")


def _case(root: ET.Element, group: str, name: str) -> ET.Element:
    # A run has one clock; a case has none of its own, but readers want the attribute.
    return ET.SubElement(root, "testcase", {"classname": f"compressor.{group}", "name": _legal(name), "time": "0"})


def _tell(case: ET.Element, kind: str, type_name: str, text: str) -> None:
    message = _legal(text)
    ET.SubElement(case, kind, {"type": type_name, "message": message.partition("\n")[0]}).text = message


def _legal(text: str) -> str:
    """The text with what XML forbids written as an escape: ``\\x1b``."""
    return _FORBIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


class Recorder:
    """The files that a run leaves, from its beginning to its end; made by :func:`recording`."""

    def __init__(self, suite: str, junit: Path | None, report: Path | None) -> None:
        self._suite, self._junit, self._report = suite, junit, report
        self._began = time.monotonic()
        self._judged = False

    def begin(self, bundle: str | Path | None) -> None:
        """Write files that say that the run has not ended: all there will be if the process is killed.

        Raises:
            UsageError: they cannot be written, or would lie inside the bundle, which is replaced as a whole.
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
        """Write what became of the run, whether or not its gates hold.

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
        """Write what ended the run, unless its gates have been judged."""
        if self._judged:
            return
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        try:
            self._write_error(type(error).__name__, str(error) or type(error).__name__, exit_code)
        except CompressorError as unwritten:
            raise CompressorError(f"{error}\n{unwritten}") from error

    def _write_error(self, kind: str, message: str, exit_code: int | None) -> None:
        if self._report is not None:
            write_report(self._report, {"error": message, "error_type": kind, "exit_code": exit_code})
        if self._junit is not None:
            write_junit(self._junit, self._suite, error=(kind, message), seconds=time.monotonic() - self._began)

    def _paths(self) -> list[Path]:
        return [path for path in (self._junit, self._report) if path is not None]


@contextmanager
def recording(
    suite: str, junit: Path | None, report: Path | None, bundle: str | Path | None = None
) -> Iterator[Recorder]:
    """Make sure that a JUnit and a JSON file tell how the block ended, also when it ends with an error.

    Args:
        suite: name of the JUnit test suite.
        bundle: where the bundle will be, if that is known already; see :meth:`Recorder.begin`.
    Raises:
        UsageError: before the block: one of them cannot be written; nothing is.
    """
    if junit is not None and report is not None and junit.resolve() == report.resolve():
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
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path}: is no file; choose another name")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written, {parent} is no folder that you may write to")


def _check_outside(paths: Sequence[Path], bundle: Path) -> None:
    for path in paths:
        if path.resolve().is_relative_to(bundle.resolve()):
            raise UsageError(
                f"{path}: lies inside the bundle, {bundle}, which is made as a whole; choose another place"
            )


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise CompressorError(f"{path}: cannot be written: {error}; free some space or choose another place") from error
