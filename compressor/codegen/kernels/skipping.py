"""The packed linear that skips inputs: small activations are zero, and the codes of their columns are not read.

Codes lie column by column, so that a column that is skipped is cache lines that are not read.  One token makes a list
of the columns that are left, in their order, and walks it with the rows of a panel in registers.  Several tokens skip
different columns: all columns are read once for a block of tokens, and what is small is multiplied as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.prologue import Prologue, fill_rows
from compressor.codegen.kernels.linear.weights import Weight, Weights, by_token, parameter
from compressor.codegen.kernels.vector import registers, splat, splat_float
from compressor.formats.extras import SkippedInputs
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

LINE_BYTES, UNIT_BYTES = 64, 16
BLOCK = 16
"""Columns of the list that are multiplied by all of a panel before the next."""


@dataclass(frozen=True)
class Panel:
    """The products of a panel of rows, in units of 16 bytes a column.

    Attributes:
        rows: of a panel.
        columns: of the weight.
    """

    rows: int
    columns: int
    fmt: Format
    isa: Isa

    @property
    def unit_rows(self) -> int:
        """Rows of 16 bytes: 16 of 8 bits, 32 of 4."""
        return 128 // self.fmt.bits

    @property
    def unit_vectors(self) -> int:
        """Registers of sums that a unit takes."""
        return self.unit_rows // self.isa.lanes

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.fmt.groups(self.columns)

    def pieces(self, most_vectors: int) -> Iterator[range]:
        """Cut the units of a panel into runs whose sums take at most so many registers."""
        units, most = self.rows // self.unit_rows, max(1, most_vectors // self.unit_vectors)
        for first in range(0, units, most):
            yield range(first, min(units, first + most))

    def values(self, codes: Any, panel: Any, column: Any, unit: int) -> Iterator[Any]:
        """Yield a unit's values of a column, but for their scale, float32 vector after vector."""
        lanes = self.isa.lanes
        for part in range(0, 16, lanes):
            stored = codes[panel, column, T.ramp(unit * UNIT_BYTES + part, 1, lanes)]
            if self.fmt.bits == 8:  # less their zero point, as signed bytes
                yield T.Cast(f"float32x{lanes}", T.Cast(f"int32x{lanes}", T.reinterpret(stored, dtype=f"int8x{lanes}")))
                continue
            both = T.Cast(f"int32x{lanes}", stored)
            yield self._nibble(both)
            yield self._nibble(T.shift_right(both, splat(4, lanes)))

    def _nibble(self, code: Any) -> Any:
        """Return the value of the lower four bits of each lane."""
        lanes = self.isa.lanes
        if self.isa.quick_lookup and self.isa.lookup16 is not None:
            return self.isa.lookup16([code - 8.0 for code in range(16)], code)
        return T.Cast(f"float32x{lanes}", T.bitwise_and(code, splat(15, lanes))) - splat_float(8.0, lanes)

    def first_row(self, unit: int, vector: int) -> int:
        """Return the row of a panel that a unit's vector begins with."""
        lanes = self.isa.lanes
        if self.fmt.bits == 8:
            return unit * 16 + vector * lanes
        return unit * 32 + vector % 2 * 16 + vector // 2 * lanes


def skipping_linear(
    rows: int,
    columns: int,
    fmt: Format,
    has_bias: bool,
    isa: Isa,
    *,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.linear.packed_linear` of a format that skips inputs.

    Parameters of the result: as of :func:`compressor.codegen.kernels.linear.packed.fused_linear` for one weight.
    """
    weights = Weights([rows], columns, fmt, has_bias, has_residual)
    panels, _, _ = fmt.parts(rows, columns)["codes"][1]
    panel = Panel(SkippedInputs.panel_rows(rows, fmt.bits), columns, fmt, isa)
    inputs, vectors = (1, 0) if prologue is None else (prologue.inputs, prologue.vectors)
    fill, gather, zero_small = fill_rows(columns, prologue), _gathering(panel), _zeroing(columns)
    block = 6 if isa.lanes == 16 else 3
    one, several = _one_token(panel), _tokens(panel, block)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given = T.meta_var([parameter((d0, d1, columns), "float32") for _ in range(inputs)])
        of_norm = T.meta_var([parameter((columns,), "float32") for _ in range(vectors)])
        weights.declare(d0, d1)
        tokens = T.meta_var(d0 * d1)
        slots = T.meta_var(T.if_then_else(tokens == 1, T.int64(1), (tokens + (block - 1)) // block * block))
        read = T.meta_var([by_token(buffer) for buffer in given])
        weight, _ = T.meta_var(weights.of_task(T.int64(0), 1))
        a = T.alloc_buffer((slots, columns), "float32")
        if tokens == 1:
            picked = T.alloc_buffer((columns + BLOCK,), "float32")
            index = T.alloc_buffer((columns + BLOCK,), "int32")
            starts = T.alloc_buffer((panel.groups + 1,), "int32")
            fill(read, of_norm, a, T.int64(0))
            gather(a, weight.parts["thresholds"], picked, index, starts)
            for p in T.parallel(panels):
                one(weight, p, picked, index, starts)
        else:
            for m in T.parallel(tokens):
                fill(read, of_norm, a, m)
                zero_small(a, weight.parts["thresholds"], m)
            for p in T.parallel(panels):
                several(weight, p, a, tokens)

    return kernel


def _gathering(panel: Panel) -> Any:
    """Make a macro that lists the inputs that are not small, and where each group of columns begins in the list.

    ``gather(a, thresholds, picked, index, starts)`` writes values and columns; NaN is not small.
    """
    columns, groups = panel.columns, panel.groups
    size = panel.fmt.columns(columns)

    @T.inline
    def gather(a, thresholds, picked, index, starts):
        count = T.alloc_buffer((1,), "int32")
        count[0] = 0
        for g in range(groups):
            starts[g] = count[0]
            for k in range(T.min(size, columns - g * size)):
                column = T.meta_var(g * size + k)
                picked[count[0]] = a[0, column]
                index[count[0]] = T.Cast("int32", column)
                is_small = T.meta_var(T.abs(a[0, column]) < thresholds[column])
                count[0] = count[0] + (1 - T.Cast("int32", is_small))
        starts[groups] = count[0]
        for k in range(BLOCK):
            index[count[0] + k] = 0

    return gather


def _zeroing(columns: int) -> Any:
    """Make a macro ``zero_small(a, thresholds, m)`` that sets a token's small activations to zero."""

    @T.inline
    def zero_small(a, thresholds, m):
        for k in range(columns):
            a[m, k] = T.Select(T.abs(a[m, k]) < thresholds[k], T.float32(0), a[m, k])

    return zero_small


def _one_token(panel: Panel) -> Any:
    """Make a function that emits the products of a panel for the listed columns.

    A block of the list is multiplied by one piece of the panel after another.  Meanwhile the next block's codes are
    prefetched in the order of their addresses: the processor sees no stream in them.
    """
    lanes = panel.isa.lanes
    pieces = list(panel.pieces(16 if lanes == 16 else 8))

    def add_piece(weight: Weight, p: Any, number: int, listed: Any, first: Any, last: Any, sums: _Sums) -> None:
        codes, (picked, index), width = weight.parts["codes"], listed, len(sums.units) * UNIT_BYTES
        with T.serial(first, last) as i:
            turn = number * BLOCK + (i - first)
            begin = T.Cast("int64", turn % len(pieces) * width)
            for line in range(0, width, LINE_BYTES):
                prefetch(codes[p, index[last + turn // len(pieces)], 0], begin + line)
            for k, unit in enumerate(sums.units):
                for v, value in enumerate(panel.values(codes, p, index[i], unit)):
                    sums.add(0, k, v, value * T.broadcast(picked[i], lanes))

    def one(weight: Weight, p: Any, picked: Any, index: Any, starts: Any) -> None:
        totals = _cleared(1, panel.rows)
        with T.serial(0, panel.groups) as g, T.serial(0, (starts[g + 1] - starts[g] + (BLOCK - 1)) // BLOCK) as b:
            first = T.bind(starts[g] + b * BLOCK)
            last = T.bind(T.min(first + BLOCK, starts[g + 1]))
            for number, units in enumerate(pieces):
                sums = _Sums(panel, units, 1)
                add_piece(weight, p, number, (picked, index), first, last, sums)
                sums.scale_into(totals, 0, weight, p, g)
        _store(weight, totals, 0, T.int64(0), p * panel.rows, panel.rows)

    return one


def _tokens(panel: Panel, block: int) -> Any:
    """Make a function that emits the products of a panel for all tokens, ``block`` of them at a time."""
    size, lanes = panel.fmt.columns(panel.columns), panel.isa.lanes

    def add_group(weight: Weight, p: Any, a: Any, first: Any, g: Any, sums: _Sums) -> None:
        with T.serial(g * size, T.min((g + 1) * size, panel.columns)) as column:
            for k, unit in enumerate(sums.units):
                for v, value in enumerate(panel.values(weight.parts["codes"], p, column, unit)):
                    for t in range(block):
                        sums.add(t, k, v, value * T.broadcast(a[first + t, column], lanes))

    def several(weight: Weight, p: Any, a: Any, tokens: Any) -> None:
        for units in panel.pieces(4):
            begin, rows = panel.first_row(units[0], 0), len(units) * panel.unit_rows
            with T.serial(T.int64(0), (tokens + (block - 1)) // block) as j:
                totals = _cleared(block, rows)
                with T.serial(0, panel.groups) as g:
                    sums = _Sums(panel, units, block)
                    add_group(weight, p, a, j * block, g, sums)
                    sums.scale_into(totals, begin, weight, p, g)
                for t in range(block):
                    with T.If(j * block + t < tokens), T.Then():
                        _store(weight, totals, t, j * block + t, p * panel.rows + begin, rows)

    return several


class _Sums:
    """Sums of some units of a panel for some tokens over a group's columns, in registers; they begin at zero."""

    def __init__(self, panel: Panel, units: range, tokens: int) -> None:
        self.panel, self.units, self.tokens, self.lanes = panel, units, tokens, panel.isa.lanes
        self.every = T.ramp(0, 1, self.lanes)
        self.acc = registers(tokens * len(units), (panel.unit_vectors, self.lanes))
        for buffer in self.acc:
            for v in range(panel.unit_vectors):
                T.buffer_store(buffer, splat_float(0.0, self.lanes), [v, self.every])

    def add(self, token: int, unit: int, vector: int, value: Any) -> None:
        """Add to a vector of sums."""
        acc = self.acc[token * len(self.units) + unit]
        T.buffer_store(acc, acc[vector, self.every] + value, [vector, self.every])

    def scale_into(self, totals: Any, begin: int, weight: Weight, p: Any, g: Any) -> None:
        """Add the sums times the scales of group ``g`` to totals [tokens, rows], which begin with row ``begin``."""
        scales = weight.parts["scales"]
        for k, unit in enumerate(self.units):
            for v in range(self.panel.unit_vectors):
                first = self.panel.first_row(unit, v)
                row = p * self.panel.rows + first
                tile = T.min(row // TILE_ROWS, int(scales.shape[0]) - 1)  # of rows that fill up a panel, another's
                stored = scales[tile, g, T.ramp(row % TILE_ROWS, 1, self.lanes)]
                at = T.ramp(first - begin, 1, self.lanes)
                for t in range(self.tokens):
                    value = self.acc[t * len(self.units) + k][v, self.every] * T.Cast(f"float32x{self.lanes}", stored)
                    T.buffer_store(totals, totals[t, at] + value, [t, at])


def _cleared(tokens: int, rows: int) -> Any:
    """Allot totals, float32 [tokens, rows], and set them to zero."""
    totals = T.alloc_buffer((tokens, rows), "float32")
    for t in range(tokens):
        with T.serial(0, rows // 16) as r:
            T.buffer_store(totals, splat_float(0.0, 16), [t, T.ramp(r * 16, 1, 16)])
    return totals


def _store(weight: Weight, totals: Any, t: int, token: Any, first: Any, rows: int) -> None:
    """Store a token's outputs from row ``first`` on, as far as the weight has rows."""
    with T.serial(0, rows // 16) as r:
        row = first + r * 16
        with T.If(row + 16 <= weight.rows):
            with T.Then():
                place = T.ramp(row, 1, 16)
                value = weight.finish(totals[t, T.ramp(r * 16, 1, 16)], token, place)
                T.buffer_store(weight.y, value, [token, place])
            with T.Else(), T.serial(0, 16) as e, T.If(row + e < weight.rows), T.Then():
                value = weight.finish(totals[t, r * 16 + e], token, row + e)
                T.buffer_store(weight.y, value, [token, row + e])
