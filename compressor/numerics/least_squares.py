"""Fit a linear map with a bias to rows of inputs and outputs, by least squares.

Symbols: X the inputs with a column of ones [n, in + 1], Y the outputs [n, out]; W = (X^T X + D)^-1 X^T Y
with a dampening D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.numerics.products.deterministic import product, quadratic, total
from compressor.numerics.sparsity.column_removal import inverse_factor


class LeastSquares:
    """Sums over rows that decide the map, in float64.

    Args:
        inputs, outputs: widths.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self._xx = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self._xy = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self._yy = torch.zeros((), dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows.

        Args:
            x: float [..., in].
            y: float [..., out].
        """
        X, Y = (rows.flatten(0, -2).double() for rows in (x, y))
        X = torch.cat([X, X.new_ones(len(X), 1)], dim=1)
        self._xx += product(X.t().contiguous(), X)
        self._xy += product(X.t().contiguous(), Y)
        self._yy += total(Y.square())

    def solve(self) -> tuple[Tensor, Tensor, float]:
        """Return weight, float32 [out, in], bias, float32 [out], and the squared error over the squared outputs.

        Raises:
            CompressorError: the sums are not positive definite, even when they are dampened.
        """
        R = inverse_factor(self._xx)  # (X^T X + D)^-1 = R^T R
        W = product(R.t().contiguous(), product(R, self._xy)).t().contiguous()
        crossed = total(W * self._xy.t())
        error = self._yy - 2 * crossed + quadratic(W, self._xx)
        relative = float(error / self._yy) if float(self._yy) else 0.0
        return W[:, :-1].float().contiguous(), W[:, -1].float().contiguous(), max(0.0, relative)
