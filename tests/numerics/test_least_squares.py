"""Least squares with a bias against PyTorch's solver; errors are those of the map."""

from __future__ import annotations

import pytest
import torch

from compressor.numerics.least_squares import LeastSquares


def test_the_map_is_the_solver_s() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(400, 12, generator=random) + 1
    y = x @ torch.randn(12, 5, generator=random) + torch.randn(5, generator=random)
    y += 0.3 * torch.randn(400, 5, generator=random)
    sums = LeastSquares(12, 5)
    for part, of in zip(x.view(4, 10, 10, 12), y.view(4, 10, 10, 5), strict=True):
        sums.add(part, of)
    weight, bias, error = sums.solve()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(400, 1)], 1).double(), y.double()).solution
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1).T.double(), solution, rtol=0, atol=5e-3)
    left = (x @ weight.T + bias - y).double().square().sum() / y.double().square().sum()
    assert error == pytest.approx(float(left), rel=1e-4) and 0.001 < error < 0.1


def test_outputs_of_zeros_have_no_error() -> None:
    sums = LeastSquares(3, 2)
    sums.add(torch.eye(3).repeat(2, 1), torch.zeros(6, 2))
    weight, bias, error = sums.solve()
    assert error == 0 and not weight.any() and not bias.any()
