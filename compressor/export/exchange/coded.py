"""Say how a packed weight is codes on a grid, row by row, and whether it is nothing but that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import (
    STORED,
    PackedWeight,
    filled_up,
    kept_columns,
    kept_part,
    kept_places,
    unpack,
)
from compressor.formats.parts import TILE_ROWS
from compressor.formats.planes import TwoPlanes
from compressor.formats.weights import BitPlanes, Codebook, Integers

_ZEROED = (ColumnBlocks, KeptOfGroup, SingleZeros)


@dataclass(frozen=True)
class Coded:
    """Codes of a weight [out, in] with nothing left out.

    Attributes:
        codes: uint8 [out, in].
        scales: as they are stored, float16, float8_e4m3fn or float8_e8m0fnu, [out, groups].
        zeros: uint8 [out, groups]; None where the format has one zero point for all.
        tensor_scale: float32 [1] of NVFP4.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    tensor_scale: Tensor | None

    def taken(self, rows: slice) -> Coded:
        """Return some of the rows."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Coded(self.codes[rows], self.scales[rows], zeros, self.tensor_scale)

    def zero_points(self, fmt: Format) -> Tensor:
        """Return the zero point of every group, uint8 [out, groups]."""
        return (
            torch.full(self.scales.shape, int(fmt.zero_point), dtype=torch.uint8) if self.zeros is None else self.zeros
        )


def coded(packed: PackedWeight) -> Coded:
    """Take a packed weight apart; weights that are left out get the code of zero."""
    fmt, shape = packed.format, packed.shape
    if fmt.extra(SingleZeros) is not None:
        codes, scales, zeros = unpack(filled_up(packed))
    elif (blocks := fmt.extra(ColumnBlocks)) is not None or fmt.extra(KeptOfGroup) is not None:
        kept, scales, zeros = unpack(kept_part(packed))
        if blocks is not None:
            places = kept_columns(packed, blocks).repeat_interleave(TILE_ROWS, dim=0)[: shape[0]]
        else:
            places = kept_places(packed)
        codes = torch.full(shape, fmt.zero_code, dtype=torch.uint8).scatter_(1, places.long(), kept)
    else:
        codes, scales, zeros = unpack(packed)
    return Coded(codes, scales.to(STORED[fmt.scale_type]), zeros, packed.parts.get("tensor_scale"))


def why_not_coded(fmt: Format) -> str:
    """Say why codes, scales and zero points are not all of a format; empty if they are."""
    if isinstance(fmt.weights, Codebook):
        return "has codebooks"
    if isinstance(fmt.weights, BitPlanes):
        return "has a grid of bit planes"
    if fmt.element is not None and not fmt.element.is_float:
        return f"has the table of values {fmt.element.name}"
    left_out = [extra for extra in fmt.extras if isinstance(extra, _ZEROED)]
    others = [extra for extra in fmt.extras if not isinstance(extra, (*_ZEROED, TwoPlanes))]
    if others:
        return f"has {others[0].suffix} ({others[0].label})"
    if left_out and not isinstance(left_out[0], SingleZeros) and fmt.group_size:
        return f"has groups of the weights that {left_out[0].suffix} keeps"
    if left_out and not (isinstance(fmt.weights, Integers) and fmt.symmetric):
        return f"has {left_out[0].suffix} on a grid without a fixed zero"
    return ""


def is_zeroed(fmt: Format) -> bool:
    """Return whether weights are left out, which codes of zero take the place of."""
    return any(isinstance(extra, _ZEROED) for extra in fmt.extras)
