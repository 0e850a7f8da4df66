"""Exact packing into the layout of :mod:`compressor.formats.format`, and what a packed weight stands for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.formats.elements import Element
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros, SkippedInputs
from compressor.formats.format import Format
from compressor.formats.layouts.columns import from_bits, from_panel, put_columns, to_bits, to_panels
from compressor.formats.layouts.masks import from_mask, keep_codes, spread_codes, to_mask
from compressor.formats.layouts.patterns import from_numbers, pack_numbers, to_numbers, unpack_numbers
from compressor.formats.layouts.words import from_words, quads_of, split_planes, to_words, whole_words
from compressor.formats.parts import CODES, TILE_ROWS, TILED, panel_rows

PIECE_ELEMENTS = 1 << 22
STORED = {"F16": torch.float16, "E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn}
"""Types that scales are stored in."""


@functools.cache
def _values(element: Element) -> NDArray[np.float32]:
    """Return the values of an element type, not as a tensor: one made while a graph is traced is fake, and stays so."""
    return np.array(element.values, np.float32)


def unscaled(codes: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Return the values of codes before they are scaled: uint8 [out, n] -> float32."""
    if fmt.element is not None:
        return torch.from_numpy(_values(fmt.element)).to(codes.device)[codes.int()]
    values = codes.float().sub_(fmt.zero_point if zeros is None else zeros)
    return values if fmt.factor == 1 else values.mul_(fmt.factor)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in its stored form.

    Attributes:
        parts: its tensors by name, in the order, types and shapes of :meth:`compressor.formats.format.Format.parts`.
        shape: (out_features, in_features).
    """

    parts: Mapping[str, Tensor]
    format: Format
    shape: tuple[int, int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], fmt: Format, shape: tuple[int, int]) -> PackedWeight:
        """From the parts in order, as :func:`compressor.ops.linear.packed_linear` takes them."""
        return cls(dict(zip(fmt.parts(*shape), tensors, strict=True)), fmt, shape)

    def with_parts(self, fmt: Format, **added: Tensor) -> PackedWeight:
        """Return the same weight in a format that stores these parts as well."""
        parts = {**self.parts, **added}
        order = [name for name in fmt.parts(*self.shape) if name in parts]
        return PackedWeight({name: parts[name] for name in order}, fmt, self.shape)

    def with_input_scale(self, input_scale: Tensor | None) -> PackedWeight:
        """Return the same weight with a stored scale of its activations, float32 [1]; as it is where that is None."""
        return self if input_scale is None else self.with_parts(self.format, input_scale=input_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of storage, counted on the tensors."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format, tensor_scale: Tensor | None = None
) -> PackedWeight:
    """Pack codes uint8 [out, in], scales that the format can store [out, groups], zeros uint8 [out, groups] or None.

    Codebooks come as scales [out, groups, levels].  What the format stores as floats is not looked at
    (:mod:`compressor.formats.outliers` adds it).

    Exact: :func:`unpack` returns the same values.
    """
    (rows, columns), fmt = codes.shape, fmt.without_outliers
    if (
        scales.shape[:2] != (rows, fmt.groups(columns))
        or scales.dim() != 2 + fmt.codebook
        or (zeros is None) != fmt.symmetric
    ):
        raise ValueError(f"scales {tuple(scales.shape)} and zeros do not fit {fmt.name} of {rows} x {columns}")
    stored = scales.to(STORED[fmt.scale_type])
    tiled = _tile(stored if fmt.scale_type == "F16" else stored.view(torch.uint8), fmt)
    found: dict[str, Tensor | None] = {**split_planes(to_words(codes, fmt.planes), fmt)}
    found |= {"codebook" if fmt.codebook else "scales": tiled}
    found |= {"zeros": None if zeros is None else _tile(zeros, fmt), "tensor_scale": tensor_scale}
    return PackedWeight({name: part for name, part in found.items() if part is not None}, fmt, (rows, columns))


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [out, in], scales float32 [out, groups] (or codebooks [..., levels]), zeros uint8 [out, groups]."""
    fmt, (rows, columns) = packed.format, packed.shape
    codes = from_words(whole_words(packed.parts), fmt.planes)
    zeros = None if fmt.symmetric else _untile(packed.parts["zeros"], fmt, rows)
    scales = _untile(packed.parts["codebook" if fmt.codebook else "scales"], fmt, rows)
    scales = scales if fmt.scale_type == "F16" else scales.contiguous().view(STORED[fmt.scale_type])
    return codes[:rows, :columns], scales.float(), zeros


def coded_rows(packed: PackedWeight) -> Iterator[tuple[slice, Tensor]]:
    """Yield the values of the codes, piece by piece: (which rows, float32 [rows, in])."""
    fmt, (rows, columns) = packed.format, packed.shape
    if (blocks := fmt.extra(ColumnBlocks)) is not None:
        kept = kept_columns(packed, blocks)
        for which, values in coded_rows(kept_part(packed)):
            yield which, put_columns(values, kept[which.start // TILE_ROWS :], columns)
        return
    if fmt.extra(KeptOfGroup) is not None:
        places = kept_places(packed)
        for which, values in coded_rows(kept_part(packed)):
            yield which, values.new_zeros(len(values), columns).scatter(1, places[which], values)
        return
    if fmt.extra(SingleZeros) is not None:
        yield from coded_rows(filled_up(packed))
        return
    if fmt.extra(SkippedInputs) is not None:
        yield from _by_panel(packed)
        return
    tiles = max(1, PIECE_ELEMENTS // (TILE_ROWS * max(1, columns)))
    block = fmt.block_tiles or 1
    tiles = -(-tiles // block) * block  # no block of scales is cut
    tiled = {name: (part, 1 if name in CODES else block) for name, part in packed.parts.items() if name in TILED}
    for first in range(0, len(packed.parts["codes"]), tiles):
        begin, end = first * TILE_ROWS, min(rows, (first + tiles) * TILE_ROWS)
        piece = {name: part[first // span : (first + tiles) // span] for name, (part, span) in tiled.items()}
        codes, scales, zeros = unpack(PackedWeight(piece, fmt, (end - begin, columns)))
        if fmt.codebook:
            yield slice(begin, end), _listed(codes, scales, fmt)
            continue
        scale, zero = _spread_out(scales, zeros, packed)
        yield slice(begin, end), unscaled(codes, zero, fmt).mul_(scale)


def kept_part(packed: PackedWeight) -> PackedWeight:
    """Return the columns that the tiles or rows of a weight keep, as a weight [out, kept] of their own."""
    parts = {name: part for name, part in packed.parts.items() if name not in ("kept", "patterns")}
    fmt, (rows, columns) = packed.format, packed.shape
    return PackedWeight(parts, fmt.of_kept, (rows, fmt.stored_columns(columns)))


def kept_columns(packed: PackedWeight, blocks: ColumnBlocks) -> Tensor:
    """Return the columns that each tile of a weight keeps, rising: int64 [tiles, kept]."""
    (rows, columns), fmt = packed.shape, packed.format
    found = from_bits(packed.parts["kept"], fmt.stored_columns(columns), blocks.width)
    return found.repeat_interleave(blocks.tiles, dim=0)[: -(-rows // TILE_ROWS)]


def leave_out(kept: PackedWeight, columns: Tensor, in_features: int, blocks: ColumnBlocks) -> PackedWeight:
    """Return the weight [out, in] of which only some columns of each tile are stored; undone by :func:`kept_part`.

    Args:
        kept: [out, kept], the columns that are stored, as many as the format keeps of ``in_features``.
        columns: int64 [tiles, kept], rising, which they are: whole blocks.
    """
    fmt, rows = kept.format.with_extra(blocks), kept.shape[0]
    if columns.shape != (-(-rows // TILE_ROWS), fmt.stored_columns(in_features)):
        raise ValueError(f"{fmt.name} of {rows} x {in_features} does not keep columns {tuple(columns.shape)}")
    first = columns[:: blocks.tiles]
    if not torch.equal(first.repeat_interleave(blocks.tiles, dim=0)[: len(columns)], columns):
        raise ValueError(f"{fmt.name}: the tiles of a block keep different columns")
    return PackedWeight({**kept.parts, "kept": to_bits(first, in_features, blocks.width)}, fmt, (rows, in_features))


def kept_places(packed: PackedWeight) -> Tensor:
    """Return the columns that each row keeps of every M, rising: int64 [out, kept]."""
    pattern, (rows, columns) = packed.format.extra(KeptOfGroup), packed.shape
    assert pattern is not None
    numbers = unpack_numbers(packed.parts["patterns"], pattern.index_bits, rows, columns // pattern.size)
    return from_numbers(numbers, pattern)


def leave_out_of_groups(kept: PackedWeight, where: Tensor, pattern: KeptOfGroup) -> PackedWeight:
    """Return the weight [out, in] of which each row stores N of every M columns; undone by :func:`kept_part`.

    Args:
        kept: [out, kept], the weights that are stored.
        where: bool [out, in], true at these.
    Raises:
        ValueError: a group keeps more or fewer.
    """
    fmt, patterns = kept.format.with_extra(pattern), pack_numbers(to_numbers(where, pattern), pattern.index_bits)
    return PackedWeight({**kept.parts, "patterns": patterns}, fmt, (kept.shape[0], where.shape[1]))


def leave_out_singles(dense: PackedWeight, kept: Tensor, single: SingleZeros) -> PackedWeight:
    """Return the weight of which only some codes are stored, the others being zero; undone by :func:`filled_up`.

    Args:
        dense: [out, in], all of it.
        kept: bool [out, in], true where codes are stored, as many as the format keeps.
    Raises:
        ValueError: these are more or fewer.
    """
    fmt, shape = dense.format.with_extra(single), dense.shape
    if int(kept.sum()) != single.kept(*shape):
        raise ValueError(f"{fmt.name} of {shape[0]} x {shape[1]} does not keep {int(kept.sum())} weights")
    codes, starts = keep_codes(unpack(dense)[0], kept, fmt.planes)
    return PackedWeight({**dense.parts, "codes": codes}, fmt, shape).with_parts(fmt, kept=to_mask(kept), starts=starts)


def filled_up(packed: PackedWeight) -> PackedWeight:
    """Return the weight in the dense format, with codes of zero where :func:`leave_out_singles` has left some out."""
    parts, fmt, (rows, columns) = dict(packed.parts), packed.format.of_kept, packed.shape
    stream, bits, starts = (parts.pop(name) for name in ("codes", "kept", "starts"))
    blank = stream.new_full((rows, columns), fmt.zero_code)
    if not fmt.symmetric:
        blank = _spread(_untile(parts["zeros"], fmt, rows), fmt.columns(columns), columns)
    codes = to_words(spread_codes(stream, starts, bits, blank, fmt.planes), fmt.planes)
    return PackedWeight({"codes": codes, **parts}, fmt, packed.shape)


def kept_singles(packed: PackedWeight) -> Tensor:
    """Return where codes are stored, bool [out, in]."""
    rows, columns = packed.shape
    return from_mask(packed.parts["kept"]).transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :columns] > 0


def skip_inputs(packed: PackedWeight, thresholds: Tensor) -> PackedWeight:
    """Store a weight column by column, with thresholds of its inputs, float32 [in]; what it stands for stays."""
    fmt, (codes, _, _) = packed.format.with_extra(SkippedInputs()), unpack(packed)
    stored = to_panels(codes, panel_rows(len(codes), fmt.bits), fmt.bits)
    return PackedWeight({**packed.parts, "codes": stored, "thresholds": thresholds.float()}, fmt, packed.shape)


def _by_panel(packed: PackedWeight) -> Iterator[tuple[slice, Tensor]]:
    """Undo :func:`skip_inputs`, panel after panel: (which rows, float32 [rows, in])."""
    fmt, (rows, columns) = packed.format, packed.shape
    scale = _spread(_untile(packed.parts["scales"], fmt, rows).float(), fmt.columns(columns), columns)
    for panel, stored in enumerate(packed.parts["codes"]):
        codes = from_panel(stored, fmt.bits)
        which = slice(panel * len(codes), min(rows, (panel + 1) * len(codes)))
        yield which, unscaled(codes[: which.stop - which.start], None, fmt).mul_(scale[which])


def _listed(codes: Tensor, codebooks: Tensor, fmt: Format) -> Tensor:
    """Look codes [..., in] up in the codebooks of their groups, [..., groups, levels]."""
    groups = enumerate(torch.split(codes.long(), fmt.columns(codes.shape[-1]), dim=-1))
    return torch.cat([codebooks[..., g, :].gather(-1, part) for g, part in groups], dim=-1)


def _spread_out(scales: Tensor, zeros: Tensor | None, packed: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Return the scale and the zero point of each column, float32 [..., in], from those of its group."""
    size = packed.format.columns(columns := packed.shape[1])
    if "tensor_scale" in packed.parts:
        scales = scales * packed.parts["tensor_scale"]
    return _spread(scales, size, columns), None if zeros is None else _spread(zeros.float(), size, columns)


def float_part(packed: PackedWeight, rows: slice) -> Tensor | None:
    """Return the values of some rows that are stored as floats, float32 [rows, in]; None where the format stores none.

    No size in here depends on data, so that the operator can be followed without any.
    """
    parts, count, columns = packed.parts, rows.stop - rows.start, packed.shape[1]
    if not {"outlier_starts", "float_columns"} & set(parts):
        return None
    found = torch.zeros(count, columns, device=parts["codes"].device)
    if "outlier_starts" in parts:
        values = parts["outlier_values"].float()
        which = torch.arange(len(values), device=values.device)
        row = torch.searchsorted(parts["outlier_starts"].long(), which, right=True) - 1 - rows.start
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
    """Return the float32 [out, in] weight that the packed form stands for."""
    weight = torch.empty(packed.shape, device=packed.parts["codes"].device)
    for rows, values in dequantize_rows(packed):
        weight[rows] = values
    return weight


def take_rows(packed: PackedWeight, rows: Tensor) -> Tensor:
    """Return some rows of what a packed weight stands for: whole numbers [...] -> float32 [..., in].

    Raises:
        ValueError: the format stores floats beside the codes, or scales of blocks of rows.
    """
    fmt, columns = packed.format, packed.shape[1]
    if fmt.extras or fmt.block_tiles:
        raise ValueError(f"{fmt.name}: rows cannot be taken one by one")
    tile, place = rows // TILE_ROWS, rows % TILE_ROWS
    taken = {name: packed.parts[name][tile, ..., place] for name in TILED if name in packed.parts}
    quads = quads_of(taken["codes"], fmt.planes)
    codes = torch.stack([(quads >> 8 * byte) & 0xFF for byte in range(4)], dim=-1).flatten(-3)[..., :columns]
    scales = taken["codebook" if fmt.codebook else "scales"]
    scales = scales if fmt.scale_type == "F16" else scales.contiguous().view(STORED[fmt.scale_type])
    if fmt.codebook:
        return _listed(codes, scales.float(), fmt)
    scale, zero = _spread_out(scales.float(), taken.get("zeros"), packed)
    if fmt.element is not None:
        return unscaled(codes, None, fmt) * scale
    return (codes - (fmt.zero_point if zero is None else zero)) * scale  # nothing in place, so that its flow is proven


def _spread(per_group: Tensor, size: int, columns: int) -> Tensor:
    """[..., groups] -> [..., columns], each value over its group's columns."""
    return per_group[..., None].expand(*per_group.shape, size).flatten(-2)[..., :columns]


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
    """Undo :func:`_tile`."""
    if fmt.block_tiles:
        return tiled.repeat_interleave(fmt.group_size, dim=0)[:rows]
    return tiled.movedim(-1, 1).flatten(0, 1)[:rows]


def meta_packed(rows: int, columns: int, fmt: Format) -> PackedWeight:
    """Make a packed [rows, columns] weight without storage."""
    sizes = fmt.parts(rows, columns).items()
    parts = {part: torch.empty(shape, dtype=getattr(torch, kind), device="meta") for part, (kind, shape) in sizes}
    return PackedWeight(parts, fmt, (rows, columns))
