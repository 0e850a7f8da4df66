"""Widths under one budget: how many channels of each family go, the least important of all first or as many of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Cost = Callable[[Sequence[int]], float]
"""Channels of each family that go -> what is left costs."""


def choose_widths(
    scores: Sequence[Tensor], cost: Cost, limit: float, multiple: int, least: float, is_global: bool
) -> list[int]:
    """Return how many channels of each family go: as few as bring the cost to the limit, or as many as can.

    Args:
        scores: of each family, float [channels], comparable across families if ``is_global``.
        limit: largest cost.
        multiple: what is left of a family is rounded up to a multiple of this.
        least: share of each family that stays.
        is_global: the least important channels of all families go first; else the same share of each family goes.
    """
    sizes = [len(each) for each in scores]
    family = torch.cat([torch.full((size,), place) for place, size in enumerate(sizes)])
    order = family[torch.argsort(torch.cat([each.double() for each in scores]), stable=True)]  # family of each to go

    def counts(step: int) -> list[int]:
        if is_global:
            wanted = torch.bincount(order[:step], minlength=len(sizes)).tolist()
        else:
            wanted = [size * step // len(order) for size in sizes]
        return [removed_of(size, gone, multiple, least) for size, gone in zip(sizes, wanted, strict=True)]

    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(counts(middle)) <= limit else (middle + 1, high)
    return counts(low)


def removed_of(size: int, wanted: int, multiple: int, least: float = 0.0) -> int:
    """Return how many of so many channels go, so that a multiple is left that is large enough."""
    left = max(size - wanted, 1, -int(-least * size // 1))
    return max(0, size - -(-left // multiple) * multiple)
