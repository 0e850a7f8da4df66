"""Quantisation grids, and exact packing into the layout of :mod:`compressor.formats`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.elements import Element
from compressor.errors import CompressorError
from compressor.formats import PARTS, TILE_ROWS, Format

PIECE_ELEMENTS = 1 << 22
_STORED = {"F16": torch.float16, "E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn}
_SCALES = {"F16": (2.0**-24, 65504.0), "E8M0": (2.0**-126, 2.0**112), "E4M3": (2.0**-9, 448.0)}
"""The smallest scale above zero, and the largest, by type; of E8M0 as far as float32 arithmetic is at ease."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight in its stored form: its parts in the kernels' layout (:mod:`compressor.formats`)."""

    codes: Tensor  # int32 [tiles, chunks, words, 16]
    scales: Tensor  # float16 or uint8 [tiles, groups, 16]
    zeros: Tensor | None  # uint8 [tiles, groups, 16]; None when symmetric
    format: Format
    shape: tuple[int, int]  # (out_features, in_features)
    tensor_scale: Tensor | None = None  # float32 [1], of NVFP4

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], fmt: Format, shape: tuple[int, int]) -> PackedWeight:
        """The inverse of :attr:`parts`."""
        return cls(parts["codes"], parts["scales"], parts.get("zeros"), fmt, shape, parts.get("tensor_scale"))

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name, those it has."""
        return {part: value for part in PARTS if (value := getattr(self, part)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of storage, counted on the tensors."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


def round_scales(scales: Tensor, fmt: Format) -> Tensor:
    """The nearest scales that the format can store, as float32; of E8M0, the power of two below.  E4M3 saturates.

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
    size = scales.abs().clamp(smallest, largest).to(_STORED[fmt.scale_type]).float()
    return torch.where(scales < 0, -size, size)


def choose_grid(weight: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Min-max grid of one group of columns.

    The symmetric integer grid spreads ``2 ** bits - 1`` steps over [-absmax, absmax], as compressed-tensors does.
    Floats and tables put absmax on the largest value; with E8M0 scales, its exponent on the largest exponent (OCP
    Microscaling Formats 1.0, section 6.3).

    Args:
        weight: float32 [out, columns]; for the tensor strategy, the whole weight.
    Returns:
        scales float32 [out] that the format can store, and zeros uint8 [out] (None when symmetric).  An all-zero
        group gets scale 1.
    Raises:
        CompressorError: the weight holds NaN or inf, or its range exceeds what a scale reaches.
    """
    if fmt.strategy == "tensor":
        low, high = (v.expand(weight.shape[0]) for v in torch.aminmax(weight))
    else:
        low, high = torch.aminmax(weight, dim=1)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    absmax = torch.maximum(-low, high)
    if fmt.element is None:
        span = 2 * absmax if fmt.symmetric else high - low
        scale = span / (fmt.levels - 1)
    elif fmt.scale_type == "E8M0":
        scale = absmax / 2.0**fmt.element.largest_exponent
    else:
        scale = absmax / fmt.element.largest
    scales = torch.where(absmax == 0, 1.0, round_scales(scale, fmt))
    if fmt.symmetric:
        return scales, None
    return scales, torch.round(-low / scales).clamp(0, fmt.levels - 1).to(torch.uint8)


def round_to_grid(weight: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Nearest codes (ties to even, saturating): float [out, n], scales [out] -> uint8 [out, n]."""
    if fmt.element is not None:
        codes, ends = _rounding(fmt.element)
        return codes[torch.bucketize((weight.double() / scales.double()[:, None]).contiguous(), ends)]
    zero = float(fmt.middle) if zeros is None else zeros.float()[:, None]
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
    rising, _ = _rounding(fmt.element)
    places = torch.empty(fmt.levels, dtype=torch.int64)
    places[rising.long()] = torch.arange(len(rising))
    return rising[(places[codes.long()] + step).clamp(0, len(rising) - 1)]


def grid_values(codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Values of codes: uint8 [out, n], scales [out] -> float32 [out, n]."""
    zero = None if zeros is None else zeros.float()[:, None]
    return _unscaled(codes, zero, fmt) * scales.float()[:, None]


def tensor_scale(weight: Tensor, fmt: Format) -> Tensor | None:
    """What NVFP4 divides a weight by, so that its largest block scale is E4M3's largest; float32 [1], else None.

    Raises:
        CompressorError: the weight holds NaN or inf.
    """
    if fmt.scale_type != "E4M3" or fmt.element is None:
        return None
    absmax = weight.abs().max().float()
    if not bool(torch.isfinite(absmax)):
        raise CompressorError(f"weights cannot be put on a {fmt.name} grid: they hold NaN or inf; check the checkpoint")
    scale = absmax / (fmt.element.largest * _SCALES[fmt.scale_type][1])
    return torch.where(scale > 0, scale, 1.0).reshape(1)


@functools.cache
def _rounding(element: Element) -> tuple[Tensor, Tensor]:
    codes, ends = element.rounding
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(ends, dtype=torch.float64)


@functools.cache
def _values(element: Element) -> Tensor:
    return torch.tensor(element.values, dtype=torch.float32)


def _unscaled(codes: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """What codes stand for before they are scaled: uint8 [out, n] -> float32."""
    if fmt.element is not None:
        return _values(fmt.element)[codes.int()]
    return codes.float() - (float(fmt.middle) if zeros is None else zeros)


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format, tensor_scale: Tensor | None = None
) -> PackedWeight:
    """Pack codes uint8 [out, in], scales that the format can store [out, groups], zeros uint8 [out, groups] or None.

    Exact: :func:`unpack` returns the same values.
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
    stored = scales.to(_STORED[fmt.scale_type])
    tiled = _tile(stored if fmt.scale_type == "F16" else stored.view(torch.uint8))
    return PackedWeight(packed, tiled, None if zeros is None else _tile(zeros), fmt, (rows, columns), tensor_scale)


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [out, in], scales float32 [out, groups] and zeros uint8 [out, groups] of a packed weight."""
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
    scales = _untile(packed.scales, rows)
    scales = scales if fmt.scale_type == "F16" else scales.contiguous().view(_STORED[fmt.scale_type])
    return codes[:rows, :columns], scales.float(), zeros


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
        if packed.tensor_scale is not None:
            scales = scales * packed.tensor_scale
        zero = None if zeros is None else _spread(zeros.float(), size, columns)
        yield slice(begin, end), _unscaled(codes, zero, fmt) * _spread(scales, size, columns)


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
