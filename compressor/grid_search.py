"""Grids that lose less than min-max grids: the range is shrunk as long as the weighted squared error falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressor.codebooks import cluster
from compressor.formats import Format
from compressor.packing import choose_grid, empty_scale, grid_values, round_scales, round_to_grid

Observer: TypeAlias = Literal["minmax", "mse"]
"""How a group's grid is chosen: by its range, or by :func:`search_grid`."""

_SHRINKS = tuple(1 - 0.03 * step for step in range(14))
_CUTS = 28  # of grids whose negative scales would be the same ones: as many tries
_FEW_BITS = 3  # up to which a grid's best range is but a part of the weight's; of one bit it is the mean size


def search_grid(weight: Tensor, importance: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """The best of a few grids of one group of columns, by sum over columns of importance * error ** 2.

    A symmetric grid of integers has one code more below zero than above.  Its scale may be negative, so that the code
    more serves the sign of the largest weight.

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


def chooser(
    observer: Observer, importance: Tensor, fmt: Format
) -> Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]:
    """(weight of a group, which columns) -> its grid; ``importance`` is of all columns."""

    def choose(group: Tensor, columns: slice) -> tuple[Tensor, Tensor | None]:
        return search_grid(group, importance[columns], fmt) if observer == "mse" else choose_grid(group, fmt)

    return choose


def _candidates(weight: Tensor, fmt: Format) -> Iterator[tuple[Tensor, Tensor | None]]:
    whole = weight.reshape(1, -1) if fmt.strategy == "tensor" else weight
    if fmt.scale_type == "E8M0":
        yield 2 * choose_grid(weight, fmt)[0], None  # what lies above the largest value is rounded rather than cut
        return
    if fmt.symmetric:
        extreme = whole.gather(1, whole.abs().argmax(1, keepdim=True))[:, 0].expand(len(weight))
        mirrored = bool(fmt.sliced) or (fmt.element is not None and fmt.element.is_float)  # a negative scale: the same
        top = fmt.middle if fmt.element is None else fmt.element.largest
        shrinks = _sliced_shrinks(fmt.bits) if fmt.sliced else _SHRINKS
        for shrink in shrinks:
            scale = round_scales((extreme.abs() if mirrored else extreme) * (shrink / top), fmt)
            scale = torch.where(extreme == 0, empty_scale(fmt), scale)
            yield scale, None
            if not mirrored:
                yield -scale, None
        return
    low, high = torch.aminmax(whole, dim=1, keepdim=True)
    for shrink in _SHRINKS[1:]:
        yield choose_grid(weight.clamp(low * shrink, high * shrink), fmt)


def _sliced_shrinks(bits: int) -> list[float]:
    return [(0.94 if bits <= _FEW_BITS else 0.98) ** step for step in range(_CUTS)]


def _error(weight: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """[out]; for the tensor strategy the sum, in every place."""
    values = grid_values(round_to_grid(weight, scales, zeros, fmt), scales, zeros, fmt)
    error = (values - weight).square() @ importance
    return error.sum().expand(len(error)) if fmt.strategy == "tensor" else error
