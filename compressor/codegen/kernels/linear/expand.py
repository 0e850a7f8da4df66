"""Expand the tiles of a task where single weights are left out, so that dense products read them.

A step is 64 columns of a tile's 16 rows.  A row's mask spreads the codes that come next over 64 bytes, with codes of
zero between them; the number of its ones moves on.  Sixteen such rows are turned, as 16 x 16 words of four columns,
into the order of a dense weight of 8 bits::

    stored     uint8  [bytes]                       codes one after another
    rows       int8   16 registers of 64 columns
    expanded   int32  [tiles, words, 1, 16]         four columns a word, a row a lane

What is read never lies outside, whatever starts and bits are.  A task's tiles stay in the cache while its tokens are
computed: time is that of the dense format, and what is saved are bytes from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.weights import Apart, Weight, Weights
from compressor.codegen.kernels.vector import splat
from compressor.formats.extras import SingleZeros
from compressor.formats.format import Format
from compressor.formats.parts import STEP, TILE_ROWS

_WORDS = STEP // 4
_STAGED = TILE_ROWS + 2  # blocks of 64 codes: a step's 16 rows may begin within one, and whole registers are loaded


def supports(fmt: Format, isa: Isa) -> str:
    """Say why tiles are not expanded; an empty text where they are, or nothing is left out."""
    if fmt.extra(SingleZeros) is None:
        return ""
    size = fmt.group_size
    if not fmt.symmetric and size % STEP and (STEP % size or size % 8):
        return f"zero points of groups of {size} columns are not expanded; take 32, 64 or 128"
    return "" if isa.spread or isa.spread_eight else f"{isa.name} has no instruction that spreads bytes"


class ExpandedProducts(Products):
    """Products of a dense format whose codes have a byte each, whatever their bits."""

    def quad(self, codes: Any, tile: Any, chunk: Any, quad: int, at: Any) -> Any:
        """Return the codes of four columns of a chunk, one a byte, for a register's rows."""
        return codes[tile, chunk * (self.fmt.chunk_columns // 4) + quad, 0, at]


@dataclass(frozen=True)
class _Tiles:
    """Some tiles of a weight: a buffer of them, read by the tiles' own numbers."""

    buffer: Any
    first: Any

    def __getitem__(self, place: tuple[Any, ...]) -> Any:
        tile, *others = place
        return self.buffer[(tile - self.first, *others)]


class ExpandingWeights(Weights):
    """Weights of which a task gets its tiles expanded."""

    def __init__(
        self, rows: Sequence[int], columns: int, fmt: Format, has_bias: bool, has_residual: bool, isa: Isa
    ) -> None:
        super().__init__(rows, columns, fmt, has_bias, has_residual)
        self.isa, self.totals = isa, [_single(fmt).kept(n, columns) for n in rows]

    def of_task(self, i: Any, n_tiles: int) -> tuple[Weight, Any]:
        """Return the weight that task ``i`` belongs to, its codes expanded, and the first of the task's tiles in it."""
        weight, first = super().of_task(i, n_tiles)
        one = _Expansion(weight, self.of_each(i, n_tiles, self.totals), self.columns, self.fmt, self.isa)
        expanded = T.alloc_buffer((n_tiles, one.steps * _WORDS, 1, TILE_ROWS), "int32")
        one.emit(expanded, first, n_tiles)
        return replace(weight, parts={**weight.parts, "codes": _Tiles(expanded, first)}), first

    def apart(self, i: Any, n_tiles: int) -> tuple[Weight, Apart]:
        """Return tiles side by side, as a task expands them."""
        weight, first = self.of_task(i, n_tiles)
        return weight, Apart(first, T.int64(1))


def weights_of(rows: Sequence[int], columns: int, fmt: Format, has_bias: bool, has_residual: bool, isa: Isa) -> Weights:
    """Return the weights of a kernel, whose tasks expand their tiles where single weights are left out."""
    if fmt.extra(SingleZeros) is None:
        return Weights(rows, columns, fmt, has_bias, has_residual)
    return ExpandingWeights(rows, columns, fmt, has_bias, has_residual, isa)


@dataclass(frozen=True)
class _Expansion:
    """Emit the loops that expand one weight's tiles.

    Attributes:
        total: codes that are stored.
        columns: of the weight.
    """

    weight: Weight
    total: Any
    columns: int
    fmt: Format
    isa: Isa

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.columns // STEP)

    def emit(self, expanded: Any, first: Any, n_tiles: int) -> None:
        """Emit the loops over tiles and steps."""
        fill = T.alloc_buffer((1,), "int64")  # codes before the next
        stage = T.alloc_buffer((_STAGED * STEP,), "uint8") if self.fmt.bits < 8 else None
        every, kept = T.ramp(0, 1, TILE_ROWS), self.weight.parts["kept"]
        with T.serial(0, n_tiles) as n:
            start = T.Cast("int64", self.weight.parts["starts"][first + n])
            T.buffer_store(fill, T.max(T.min(start, self.total), T.int64(0)), [0])
            with T.serial(0, self.steps) as step:
                stored = [kept[first + n, step, r, T.ramp(0, 1, 8)] for r in range(TILE_ROWS)]
                masks = [T.bind(T.reinterpret(mask, dtype="uint64")) for mask in stored]
                place = fill[0] if stage is None else self._unpack(stage, fill[0], masks)
                rows = []
                for r, mask in enumerate(masks):
                    rows.append(T.bind(self._row(stage, place, mask, self._others(first + n, step, r))))
                    place = T.bind(place + T.Cast("int64", T.popcount(mask)))
                    place = place if stage is not None else T.bind(T.min(place, self.total))
                for w, word in enumerate(_turned(rows)):
                    T.buffer_store(expanded, word, [n, step * _WORDS + w, 0, every])
                if stage is None:
                    T.buffer_store(fill, place, [0])
                else:
                    ones = sum((T.Cast("int64", T.popcount(mask)) for mask in masks), T.int64(0))
                    T.buffer_store(fill, T.min(fill[0] + ones, self.total), [0])

    def _row(self, stage: Any, place: Any, mask: Any, others: Sequence[Any]) -> Any:
        """Return 64 columns of a row, int32x16: the codes from ``place`` on where the mask has ones."""
        source = self.weight.parts["codes"] if stage is None else stage
        if self.isa.spread is not None:
            values = T.reinterpret(source[T.ramp(place, 1, STEP)], dtype=f"int8x{STEP}")
            pieces = [T.broadcast(_as_int8(other), STEP // len(others)) for other in others]
            blank = pieces[0] if len(pieces) == 1 else T.Shuffle(pieces, list(range(STEP)))
            return T.reinterpret(self.isa.spread(values, mask, blank), dtype=f"int32x{_WORDS}")
        assert self.isa.spread_eight is not None
        found = []
        for k in range(STEP // 8):
            flags = T.bind(T.bitwise_and(T.shift_right(mask, T.uint64(8 * k)), T.uint64(0xFF)))
            values = T.reinterpret(source[T.ramp(place, 1, 8)], dtype="uint64")
            blank = _as_uint64(others[k * len(others) // 8])
            found.append(T.bind(self.isa.spread_eight(values, flags, blank)))
            place = T.bind(place + T.Cast("int64", T.popcount(flags)))
        return T.reinterpret(T.Shuffle(found, list(range(len(found)))), dtype=f"int32x{_WORDS}")

    def _others(self, tile: Any, step: Any, row: int) -> list[Any]:
        """Return the codes of zero of a row's columns, numbers or uint8: one for each equal part of the step."""
        if self.fmt.symmetric:
            return [self.fmt.zero_code]
        zeros, size = self.weight.parts["zeros"], self.fmt.columns(self.columns)
        last, count = self.fmt.groups(self.columns) - 1, max(1, STEP // size) if self.fmt.group_size else 1
        places = [T.min((step * STEP + k * (STEP // count)) // size, last) for k in range(count)]
        if self.fmt.block_tiles:
            return [T.bind(zeros[tile // self.fmt.block_tiles, g]) for g in places]
        return [T.bind(zeros[tile, g, row]) for g in places]

    def _unpack(self, stage: Any, fill: Any, masks: Sequence[Any]) -> Any:
        """Emit what unpacks the codes of a step to a byte each; return where they begin."""
        begin = T.bind(fill // STEP)
        ones = sum((T.Cast("int64", T.popcount(mask)) for mask in masks), T.int64(0))
        last = (self.total + (STEP - 1)) // STEP  # zeros
        with T.serial(T.int64(0), (fill % STEP + ones + (STEP - 1)) // STEP) as k:
            whole = self._codes(T.min(begin + k, last))
            T.buffer_store(stage, T.reinterpret(whole, dtype=f"uint8x{STEP}"), [T.ramp(k * STEP, 1, STEP)])
        return T.bind(fill % STEP)

    def _codes(self, block: Any) -> Any:
        """Return 64 codes, a byte each, int32x16."""
        found, offset, first = None, 0, 0
        for width in self.fmt.planes:
            place = block * (8 * self.fmt.bits) + first
            stored = self.weight.parts["codes"][T.ramp(place, 1, 8 * width)]
            plane, parts = T.bind(T.reinterpret(stored, dtype=f"int32x{2 * width}")), []
            for j in range(8 // width):
                down = width * j - offset
                moved = T.shift_right if down > 0 else T.shift_left
                part = moved(plane, splat(abs(down), 2 * width)) if down else plane
                parts.append(T.bitwise_and(part, splat((((1 << width) - 1) << offset) * 0x01010101, 2 * width)))
            whole = T.Shuffle(parts, list(range(_WORDS)))
            found = whole if found is None else T.bitwise_or(found, whole)
            offset, first = offset + width, first + 8 * width
        return found


def _turned(rows: Sequence[Any]) -> Sequence[Any]:
    """Transpose 16 int32x16: four rounds, each of which moves the highest bit of a row's number to the columns'."""
    half = TILE_ROWS // 2
    for _ in range(4):
        rows = [
            T.bind(T.Shuffle([rows[k // 2], rows[k // 2 + half]], [
                half * (k % 2) + lane // 2 + TILE_ROWS * (lane % 2) for lane in range(TILE_ROWS)
            ]))
            for k in range(TILE_ROWS)
        ]  # fmt: skip
    return rows


def _as_int8(byte: Any) -> Any:
    """Return a byte as int8: what is loaded, or a number, which LLVM does not reinterpret if it is 0."""
    return T.int8(byte - 256 * (byte > 127)) if isinstance(byte, int) else T.reinterpret(byte, dtype="int8")


def _as_uint64(byte: Any) -> Any:
    """Return a byte eight times.  TVM has no constants above 2^63, hence the signed one."""
    ones = 0x0101010101010101
    if not isinstance(byte, int):
        return T.Cast("uint64", byte) * T.uint64(ones)
    return T.uint64(byte * ones) if byte < 128 else T.reinterpret(T.int64(byte * ones - (1 << 64)), dtype="uint64")


def _single(fmt: Format) -> SingleZeros:
    found = fmt.extra(SingleZeros)
    assert found is not None
    return found
