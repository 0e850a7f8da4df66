"""Gather statistics of what each linear reads: second moments (GPTQ), ranges and mean sizes of channels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from compressor.numerics.deterministic import BLOCK


class Statistic(Protocol):
    """Statistic of the input of one group of linears."""

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in the rows of one micro-batch, float32 [tokens, in_features].

        ``dense`` are the same rows in the graph that runs beside this one; ``x`` itself unless one was asked for.
        """


class Hessian:
    """H = 2 / n * X^T X over n tokens, float32 [in, in] (Frantar et al. 2022, section 3).

    Of the symmetric matrix only the upper half is summed.
    """

    def __init__(self, in_features: int) -> None:
        self.tokens = 0
        self._sum = torch.zeros(in_features, in_features, dtype=torch.float32)
        self._cross: Tensor | None = None
        self._scale = 1.0  # of both, as they are now

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in rows, float32 [tokens, in_features]."""
        self._rescale(1.0)
        for first in range(0, x.shape[1], BLOCK):
            last = first + BLOCK
            self._sum[:last, first:last].addmm_(x[:, :last].t(), x[:, first:last])
        self.tokens += len(x)
        if dense is not x:
            self._cross = torch.zeros_like(self._sum) if self._cross is None else self._cross
            self._cross.addmm_((dense - x).t(), x)

    @property
    def value(self) -> Tensor:
        """The Hessian, until more rows arrive; all zeros if no token ever did."""
        self._rescale(2 / max(1, self.tokens))
        for first in range(BLOCK, len(self._sum), BLOCK):
            last = first + BLOCK
            self._sum[first:last, :first] = self._sum[:first, first:last].t()
        return self._sum

    @property
    def cross(self) -> Tensor | None:
        """2 / n * (X_dense - X)^T X, float32 [in, in]; None where the dense inputs were not asked for."""
        self._rescale(2 / max(1, self.tokens))
        return self._cross

    def _rescale(self, scale: float) -> None:
        """In place: a second copy of the largest statistics would not fit where they just do."""
        if scale != self._scale:
            for matrix in (self._sum, self._cross):
                if matrix is not None:
                    matrix.mul_(scale / self._scale)
            self._scale = scale


class Inputs:
    """Range, mean size and mean square of each channel, float64 [in], and some of the rows.

    Attributes:
        absmax, mean_abs, mean_square: over all tokens; zeros if none ever arrived.
    """

    _EACH = 64  # rows of a micro-batch that are kept

    def __init__(self, in_features: int) -> None:
        self.tokens = 0
        self.absmax = torch.zeros(in_features, dtype=torch.float64)
        self._sums = torch.zeros(2, in_features, dtype=torch.float64)
        self._rows: list[Tensor] = []

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in rows, float32 [tokens, in_features]."""
        size = x.abs().double()
        self.absmax = torch.maximum(self.absmax, size.amax(0))
        self._sums += torch.stack([size.sum(0), size.square().sum(0)])
        self.tokens += len(x)
        self._rows.append(x[:: max(1, len(x) // self._EACH)].clone())

    @property
    def mean_abs(self) -> Tensor:
        """Mean of |x|."""
        return self._sums[0] / max(1, self.tokens)

    @property
    def mean_square(self) -> Tensor:
        """Mean of x^2."""
        return self._sums[1] / max(1, self.tokens)

    @property
    def rows(self) -> Tensor:
        """Some of the rows, float32 [n, in]."""
        return torch.cat(self._rows)
