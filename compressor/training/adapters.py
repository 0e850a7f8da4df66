"""Low-rank changes of weights, trained in their place and added to them at the end (LoRA, arXiv 2106.09685).

Symbols: W a weight, B and A the two matrices, of which only these are trained: W + B A, with the zeros of W kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compressor.numerics.products.deterministic import product


class Adapters:
    """A pair of matrices for each weight; B begins at zero, so that nothing changes at first.

    Args:
        weights: float32 [out, in], by name; they stay as they are.
        rank: rows of A and columns of B.
        seed: of A, whose entries are normal, with a variance of 1 / in.

    Attributes:
        leaves: A [rank, in] and B [out, rank] of each weight, which gradients are asked of.
    """

    def __init__(self, weights: Mapping[str, Tensor], rank: int, seed: int) -> None:
        self._weights, self.leaves = weights, dict[str, Tensor]()
        self._zeros = {name: weight == 0 for name, weight in weights.items()}
        generator = torch.Generator().manual_seed(seed)
        for name, weight in weights.items():
            rows, columns = weight.shape
            A = torch.randn(rank, columns, generator=generator) / columns**0.5
            self.leaves[f"{name}.A"] = A.to(weight.device).requires_grad_()
            self.leaves[f"{name}.B"] = weight.new_zeros(rows, rank).requires_grad_()

    def fused(self) -> dict[str, Tensor]:
        """Return W + B A by name, float32 [out, in]: what runs in the place of W."""
        found = {}
        for name, weight in self._weights.items():
            change = product(self.leaves[f"{name}.B"], self.leaves[f"{name}.A"])
            found[name] = weight + change.masked_fill(self._zeros[name], 0.0)
        return found

    def stored(self) -> dict[str, Tensor]:
        """Return what runs."""
        return self.fused()
