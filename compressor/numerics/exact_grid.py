"""Find the grid that weights already lie on: the codes and scales that another tool chose, without a rounding error.

A group of weights that was dequantised is ``(code - zero) * scale`` exactly: integers of up to 8 bits times a scale of
11 bits fit float32.  The group's largest size is therefore the scale times one of the few sizes that a code can have.
Each is tried, and the grid whose values are the weights, bit for bit, is the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.formats.weights import Floats, Integers
from compressor.numerics.grids import nearest_values, over_shared, round_scales
from compressor.numerics.nearest import rtn_quantize

_LARGEST = 65504.0  # of float16
_FEW = 128  # columns that a grid is tried on before all


def has_exact_grids(fmt: Format) -> bool:
    """Say whether grids of the format can be found: integers or floats, one scale each, nothing beside the codes."""
    if fmt.scale_type == "E4M3" or fmt.extras:
        return False
    return isinstance(fmt.weights, Integers) or (isinstance(fmt.weights, Floats) and fmt.weights.element.is_float)


def exact_grid(weight: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None] | None:
    """Return the grid whose values are the weights of one group of columns, or None where there is none.

    Where several grids hold the weights (all codes even), the one with the smallest scale is taken: the values are the
    same.

    Args:
        weight: float32 [out, columns]; for the tensor strategy, the whole weight.
        fmt: a format for which :func:`has_exact_grids` holds.
    Returns:
        scales float32 [out] that the format can store, and zeros uint8 [out] (None when symmetric).
    """
    absmax = over_shared(weight.abs().amax(1), fmt, torch.amax)
    if not bool(torch.isfinite(absmax).all()):
        return None
    scales = torch.ones_like(absmax)
    zeros = None if fmt.symmetric else torch.zeros(len(weight), dtype=torch.uint8)
    missing = (absmax > 0).nonzero()[:, 0]
    for divisor in _divisors(fmt):
        if not len(missing):
            break
        tried, rows = absmax[missing] / divisor, missing
        storable = round_scales(tried.clamp(-_LARGEST, _LARGEST), fmt) == tried  # most are not, which costs little
        tried, rows = tried[storable], rows[storable]
        if len(rows) and weight.shape[1] > _FEW:
            maybe = _try(weight[rows, :_FEW], tried, fmt)[0]
            tried, rows = tried[maybe], rows[maybe]
        if not len(rows):
            continue
        found, scale, zero = _try(weight[rows], tried, fmt)
        scales[rows[found]] = scale[found]
        if zeros is not None and zero is not None:
            zeros[rows[found]] = zero[found]
        missing = missing[~torch.isin(missing, rows[found])]
    return None if len(missing) else (scales, zeros)


class _OffGridError(Exception):
    """A group of columns does not lie on the grid that is tried."""


def pack_exact(weight: Tensor, fmt: Format) -> PackedWeight | None:
    """Pack a weight without a rounding error; None where it does not lie on the format's grids.

    Args:
        weight: float32 [out, in].
        fmt: a format for which :func:`has_exact_grids` holds.
    """

    def choose(group: Tensor, _columns: slice) -> tuple[Tensor, Tensor | None]:
        grid = exact_grid(group, fmt)
        if grid is None:
            raise _OffGridError
        return grid

    try:
        return rtn_quantize(weight, fmt, choose)
    except _OffGridError:
        return None


def _divisors(fmt: Format) -> list[float]:
    """Return what a group's largest size over its scale can be, the largest first; below zero for negative scales."""
    if fmt.element is not None:
        return sorted({abs(value) for value in fmt.element.values if 0 < abs(value) <= fmt.element.max_value})[::-1]
    if fmt.symmetric:
        return [sign * float(size) for size in range(int(fmt.zero_point), 0, -1) for sign in (1, -1)]
    return [float(size) for size in range(fmt.levels - 1, 0, -1)]


def _try(weight: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return in which rows the grid of these scales holds the weights, bool [out], the stored scales and the zeros."""
    stored = round_scales(scale.clamp(-_LARGEST, _LARGEST), fmt)
    zero = None
    if not fmt.symmetric:
        lowest = over_shared(torch.round(weight / stored[:, None]).amin(1), fmt, torch.amin)
        zero = (-lowest).clamp(0, fmt.levels - 1).to(torch.uint8)
    same = (nearest_values(weight, stored, zero, fmt) == weight).all(1) & (stored == scale)
    return over_shared(same.float(), fmt, torch.amin) > 0, stored, zero
