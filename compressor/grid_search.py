"""Grids that lose less than min-max grids: the range is shrunk as long as the weighted squared error falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressor.codebooks import cluster
from compressor.formats import Format
from compressor.packing import choose_grid, grid_values, over_shared, round_scales, round_to_grid

Observer: TypeAlias = Literal["minmax", "mse"]
"""How a group's grid is chosen: by its range, or by :func:`search_grid`."""

ChooseGrid: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""(weight of a group float32 [out, columns], which columns) -> its scales and zeros, as :func:`search_grid`."""

_SHRINKS = tuple(1 - 0.03 * step for step in range(14))


def search_grid(weight: Tensor, importance: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """The best of a few grids of one group of columns, by sum over columns of importance * error ** 2.

    A symmetric grid has one code more below zero than above.  Its scale may be negative, so that the code more
    serves the sign of the largest weight.

    Args:
        weight: float32 [out, columns]; for the tensor strategy, the whole weight.
        importance: [columns], such as the diagonal of the Hessian; all zeros count as all ones.
    Returns:
        scales float32 [out] that the format can store and zeros uint8 [out] (None when symmetric), never worse than
        min-max.
    Raises:
        CompressorError: as :func:`compressor.packing.choose_grid`.
    """
    importance = importance.float() if bool(importance.any()) else torch.ones_like(importance, dtype=torch.float32)
    importance = importance / importance.mean()
    importance = importance.clamp(min=1e-3)  # an input that these samples hardly excite may matter elsewhere
    if fmt.codebook:
        return cluster(weight, importance.expand_as(weight), fmt.levels, choose_grid(weight, fmt)[0]), None
    scales, zeros = choose_grid(weight, fmt)
    least = _error(weight, importance, scales, zeros, fmt)
    for scale, zero in _candidates(weight, fmt):
        error = _error(weight, importance, scale, zero, fmt)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, scale, scales)
        if zeros is not None and zero is not None:
            zeros = torch.where(better, zero, zeros)
    return scales, zeros


def chooser(observer: Observer, importance: Tensor, fmt: Format) -> ChooseGrid:
    """How a pass chooses grids; ``importance`` is of all columns."""

    def choose(group: Tensor, columns: slice) -> tuple[Tensor, Tensor | None]:
        return search_grid(group, importance[columns], fmt) if observer == "mse" else choose_grid(group, fmt)

    return choose


def _candidates(weight: Tensor, fmt: Format) -> Iterator[tuple[Tensor, Tensor | None]]:
    if fmt.scale_type == "E8M0":
        yield 2 * choose_grid(weight, fmt)[0], None  # what lies above the largest value is rounded rather than cut
        return
    low, high = torch.aminmax(weight, dim=1)
    low, high = over_shared(low, fmt, torch.amin), over_shared(high, fmt, torch.amax)
    if fmt.symmetric:
        extreme = torch.where(-low > high, low, high)
        mirrored = fmt.element is not None and fmt.element.is_float  # then a negative scale gives the same grid
        top = fmt.middle if fmt.element is None else fmt.element.largest
        for shrink in _SHRINKS:
            scale = round_scales((extreme.abs() if mirrored else extreme) * (shrink / top), fmt)
            scale = torch.where(extreme == 0, 1.0, scale)
            yield scale, None
            if not mirrored:
                yield -scale, None
        return
    for shrink in _SHRINKS[1:]:
        yield choose_grid(weight.clamp(low[:, None] * shrink, high[:, None] * shrink), fmt)


def _error(weight: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """[out]; the sum of rows that share a grid, in every place."""
    values = grid_values(round_to_grid(weight, scales, zeros, fmt), scales, zeros, fmt)
    return over_shared((values - weight).square() @ importance, fmt, torch.sum)
