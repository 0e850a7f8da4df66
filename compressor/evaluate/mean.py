"""Means of many numbers that come in parts, and how certain they are."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_DEVIATIONS = 1.959964  # of a normal distribution, on both sides of 95%
_RESAMPLES, _SEED = 2000, 0
_TAIL = 0.025
_BLOCK_TOKENS = 64  # a few sentences: beyond them what a token costs says little about another
_LEAST_BLOCKS, _MOST_BLOCKS = 20, 1000


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


class BlockMean(Mean):
    """The mean of numbers of consecutive tokens, which are alike, and its interval by bootstrap over blocks of text.

    Blocks of 64 tokens are drawn with replacement, 2,000 times with one seed, and the interval holds the middle 95% of
    the means (percentile bootstrap over blocks: Efron and Tibshirani 1993, sections 8.6 and 13.3).  Short texts have 20
    shorter blocks, long ones 1,000 longer blocks.  Numbers come in the order of the text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        """Take more numbers, float64 of any shape, that follow those before in the text."""
        super().add(values)
        self._values.append(values.detach().flatten().cpu())

    @property
    def interval(self) -> tuple[float, float]:
        """The middle 95% of the means of texts that are made of drawn blocks."""
        sums, counts = self.blocks()
        drawn = np.random.default_rng(_SEED).integers(0, len(sums), (_RESAMPLES, len(sums)))
        low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), [_TAIL, 1 - _TAIL])
        return float(low), float(high)

    @property
    def fraction_interval(self) -> tuple[float, float]:
        """The same; but Wilson's where all blocks are alike, of which any text that is drawn has the same mean."""
        low, high = self.interval
        return (low, high) if low < high else super().fraction_interval

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum and the count of each block, float64 [blocks]."""
        values = torch.cat(self._values).numpy()
        length = min(_BLOCK_TOKENS, max(1, len(values) // _LEAST_BLOCKS))
        starts = np.arange(0, len(values), max(length, -(-len(values) // _MOST_BLOCKS)))
        return np.add.reduceat(values, starts), np.diff(starts, append=len(values)).astype(np.float64)
