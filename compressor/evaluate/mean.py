"""Means of many numbers that come in parts, and how certain they are."""

from __future__ import annotations

import math

from torch import Tensor

_DEVIATIONS = 1.959964  # of a normal distribution, on both sides of 95%


class Mean:
    """The mean of numbers, and its 95% confidence interval, as if the numbers were independent."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        """Take more numbers, float64 of any shape."""
        self.count += values.numel()
        self._sum += float(values.sum())
        self._squares += float(values.square().sum())

    @property
    def mean(self) -> float:
        """Their mean."""
        return self._sum / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """The mean and 1.96 standard errors on both sides (central limit theorem)."""
        variance = max(0.0, self._squares / self.count - self.mean**2)
        half = _DEVIATIONS * math.sqrt(variance / max(1, self.count - 1))
        return self.mean - half, self.mean + half

    @property
    def fraction_interval(self) -> tuple[float, float]:
        """Wilson's interval, for numbers that are 0 or 1 (JASA 22, 1927): within [0, 1], and never of width 0."""
        n, p, z = self.count, self.mean, _DEVIATIONS
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        whole = 1 + z * z / n
        return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)
