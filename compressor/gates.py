"""Gates: what a result must reach, such as ``perplexity_increase: "<= 3%"``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compressor.errors import RecipeError
from compressor.recipe_yaml import nearest

_BYTE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
}  # fmt: skip
_FRACTION, _BYTES, _DENSE = {"%": 0.01}, _BYTE_UNITS, {"x dense": math.nan}
_PLAIN = {"": 1}

METRICS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "perplexity": {**_PLAIN, **_DENSE},
        "perplexity_increase": _FRACTION,
        "kl_divergence": _PLAIN,
        "top1_agreement": {**_PLAIN, **_FRACTION},
        "weight_bytes": {**_BYTES, **_DENSE},
        "bundle_bytes": _BYTES,
        "peak_rss_bytes": _BYTES,
        "prefill_tokens_per_s": {**_PLAIN, **_DENSE},
        "decode_tokens_per_s": {**_PLAIN, **_DENSE},
    }
)
"""Each metric, and the units in which its gate may be written, with their factors."""

QUALITY = frozenset({"perplexity", "perplexity_increase", "kl_divergence", "top1_agreement"})
"""Metrics that need text to evaluate on."""

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
)
_GATE = re.compile(r"(<=|>=|<|>)\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)\s*(x\s+dense|%|[KMG]i?B|B)?")


@dataclass(frozen=True)
class Gate:
    """One condition on one metric.

    Attributes:
        metric: a key of :data:`METRICS`.
        op: ``<=``, ``>=``, ``<`` or ``>``.
        value: the number as written.
        unit: as written: ``%``, ``MB``, ``x dense``..., or empty.
    """

    metric: str
    op: str
    value: float
    unit: str = ""

    @classmethod
    def parse(cls, metric: str, text: object) -> Gate:
        """Read ``<= 3%``, ``>= 1.2x dense``, ``<= 120MB``.

        Raises:
            RecipeError: the metric is unknown, or the text is no condition on it.
        """
        if metric not in METRICS:
            raise RecipeError(f"unknown metric; {nearest(metric, METRICS)}")
        match = _GATE.fullmatch(text.strip()) if isinstance(text, str) and len(text) < 80 else None
        units = METRICS[metric]
        allowed = ", ".join(unit or "none" for unit in units)
        if match is None:
            shown = repr(text)[:80]
            raise RecipeError(f"{shown} is no condition; write <=, >=, < or >, a number and a unit ({allowed})")
        unit = "x dense" if (match[3] or "").startswith("x") else match[3] or ""
        if unit not in units:
            raise RecipeError(f"{text!r}: unit {unit or 'none'!r} does not fit {metric}; units: {allowed}")
        return cls(metric, match[1], float(match[2]), unit)

    def __str__(self) -> str:
        return f"{self.op} {self.value:.12g}{self.unit}"

    def limit(self, dense: float | None = None) -> float:
        """The bound in the metric's own unit (bytes, tokens/s; increases and agreement as fractions).

        Args:
            dense: the dense model's value; needed where the unit is ``x dense``.
        """
        if self.unit != "x dense":
            return self.value * METRICS[self.metric][self.unit]
        if dense is None:
            raise RecipeError(f"gate {self.metric} {self}: the dense model's {self.metric} is not known")
        return self.value * dense

    def holds(self, measured: float, dense: float | None = None) -> bool:
        """Whether the measured value, in the metric's own unit, passes; NaN never does."""
        return _OPERATORS[self.op](measured, self.limit(dense))
