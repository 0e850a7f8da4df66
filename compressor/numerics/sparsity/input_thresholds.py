"""Thresholds below which a linear's inputs count as zero, and how much each linear of a block should skip.

A threshold is a quantile of the inputs' sizes (TEAL, Liu et al. 2024, arXiv 2408.14690), here of the sizes themselves,
since few inputs have the symmetric distributions that the paper fits.  Weighted by the norms of the weight's columns
(WINA, Chen et al. 2025, arXiv 2505.19427), an input counts by what it adds to the outputs: the threshold of column j is
``t / ||W_j||``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOST_SIZES = 1 << 20
"""Sizes that a quantile is taken of."""
STEP = 0.1
"""Step by which the share of a linear grows."""
MOST_SHARE = 0.95


class Sizes:
    """Sizes of a linear's inputs, in order.

    Args:
        rows: some of its inputs, float32 [tokens, in].
        norms: what sizes are weighted by, float32 [in].
    """

    def __init__(self, rows: Tensor, norms: Tensor) -> None:
        self._norms = norms
        sizes = (rows.abs() * norms).flatten()
        self._sorted = sizes[:: -(-len(sizes) // MOST_SIZES)].sort().values

    def thresholds(self, share: float) -> Tensor:
        """Return a threshold for each column, float32 [in], below which that share of the inputs lies.

        It is above zero where the share is, so that inputs that are zero are skipped however many there are.
        """
        if share <= 0:
            return torch.zeros_like(self._norms)
        place = min(len(self._sorted) - 1, round(share * len(self._sorted)))
        tiny = torch.finfo(torch.float32).tiny
        return (self._sorted[place] / self._norms.clamp_min(tiny)).clamp_min(tiny)


def skipped(rows: Tensor, thresholds: Tensor) -> float:
    """Return the share of the inputs, float32 [tokens, in], that are smaller than their thresholds."""
    return float((rows.abs() < thresholds).double().mean())


def greedy_shares(sizes: Sequence[int], share: float, error: Callable[[Sequence[float]], float]) -> list[float]:
    """Return what each linear of a block should skip, so that the block skips ``share`` of its weights.

    As in TEAL's algorithm 1, the share of one linear after another grows: of the one that adds the least error for its
    size.  The result has no larger error than the same share for all, which is tried as well.

    Args:
        sizes: weights of each linear.
        error: of the block's outputs, where linears skip these shares.
    """
    uniform, shares = [share] * len(sizes), [0.0] * len(sizes)
    left, found = share * sum(sizes), 0.0
    while left > 1e-6 * sum(sizes):
        tries = []
        for i, size in enumerate(sizes):
            grown = min(STEP, MOST_SHARE - shares[i], left / size)
            if grown > 1e-9:
                trial = [*shares[:i], shares[i] + grown, *shares[i + 1 :]]
                rise = error(trial) - found
                tries.append((rise / (grown * size), i, trial, grown * size))
        if not tries:
            break
        rate, _, shares, taken = min(tries)
        left, found = left - taken, found + rate * taken
    return min((shares, uniform), key=error)
