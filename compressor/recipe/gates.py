"""Gates: what a result must reach, such as ``perplexity_increase: "<= 3%"``, held against what was measured."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from compressor.errors import RecipeError, UsageError
from compressor.evaluate.timing import CONFIDENCE, Timing
from compressor.recipe.located_yaml import nearest


@dataclass(frozen=True)
class Metric:
    """A figure that a gate may be put on.

    Attributes:
        units: how a gate on it may be written: unit to its factor to the metric's own unit, which is that of the JSON
            output.  None: the metric is a yes or no.
        dense: whether a gate may also be written relative to the dense model's figure, ``x dense``.
        text: whether measuring it takes text, or images, to evaluate on.
        timing: whether it differs from one repeat to the next, so that a gate on it is decided with a confidence.
    """

    units: Mapping[str, float] | None
    dense: bool = False
    text: bool = False
    timing: bool = False


_PLAIN = {"": 1.0}
_PERCENT = {"%": 0.01}
_FRACTION = _PLAIN | _PERCENT
_BYTES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
}  # fmt: skip
_MILLISECONDS = {"": 1.0, "ms": 1.0, "s": 1e3}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3}

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "perplexity": Metric(_PLAIN, dense=True, text=True),
        "perplexity_increase": Metric(_PERCENT, text=True),
        "kl_divergence": Metric(_PLAIN, text=True),
        "top1_agreement": Metric(_FRACTION, text=True),
        "accuracy": Metric(_FRACTION, dense=True, text=True),
        "accuracy_drop": Metric(_PERCENT, text=True),
        "embedding_cosine": Metric(_FRACTION, text=True),
        "embedding_cosine_min": Metric(_FRACTION, text=True),
        "kernel_error": Metric(_FRACTION),
        "batch_independent": Metric(None),
        "weight_bytes": Metric(_BYTES, dense=True),
        "bundle_bytes": Metric(_BYTES),
        "bytes_per_token": Metric(_BYTES),
        "cache_bytes_per_token": Metric(_BYTES, dense=True),
        "peak_rss_bytes": Metric(_BYTES, dense=True),
        "latency_ms": Metric(_MILLISECONDS, dense=True, timing=True),
        "first_token_ms": Metric(_MILLISECONDS, dense=True, timing=True),
        "load_s": Metric(_SECONDS, timing=True),
        "prefill_tokens_per_s": Metric(_PLAIN, dense=True, timing=True),
        "decode_tokens_per_s": Metric(_PLAIN, dense=True, timing=True),
    }
)
"""All metrics, by their names in the JSON output."""

QUALITY = frozenset(name for name, metric in METRICS.items() if metric.text)
"""Metrics that need text or images to evaluate on."""

_DENSE = "x dense"
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
)
_IS = "is"
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)\s*"
_GATE = re.compile(rf"(<=|>=|<|>)\s*{_NUMBER}(x\s+dense|%|ms|s|[KMG]i?B|B)?")
_AMOUNT = re.compile(rf"{_NUMBER}(ms|s|[KMG]i?B|B)?")


def parse_amount(metric: str, value: object) -> float:
    """A number, or text with one of the metric's units, in the metric's own: ``4 MB`` of ``weight_bytes`` is 4,000,000.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(value, int | float):
        return float(value)
    units = METRICS[metric].units or {}
    match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 80 else None
    if match is None or (match[2] or "") not in units:
        allowed = ", ".join(unit or "none" for unit in units)
        raise UsageError(f"{metric} {str(value)[:80]!r}: write a number and a unit ({allowed})")
    return float(match[1]) * units[match[2] or ""]


@dataclass(frozen=True)
class Gate:
    """One condition on one metric.

    Attributes:
        metric: a key of :data:`METRICS`.
        op: ``<=``, ``>=``, ``<`` or ``>``; ``is`` where the metric is a yes or no.
        value: the number as written; True or False after ``is``.
        unit: as written: ``%``, ``MB``, ``ms``, ``x dense``..., or empty.
    """

    metric: str
    op: str
    value: float
    unit: str = ""

    @classmethod
    def parse(cls, metric: str, text: object) -> Gate:
        """Read ``<= 3%``, ``>= 1.2x dense``, ``<= 120MB``, or ``true`` where the metric is a yes or no.

        Raises:
            RecipeError: the metric is unknown, or the text is no condition on it.
        """
        if metric not in METRICS:
            raise RecipeError(f"unknown metric; {nearest(metric, METRICS)}")
        known, shown = METRICS[metric], repr(text)[:80]
        if known.units is None:
            answer = {"true": True, "false": False}.get(str(text).lower() if isinstance(text, str | bool) else "")
            if answer is None:
                raise RecipeError(f"{shown} is no condition; {metric} is a yes or no: write true or false")
            return cls(metric, _IS, answer)
        units = [*known.units, *([_DENSE] if known.dense else [])]
        allowed = ", ".join(unit or "none" for unit in units)
        match = _GATE.fullmatch(text.strip()) if isinstance(text, str) and len(text) < 80 else None
        if match is None:
            raise RecipeError(f"{shown} is no condition; write <=, >=, < or >, a number and a unit ({allowed})")
        unit = _DENSE if (match[3] or "").startswith("x") else match[3] or ""
        if unit not in units:
            raise RecipeError(f"{text!r}: unit {unit or 'none'!r} does not fit {metric}; units: {allowed}")
        gate = cls(metric, match[1], float(match[2]), unit)
        if not math.isfinite(gate.limit):
            raise RecipeError(f"{text!r}: the number is too large")
        return gate

    def __str__(self) -> str:
        return str(self.value).lower() if self.op == _IS else f"{self.op} {self.value:.12g}{self.unit}"

    @property
    def relative(self) -> bool:
        """Whether the bound is a multiple of the dense model's figure."""
        return self.unit == _DENSE

    @property
    def factor(self) -> float:
        """One of the unit as written, in the metric's own unit (bytes, ms, fractions); for ``x dense`` 1, a ratio."""
        units = METRICS[self.metric].units
        return 1.0 if self.relative or units is None else units[self.unit]

    @property
    def limit(self) -> float:
        """The bound in the metric's own unit; for ``x dense`` the ratio to the dense model's figure."""
        return self.value * self.factor

    def holds(self, figure: float) -> bool:
        """Whether a figure passes: in the metric's own unit, for ``x dense`` a ratio; NaN never does."""
        return figure == self.value if self.op == _IS else _OPERATORS[self.op](figure, self.limit)

    def decided(self, timing: Timing) -> bool:
        """Whether the whole confidence interval lies on one side of the limit."""
        ends = timing.interval
        return ends is not None and self.holds(ends[0]) == self.holds(ends[1])


@dataclass(frozen=True)
class GateResult:
    """A gate held against what was measured.

    Attributes:
        gate: the gate.
        passed: whether it holds; never where nothing was measured.
        measured: the bundle's figure in the metric's own unit, of a timing the median; None: it was not measured.
        dense: the dense model's figure, where the gate is relative to it.
        timing: the repeats behind the figure that the gate is held against (ratios, where it is relative to dense);
            None for what needs no repeats.
    """

    gate: Gate
    passed: bool
    measured: float | None = None
    dense: float | None = None
    timing: Timing | None = None

    @property
    def figure(self) -> float | None:
        """What the gate is held against: the measured figure, or its ratio to the dense model's."""
        if self.timing is not None:
            return self.timing.median
        if self.measured is None or not self.gate.relative:
            return self.measured
        return self.measured / self.dense if self.dense else math.nan

    @property
    def decided(self) -> bool:
        """False for a timing whose confidence interval holds the limit: its median decided."""
        return self.timing is None or self.gate.decided(self.timing)

    def __str__(self) -> str:
        return f"{self.gate.metric}: expected {self.gate}, {self.found}"

    @property
    def found(self) -> str:
        """What was measured, in the unit as written, and how certain it is."""
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
        count, ends = len(timing.samples), timing.interval
        repeats = f"{count} repeat{'s' * (count > 1)}"
        if ends is None:
            return f"undecided at {CONFIDENCE:.0%} after {repeats}, too few for an interval: median"
        between = f"{self._digits(ends[0])} to {self._digits(ends[1])}{self.gate.unit}"
        if self.decided:
            return f"{between} at {CONFIDENCE:.0%} confidence, {repeats}"
        return f"undecided at {CONFIDENCE:.0%} after {repeats}, {between}: median"

    def _digits(self, figure: float) -> str:
        """A figure in the unit as written; as many digits as it takes to see on which side of the limit it is."""
        compare, value, text = _OPERATORS[self.gate.op], figure / self.gate.factor, ""
        for digits in (4, 6, 9, 17):
            text = f"{value:.{digits}g}"
            if "e+" in text:
                text = f"{value:.0f}"
            if compare(float(text), self.gate.value) == self.gate.holds(figure):
                break
        return text

    def content(self) -> dict[str, Any]:
        """The JSON form; figures in the metric's own unit, the interval that of ``figure``."""
        content: dict[str, Any] = {
            "metric": self.gate.metric,
            "expected": str(self.gate),
            "measured": self.measured,
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
    """Hold every gate against what was measured.

    Args:
        metrics: figures by their JSON names; ``x dense`` compares with ``dense_<metric>``.
        timings: the repeats behind the figures that differ from one to the next, by the same names.
    """
    return [_check(gate, metrics, timings or {}) for gate in gates]


def timing_of(gate: Gate, timings: Mapping[str, Timing]) -> Timing | None:
    """The repeats that a gate is held against: the metric's, or the pairs' ratios where it is relative to dense."""
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
