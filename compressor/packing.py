"""Quantisation grids, and exact packing into the layout of :mod:`compressor.formats`.

Of formats with codebooks, the ``scales`` of a grid are the values themselves: [out, levels] in place of [out].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from compressor.codebooks import cluster
from compressor.elements import Element
from compressor.errors import CompressorError
from compressor.formats import TILE_ROWS, TILED, Format

PIECE_ELEMENTS = 1 << 22
_STORED = {"F16": torch.float16, "E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn}
_SCALES = {"F16": (2.0**-24, 65504.0), "E8M0": (2.0**-126, 2.0**112), "E4M3": (2.0**-9, 448.0)}
"""The smallest scale above zero, and the largest, by type; of E8M0 as far as float32 arithmetic is at ease."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight in its stored form.

    Attributes:
        parts: its tensors by name, in the order, types and shapes of :meth:`compressor.formats.Format.parts`.
        shape: (out_features, in_features).
    """

    parts: Mapping[str, Tensor]
    format: Format
    shape: tuple[int, int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], fmt: Format, shape: tuple[int, int]) -> PackedWeight:
        """From the parts in order, as :func:`compressor.ops.packed_linear` takes them."""
        return cls(dict(zip(fmt.parts(*shape), tensors, strict=True)), fmt, shape)

    def with_parts(self, fmt: Format, **added: Tensor) -> PackedWeight:
        """The same in a format that stores these parts as well."""
        parts = {**self.parts, **added}
        order = [name for name in fmt.parts(*self.shape) if name in parts]
        return PackedWeight({name: parts[name] for name in order}, fmt, self.shape)

    def fed_with(self, input_scale: Tensor | None) -> PackedWeight:
        """The same with a stored scale of its activations, float32 [1]; None where the format has none."""
        return self if input_scale is None else self.with_parts(self.format, input_scale=input_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of storage, counted on the tensors."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


def empty_scale(fmt: Format) -> float:
    """The scale of a group of zeros: 1, or where the grid has no zero, the smallest."""
    return _SCALES[fmt.scale_type][0] if fmt.sliced == "BIP" else 1.0


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
        scale = absmax / fmt.element.largest
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
    zero = fmt.middle if zeros is None else zeros.float()[:, None]
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
    return _unscaled(codes, zero, fmt) * scales.float()[:, None]


def nearest_values(weight: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Values of the nearest codes: :func:`grid_values` of :func:`round_to_grid`, of integers without the codes."""
    if fmt.codebook or fmt.element is not None:
        return grid_values(round_to_grid(weight, scales, zeros, fmt), scales, zeros, fmt)
    zero, step = fmt.middle if zeros is None else zeros.float()[:, None], scales.float()[:, None]
    return (weight / step).add_(zero).round_().clamp_(0, fmt.levels - 1).sub_(zero).mul_(step)


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
def _rounding(element: Element) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    codes, ends = element.rounding
    return np.array(codes, np.uint8), np.array(ends)


@functools.cache
def _values(element: Element) -> NDArray[np.float32]:
    """Not as a tensor: one that is made while a graph is traced is fake, and would be kept."""
    return np.array(element.values, np.float32)


def _unscaled(codes: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """What codes stand for before they are scaled: uint8 [out, n] -> float32."""
    if fmt.element is not None:
        return torch.from_numpy(_values(fmt.element))[codes.int()]
    return codes.float().sub_(fmt.middle if zeros is None else zeros)


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format, tensor_scale: Tensor | None = None
) -> PackedWeight:
    """Pack codes uint8 [out, in], scales that the format can store [out, groups], zeros uint8 [out, groups] or None.

    Codebooks come as scales [out, groups, levels].  What the format stores as floats is not looked at
    (:mod:`compressor.outliers` adds it).

    Exact: :func:`unpack` returns the same values.
    """
    (rows, columns), fmt = codes.shape, fmt.coded
    if (
        scales.shape[:2] != (rows, fmt.groups(columns))
        or scales.dim() != 2 + fmt.codebook
        or (zeros is None) != fmt.symmetric
    ):
        raise ValueError(f"scales {tuple(scales.shape)} and zeros do not fit {fmt.name} of {rows} x {columns}")
    tiles, chunks, span = -(-rows // TILE_ROWS), fmt.chunks(columns), fmt.chunk_columns
    grid = pad(codes, (0, chunks * span - columns, 0, tiles * TILE_ROWS - rows))
    quads = grid.contiguous().view(torch.int32).view(tiles, TILE_ROWS, chunks, span // 4)  # four columns each
    words, offset = [], 0
    for width in fmt.planes:
        plane = (quads >> offset) & _every_byte((1 << width) - 1)
        # A word's columns are numbered 4 * j + i: byte i, bits width * j.
        plane = plane.view(tiles, TILE_ROWS, chunks, span * width // 32, 8 // width)
        shifted = (plane[..., j] << (width * j) for j in range(8 // width))
        words.append(functools.reduce(torch.bitwise_or, shifted))  # [tiles, 16, chunks, words of this plane]
        offset += width
    packed = torch.cat(words, dim=-1).permute(0, 2, 3, 1).contiguous()
    stored = scales.to(_STORED[fmt.scale_type])
    tiled = _tile(stored if fmt.scale_type == "F16" else stored.view(torch.uint8), fmt)
    found: dict[str, Tensor | None] = {"codes": packed, "codebook" if fmt.codebook else "scales": tiled}
    found |= {"zeros": None if zeros is None else _tile(zeros, fmt), "tensor_scale": tensor_scale}
    return PackedWeight({name: part for name, part in found.items() if part is not None}, fmt, (rows, columns))


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [out, in], scales float32 [out, groups] (or codebooks [..., levels]), zeros uint8 [out, groups]."""
    fmt, (rows, columns) = packed.format, packed.shape
    tiles, chunks = packed.parts["codes"].shape[:2]
    words = packed.parts["codes"].permute(0, 3, 1, 2).contiguous()  # [tiles, 16, chunks, words]
    quads: Tensor | None = None  # of four columns each, int32 [tiles, 16, chunks, quads]
    offset = first = 0
    for width in fmt.planes:
        count, mask = fmt.chunk_columns * width // 32, _every_byte((1 << width) - 1)
        plane = words[..., first : first + count]
        found = torch.stack([(plane >> (width * j)) & mask for j in range(8 // width)], dim=-1).flatten(-2)
        quads = found if quads is None else quads | found << offset
        offset, first = offset + width, first + count
    assert quads is not None
    codes = quads.view(torch.uint8).view(tiles * TILE_ROWS, chunks * fmt.chunk_columns)
    zeros = None if fmt.symmetric else _untile(packed.parts["zeros"], fmt, rows)
    scales = _untile(packed.parts["codebook" if fmt.codebook else "scales"], fmt, rows)
    scales = scales if fmt.scale_type == "F16" else scales.contiguous().view(_STORED[fmt.scale_type])
    return codes[:rows, :columns], scales.float(), zeros


def _every_byte(value: int) -> int:
    """An int32 whose four bytes are the same."""
    return int.from_bytes(bytes([value] * 4), "little", signed=True)


def coded_rows(packed: PackedWeight) -> Iterator[tuple[slice, Tensor]]:
    """What the codes stand for, piece by piece: (which rows, float32 [rows, in])."""
    fmt, (rows, columns) = packed.format, packed.shape
    size, tiles = fmt.columns(columns), max(1, PIECE_ELEMENTS // (TILE_ROWS * max(1, columns)))
    block = fmt.block_tiles or 1
    tiles = -(-tiles // block) * block  # no block of scales is cut
    tiled = {name: (part, 1 if name == "codes" else block) for name, part in packed.parts.items() if name in TILED}
    for first in range(0, len(packed.parts["codes"]), tiles):
        begin, end = first * TILE_ROWS, min(rows, (first + tiles) * TILE_ROWS)
        piece = {name: part[first // span : (first + tiles) // span] for name, (part, span) in tiled.items()}
        codes, scales, zeros = unpack(PackedWeight(piece, fmt, (end - begin, columns)))
        if fmt.codebook:
            groups = enumerate(torch.split(codes.long(), size, dim=1))
            yield slice(begin, end), torch.cat([scales[:, g].gather(1, part) for g, part in groups], dim=1)
            continue
        if "tensor_scale" in packed.parts:
            scales = scales * packed.parts["tensor_scale"]
        zero = None if zeros is None else _spread(zeros.float(), size, columns)
        yield slice(begin, end), _unscaled(codes, zero, fmt).mul_(_spread(scales, size, columns))


def float_part(packed: PackedWeight, rows: slice) -> Tensor | None:
    """What is stored as floats of some rows, float32 [rows, in]; None where the format has nothing of that kind.

    No size in here depends on data, so that the operator can be followed without any.
    """
    parts, count, columns = packed.parts, rows.stop - rows.start, packed.shape[1]
    if not {"outlier_starts", "float_columns"} & set(parts):
        return None
    found = torch.zeros(count, columns)
    if "outlier_starts" in parts:
        values = parts["outlier_values"].float()
        row = torch.searchsorted(parts["outlier_starts"].long(), torch.arange(len(values)), right=True) - 1 - rows.start
        values = torch.where((row >= 0) & (row < count), values, 0.0)
        places = row.clamp(0, count - 1) * columns + parts["outlier_columns"].long()
        found = found.view(-1).index_add(0, places, values).view(count, columns)
    if "float_columns" in parts:
        stored = parts["float_values"].movedim(-1, 1).flatten(0, 1)[rows]
        found = found.index_add(1, parts["float_columns"].long(), stored.float())
    return found


def dequantize_rows(packed: PackedWeight) -> Iterator[tuple[slice, Tensor]]:
    """:func:`dequantize` piece by piece, for weights of which one copy is enough: (which rows, float32 [rows, in])."""
    for rows, values in coded_rows(packed):
        floats = float_part(packed, rows)
        yield rows, values if floats is None else values + floats


def dequantize(packed: PackedWeight) -> Tensor:
    """The float32 [out, in] weight that the packed form stands for."""
    weight = torch.empty(packed.shape, dtype=torch.float32)
    for rows, values in dequantize_rows(packed):
        weight[rows] = values
    return weight


def _spread(per_group: Tensor, size: int, columns: int) -> Tensor:
    """[out, groups] -> [out, columns], each value over its group's columns."""
    return per_group[:, :, None].expand(-1, -1, size).flatten(1)[:, :columns]


def _tile(per_row: Tensor, fmt: Format) -> Tensor:
    """[out, groups, ...] -> [tiles, groups, ..., 16]; [blocks of rows, groups] where rows of a block are the same."""
    if fmt.block_tiles:
        span = fmt.group_size
        first = per_row[::span]
        if not torch.equal(first.repeat_interleave(span, dim=0)[: len(per_row)], per_row):
            raise ValueError(f"{fmt.name}: the rows of a block have different scales or zeros")
        return first.contiguous()
    filler = per_row.new_zeros(-per_row.shape[0] % TILE_ROWS, *per_row.shape[1:])
    return torch.cat([per_row, filler]).view(-1, TILE_ROWS, *per_row.shape[1:]).movedim(1, -1).contiguous()


def _untile(tiled: Tensor, fmt: Format, rows: int) -> Tensor:
    """The inverse of :func:`_tile`."""
    if fmt.block_tiles:
        return tiled.repeat_interleave(fmt.group_size, dim=0)[:rows]
    return tiled.movedim(-1, 1).flatten(0, 1)[:rows]
