"""Weights and Hessians for tests of pruning."""

from __future__ import annotations

import torch
from torch import Tensor


def problem(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a weight and the Hessian of correlated inputs of very different sizes."""
    rng = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=rng) * torch.rand(columns, generator=rng) ** 2
    x = torch.randn(4 * columns, columns, generator=rng) @ mixing
    return torch.randn(rows, columns, generator=rng), 2 / len(x) * x.T @ x
