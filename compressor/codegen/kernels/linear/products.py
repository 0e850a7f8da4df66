"""The products of the packed linear: what a group of columns adds to the outputs of some tiles, for some tokens.

A packed linear in :mod:`compressor.codegen.kernels.linear.packed` is loops around these statements.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import code_quad, code_values, dot4, less_128, scale_values
from compressor.codegen.kernels.vector import product, splat, splat_float
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS


class Products:
    """The unrolled inner statements; each method emits stores into the function that is being built."""

    def __init__(self, rows: int, columns: int, fmt: Format, isa: Isa) -> None:
        self.fmt, self.isa, self.integer, self.tiles = fmt, isa, fmt.integer_products, -(-rows // TILE_ROWS)
        act = fmt.activations.group_size if fmt.activations is not None and self.integer else 0
        # A group here shares both scales, of the weight and of integer activations; the larger is a multiple.
        self.group_columns = min(fmt.columns(columns), act or fmt.columns(columns))
        self.scale_groups = -(-fmt.columns(columns) // self.group_columns)
        self.act_span = max(1, act // self.group_columns)
        self.chunks, self.groups = fmt.chunks(columns), -(-columns // self.group_columns)
        self.act_groups = -(-columns // act) if act else 1
        self.padded = self.chunks * fmt.chunk_columns  # columns of prepared activations
        self.group_chunks = -(-self.group_columns // fmt.chunk_columns)
        self.table_size = fmt.levels if fmt.codebook else 1
        # Codes of integers are unsigned: their zero point is subtracted, a half of one from the sums of integers.
        self.has_zeros = fmt.element is None and not fmt.codebook
        self.accumulators = self.digits = 1  # registers of sums for rows of a tile, numbers for an activation
        self.half = fmt.zero_point % 1 if self.integer else 0.0
        # What codes are less where products multiply them, and their zero points; only signed products need it.
        self.less = 128 if self.integer and self.has_zeros and fmt.bits == 8 and isa.signed4 is not None else 0

    def lanes(self, n_tokens: int, n_tiles: int) -> Iterator[tuple[int, int, Any]]:
        """(token, tile, rows of the tile that one register holds)."""
        for n in range(n_tiles):
            for part in range(0, TILE_ROWS, self.isa.lanes):
                for t in range(n_tokens):
                    yield t, n, T.ramp(part, 1, self.isa.lanes)

    def at(self, token: Any, tile: Any, place: Any) -> tuple[Any, ...]:
        """Return the index of what a token has at a place: activations and sums [tokens, n] are those of all tiles."""
        return token, place

    def four(self, a: Any, token: Any, tile: Any, column: Any) -> Any:
        """Return a token's integer activations of four columns, as an int32."""
        return T.reinterpret(a[self.at(token, tile, T.ramp(column, 1, 4))], dtype="int32")

    def quad(self, codes: Any, tile: Any, chunk: Any, quad: int, at: Any) -> Any:
        """Return the codes of four columns of a chunk, one a byte, for a register's rows."""
        return code_quad(lambda word: codes[tile, chunk, word, at], self.fmt, quad, self.isa.lanes)

    def dot(self, total: Any, codes: Any, four: Any) -> Any:
        """Add the products of four codes with four activations in each lane."""
        if self.less:
            assert self.isa.signed4 is not None
            return self.isa.signed4(total, less_128(codes, self.isa.lanes), four)
        return dot4(total, codes, four, self.fmt, self.isa)

    def _const(self, value: float) -> Any:
        return T.int32(int(value)) if self.integer else T.float32(value)

    def clear(self, out: Any, n_tokens: int, n_tiles: int) -> None:
        """Set the outputs to zero, unless the only group sets them."""
        for t, n, at in self.lanes(n_tokens if self.groups > 1 else 0, n_tiles):
            buffer, place = outputs_of(out, t)
            T.buffer_store(buffer, T.broadcast(T.float32(0), self.isa.lanes), [place, n, at])

    def start_group(
        self, acc: Any, sums: Any, zeros: Any, first: Any, m0: Any, g: Any, n_tokens: int, n_tiles: int
    ) -> None:
        """Accumulators begin at minus the zero point times the sum of the group's activations."""
        for t, n, at in self.lanes(n_tokens, n_tiles):
            if not self.has_zeros:
                T.buffer_store(acc[t], T.broadcast(T.float32(0), self.isa.lanes), [n, at])
                continue
            T.buffer_store(acc[t], self.minus_zeros(sums[self.at(m0 + t, n, g)], zeros, first + n, g, at), [n, at])

    def minus_zeros(self, total: Any, zeros: Any, tile: Any, g: Any, at: Any) -> Any:
        """Minus the zero points of a register's rows times ``total``, the sum of a token's activations in the group."""
        lanes, kind = self.isa.lanes, "int32" if self.integer else "float32"
        minus_sum = self._const(0) - total
        if zeros is None:
            return T.broadcast(minus_sum * self._const(self.fmt.zero_point - self.half - self.less), lanes)
        points = T.Cast(f"{kind}x{lanes}", self.of_rows(zeros, tile, g, at))
        return T.broadcast(minus_sum, lanes) * (points - splat(self.less, lanes) if self.less else points)

    def of_rows(self, part: Any, tile: Any, g: Any, at: Any) -> Any:
        """Scales or zeros of a register's rows; those of a block share one."""
        if self.fmt.block_tiles:
            return T.broadcast(part[tile // self.fmt.block_tiles, g // self.scale_groups], self.isa.lanes)
        return part[tile, g // self.scale_groups, at]

    def load_table(self, table: Any, codebook: Any, first: Any, g: Any, n_tiles: int) -> None:
        """Load the group's codebook as float32, where it has one."""
        for _, n, at in self.lanes(1, n_tiles if self.fmt.codebook else 0):
            for level in range(self.table_size):
                value = T.Cast(f"float32x{self.isa.lanes}", codebook[first + n, g, level, at])
                T.buffer_store(table, value, [n, level, at])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add one chunk of columns of every tile and token."""
        lanes, fmt = self.isa.lanes, self.fmt
        for quad in range(fmt.chunk_columns // 4):
            column = c * fmt.chunk_columns + 4 * quad
            last = None
            for t, n, at in self.lanes(n_tokens, n_tiles):
                if t == 0:  # a new register of codes, shared by all tokens
                    last = self.quad(codes, first + n, c, quad, at)
                    for i in range(0 if self.integer else 4):
                        value = code_values(last, i, fmt, self.isa, partial(_entry, table, n, at))
                        T.buffer_store(values, value, [i, at])
                if self.integer:
                    four = T.broadcast(self.four(a, m0 + t, n, column), lanes)
                    value = self.dot(acc[t][n, at], last, four)
                else:
                    value = acc[t][n, at]
                    for i in range(4):
                        value = value + values[i, at] * T.broadcast(a[self.at(m0 + t, n, column + i)], lanes)
                T.buffer_store(acc[t], value, [n, at])

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Apply the group's scales: the weight's, and the activations' where they have several (``factor``)."""
        for t, n, at in self.lanes(n_tokens, n_tiles):
            scale = None
            if scales is not None:
                scale = scale_values(self.of_rows(scales, first + n, g, at), self.fmt, self.isa.lanes)
            value = self.scaled(acc[t][n, at], scale, sums, factor, m0 + t, g)
            buffer, place = outputs_of(out, t)
            T.buffer_store(buffer, value if self.groups == 1 else buffer[place, n, at] + value, [place, n, at])

    def scaled(self, total: Any, scale: Any, sums: Any, factor: Any, m: Any, g: Any) -> Any:
        """Scale a group's sums for a token, as float32.

        Those of the only group wait for bias and residual, and for a factor that LLVM may know to be 1.
        """
        lanes = self.isa.lanes
        value = T.Cast(f"float32x{lanes}", total) if self.integer else total
        if self.half:
            value = value + T.broadcast(T.Cast("float32", sums[m, g]), lanes) * splat_float(-self.half, lanes)
        if scale is None:
            return value
        if factor is not None:
            scale = scale * T.broadcast(factor[m, g // self.act_span], lanes)
        return product(value, scale, lanes) if self.groups == 1 else value * scale


def outputs_of(out: Any, token: int) -> tuple[Any, int]:
    """Return the buffer [tokens, tiles, 16] that has a token's outputs, one for all or one each, and its place."""
    return (out[token], 0) if isinstance(out, list) else (out, token)


def _entry(table: Any, n: int, at: Any, level: int) -> Any:
    return table[n, level, at]
