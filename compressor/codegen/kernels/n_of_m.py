"""The packed linear of which each row stores N of every M weights: codes are read as they lie, expanded in registers.

One row a lane.  A group's number selects, by ``1 << number`` and a mask for each column and place, which stored value a
column has; the others are zero.  What follows are dense products: zeros cost what other weights do, and what is saved
are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import code_quad, code_values, scale_values
from compressor.codegen.kernels.linear.prologue import Prologue, declare_inputs, fill_rows
from compressor.codegen.kernels.linear.weights import Weight, Weights, by_token
from compressor.codegen.kernels.vector import registers, splat, splat_float
from compressor.formats.extras import KeptOfGroup
from compressor.formats.format import Format
from compressor.formats.layouts.patterns import combinations
from compressor.formats.parts import TILE_ROWS

TOKENS = 4
"""Tokens that share what is expanded."""


def supports(fmt: Format) -> str:
    """Say why this kernel does not serve a format; an empty text if it does, or if the format is another kernel's."""
    pattern = fmt.extra(KeptOfGroup)
    if pattern is None or pattern.choices <= 32:  # one bit of a lane for each
        return ""
    return f"the kernel of N:M takes at most 32 choices a group, {pattern.choices} are too many"


@dataclass(frozen=True)
class Groups:
    """The products of a tile of 16 rows, group of M columns after group.

    Attributes:
        columns: of the weight.
    """

    columns: int
    fmt: Format
    isa: Isa

    @property
    def pattern(self) -> KeptOfGroup:
        """N and M."""
        found = self.fmt.extra(KeptOfGroup)
        assert found is not None
        return found

    @property
    def step(self) -> int:
        """Groups that end with a chunk of stored codes."""
        return self.fmt.chunk_columns // math.gcd(self.fmt.chunk_columns, self.pattern.kept)

    @property
    def count(self) -> int:
        """Groups of a row."""
        return self.columns // self.pattern.size

    @property
    def of_scale(self) -> int:
        """Groups that a scale serves."""
        return self.fmt.columns(self.columns) // self.pattern.kept

    def number(self, weight: Weight, tile: Any, group: Any, at: Any) -> Any:
        """Return ``1 << number`` of a group, one row a lane."""
        words, lanes, bits = weight.parts["patterns"], self.isa.lanes, self.pattern.index_bits
        first, last = group * bits // 32, int(words.shape[1]) - 1
        down = T.Cast("int32", group * bits % 32)
        low = T.reinterpret(words[tile, first, at], dtype=f"uint32x{lanes}")
        low = T.shift_right(low, T.Cast(f"uint32x{lanes}", T.broadcast(down, lanes)))
        high = words[tile, T.min(first + 1, last), at]  # what it adds beyond the number is masked
        high = T.shift_left(T.shift_left(high, T.broadcast(31 - down, lanes)), splat(1, lanes))
        both = T.bitwise_or(T.reinterpret(low, dtype=f"int32x{lanes}"), high)
        return T.bind(T.shift_left(splat(1, lanes), T.bitwise_and(both, splat((1 << bits) - 1, lanes))))

    def stored(self, weight: Weight, tile: Any, chunk: Any, places: range, at: Any) -> Iterator[Any]:
        """Yield the values of stored columns, counted from the beginning of a chunk, but for their scale."""
        codes, fmt, lanes = weight.parts["codes"], self.fmt, self.isa.lanes
        for place in places:
            which, column = divmod(place, fmt.chunk_columns)
            quad = code_quad(lambda word, which=which: codes[tile, chunk + which, word, at], fmt, column // 4, lanes)
            value = code_values(quad, column % 4, fmt, self.isa, lambda level: None)
            yield T.bind(value - splat_float(float(fmt.zero_point), lanes))

    def expanded(self, number: Any, stored: Sequence[Any]) -> Iterator[Any]:
        """Yield the values of a group's M columns, zero where a row does not keep one."""
        lanes, kept = self.isa.lanes, combinations(self.pattern)
        for column in range(self.pattern.size):
            value = splat_float(0.0, lanes)
            for place, given in enumerate(stored):
                mask = sum(1 << n for n, columns in enumerate(kept) if columns[place] == column)
                if mask:
                    is_it = T.NE(T.bitwise_and(number, splat(mask, lanes)), splat(0, lanes))
                    value = T.Select(is_it, given, value)
            yield T.bind(value)


def n_of_m_linear(
    rows: Sequence[int],
    columns: int,
    fmt: Format,
    has_bias: bool,
    isa: Isa,
    *,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.linear.packed_linear` of a format that keeps N of every M weights.

    Parameters of the result: as of :func:`compressor.codegen.kernels.linear.packed.fused_linear`.
    """
    weights, groups = Weights(rows, columns, fmt, has_bias, has_residual), Groups(columns, fmt, isa)
    fill, one, several = fill_rows(columns, prologue), _products(groups, 1), _products(groups, TOKENS)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given, of_norm = T.meta_var(declare_inputs(prologue, columns, d0, d1))
        weights.declare(d0, d1)
        tokens = T.meta_var(d0 * d1)
        slots = T.meta_var(T.if_then_else(tokens == 1, T.int64(1), (tokens + (TOKENS - 1)) // TOKENS * TOKENS))
        read = T.meta_var([by_token(buffer) for buffer in given])
        a = T.alloc_buffer((slots, columns), "float32")
        if tokens == 1:
            fill(read, of_norm, T.int64(0), a, T.int64(0))
            for i in T.parallel(weights.steps(1)):
                weight, tile = T.meta_var(weights.of_task(i, 1))
                one(weight, tile, a, tokens)
        else:
            for m in T.parallel(tokens):
                fill(read, of_norm, m, a, m)
            for i in T.parallel(weights.steps(1)):
                weight, tile = T.meta_var(weights.of_task(i, 1))
                several(weight, tile, a, tokens)

    return kernel


def _products(groups: Groups, block: int) -> Any:
    """Make a function that emits a tile's outputs for all tokens, ``block`` of them at a time."""
    lanes = groups.isa.lanes
    ramps = [T.ramp(first, 1, lanes) for first in range(0, TILE_ROWS, lanes)]

    def clear(buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            for v in range(len(ramps)):
                T.buffer_store(buffer, splat_float(0.0, lanes), [v, T.ramp(0, 1, lanes)])

    def add(buffer: Any, v: int, value: Any) -> None:
        at = [v, T.ramp(0, 1, lanes)]
        T.buffer_store(buffer, buffer[v, T.ramp(0, 1, lanes)] + value, at)

    def add_groups(weight: Weight, tile: Any, a: Any, token: Any, first: Any, count: int, acc: Sequence[Any]) -> None:
        size, kept = groups.pattern.size, groups.pattern.kept
        chunk = first * kept // groups.fmt.chunk_columns
        for v, at in enumerate(ramps):
            for u in range(count):
                number = groups.number(weight, tile, first + u, at)
                stored = list(groups.stored(weight, tile, chunk, range(u * kept, (u + 1) * kept), at))
                for c, value in enumerate(groups.expanded(number, stored)):
                    for t in range(block):
                        add(acc[t], v, value * T.broadcast(a[token + t, (first + u) * size + c], lanes))

    def products(weight: Weight, tile: Any, a: Any, tokens: Any) -> None:
        step, rest = groups.step, groups.count % groups.step
        scales = -(-groups.count // groups.of_scale)
        with T.serial(T.int64(0), (tokens + (block - 1)) // block) as j:
            acc, totals = (registers(block, (len(ramps), lanes)) for _ in range(2))
            clear(totals)
            with T.serial(0, scales) as g:
                clear(acc)
                begin = g * groups.of_scale
                with T.serial(0, T.min(groups.of_scale, groups.count - begin) // step) as s:
                    add_groups(weight, tile, a, j * block, begin + s * step, step, acc)
                if rest:
                    with T.If(g == scales - 1), T.Then():
                        add_groups(weight, tile, a, j * block, groups.count - rest, rest, acc)
                for v, at in enumerate(ramps):
                    scale = T.bind(scale_values(weight.parts["scales"][tile, g, at], groups.fmt, lanes))
                    for t in range(block):
                        add(totals[t], v, acc[t][v, T.ramp(0, 1, lanes)] * scale)
            for t in range(block):
                with T.If(j * block + t < tokens), T.Then():
                    _store(weight, totals[t], j * block + t, tile * TILE_ROWS, lanes)

    return products


def _store(weight: Weight, total: Any, token: Any, row: Any, lanes: int) -> None:
    """Store a token's outputs of a tile, as far as the weight has rows."""
    with T.If(row + TILE_ROWS <= weight.rows):
        with T.Then():
            for v in range(TILE_ROWS // lanes):
                place = T.ramp(row + v * lanes, 1, lanes)
                T.buffer_store(weight.y, weight.finish(total[v, T.ramp(0, 1, lanes)], token, place), [token, place])
        with T.Else(), T.serial(0, TILE_ROWS) as e, T.If(row + e < weight.rows), T.Then():
            value = weight.finish(total[e // lanes, e % lanes], token, row + e)
            T.buffer_store(weight.y, value, [token, row + e])
