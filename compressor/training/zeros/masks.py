"""Which entries of weights have to be zero while they are trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from compressor.formats.extras import ColumnBlocks
from compressor.numerics.sparsity.block_sparsity import COLUMNS, block_mask, largest_blocks

_EVERY = 4  # steps between two choices of blocks


class Masks(Protocol):
    """Zeros that a training keeps, or makes."""

    def is_final(self, step: int) -> bool:
        """Return whether the zeros after so many steps are those of the end: only then is a state worth keeping."""

    def before_step(self, weights: Mapping[str, Tensor]) -> None:
        """Clear the gradients of zeros, so that neither clipping nor the optimiser's means see them."""

    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Set to zero what has to be after so many steps."""

    def state(self) -> dict[str, Tensor]:
        """Return the masks where weights alone do not tell them, for a checkpoint."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's masks."""


class KeptZeros:
    """Keep every zero of some weights: what pruning took away stays away.

    Args:
        weights: as training begins.
        names: weights whose zeros stay; a bias or a norm may begin at zero and leave it.
    """

    def __init__(self, weights: Mapping[str, Tensor], names: Collection[str]) -> None:
        masks = {name: weights[name].detach() != 0 for name in names}
        self._masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}

    def is_final(self, step: int) -> bool:
        """Return True: they are from the beginning."""
        return True

    @torch.no_grad()
    def before_step(self, weights: Mapping[str, Tensor]) -> None:
        """Clear the gradients of zeros."""
        for name, mask in self._masks.items():
            gradient = weights[name].grad
            assert gradient is not None
            gradient.mul_(mask)

    @torch.no_grad()
    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Set zeros to zero, which without gradients they are already."""
        for name, mask in self._masks.items():
            weights[name].mul_(mask)

    def state(self) -> dict[str, Tensor]:
        """Return nothing: the weights at the beginning tell the masks."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take nothing."""


class LastThird(KeptZeros):
    """Keep zeros, of a training whose first two thirds have another loss than its end: states count from there on.

    Args:
        weights, names: as of :class:`KeptZeros`.
        steps: of the training.
    """

    def __init__(self, weights: Mapping[str, Tensor], names: Collection[str], steps: int) -> None:
        super().__init__(weights, names)
        self._last = math.ceil(2 * steps / 3)

    def is_final(self, step: int) -> bool:
        """Return whether two thirds of the steps are done."""
        return step >= self._last


class GrowingBlocks(KeptZeros):
    """Leave out more and more blocks of columns of a tile of 16 rows, until it keeps as many columns as it shall.

    How many are kept falls by a cubic schedule (Zhu and Gupta 2017, arXiv 1710.01878) in the first two thirds of the
    steps; then the zeros stay.  Which ones go is chosen by W^2 diag(H), their contribution to the outputs (Wanda).  All
    tiles of a weight keep as many at any time.  A block that is gone has no gradient and stays away.

    Args:
        weights: as training begins.
        kept: columns that each tile keeps in the end, by weight.
        moments: mean squares of the inputs' channels, float [in], by weight.
        steps: of the training.
        blocks: of which shape.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        kept: Mapping[str, int],
        moments: Mapping[str, Tensor],
        steps: int,
        blocks: ColumnBlocks = COLUMNS,
    ) -> None:
        self._masks = {name: weights[name].detach() != 0 for name in kept}
        self._kept, self._last, self._blocks = kept, math.ceil(2 * steps / 3), blocks
        self._moments = {name: moments[name].to(weights[name].device) for name in kept}

    def is_final(self, step: int) -> bool:
        """Return whether two thirds of the steps are done."""
        return step >= self._last

    def count(self, step: int, columns: int, kept: int) -> int:
        """Return the columns of a tile that are left after so many steps."""
        return kept + math.floor((columns - kept) * (1 - min(1.0, step / self._last)) ** 3)

    @torch.no_grad()
    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Choose the blocks anew every few steps, and set those that are gone to zero."""
        if step == self._last or (step < self._last and step % _EVERY == 0):
            for name, kept in self._kept.items():
                rows, columns = weights[name].shape
                count = self.count(step, columns, kept)
                left = largest_blocks(weights[name], self._moments[name], count, self._blocks)
                self._masks[name] &= block_mask(left, rows, columns)
        super().after_step(step, weights)

    def state(self) -> dict[str, Tensor]:
        """Return the masks, bool [out, in]."""
        return dict(self._masks)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's masks."""
        self._masks = {name: mask.to(self._masks[name].device, copy=True) for name, mask in state.items()}
