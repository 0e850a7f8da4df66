"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2), with a state that can be written down.

Symbols: w a weight, g its gradient, m and v the running means of g and g^2, t the step, from 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compressor.numerics.products.deterministic import total

_FIRST, _SECOND, _EPS = 0.9, 0.999, 1e-8


class AdamW:
    """Optimiser of named weights; vectors (norms, biases) do not decay.

    Args:
        weights: leaves, changed in place.

    Attributes:
        first, second: m and v, by name.
    """

    def __init__(self, weights: Mapping[str, Tensor], weight_decay: float) -> None:
        self._weights, self._decay = weights, weight_decay
        self.first = {name: torch.zeros_like(w, requires_grad=False) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w, requires_grad=False) for name, w in weights.items()}

    @torch.no_grad()
    def step(self, t: int, rate: float) -> None:
        """Change all weights by their gradients.

        w <- (1 - rate * decay) w - rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        """
        for name, w in self._weights.items():
            g, m, v = w.grad, self.first[name], self.second[name]
            assert g is not None
            m.mul_(_FIRST).add_(g, alpha=1 - _FIRST)
            v.mul_(_SECOND).add_(g * g, alpha=1 - _SECOND)
            if w.dim() > 1:
                w.mul_(1 - rate * self._decay)
            spread = (v / (1 - _SECOND**t)).sqrt_().add_(_EPS)
            w.sub_(m / spread, alpha=rate / (1 - _FIRST**t))


@torch.no_grad()
def clip(weights: Mapping[str, Tensor], most: float) -> float:
    """Scale all gradients so that their common norm is at most so large, and return the norm they had."""
    gradients = [w.grad for w in weights.values() if w.grad is not None]
    norm = float(torch.stack([total(g.square()).double() for g in gradients]).sum().sqrt())
    if norm > most:
        for g in gradients:
            g.mul_(most / norm)
    return norm
