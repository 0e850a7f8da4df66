"""Round weights to the nearest codes: on min-max grids (RTN), or on grids that a caller chooses."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.outliers import add_outliers, largest
from compressor.formats.packing import PIECE_ELEMENTS, PackedWeight, dequantize_rows, pack
from compressor.numerics.grids import choose_grid, round_to_grid, tensor_scale
from compressor.numerics.products.deterministic import total
from compressor.numerics.range_search import ChooseGrid, Work, grid_work, search_grid


def rtn_quantize(
    weight: Tensor, fmt: Format, choose: ChooseGrid | None = None, outliers: Tensor | None = None
) -> PackedWeight:
    """Quantise a float [out, in] weight group by group to the nearest codes.

    Args:
        weight: float [out, in].
        fmt: how it is stored.
        choose: (weight float32 [out, columns of a group], which columns) -> scales [out] that the format can store,
            zeros uint8 [out] or None; left out, the min-max grid.  The weight is divided by the tensor's scale.
        outliers: where the weights are, bool [out, in], that the format stores as floats; left out, the largest.
    Raises:
        CompressorError: the weight holds NaN or inf, or a range that no float16 scale reaches.
    """
    if fmt.outlier_percent:
        where = largest(weight.abs(), fmt.outliers(*weight.shape)) if outliers is None else outliers
        rest = rtn_quantize(weight.float().masked_fill(where, 0.0), fmt.without_outliers, choose)
        return add_outliers(rest, weight, where, fmt.outlier_percent)
    size = fmt.columns(weight.shape[1])
    codes, scales, zeros, unit = [], [], [], tensor_scale(weight, fmt)
    for first in range(0, weight.shape[1], size):
        columns = slice(first, first + size)
        group = weight[:, columns].float() if unit is None else weight[:, columns].float() / unit
        scale, zero = choose(group, columns) if choose else choose_grid(group, fmt)
        codes.append(round_to_grid(group, scale, zero, fmt))
        scales.append(scale)
        if zero is not None:
            zeros.append(zero)
    stacked_zeros = torch.stack(zeros, dim=1) if zeros else None
    return pack(torch.cat(codes, dim=1), torch.stack(scales, dim=1), stacked_zeros, fmt, unit)


def weight_error(weight: Tensor, packed: PackedWeight) -> float:
    """||W - Q||^2 / ||W||^2, in float64."""
    loss = norm = 0.0
    for rows, values in dequantize_rows(packed):
        dense = weight[rows].double()
        loss, norm = loss + float(total((dense - values).square())), norm + float(total(dense.square()))
    return loss / norm if norm > 0 else 0.0


def awq_quantize(weight: Tensor, mean_square: Tensor, fmt: Format) -> PackedWeight:
    """Round to nearest on grids whose range is clipped as long as the outputs' error falls (section 3.2).

    Args:
        weight: float32 [out, in], scaled.
        mean_square: of the inputs, divided by the same scale; float [in].
    """
    return rtn_quantize(weight, fmt, lambda group, columns: search_grid(group, mean_square[columns], fmt))


_ERROR_BYTES = 32  # of float64, a weight whose error is taken


_FRESH_BYTES = 32 << 20  # from this size on, the C library asks the system for every block of memory


def rtn_work(rows: int, columns: int, fmt: Format) -> Work:
    """Work of rounding a weight to nearest and of its error."""
    size = rows * columns
    unit = "fresh_byte" if 8 * min(size, PIECE_ELEMENTS) >= _FRESH_BYTES else "stream_byte"
    grids = Counter(grid_work(rows, columns, fmt, 1, searched=False))
    grids.update({"rtn_element": size, "dequantize_element": size, unit: _ERROR_BYTES * size})
    return grids


def rtn_working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Memory of rounding to nearest: the weight in float32, and its codes thrice and planes, or the error's pieces."""
    size, packed = rows * columns, fmt.packed_bytes(rows, columns)
    return packed + max(9 * size, 4 * size + (_ERROR_BYTES + 18) * min(size, PIECE_ELEMENTS))
