"""The packed linear that skips inputs: small activations are zero, and the codes of their columns are not read.

Codes lie column by column, so that a column that is skipped is cache lines that are not read.  One token makes a list
of the columns that are left, in their order, and walks it with the rows of a panel in registers.  Several tokens skip
different columns: all columns are read once for a block of tokens, and what is small is multiplied as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

LINE_BYTES = 64
BLOCK = 16
"""Columns of the list that are multiplied by all of a panel before the next."""
AHEAD = BLOCK


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
            stored = codes[panel, column, T.ramp(unit * 16 + part, 1, lanes)]
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
    fill, gather, zero_small = _fill(columns, prologue), _gathering(panel), _zeroing(columns)
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
            picked = T.alloc_buffer((columns + AHEAD,), "float32")
            index = T.alloc_buffer((columns + AHEAD,), "int32")
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


def _fill(columns: int, prologue: Prologue | None) -> Any:
    """Make a macro ``fill(inputs, vectors, a, m)`` that writes a token's activations: copied, or computed."""
    compute = None if prologue is None else prologue.row(columns)

    @T.inline
    def copied(inputs, vectors, a, m):
        for k in range(columns // 16):
            a[m, T.ramp(k * 16, 1, 16)] = inputs[0][m, T.ramp(k * 16, 1, 16)]
        for k in range(columns % 16):
            a[m, columns // 16 * 16 + k] = inputs[0][m, columns // 16 * 16 + k]

    @T.inline
    def computed(inputs, vectors, a, m):
        compute(inputs, vectors, m, a, m)  # type: ignore[misc]

    return copied if compute is None else computed


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
        for k in range(AHEAD):
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
    pieces = list(panel.pieces(16 if panel.isa.lanes == 16 else 8))

    def one(weight: Weight, p: Any, picked: Any, index: Any, starts: Any) -> None:
        totals = T.alloc_buffer((panel.rows,), "float32")
        with T.serial(0, panel.rows // 16) as r:
            T.buffer_store(totals, splat_float(0.0, 16), [T.ramp(r * 16, 1, 16)])
        with T.serial(0, panel.groups) as g, T.serial(0, (starts[g + 1] - starts[g] + (BLOCK - 1)) // BLOCK) as b:
            first = T.bind(starts[g] + b * BLOCK)
            last = T.bind(T.min(first + BLOCK, starts[g + 1]))
            for n, units in enumerate(pieces):
                _add_block(panel, weight, p, (n, len(pieces)), units, (picked, index), (first, last), g, totals)
        _store_totals(panel, weight, p, totals)

    return one


def _add_block(panel, weight, p, place, units, listed, span, g, totals):
    codes, lanes = weight.parts["codes"], panel.isa.lanes
    (number, count), (picked, index), (first, last) = place, listed, span
    sums = _Sums(panel, weight, p, units, 1)
    sums._clear(sums.acc)
    width = len(units) * 16
    with T.serial(first, last) as i:
        turn = number * BLOCK + (i - first)
        for line in range(-(-width // LINE_BYTES)):
            prefetch(codes[p, index[last + turn // count], 0], T.Cast("int64", turn % count * width + line * LINE_BYTES))
        for k, unit in enumerate(units):
            for v, value in enumerate(panel.values(codes, p, index[i], unit)):
                sums.add(0, k, v, value * T.broadcast(picked[i], lanes))
    for k, unit in enumerate(units):
        for v in range(panel.unit_vectors):
            at = T.ramp(panel.first_row(unit, v), 1, lanes)
            T.buffer_store(totals, totals[at] + sums.acc[k][v, sums.every] * sums._scale(k, v, g), [at])


def _store_totals(panel, weight, p, totals):
    token = T.int64(0)
    with T.serial(0, panel.rows // 16) as r:
        row = p * panel.rows + r * 16
        with T.If(row + 16 <= weight.rows):
            with T.Then():
                place = T.ramp(row, 1, 16)
                T.buffer_store(weight.y, weight.finish(totals[T.ramp(r * 16, 1, 16)], token, place), [token, place])
            with T.Else(), T.serial(0, 16) as e, T.If(row + e < weight.rows), T.Then():
                T.buffer_store(weight.y, weight.finish(totals[r * 16 + e], token, row + e), [token, row + e])


def _tokens(panel: Panel, block: int) -> Any:
    """Make a function that emits the products of a panel for all tokens, ``block`` of them at a time."""
    size, lanes = panel.fmt.columns(panel.columns), panel.isa.lanes

    def several(weight: Weight, p: Any, a: Any, tokens: Any) -> None:
        codes = weight.parts["codes"]
        for units in panel.pieces(4):
            with T.serial(T.int64(0), (tokens + (block - 1)) // block) as j:
                sums = _Sums(panel, weight, p, units, block)

                def add(g: Any, units: range = units, sums: _Sums = sums, j: Any = j) -> None:
                    with T.serial(g * size, T.min((g + 1) * size, panel.columns)) as column:
                        for k, unit in enumerate(units):
                            for v, value in enumerate(panel.values(codes, p, column, unit)):
                                for t in range(block):
                                    sums.add(t, k, v, value * T.broadcast(a[j * block + t, column], lanes))

                sums.over_groups(add)
                sums.store([j * block + t for t in range(block)], tokens)

    return several


class _Sums:
    """Sums of some units of a panel for some tokens, in registers: of a group of columns, and of all."""

    def __init__(self, panel: Panel, weight: Weight, p: Any, units: range, tokens: int) -> None:
        self.panel, self.weight, self.p, self.units, self.tokens = panel, weight, p, units, tokens
        self.lanes, self.vectors = panel.isa.lanes, panel.unit_vectors
        count, shape = tokens * len(units), (self.vectors, self.lanes)
        self.acc = registers(count, shape)
        self.out = registers(count, shape) if panel.groups > 1 else self.acc
        self.every = T.ramp(0, 1, self.lanes)

    def _clear(self, buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            for v in range(self.vectors):
                T.buffer_store(buffer, splat_float(0.0, self.lanes), [v, self.every])

    def add(self, token: int, unit: int, vector: int, value: Any) -> None:
        """Add to the sums of a group."""
        acc = self.acc[token * len(self.units) + unit]
        T.buffer_store(acc, acc[vector, self.every] + value, [vector, self.every])

    def over_groups(self, add: Any) -> None:
        """Emit ``add(g)`` for every group, and what its scales make of its sums."""
        if self.panel.groups == 1:
            self._clear(self.acc)
            add(0)
            return
        self._clear(self.out)
        with T.serial(0, self.panel.groups) as g:
            self._clear(self.acc)
            add(g)
            for k in range(len(self.units)):
                for v in range(self.vectors):
                    scale = self._scale(k, v, g)
                    for t in range(self.tokens):
                        acc, out = (buffers[t * len(self.units) + k] for buffers in (self.acc, self.out))
                        value = out[v, self.every] + acc[v, self.every] * scale
                        T.buffer_store(out, value, [v, self.every])

    def _row(self, k: int, v: int) -> Any:
        return self.p * self.panel.rows + self.panel.first_row(self.units[k], v)

    def _scale(self, k: int, v: int, g: Any) -> Any:
        """Return the scales of a vector's rows; of rows that fill up the panel, others'."""
        scales, row = self.weight.parts["scales"], self._row(k, v)
        tile = T.min(row // TILE_ROWS, int(scales.shape[0]) - 1)
        return T.Cast(f"float32x{self.lanes}", scales[tile, g, T.ramp(row % TILE_ROWS, 1, self.lanes)])

    def store(self, places: Sequence[Any], tokens: Any) -> None:
        """Store the outputs of the tokens that there are."""
        for t, token in enumerate(places):
            with T.If(token < tokens), T.Then():
                for k in range(len(self.units)):
                    for v in range(self.vectors):
                        self._store(self.out[t * len(self.units) + k], token, k, v)

    def _store(self, out: Any, token: Any, k: int, v: int) -> None:
        weight, lanes, row = self.weight, self.lanes, self._row(k, v)
        if self.panel.groups == 1:
            T.buffer_store(out, out[v, self.every] * self._scale(k, v, 0), [v, self.every])
        with T.If(row + lanes <= weight.rows):
            with T.Then():
                place = T.ramp(row, 1, lanes)
                T.buffer_store(weight.y, weight.finish(out[v, self.every], token, place), [token, place])
            with T.Else(), T.serial(0, lanes) as r, T.If(row + r < weight.rows), T.Then():
                T.buffer_store(weight.y, weight.finish(out[v, r], token, row + r), [token, row + r])
