"""Repeated measurements: their median, and distribution-free confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
"""Probability that an interval contains the true median; with several looks at a growing sample, that all of them
do.
"""


@dataclass(frozen=True)
class Timing:
    """Samples of one repeated measurement.

    Attributes:
        samples: one figure per repeat, in the order in which they were taken.
        looks: how often the samples are checked to decide whether they suffice.  Each look adds a chance of error, so
            the allowed error is divided among the looks (Bonferroni).
    """

    samples: tuple[float, ...]
    looks: int = 1

    @property
    def median(self) -> float:
        """Median of the samples; for an even number the mean of the middle two."""
        return statistics.median(self.samples)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval of the true median; None if there are too few samples for one."""
        return median_interval(self.samples, (1 - CONFIDENCE) / self.looks)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.samples) - min(self.samples)) / self.median

    def over(self, other: Timing) -> Timing:
        """Return the ratios of repeats that were taken in pairs, in which disturbances that slow both cancel."""
        return Timing(tuple(a / b for a, b in zip(self.samples, other.samples, strict=True)), self.looks)


def median_interval(samples: Sequence[float], error: float) -> tuple[float, float] | None:
    """Return the narrowest symmetric pair of order statistics that misses the true median with probability <=
    ``error``.

    Of n independent samples of one distribution, the number below its median is binomial(n, 1/2) (or the median lies
    at a tie, which only helps).  The k-th smallest is above the median when fewer than k samples are below it, so
    [k-th smallest, k-th largest] misses it with probability 2 P(binomial(n, 1/2) < k), whatever the distribution
    (David and Nagaraja, Order Statistics, section 7.1).

    Returns:
        The ends of the interval, or None when not even [smallest, largest] is that certain: 2^(1 - n) > error.
    """
    n = len(samples)
    outside, k = 0, 0  # outside: subsets of the n samples with fewer than k members
    while 2 * (outside + math.comb(n, k)) <= error * 2**n:
        outside, k = outside + math.comb(n, k), k + 1
    if k == 0:
        return None
    ordered = sorted(samples)
    return ordered[k - 1], ordered[n - k]


def collect(repeats: Sequence[Mapping[str, float]], looks: int = 1) -> dict[str, Timing]:
    """Collect the figures of several repeats, by name."""
    return {name: Timing(tuple(repeat[name] for repeat in repeats), looks) for name in repeats[0]}


def record(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Return the JSON form: each figure's samples and interval, and the ratios of pairs with ``dense_<figure>``."""
    ratios = {
        name: timing.over(timings[f"dense_{name}"]) for name, timing in timings.items() if f"dense_{name}" in timings
    }
    return {
        "confidence": CONFIDENCE,
        "figures": {name: {"interval": timing.interval, "samples": timing.samples} for name, timing in timings.items()},
        "ratios": {name: {"median": ratio.median, "interval": ratio.interval} for name, ratio in ratios.items()},
    }
