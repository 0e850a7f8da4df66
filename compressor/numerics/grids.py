"""Quantisation grids: their scales, the nearest codes, and what codes stand for.

Of formats with codebooks, the ``scales`` of a grid are the values themselves: [out, levels] in place of [out].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.elements import Element
from compressor.formats.format import Format
from compressor.formats.packing import STORED, unscaled
from compressor.numerics.clustering import cluster

_SCALES = {"F16": (2.0**-24, 65504.0), "E8M0": (2.0**-126, 2.0**112), "E4M3": (2.0**-9, 448.0)}
"""The smallest scale above zero, and the largest, by type; of E8M0 as far as float32 arithmetic is at ease."""


def empty_scale(fmt: Format) -> float:
    """Return the scale of a group of zeros: 1, or the smallest scale if the grid has no zero."""
    return _SCALES[fmt.scale_type][0] if fmt.bit_planes == "bipolar" else 1.0


def round_scales(scales: Tensor, fmt: Format) -> Tensor:
    """Round scales to the nearest that the format can store, as float32.

    E8M0 takes the power of two below; E4M3 saturates.

    Raises:
        CompressorError: one is NaN, or too large to be stored.
    """
    smallest, largest = _SCALES[fmt.scale_type]
    saturates = fmt.scale_type == "E4M3"  # the tensor's scale has brought them into range, but for what GPTQ adds
    if not bool((scales.abs() <= (torch.finfo(torch.float32).max if saturates else largest)).all()):
        raise CompressorError(
            f"weights cannot be put on a {fmt.name} grid: they hold NaN, inf or values whose scale exceeds "
            f"{largest:g}; check the checkpoint"
        )
    if fmt.scale_type == "E8M0":
        return torch.ldexp(torch.ones_like(scales), torch.frexp(scales.clamp(min=smallest))[1] - 1)
    size = scales.abs().clamp(smallest, largest).to(STORED[fmt.scale_type]).float()
    return torch.where(scales < 0, -size, size)


def choose_grid(weight: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Min-max grid of one group of columns.

    The symmetric integer grid spreads ``levels - 1`` steps over [-absmax, absmax], as compressed-tensors does.
    A codebook has the values of k-means.  Floats and tables put absmax on the largest value; with E8M0 scales, its
    exponent on the largest exponent (OCP Microscaling Formats 1.0, section 6.3).

    Args:
        weight: float32 [out, columns]; for the tensor strategy, the whole weight.
    Returns:
        scales float32 [out], one for each row, that the format can store, and zeros uint8 [out] (None when symmetric).
        An all-zero group gets scale 1, or where the grid has no zero, the smallest.
    Raises:
        CompressorError: the weight holds NaN or inf, or its range exceeds what a scale reaches.
    """
    if fmt.codebook:
        return cluster(weight, torch.ones_like(weight), fmt.levels), None
    low, high = torch.aminmax(weight, dim=1)
    low, high = over_shared(low, fmt, torch.amin).clamp(max=0.0), over_shared(high, fmt, torch.amax).clamp(min=0.0)
    absmax = torch.maximum(-low, high)
    if fmt.element is None:
        span = 2 * absmax if fmt.symmetric else high - low
        scale = span / (fmt.levels - 1)
    elif fmt.scale_type == "E8M0":
        scale = absmax / 2.0**fmt.element.largest_exponent
    else:
        scale = absmax / fmt.element.max_value
    scales = torch.where(absmax == 0, empty_scale(fmt), round_scales(scale, fmt))
    if fmt.symmetric:
        return scales, None
    return scales, torch.round(-low / scales).clamp(0, fmt.levels - 1).to(torch.uint8)


def over_shared(of_rows: Tensor, fmt: Format, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """[out] -> [out]: what each row has is replaced by ``reduce`` of all rows that share its grids."""
    span = fmt.grid_rows(len(of_rows))
    if span == 1:
        return of_rows
    return torch.cat([reduce(part).expand(len(part)) for part in torch.split(of_rows, span)])


def round_to_grid(weight: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Nearest codes (ties to even, saturating): float [out, n], scales [out] -> uint8 [out, n]."""
    if fmt.codebook:
        values = scales.to(weight.dtype)
        return torch.searchsorted((values[:, 1:] + values[:, :-1]) / 2, weight.contiguous()).to(torch.uint8)
    if fmt.element is not None:
        codes, ends = map(torch.from_numpy, _rounding(fmt.element))
        return codes[torch.bucketize((weight.double() / scales.double()[:, None]).contiguous(), ends)]
    zero = fmt.zero_point if zeros is None else zeros.float()[:, None]
    return torch.round(weight / scales.float()[:, None] + zero).clamp(0, fmt.levels - 1).to(torch.uint8)


def neighbour_codes(codes: Tensor, higher: Tensor, fmt: Format) -> Tensor:
    """Codes of the next values before they are scaled, higher or lower; at the grid's ends the codes themselves.

    Args:
        codes: uint8, as :func:`round_to_grid` gives them.
        higher: bool, of the same shape.
    """
    step = torch.where(higher, 1, -1)
    if fmt.element is None:
        return (codes.int() + step).clamp(0, fmt.levels - 1).to(torch.uint8)
    rising = torch.from_numpy(_rounding(fmt.element)[0])
    places = torch.empty(fmt.levels, dtype=torch.int64)
    places[rising.long()] = torch.arange(len(rising))
    return rising[(places[codes.long()] + step).clamp(0, len(rising) - 1)]


def grid_values(codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Values of codes: uint8 [out, n], scales [out] -> float32 [out, n]."""
    if fmt.codebook:
        return scales.gather(1, codes.long())
    zero = None if zeros is None else zeros.float()[:, None]
    return unscaled(codes, zero, fmt) * scales.float()[:, None]


def nearest_values(weight: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Values of the nearest codes: :func:`grid_values` of :func:`round_to_grid`, of integers without the codes."""
    if fmt.codebook or fmt.element is not None:
        return grid_values(round_to_grid(weight, scales, zeros, fmt), scales, zeros, fmt)
    zero, step = fmt.zero_point if zeros is None else zeros.float()[:, None], scales.float()[:, None]
    return (weight / step).add_(zero).round_().clamp_(0, fmt.levels - 1).sub_(zero).mul_(step)


def tensor_scale(weight: Tensor, fmt: Format) -> Tensor | None:
    """Return NVFP4's tensor scale, float32 [1], or None for other formats: it makes the largest block scale E4M3's
    largest value.

    Raises:
        CompressorError: the weight holds NaN or inf.
    """
    if fmt.scale_type != "E4M3" or fmt.element is None:
        return None
    absmax = weight.abs().max().float()
    if not bool(torch.isfinite(absmax)):
        raise CompressorError(f"weights cannot be put on a {fmt.name} grid: they hold NaN or inf; check the checkpoint")
    scale = absmax / (fmt.element.max_value * _SCALES[fmt.scale_type][1])
    return torch.where(scale > 0, scale, 1.0).reshape(1)


@functools.cache
def _rounding(element: Element) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    codes, ends = element.rounding
    return np.array(codes, np.uint8), np.array(ends)
