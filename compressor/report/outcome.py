"""Hold what a run gave, and compare it with what the plan predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.codegen.backend import Check
from compressor.evaluate.gates import GateResult


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        bundle: folder of the bundle.
        metrics: measured figures by their JSON names; dense figures begin with ``dense_``.
        gates: how each gate went.
        sites: what each pass did to each linear.
        stages: time, weight bytes and blocks of each pass, and how many blocks came from the cache.
        kernel_error: relative error of the bundle's outputs against the graph in PyTorch; None if they cannot run here.
        notes: warnings.
        remarks: what passes have to say beside their records, what came from the cache, and how schedules were chosen.
        fronts: what searches found for several budgets: a measure, and the choices that were scored, by rising cost.
        exports: what was written for other programs, as ``compress export --json`` prints it.
        schedules: of each kernel that was timed, what was tried and what won.
        checks: what else was made sure of.
        predictions: the plan beside what happened: (name, predicted, measured, predicted / measured).
    """

    bundle: Path
    metrics: Mapping[str, Any]
    gates: Sequence[GateResult]
    sites: Sequence[Mapping[str, Any]]
    stages: Sequence[Mapping[str, Any]]
    kernel_error: float | None
    notes: Sequence[str]
    checks: Sequence[Check] = ()
    predictions: Sequence[tuple[str, float, float, float]] = ()
    remarks: Sequence[str] = ()
    schedules: Sequence[Mapping[str, Any]] = ()
    fronts: Sequence[Mapping[str, Any]] = ()
    exports: Sequence[Mapping[str, Any]] = ()
