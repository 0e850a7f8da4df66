"""Write a run's results as JUnit XML, for CI systems."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.codegen.backend import Check
from compressor.report.content import write_file

if TYPE_CHECKING:
    from compressor.evaluate.gates import GateResult


_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even as a reference: https://www.w3.org/TR/xml/#charsets"""


def write_junit(
    path: Path,
    suite: str,
    gates: Sequence[GateResult] = (),
    checks: Sequence[Check] = (),
    *,
    error: tuple[str, str] | None = None,
    seconds: float = 0.0,
) -> None:
    """Write JUnit XML, atomically, with one test suite and a test case for each check and each gate.

    Args:
        suite: the suite's name.
        error: class and message of the error that ended the run before its gates could be judged: one more test case.
        seconds: duration of the run.
    Raises:
        CompressorError: the file cannot be written.
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
    write_file(path, ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")


def _case(root: ET.Element, group: str, name: str) -> ET.Element:
    # Only the run is timed, but readers of JUnit expect the attribute on each case.
    return ET.SubElement(root, "testcase", {"classname": f"compressor.{group}", "name": _legal(name), "time": "0"})


def _tell(case: ET.Element, kind: str, type_name: str, text: str) -> None:
    message = _legal(text)
    ET.SubElement(case, kind, {"type": type_name, "message": message.partition("\n")[0]}).text = message


def _legal(text: str) -> str:
    """Escape the characters that XML forbids, such as ``\\x1b``."""
    return _FORBIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
