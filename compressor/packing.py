"""Quantisation grids, and exact packing into the layout of :mod:`compressor.formats`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.errors import CompressorError
from compressor.formats import TILE_ROWS, Format

PARTS = ("codes", "scales", "zeros")
"""Names of the tensors of a packed weight; a graph has them as parameters ``<site>.<part>``."""

_LARGEST_SCALE = torch.finfo(torch.float16).max
PIECE_ELEMENTS = 1 << 22
_SMALLEST_SCALE = 2.0**-24  # the smallest float16 above zero


@dataclass(frozen=True)
class PackedWeight:
    """A weight in its stored form: codes, scales and zeros in the kernels' layout."""

    codes: Tensor  # int32 [tiles, chunks, words, 16]
    scales: Tensor  # float16 [tiles, groups, 16]
    zeros: Tensor | None  # uint8 [tiles, groups, 16]; None when symmetric
    format: Format
    shape: tuple[int, int]  # (out_features, in_features)

    @property
    def nbytes(self) -> int:
        """Bytes of storage, counted on the tensors."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.zeros) if t is not None)


def choose_grid(weight: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Min-max grid of one group of columns.

    The symmetric grid spreads ``2 ** bits - 1`` steps over [-absmax, absmax], as compressed-tensors does.

    Args:
        weight: float32 [out, columns]; for the tensor strategy, the whole weight.
    Returns:
        scales float16 [out] and zeros uint8 [out] (None when symmetric).  An all-zero group gets scale 1.
    Raises:
        CompressorError: the weight holds NaN or inf, or its range exceeds what a float16 scale reaches.
    """
    if fmt.strategy == "tensor":
        low, high = (v.expand(weight.shape[0]) for v in torch.aminmax(weight))
    else:
        low, high = torch.aminmax(weight, dim=1)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    span = 2 * torch.maximum(-low, high) if fmt.symmetric else high - low
    scale = span / (fmt.levels - 1)
    if not bool(torch.isfinite(span).all()) or bool((scale > _LARGEST_SCALE).any()):
        raise CompressorError(
            f"weights cannot be put on a {fmt.name} grid: they hold NaN, inf or values whose scale exceeds "
            f"float16 ({_LARGEST_SCALE:.0f}); check the checkpoint"
        )
    scale = torch.where(span == 0, 1.0, scale.clamp(min=_SMALLEST_SCALE))
    scales = scale.to(torch.float16)
    if fmt.symmetric:
        return scales, None
    zeros = torch.round(-low / scales.float()).clamp(0, fmt.levels - 1).to(torch.uint8)
    return scales, zeros


def round_to_grid(weight: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Nearest codes (ties to even, saturating): float32 [out, n], scales [out] -> uint8 [out, n]."""
    zero = float(fmt.middle) if zeros is None else zeros.float()[:, None]
    return torch.round(weight / scales.float()[:, None] + zero).clamp(0, fmt.levels - 1).to(torch.uint8)


def grid_values(codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Values of codes: uint8 [out, n], scales [out] -> float32 [out, n]."""
    zero = float(fmt.middle) if zeros is None else zeros.float()[:, None]
    return (codes.float() - zero) * scales.float()[:, None]


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> PackedWeight:
    """Pack codes uint8 [out, in], scales float16 [out, groups], zeros uint8 [out, groups] or None.

    Exact: :func:`unpack` returns the same tensors.
    """
    rows, columns = codes.shape
    if scales.shape != (rows, fmt.groups(columns)) or (zeros is None) != fmt.symmetric:
        raise ValueError(f"scales {tuple(scales.shape)} and zeros do not fit {fmt.name} of {rows} x {columns}")
    tiles, chunks, span = -(-rows // TILE_ROWS), fmt.chunks(columns), fmt.chunk_columns
    grid = pad(codes, (0, chunks * span - columns, 0, tiles * TILE_ROWS - rows))
    grid = grid.view(tiles, TILE_ROWS, chunks, span)
    words, offset = [], 0
    for width in fmt.planes:
        plane = (grid >> offset) & ((1 << width) - 1)
        # A word's columns are numbered 4 * j + i: byte i, bits width * j.
        plane = plane.view(tiles, TILE_ROWS, chunks, span * width // 32, 8 // width, 4)
        octets = torch.zeros(*plane.shape[:4], 4, dtype=torch.uint8)
        for j in range(8 // width):
            octets |= plane[..., j, :] << (width * j)
        words.append(octets.view(torch.int32).squeeze(-1))  # [tiles, 16, chunks, words of this plane]
        offset += width
    packed = torch.cat(words, dim=-1).permute(0, 2, 3, 1).contiguous()
    return PackedWeight(packed, _tile(scales), None if zeros is None else _tile(zeros), fmt, (rows, columns))


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [out, in], scales float16 [out, groups] and zeros uint8 [out, groups] of a packed weight."""
    fmt, (rows, columns) = packed.format, packed.shape
    tiles, chunks = packed.codes.shape[:2]
    words = packed.codes.permute(0, 3, 1, 2).contiguous()  # [tiles, 16, chunks, words]
    codes = torch.zeros(tiles * TILE_ROWS, chunks * fmt.chunk_columns, dtype=torch.uint8)
    offset = first = 0
    for width in fmt.planes:
        count = fmt.chunk_columns * width // 32
        octets = words[..., first : first + count].contiguous().view(torch.uint8)
        octets = octets.view(tiles, TILE_ROWS, chunks, count, 1, 4)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
        codes |= (((octets >> shifts) & ((1 << width) - 1)) << offset).view_as(codes)
        offset, first = offset + width, first + count
    zeros = None if packed.zeros is None else _untile(packed.zeros, rows)
    return codes[:rows, :columns], _untile(packed.scales, rows), zeros


def dequantize(packed: PackedWeight) -> Tensor:
    """The float32 [out, in] weight that the packed form stands for."""
    weight = torch.empty(packed.shape, dtype=torch.float32)
    for rows, values in dequantize_rows(packed):
        weight[rows] = values
    return weight


def dequantize_rows(packed: PackedWeight) -> Iterator[tuple[slice, Tensor]]:
    """:func:`dequantize` piece by piece, for weights of which one copy is enough: (which rows, float32 [rows, in])."""
    fmt, (rows, columns) = packed.format, packed.shape
    size, tiles = fmt.columns(columns), max(1, PIECE_ELEMENTS // (TILE_ROWS * max(1, columns)))
    for first in range(0, len(packed.codes), tiles):
        begin, end = first * TILE_ROWS, min(rows, (first + tiles) * TILE_ROWS)
        part = slice(first, first + tiles)
        zeros = None if packed.zeros is None else packed.zeros[part]
        piece = PackedWeight(packed.codes[part], packed.scales[part], zeros, fmt, (end - begin, columns))
        codes, scales, zeros = unpack(piece)
        zero = float(fmt.middle) if zeros is None else _spread(zeros.float(), size, columns)
        yield slice(begin, end), (codes.float() - zero) * _spread(scales.float(), size, columns)


def _spread(per_group: Tensor, size: int, columns: int) -> Tensor:
    """[out, groups] -> [out, columns], each value over its group's columns."""
    return per_group.repeat_interleave(size, dim=1)[:, :columns]


def _tile(per_row: Tensor) -> Tensor:
    """[out, groups] -> [tiles, groups, 16]."""
    padded = pad(per_row, (0, 0, 0, -per_row.shape[0] % TILE_ROWS))
    return padded.view(-1, TILE_ROWS, per_row.shape[1]).transpose(1, 2).contiguous()


def _untile(tiled: Tensor, rows: int) -> Tensor:
    """[tiles, groups, 16] -> [out, groups]."""
    return tiled.transpose(1, 2).reshape(-1, tiled.shape[1])[:rows]
