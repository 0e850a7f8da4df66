"""Choose zeros by ADMM: weights are drawn towards their projection onto the pattern, and only then replaced by it.

After ELSA (arXiv 2510.01650): the gradients are those of the whole model at weights that are still dense, and no mask
stands between.  Symbols: w a weight, z its projection, y the dual variable, rho the penalty; u = y / rho.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compressor.formats.extras import ColumnBlocks
from compressor.numerics.products.deterministic import total
from compressor.numerics.sparsity.block_sparsity import COLUMNS, block_mask, largest_blocks
from compressor.training.zeros.masks import GrowingBlocks, KeptZeros


class ProjectedBlocks(GrowingBlocks):
    """Leave out blocks of columns, all at once after two thirds of the steps, as ADMM has prepared it.

    minimise f(w) with w = z, and z of the pattern.  Until then, after each step of the optimiser on f:

        w <- argmin 1 / (2 rate) ||w' - w||^2 + rho / 2 ||w' - z + u||^2 = (w + rate rho (z - u)) / (1 + rate rho)

    and every so many steps z <- the largest blocks of w + u, y <- y + rho (w - z).  rho rises straight from zero.  y is
    kept, not u, so that a change of rho leaves it as it is.  Blocks are compared as those of :class:`GrowingBlocks`,
    and the pattern has as many at any step; but one that is gone may come back, until the end.

    Args:
        weights, kept, moments, steps: as of :class:`GrowingBlocks`.
        rate: the learning rate of a step, the first of which is 0.
        penalty: rho in the end, over the root of a weight's mean square as training begins.
        every: steps between two projections.
        blocks: of which shape.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        kept: Mapping[str, int],
        moments: Mapping[str, Tensor],
        steps: int,
        rate: Callable[[int], float],
        penalty: float,
        every: int,
        blocks: ColumnBlocks = COLUMNS,
    ) -> None:
        super().__init__(weights, kept, moments, steps, blocks)
        self._rate, self._every = rate, every
        begun = {name: weights[name].detach() for name in kept}
        squares = {name: float(total(w.square())) / w.numel() for name, w in begun.items()}
        self._penalties = {name: penalty / max(square, 1e-30) ** 0.5 for name, square in squares.items()}
        self.dual = {name: torch.zeros_like(w) for name, w in begun.items()}
        self.target = {name: w.clone() for name, w in begun.items()}

    @torch.no_grad()
    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Draw weights towards the pattern, project now and then, and in the end take the projection."""
        if step <= self._last:
            for name in self._kept:
                self._draw(name, weights[name], step)
        KeptZeros.after_step(self, step, weights)

    def _draw(self, name: str, w: Tensor, step: int) -> None:
        """Go one step of ADMM on one weight."""
        rho = self._penalties[name] * step / self._last
        pull, z, y = self._rate(step - 1) * rho, self.target[name], self.dual[name]
        w.add_(z - y / rho, alpha=pull).div_(1 + pull)
        if step % self._every == 0 or step == self._last:
            z.copy_(self.project(name, w + y / rho, step))
            y.add_(w - z, alpha=rho)
        if step == self._last:
            self._masks[name] &= z != 0

    def project(self, name: str, values: Tensor, step: int) -> Tensor:
        """Return the values with all but the largest blocks at zero, as many as are left after so many steps."""
        count = self.count(step, values.shape[1], self._kept[name])
        left = largest_blocks(values, self._moments[name], count, self._blocks)
        return values * block_mask(left, *values.shape)

    def state(self) -> dict[str, Tensor]:
        """Return masks, projections and dual variables."""
        of = {"target": self.target, "dual": self.dual}
        return super().state() | {
            f"{name}/{kind}": value for kind, found in of.items() for name, value in found.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's."""
        super().restore({name: state[name] for name in self._masks})
        for kind, into in (("target", self.target), ("dual", self.dual)):
            for name, value in into.items():
                value.copy_(state[f"{name}/{kind}"])
