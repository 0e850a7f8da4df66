"""A panel of rows whose codes lie column by column: the values of its codes, and the sums of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear.weights import Weight
from compressor.codegen.kernels.vector import splat, splat_float
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

UNIT_BYTES = 16


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
        return self.isa.registers * 3 // 16

    @property
    def together(self) -> int:
        """Columns of a token's list that are added at a time: codes of 8 bits leave registers for more of them."""
        return 8 if self.fmt.bits == 8 else 4

    @property
    def ahead(self) -> int:
        """Columns of the list between one that is added and the one that is asked for meanwhile."""
        return 16 if self.fmt.bits == 8 else 4

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


def allot(panel: Panel, tokens: int, units: int) -> tuple[Any, Any]:
    """Allot a group's sums and those of all groups, float32 [tokens, registers of the units, lanes].

    One buffer is both where all columns are one group; its sums are scaled when they are stored.
    """
    shape = (tokens, units * panel.unit_vectors, panel.isa.lanes)
    sums = T.alloc_buffer(shape, "float32")
    return sums, sums if panel.groups == 1 else T.alloc_buffer(shape, "float32")


def clear(panel: Panel, buffer: Any, tokens: Any, units: int) -> None:
    """Set sums to zero."""
    lanes = panel.isa.lanes
    with T.serial(0, tokens) as t, T.serial(0, units * panel.unit_vectors) as v:
        T.buffer_store(buffer, splat_float(0.0, lanes), [t, v, T.ramp(0, 1, lanes)])


def scale(
    panel: Panel, weight: Weight, p: Any, first: Any, units: int, g: Any, tokens: Any, sums: Any, totals: Any
) -> None:
    """Add sums of units from ``first`` on, times the scales of group ``g``, to those of all groups, and clear them."""
    every = T.ramp(0, 1, panel.isa.lanes)
    if totals is sums:
        return
    with T.serial(0, tokens) as t, T.serial(0, units) as unit:
        for v in range(panel.unit_vectors):
            row, at = p * panel.rows + panel.first_row(first + unit, v), (t, unit * panel.unit_vectors + v, every)
            T.buffer_store(totals, totals[at] + sums[at] * _scales(panel, weight, g, row), [*at])
            T.buffer_store(sums, splat_float(0.0, panel.isa.lanes), [*at])


def store(panel: Panel, weight: Weight, p: Any, first: Any, units: int, m0: Any, tokens: Any, totals: Any) -> None:
    """Store the outputs of tokens from ``m0`` on, as far as the weight has rows."""
    lanes = panel.isa.lanes
    every = T.ramp(0, 1, lanes)
    with T.serial(0, tokens) as t, T.serial(0, units) as unit:
        for v in range(panel.unit_vectors):
            row, vector = p * panel.rows + panel.first_row(first + unit, v), unit * panel.unit_vectors + v
            whole, factor = totals[t, vector, every], None
            if panel.groups == 1:
                factor = _scales(panel, weight, 0, row)
            with T.If(row + lanes <= weight.rows):
                with T.Then():
                    place = T.ramp(row, 1, lanes)
                    T.buffer_store(weight.y, weight.finish(whole, m0 + t, place, factor), [m0 + t, place])
                with T.Else(), T.serial(0, lanes) as e, T.If(row + e < weight.rows), T.Then():
                    one, single = totals[t, vector, e], None
                    if panel.groups == 1:
                        single = T.Cast("float32", _stored(weight, 0, row, row % TILE_ROWS + e))
                    T.buffer_store(weight.y, weight.finish(one, m0 + t, row + e, single), [m0 + t, row + e])


def _scales(panel: Panel, weight: Weight, g: Any, row: Any) -> Any:
    """Load the scales of a register's rows as float32."""
    return T.Cast(f"float32x{panel.isa.lanes}", _stored(weight, g, row, T.ramp(row % TILE_ROWS, 1, panel.isa.lanes)))


def _stored(weight: Weight, g: Any, row: Any, at: Any) -> Any:
    """Load scales of the tile that a row is in; of rows that fill up a panel, another tile's."""
    scales = weight.parts["scales"]
    return scales[T.min(row // TILE_ROWS, int(scales.shape[0]) - 1), g, at]
