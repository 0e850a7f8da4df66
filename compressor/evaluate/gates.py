"""Hold measured figures against a recipe's gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressor.evaluate.timing import CONFIDENCE, Timing
from compressor.recipe.gates import _IS, _OPERATORS, Gate


@dataclass(frozen=True)
class GateResult:
    """A gate and its measured figure.

    Attributes:
        gate: the gate.
        passed: whether it holds; False if nothing was measured.
        measured: the bundle's figure in the metric's own unit, the median if it is a timing; None if it was not
            measured.
        dense: the dense model's figure, if the gate is relative to it.
        timing: the repeats behind the compared figure (ratios, if it is relative to dense); None for figures that need
            no repeats.
    """

    gate: Gate
    passed: bool
    measured: float | None = None
    dense: float | None = None
    timing: Timing | None = None

    @property
    def figure(self) -> float | None:
        """The figure that the gate compares: the measured one, or its ratio to the dense model's."""
        if self.timing is not None:
            return self.timing.median
        if self.measured is None or not self.gate.relative:
            return self.measured
        return self.measured / self.dense if self.dense else math.nan

    @property
    def decided(self) -> bool:
        """False for a timing whose confidence interval contains the limit: its median decided."""
        return self.timing is None or decided(self.gate, self.timing)

    def __str__(self) -> str:
        return f"{self.gate.metric}: expected {self.gate}, {self.found}"

    @property
    def found(self) -> str:
        """The measured figure in the unit as written, and its confidence."""
        figure = self.figure
        if figure is None:
            return "not measured"
        if self.gate.op == _IS:
            return f"measured {str(bool(figure)).lower()}"
        text = f"measured {self._digits(figure)}{self.gate.unit}"
        if self.gate.relative:
            text += f" ({self.measured:.6g} against {self.dense:.6g})"
        return text if self.timing is None else f"{text}; {self._certainty(self.timing)}"

    def _certainty(self, timing: Timing) -> str:
        count = len(timing.samples)
        ends = timing.interval
        repeats = f"{count} repeat{'s' * (count > 1)}"
        if ends is None:
            return f"undecided at {CONFIDENCE:.0%} after {repeats}, too few for an interval: median"
        between = f"{self._digits(ends[0])} to {self._digits(ends[1])}{self.gate.unit}"
        if self.decided:
            return f"{between} at {CONFIDENCE:.0%} confidence, {repeats}"
        return f"undecided at {CONFIDENCE:.0%} after {repeats}, {between}: median"

    def _digits(self, figure: float) -> str:
        """Format a figure in the unit as written, with enough digits to show on which side of the limit it is."""
        compare = _OPERATORS[self.gate.op]
        value = figure / self.gate.factor
        text = ""
        for digits in (4, 6, 9, 17):
            text = f"{value:.{digits}g}"
            if "e+" in text:
                text = f"{value:.0f}"
            if compare(float(text), self.gate.value) == self.gate.holds(figure):
                break
        return text

    def content(self) -> dict[str, Any]:
        """Return the JSON form: figures in the metric's own unit, the interval of ``figure``."""
        content: dict[str, Any] = {
            "metric": self.gate.metric,
            "expected": str(self.gate),
            "measured": self.measured,
            "found": self.found,
            "passed": self.passed,
        }
        if self.gate.relative:
            content |= {"dense": self.dense, "ratio": self.figure}
        if self.timing is not None:
            content |= {"interval": self.timing.interval, "confidence": CONFIDENCE}
            content |= {"repeats": len(self.timing.samples), "decided": self.decided}
        return content


def check_gates(
    gates: Sequence[Gate], metrics: Mapping[str, Any], timings: Mapping[str, Timing] | None = None
) -> list[GateResult]:
    """Compare every gate with the measured figures.

    Args:
        metrics: figures by their JSON names; ``x dense`` compares with ``dense_<metric>``.
        timings: the repeats behind each figure that varies between repeats, by the same names.
    """
    return [_check(gate, metrics, timings or {}) for gate in gates]


def timing_of(gate: Gate, timings: Mapping[str, Timing]) -> Timing | None:
    """Return the repeats that decide a gate: the metric's, or the pairs' ratios if the gate is relative to dense."""
    ours, dense = timings.get(gate.metric), timings.get(f"dense_{gate.metric}")
    if not gate.relative:
        return ours
    return None if ours is None or dense is None else ours.over(dense)


def _check(gate: Gate, metrics: Mapping[str, Any], timings: Mapping[str, Timing]) -> GateResult:
    measured = metrics.get(gate.metric)
    dense = metrics.get(f"dense_{gate.metric}") if gate.relative else None
    if measured is None or (gate.relative and dense is None):
        return GateResult(gate, passed=False)
    result = GateResult(gate, False, measured, dense, timing_of(gate, timings))
    figure = result.figure
    return result if figure is None else replace(result, passed=gate.holds(figure))


def decided(gate: Gate, timing: Timing) -> bool:
    """Return whether the whole confidence interval lies on one side of the limit."""
    ends = timing.interval
    return ends is not None and gate.holds(ends[0]) == gate.holds(ends[1])
