"""Store single weights and whole input columns as floats, beside the codes of a weight.

They are added to what the codes stand for.  Single weights are in CSR over the rows of all tiles, and their number is
the percentage of rows and columns filled up to tiles and chunks, rounded; columns are whole::

    outlier_starts   int32    [16 * ceil(out / 16) + 1]
    outlier_columns  int16    [outliers]    int32 from 32,768 columns on
    outlier_values   float16  [outliers]
    float_columns    int32    [columns]
    float_values     float16  [ceil(out / 16), columns, 16]
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.extras import OutlierFeatures, Outliers
from compressor.formats.packing import PackedWeight, coded_rows
from compressor.formats.parts import TILE_ROWS


def largest(size: Tensor, count: int) -> Tensor:
    """Where the ``count`` largest elements are, bool; all of them where there are no more."""
    found = torch.zeros(size.numel(), dtype=torch.bool)
    found[size.flatten().topk(min(count, size.numel())).indices] = True
    return found.view_as(size)


def add_outliers(packed: PackedWeight, weight: Tensor, where: Tensor, percent: float) -> PackedWeight:
    """Store what the codes miss of some weights as float16, so that their sum is the weight.

    Args:
        packed: a format without outliers.
        weight: float [out, in].
        where: bool [out, in], as many as ``Format.outliers`` says (or all, where that is more).
        percent: of the format.
    """
    fmt, (rows, columns) = packed.format.with_extra(Outliers(percent)), packed.shape
    count = fmt.outliers(rows, columns)
    if not count:
        return packed.with_parts(fmt)
    missed = weight.float() - torch.cat([values for _, values in coded_rows(packed)])
    found = where.nonzero()
    spare = count - len(found)  # places beyond all the weights there are: zeros at the end of the last row
    if spare < 0 or (spare and len(found) < weight.numel()):
        raise ValueError(f"{len(found)} outliers, {fmt.name} of {rows} x {columns} has {count}")
    counts = torch.bincount(found[:, 0], minlength=-(-rows // TILE_ROWS) * TILE_ROWS)
    counts[-1] += spare
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    kind = getattr(torch, fmt.parts(rows, columns)["outlier_columns"][0])
    return packed.with_parts(
        fmt,
        outlier_starts=starts.int(),
        outlier_columns=torch.cat([found[:, 1], found.new_zeros(spare)]).to(kind),
        outlier_values=torch.cat([_half(missed[where]), torch.zeros(spare, dtype=torch.float16)]),
    )


def add_columns(packed: PackedWeight, weight: Tensor, columns: Tensor) -> PackedWeight:
    """Store whole columns as float16, of which the codes hold nothing.

    Args:
        packed: a format without such columns, of the weight with zeros in their place.
        weight: float [out, in].
        columns: int64 [n], rising.
    """
    if not len(columns):
        return packed
    filler = weight.new_zeros(-weight.shape[0] % TILE_ROWS, len(columns))
    tiled = torch.cat([weight[:, columns], filler]).view(-1, TILE_ROWS, len(columns)).movedim(1, -1)
    fmt = packed.format.with_extra(OutlierFeatures(len(columns)))
    return packed.with_parts(fmt, float_columns=columns.int(), float_values=_half(tiled).contiguous())


def _half(values: Tensor) -> Tensor:
    found = values.half()
    if not bool(torch.isfinite(found).all()):
        raise CompressorError(
            "outliers cannot be stored: they hold NaN, inf or values over 65504; check the checkpoint"
        )
    return found
