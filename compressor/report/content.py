"""Write a run's results as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.codegen.backend import Check
from compressor.errors import failed_write
from compressor.export.manifest import finite
from compressor.host.cache import replace_file

if TYPE_CHECKING:
    from compressor.report.outcome import Outcome


def outcome_content(outcome: Outcome) -> dict[str, Any]:
    """Return what ``compress run --json`` prints and ``--report`` writes: every figure, gate, pass and site."""
    content = {
        "bundle": str(outcome.bundle),
        **outcome.metrics,
        "kernel_error": outcome.kernel_error,
        "gates": {result.gate.metric: result.passed for result in outcome.gates},
        "gate_results": [result.content() for result in outcome.gates],
        "sites": list(outcome.sites),
        "passes": list(outcome.stages),
        "schedules": list(outcome.schedules),
        "fronts": list(outcome.fronts),
        "exports": list(outcome.exports),
        "checks": [dataclasses.asdict(check) for check in outcome_checks(outcome)],
        "predictions": {
            name: {"predicted": predicted, "measured": measured} for name, predicted, measured, _ in outcome.predictions
        },
        "notes": [*outcome.remarks, *outcome.notes],
    }
    return {name: finite(value) for name, value in content.items()}


def outcome_checks(outcome: Outcome) -> list[Check]:
    """Return the checks of a run, all passed or not executable: a failed check ends a run without an outcome."""
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
    """Write JSON, atomically.

    Raises:
        CompressorError: the file cannot be written.
    """
    write_file(path, (json.dumps(finite(content), indent=2, default=str, allow_nan=False) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    """Write one of a run's files atomically, and create its folders.

    Raises:
        CompressorError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        advice = "free some space or choose another place"
        raise failed_write(error, f"{path}: cannot be written: {error}; {advice}") from error
