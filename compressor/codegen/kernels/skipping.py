"""The packed linear that skips inputs: small activations are zero, and the codes of their columns are not read.

Codes lie column by column, so that a column that is skipped is cache lines that are not read.  One token makes a list
of the columns that are left, in their order, and adds four of them at a time to the sums of a panel's rows, which stay
in the first-level cache: each is a long run of bytes, which the processor fetches ahead as such.  Several tokens skip
different columns.  Their columns are all read, and become floats once for many tokens; what is small is multiplied as
zero.  Sums go through a group's columns in their order either way, and have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.linear.weights import Weight, Weights, by_token, parameter
from compressor.codegen.kernels.vector import registers, splat, splat_float
from compressor.formats.extras import SkippedInputs
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

LINE_BYTES, UNIT_BYTES = 64, 16
TOGETHER = 4
"""Columns of the list that are added at a time."""
AHEAD = 4
"""Columns that are prefetched before they are added."""
SPAN = 128
"""Columns that become floats at a time, for several tokens: 32 KB of the first-level cache."""
SHARE_BYTES, SHARE_BLOCKS = 512, 48
"""Bytes of a column, and blocks of tokens, whose sums stay in the second-level cache."""


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
    def units(self) -> int:
        """Units of a panel."""
        return self.rows // self.unit_rows

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.fmt.groups(self.columns)

    @property
    def block(self) -> int:
        """Tokens whose sums stay in registers, for four registers of rows."""
        return 6 if self.isa.lanes == 16 else 3

    @property
    def listed(self) -> int:
        """Most columns of the list: those of each group are filled up to whole steps."""
        return self.groups * -(-self.fmt.columns(self.columns) // TOGETHER) * TOGETHER

    def divisor(self, units: int, most: int) -> int:
        """Return the largest number up to ``most`` that divides some units."""
        return max(n for n in range(1, max(1, most) + 1) if units % n == 0)

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
    fill, gather, turn = _fill(columns, prologue), _gathering(panel), _turning(panel)
    one, (several, shares), block = _one_token(panel), _tokens(panel), panel.block

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given = T.meta_var([parameter((d0, d1, columns), "float32") for _ in range(inputs)])
        of_norm = T.meta_var([parameter((columns,), "float32") for _ in range(vectors)])
        weights.declare(d0, d1)
        tokens = T.meta_var(d0 * d1)
        blocks = T.meta_var((tokens + (block - 1)) // block)
        read = T.meta_var([by_token(buffer) for buffer in given])
        weight, _ = T.meta_var(weights.of_task(T.int64(0), 1))
        if tokens == 1:
            a = T.alloc_buffer((1, columns), "float32")
            picked = T.alloc_buffer((panel.listed + TOGETHER,), "float32")
            index = T.alloc_buffer((panel.listed + max(TOGETHER, AHEAD),), "int32")
            starts = T.alloc_buffer((panel.groups + 1,), "int32")
            fill(read, of_norm, T.int64(0), a)
            gather(a, weight.parts["thresholds"], picked, index, starts)
            for p in T.parallel(panels):
                one(weight, p, picked, index, starts)
        else:
            turned = T.alloc_buffer((blocks, columns, block), "float32")
            for m in T.parallel(blocks * block):
                row = T.alloc_buffer((1, columns), "float32")
                fill(read, of_norm, T.min(m, tokens - 1), row)
                turn(row, weight.parts["thresholds"], turned, m)
            for task in T.parallel(panels * shares):
                several(weight, task, turned, tokens)

    return kernel


def _fill(columns: int, prologue: Prologue | None) -> Any:
    """Make a macro ``fill(inputs, vectors, m, row)`` that writes token m's activations: copied, or computed."""
    compute = None if prologue is None else prologue.row(columns)

    @T.inline
    def copied(inputs, vectors, m, row):
        for k in range(columns // 16):
            row[0, T.ramp(k * 16, 1, 16)] = inputs[0][m, T.ramp(k * 16, 1, 16)]
        for k in range(columns % 16):
            row[0, columns // 16 * 16 + k] = inputs[0][m, columns // 16 * 16 + k]

    @T.inline
    def computed(inputs, vectors, m, row):
        compute(inputs, vectors, m, row, 0)  # type: ignore[misc]

    return copied if compute is None else computed


def _gathering(panel: Panel) -> Any:
    """Make a macro that lists the inputs that are not small, and where each group of columns begins in the list.

    ``gather(a, thresholds, picked, index, starts)`` writes values and columns; NaN is not small.  Zeros times the last
    column fill a group's list up to whole steps.  Behind the list come the first columns of the next panel.
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
            for k in range(TOGETHER - 1):
                picked[count[0] + k] = T.float32(0)
                index[count[0] + k] = index[T.max(count[0] - 1, 0)]
            count[0] = (count[0] + (TOGETHER - 1)) // TOGETHER * TOGETHER
        starts[groups] = count[0]
        for k in range(AHEAD):
            index[count[0] + k] = index[k] + columns

    return gather


def _turning(panel: Panel) -> Any:
    """Make a macro ``turn(row, thresholds, turned, m)`` that puts a token's activations beside those of its block."""
    block = panel.block

    @T.inline
    def turn(row, thresholds, turned, m):
        for k in range(panel.columns):
            is_small = T.meta_var(T.abs(row[0, k]) < thresholds[k])
            turned[m // block, k, m % block] = T.Select(is_small, T.float32(0), row[0, k])

    return turn


def _one_token(panel: Panel) -> Any:
    """Make a function that emits the products of a panel for the listed columns, four of them at a time."""
    lanes, unit_vectors, line_units = panel.isa.lanes, panel.unit_vectors, LINE_BYTES // UNIT_BYTES
    every = T.ramp(0, 1, lanes)

    def add_units(weight: Weight, p: Any, first: Any, units: int, four: list[tuple[Any, ...]], sums: Any) -> None:
        codes = weight.parts["codes"]
        for _, _, ahead in four:
            prefetch(codes[p, ahead, 0], T.Cast("int64", first * UNIT_BYTES))
        for unit in (first + n for n in range(units)):
            of_columns = [panel.values(codes, p, column, unit) for _, column, _ in four]
            for v, values in enumerate(zip(*of_columns, strict=True)):
                at = [0, unit * unit_vectors + v, every]
                total = sums[tuple(at)]
                for (x, _, _), value in zip(four, values, strict=True):
                    total = total + value * x
                T.buffer_store(sums, total, at)

    def one(weight: Weight, p: Any, picked: Any, index: Any, starts: Any) -> None:
        sums, totals = _allot(panel, 1, panel.units)
        _clear(panel, sums, 1, panel.units)
        _clear(panel, totals, 1, panel.units)
        with T.serial(0, panel.groups) as g:
            with T.serial(0, (starts[g + 1] - starts[g]) // TOGETHER) as step:
                places = [starts[g] + step * TOGETHER + k for k in range(TOGETHER)]
                four = [
                    (T.bind(T.broadcast(picked[i], lanes)), T.bind(index[i]), T.bind(index[i + AHEAD])) for i in places
                ]
                with T.serial(0, panel.units // line_units) as line:
                    add_units(weight, p, line * line_units, line_units, four, sums)
                if panel.units % line_units:
                    rest = panel.units // line_units * line_units
                    add_units(weight, p, rest, panel.units - rest, four, sums)
            _scale(panel, weight, p, 0, panel.units, g, 1, sums, totals)
        _store(panel, weight, p, 0, panel.units, T.int64(0), 1, totals)

    return one


def _tokens(panel: Panel) -> tuple[Any, int]:
    """Make a function that emits the products of a share of a panel's rows for all tokens; return the shares as well.

    A block of tokens and a few registers of rows have their sums in registers over a span of columns.
    """
    block, lanes, unit_vectors = panel.block, panel.isa.lanes, panel.unit_vectors
    size = panel.fmt.columns(panel.columns)
    span = min(size, SPAN)
    share = panel.divisor(panel.units, SHARE_BYTES // UNIT_BYTES)
    units = panel.divisor(share, 4 // unit_vectors)
    vectors, every = units * unit_vectors, T.ramp(0, 1, lanes)

    def unpack(codes: Any, p: Any, begin: Any, count: Any, unit: Any, values: Any) -> None:
        with T.serial(0, count) as k:
            for u in range(units):
                for v, value in enumerate(panel.values(codes, p, begin + k, unit + u)):
                    T.buffer_store(values, value, [k, u * unit_vectors + v, every])

    def multiply(turned: Any, j: Any, begin: Any, count: Any, values: Any, sums: Any, slot: Any, part: Any) -> None:
        acc = registers(block, (vectors, lanes))
        cells = [(t, v, [slot + t, part * vectors + v, every]) for v in range(vectors) for t in range(block)]
        for t, v, at in cells:
            T.buffer_store(acc[t], sums[tuple(at)], [v, every])
        with T.serial(0, count) as k:
            for t, v, _ in cells:
                x = T.broadcast(turned[j, begin + k, t], lanes)
                T.buffer_store(acc[t], acc[t][v, every] + values[k, v, every] * x, [v, every])
        for t, v, at in cells:
            T.buffer_store(sums, acc[t][v, every], at)

    def add_group(weight: Weight, p: Any, first: Any, g: Any, turned: Any, j0: Any, blocks: Any, sums: Any) -> None:
        values = T.alloc_buffer((span, vectors, lanes), "float32")
        end = T.min((g + 1) * size, panel.columns)
        with T.serial(0, -(-size // span)) as s:
            begin = g * size + s * span
            count = T.max(T.min(end - begin, span), 0)
            with T.serial(0, share // units) as part:
                unpack(weight.parts["codes"], p, begin, count, first + part * units, values)
                with T.serial(T.int64(0), blocks) as j:
                    multiply(turned, j0 + j, begin, count, values, sums, j * block, part)

    def several(weight: Weight, task: Any, turned: Any, tokens: Any) -> None:
        p, first = task // (panel.units // share), task % (panel.units // share) * share
        blocks = (tokens + (block - 1)) // block
        sums, totals = _allot(panel, SHARE_BLOCKS * block, share)
        with T.serial(T.int64(0), (blocks + (SHARE_BLOCKS - 1)) // SHARE_BLOCKS) as chunk:
            j0 = chunk * SHARE_BLOCKS
            here = T.min(blocks - j0, T.int64(SHARE_BLOCKS))
            count = T.min(tokens - j0 * block, T.int64(SHARE_BLOCKS * block))
            _clear(panel, sums, here * block, share)
            _clear(panel, totals, count, share)
            with T.serial(0, panel.groups) as g:
                add_group(weight, p, first, g, turned, j0, here, sums)
                _scale(panel, weight, p, first, share, g, count, sums, totals)
            _store(panel, weight, p, first, share, j0 * block, count, totals)

    return several, panel.units // share


def _allot(panel: Panel, tokens: int, units: int) -> tuple[Any, Any]:
    """Allot a group's sums and all groups' totals, float32 [tokens, registers of the units, lanes]; one where one does."""
    shape = (tokens, units * panel.unit_vectors, panel.isa.lanes)
    sums = T.alloc_buffer(shape, "float32")
    return sums, sums if panel.groups == 1 else T.alloc_buffer(shape, "float32")


def _clear(panel: Panel, buffer: Any, tokens: Any, units: int) -> None:
    """Set sums to zero."""
    lanes = panel.isa.lanes
    with T.serial(0, tokens) as t, T.serial(0, units * panel.unit_vectors) as v:
        T.buffer_store(buffer, splat_float(0.0, lanes), [t, v, T.ramp(0, 1, lanes)])


def _scale(
    panel: Panel, weight: Weight, p: Any, first: Any, units: int, g: Any, tokens: Any, sums: Any, totals: Any
) -> None:
    """Multiply sums of units from ``first`` on by the scales of group ``g``; add them to totals and begin again."""
    lanes, scales = panel.isa.lanes, weight.parts["scales"]
    with T.serial(0, tokens) as t, T.serial(0, units) as unit:
        for v in range(panel.unit_vectors):
            row = p * panel.rows + panel.first_row(first + unit, v)
            tile = T.min(row // TILE_ROWS, int(scales.shape[0]) - 1)  # of rows that fill up a panel, another's
            scale = T.Cast(f"float32x{lanes}", scales[tile, g, T.ramp(row % TILE_ROWS, 1, lanes)])
            at = (t, unit * panel.unit_vectors + v, T.ramp(0, 1, lanes))
            if totals is sums:
                T.buffer_store(sums, sums[at] * scale, [*at])
            else:
                T.buffer_store(totals, totals[at] + sums[at] * scale, [*at])
                T.buffer_store(sums, splat_float(0.0, lanes), [*at])


def _store(
    panel: Panel, weight: Weight, p: Any, first: Any, units: int, m0: Any, tokens: Any, totals: Any
) -> None:
    """Store the outputs of tokens from ``m0`` on, as far as the weight has rows."""
    lanes = panel.isa.lanes
    with T.serial(0, tokens) as t, T.serial(0, units) as unit:
        for v in range(panel.unit_vectors):
            row, vector = p * panel.rows + panel.first_row(first + unit, v), unit * panel.unit_vectors + v
            with T.If(row + lanes <= weight.rows):
                with T.Then():
                    place = T.ramp(row, 1, lanes)
                    value = weight.finish(totals[t, vector, T.ramp(0, 1, lanes)], m0 + t, place)
                    T.buffer_store(weight.y, value, [m0 + t, place])
                with T.Else(), T.serial(0, lanes) as e, T.If(row + e < weight.rows), T.Then():
                    T.buffer_store(weight.y, weight.finish(totals[t, vector, e], m0 + t, row + e), [m0 + t, row + e])
