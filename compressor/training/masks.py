"""Which entries of weights have to be zero while they are trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor


class Masks(Protocol):
    """Zeros that a training keeps, or makes."""

    def is_final(self, step: int) -> bool:
        """Return whether the zeros after so many steps are those of the end: only then is a state worth keeping."""

    def before_step(self, weights: Mapping[str, Tensor]) -> None:
        """Clear the gradients of zeros, so that neither clipping nor the optimiser's means see them."""

    def after_step(self, step: int, weights: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        """Set to zero what has to be after so many steps.

        Args:
            second: running means of the squared gradients.
        """

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
        self.masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}

    def is_final(self, step: int) -> bool:
        """Return True: they are from the beginning."""
        return True

    @torch.no_grad()
    def before_step(self, weights: Mapping[str, Tensor]) -> None:
        """Clear the gradients of zeros."""
        for name, mask in self.masks.items():
            gradient = weights[name].grad
            assert gradient is not None
            gradient.mul_(mask)

    @torch.no_grad()
    def after_step(self, step: int, weights: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        """Set zeros to zero, which without gradients they are already."""
        for name, mask in self.masks.items():
            weights[name].mul_(mask)

    def state(self) -> dict[str, Tensor]:
        """Return nothing: the weights at the beginning tell the masks."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take nothing."""
