"""Gates: conditions that a result must meet, such as ``perplexity_increase: "<= 3%"``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from compressor.errors import RecipeError, UsageError
from compressor.recipe.located_yaml import nearest


@dataclass(frozen=True)
class Metric:
    """A figure that a gate may be put on.

    Attributes:
        units: units in which a gate may be written, each with its factor to the metric's own unit, which is that of the
            JSON output.  None: the metric is a yes or no.
        dense: whether a gate may also be written relative to the dense model's figure, ``x dense``.
        text: whether measuring it needs text, images or sound to evaluate on.
        timing: whether it varies between repeats, so that a gate on it is decided with a confidence.
        kinds: of the models that it is measured on.
        most: what it is at best.
        sound: whether it is measured on models that read sound only.
    """

    units: Mapping[str, float] | None
    dense: bool = False
    text: bool = False
    timing: bool = False
    kinds: tuple[str, ...] = ("decoder", "seq2seq", "encoder", "module")
    most: float = math.inf
    sound: bool = False


_PLAIN = {"": 1.0}
_PERCENT = {"%": 0.01}
_FRACTION = _PLAIN | _PERCENT
_BYTES = {
    "": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
}  # fmt: skip
_MILLISECONDS = {"": 1.0, "ms": 1.0, "s": 1e3}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3}

_DECODERS, _ENCODERS, _MODULES = ("decoder", "seq2seq"), ("encoder",), ("module",)
_TEXT, _SPEECH = _DECODERS + _ENCODERS, ("seq2seq", "module")

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "perplexity": Metric(_PLAIN, dense=True, text=True, kinds=_DECODERS),
        "perplexity_increase": Metric(_PERCENT, text=True, kinds=_DECODERS),
        "kl_divergence": Metric(_PLAIN, text=True, kinds=_DECODERS + _MODULES),
        "top1_agreement": Metric(_FRACTION, text=True, kinds=_DECODERS + _MODULES, most=1),
        "overfit_gap": Metric(_PLAIN, text=True, kinds=("decoder",)),
        "swept_kl_divergence": Metric(_PLAIN, text=True, kinds=("decoder",)),
        "continuation_agreement": Metric(_FRACTION, text=True, kinds=("decoder",), most=1),
        "repetition": Metric(_FRACTION, dense=True, text=True, kinds=("decoder",), most=1),
        "accuracy": Metric(_FRACTION, dense=True, text=True, kinds=_MODULES, most=1),
        "accuracy_drop": Metric(_PERCENT, text=True, kinds=_MODULES, most=1),
        "embedding_cosine": Metric(_FRACTION, text=True, kinds=_ENCODERS, most=1),
        "embedding_cosine_min": Metric(_FRACTION, text=True, kinds=_ENCODERS, most=1),
        "word_error_rate": Metric(_FRACTION, dense=True, text=True, kinds=_SPEECH, sound=True),
        "word_error_increase": Metric(_PERCENT, text=True, kinds=_SPEECH, sound=True),
        "character_error_rate": Metric(_FRACTION, dense=True, text=True, kinds=_SPEECH, sound=True),
        "character_error_increase": Metric(_PERCENT, text=True, kinds=_SPEECH, sound=True),
        "kernel_error": Metric(_FRACTION),
        "batch_independent": Metric(None),
        "weight_bytes": Metric(_BYTES, dense=True),
        "bundle_bytes": Metric(_BYTES),
        "bytes_per_token": Metric(_BYTES, kinds=_DECODERS),
        "cache_bytes_per_token": Metric(_BYTES, dense=True, kinds=_DECODERS),
        "peak_rss_bytes": Metric(_BYTES, dense=True, kinds=_TEXT),
        "latency_ms": Metric(_MILLISECONDS, dense=True, timing=True, kinds=_TEXT),
        "first_token_ms": Metric(_MILLISECONDS, dense=True, timing=True, kinds=_DECODERS),
        "load_s": Metric(_SECONDS, timing=True, kinds=_TEXT),
        "prefill_tokens_per_s": Metric(_PLAIN, dense=True, timing=True, kinds=_DECODERS),
        "decode_tokens_per_s": Metric(_PLAIN, dense=True, timing=True, kinds=_DECODERS),
    }
)
"""All metrics, by their names in the JSON output."""


def is_measured(metric: str, kind: str, hears: bool) -> bool:
    """Return whether a metric is measured on a kind of model; those that read sound are not timed."""
    known = METRICS[metric]
    timed = known.timing or metric == "peak_rss_bytes"
    unheard = timed or known.kinds == _MODULES  # what modules alone have is of images
    return kind in known.kinds and (hears or not known.sound) and not (hears and unheard)


QUALITY = frozenset(name for name, metric in METRICS.items() if metric.text)
"""Metrics that need text, images or sound to evaluate on."""

ASKED_FOR: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "continuation_agreement": ("continuations", "32"),
        "repetition": ("continuations", "32"),
        "overfit_gap": ("in_domain", "32"),
        "swept_kl_divergence": ("temperatures", "[0.5, 1.5]"),
    }
)
"""Metrics that an evaluation has to ask for: its key, and a value to begin with."""

_DENSE = "x dense"
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
)
_IS = "is"
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)\s*"
_GATE = re.compile(rf"(<=|>=|<|>)\s*{_NUMBER}(x\s+dense|%|ms|s|[kKMG]i?B|B)?")
_AMOUNT = re.compile(rf"{_NUMBER}(ms|s|[kKMG]i?B|B)?")


def check_measured(gates: Sequence[Gate], evaluation: object, has_text: bool) -> None:
    """Refuse gates on what will not be measured.

    Args:
        evaluation: the recipe's, with a key for each thing that has to be asked for.
        has_text: there is data to evaluate on, its own or what calibration leaves.
    Raises:
        ValueError: there is such a gate.
    """
    for gate in gates:
        if gate.metric in QUALITY and not has_text:
            raise ValueError(f"gates.{gate.metric}: there is no text to measure it on; add `evaluation:`")
        key, example = ASKED_FOR.get(gate.metric, ("", ""))
        if key and getattr(evaluation, key) is None:
            raise ValueError(f"gates.{gate.metric}: is not measured; add `{key}: {example}` to `evaluation`")


def parse_amount(metric: str, value: object, name: str = "") -> float:
    """Convert a number, or text with one of the metric's units, to the metric's own unit: ``4 MB`` of ``weight_bytes``
    is 4,000,000.

    Args:
        name: name of an option in messages, where the option is not a metric but has its units.
    Raises:
        UsageError: the value is neither.
    """
    if isinstance(value, int | float):
        return float(value)
    units = METRICS[metric].units or {}
    match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 80 else None
    if match is None or (match[2] or "") not in units:
        allowed = ", ".join(unit or "none" for unit in units)
        raise UsageError(f"{name or metric} {str(value)[:80]!r}: write a number and a unit ({allowed})")
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
        """Parse ``<= 3%``, ``>= 1.2x dense``, ``<= 120MB``, or ``true`` where the metric is a yes or no.

        Raises:
            RecipeError: the metric is unknown, or the text is not a condition on it.
        """
        if metric not in METRICS:
            raise RecipeError(f"unknown metric; {nearest(metric, METRICS)}")
        known = METRICS[metric]
        shown = repr(text)[:80]
        if known.units is None:
            answer = {"true": True, "false": False}.get(str(text).lower() if isinstance(text, str | bool) else "")
            if answer is None:
                raise RecipeError(f"{shown} is not a condition; {metric} is a yes or no: write true or false")
            return cls(metric, _IS, answer)
        units = [*known.units, *([_DENSE] if known.dense else [])]
        allowed = ", ".join(unit or "none" for unit in units)
        match = _GATE.fullmatch(text.strip()) if isinstance(text, str) and len(text) < 80 else None
        if match is None:
            raise RecipeError(f"{shown} is not a condition; write <=, >=, < or >, a number and a unit ({allowed})")
        unit = _DENSE if (match[3] or "").startswith("x") else match[3] or ""
        if unit not in units:
            raise RecipeError(f"{text!r}: unit {unit or 'none'!r} does not fit {metric}; units: {allowed}")
        gate = cls(metric, match[1], float(match[2]), unit)
        if not math.isfinite(gate.limit):
            raise RecipeError(f"{text!r}: the number is too large")
        too_much = gate.limit > known.most or (gate.limit == known.most and gate.op == ">")
        if not gate.relative and too_much and gate.op in (">", ">="):
            raise RecipeError(f"{text!r} never holds: {metric} is at most {known.most / gate.factor:g}{unit}")
        return gate

    def __str__(self) -> str:
        return str(self.value).lower() if self.op == _IS else f"{self.op} {self.value:.12g}{self.unit}"

    @property
    def relative(self) -> bool:
        """True if the bound is a multiple of the dense model's figure."""
        return self.unit == _DENSE

    @property
    def factor(self) -> float:
        """Factor from the unit as written to the metric's own (bytes, ms, fractions); 1 for ``x dense``."""
        units = METRICS[self.metric].units
        return 1.0 if self.relative or units is None else units[self.unit]

    @property
    def limit(self) -> float:
        """The bound in the metric's own unit; for ``x dense`` the ratio to the dense model's figure."""
        return self.value * self.factor

    def holds(self, figure: float) -> bool:
        """Return whether a figure, in the metric's own unit or for ``x dense`` a ratio, passes; NaN never does."""
        return figure == self.value if self.op == _IS else _OPERATORS[self.op](figure, self.limit)
