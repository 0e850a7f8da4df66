"""Embeddings: gather rows of a table, and widen or dequantise them to float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import code_quad, code_values, scale_values, to_float
from compressor.codegen.kernels.linear.weights import by_token, parameter
from compressor.codegen.kernels.vector import VECTOR
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS


def embedding(rows: int, width: int, storage: str) -> tvm.tirx.PrimFunc:
    """TIR for ``y[i, j] = table[ids[i, j]]``.

    Parameters of the result: table [rows, width] of dtype ``storage`` (as in ``dense_linear``), ids int64
    [d0, d1], y float32 [d0, d1, width].  The run-time checks that ids lie in the table.
    """
    vectors, tail = width // VECTOR, width % VECTOR

    @T.prim_func(s_tir=True, private=True)
    def kernel(table_: T.handle, ids_: T.handle, y_: T.handle) -> None:
        d0 = T.int64()
        d1 = T.int64()
        table = T.match_buffer(table_, (rows, width), storage)
        ids = T.match_buffer(ids_, (d0, d1), "int64")
        y = T.match_buffer(y_, (d0, d1, width), "float32")
        for i, j in T.grid(d0, d1):
            for k in range(vectors):
                at = T.meta_var(T.ramp(k * VECTOR, 1, VECTOR))
                y[i, j, at] = to_float(table[ids[i, j], at], storage, VECTOR)
            for k in range(tail):
                one = T.meta_var(vectors * VECTOR + k)
                y[i, j, one] = to_float(table[ids[i, j], one], storage, 1)

    return kernel


def packed_embedding(rows: int, width: int, fmt: Format, isa: Isa) -> tvm.tirx.PrimFunc:
    """TIR for the rows of a packed table, one value after another: the words of a row lie 16 apart.

    Parameters of the result: ids int64 [d0, d1], the parts of the table (:mod:`compressor.formats.format`), y float32
    [d0, d1, width].  Ids outside the table, which the run-time refuses, read its first or last row.
    """
    row = PackedRow(fmt, width, replace(isa, lanes=1, quick_lookup=False, lookup16=None))
    stored = fmt.parts(rows, width)
    span, groups = fmt.chunk_columns, fmt.groups(width)
    group_chunks, (whole, rest) = -(-fmt.columns(width) // span), divmod(width, span)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        ids = T.meta_var(parameter((d0, d1), "int64"))
        parts = T.meta_var({name: parameter(shape, kind) for name, (kind, shape) in stored.items()})
        y3 = T.meta_var(parameter((d0, d1, width), "float32"))
        y = T.meta_var(by_token(y3))
        factor = T.alloc_buffer((2,), "float32")  # scale and zero of a group
        for i, j in T.grid(d0, d1):
            place = T.meta_var(T.max(T.min(ids[i, j], T.int64(rows - 1)), T.int64(0)))
            tile, lane = T.meta_var((place // TILE_ROWS, place % TILE_ROWS))
            token = T.meta_var(i * d1 + j)
            for g in range(groups):
                row.start_group(parts, factor, tile, g, lane)
                for c in range(T.min(group_chunks, whole - g * group_chunks)):
                    row.chunk(parts, factor, y, token, tile, g, g * group_chunks + c, lane, span)
            if rest > 0:
                row.chunk(parts, factor, y, token, tile, groups - 1, whole, lane, rest)

    return kernel


@dataclass(frozen=True)
class PackedRow:
    """Emit what turns the words of one row into numbers.

    Attributes:
        isa: of one lane.
    """

    fmt: Format
    width: int
    isa: Isa

    def start_group(self, parts: Mapping[str, Any], factor: Any, tile: Any, g: Any, lane: Any) -> None:
        """Load the scale of a group of columns, and its zero point."""
        if self.fmt.codebook:
            return
        scale = scale_values(parts["scales"][tile, g, lane], self.fmt, 1)
        if "tensor_scale" in parts:
            scale = scale * parts["tensor_scale"][0]
        T.buffer_store(factor, scale, [0])
        zero = T.float32(self.fmt.zero_point)
        if not self.fmt.symmetric:
            zero = T.Cast("float32", parts["zeros"][tile, g, lane])
        T.buffer_store(factor, zero, [1])

    def chunk(
        self,
        parts: Mapping[str, Any],
        factor: Any,
        y: Any,
        token: Any,
        tile: Any,
        g: Any,
        c: Any,
        lane: Any,
        count: int,
    ) -> None:
        """Write the first ``count`` columns of a chunk."""
        fmt, codes = self.fmt, parts["codes"]
        for quad in range(-(-count // 4)):
            four = code_quad(lambda word: codes[tile, c, word, lane], fmt, quad, 1)
            for byte in range(min(4, count - 4 * quad)):
                column = c * fmt.chunk_columns + 4 * quad + byte
                T.buffer_store(y, self._value(parts, factor, four, byte, tile, g, lane), [token, column])

    def _value(self, parts: Mapping[str, Any], factor: Any, four: Any, byte: int, tile: Any, g: Any, lane: Any) -> Any:
        if self.fmt.codebook:
            code = T.bitwise_and(T.shift_right(four, T.int32(8 * byte)), T.int32(0xFF))
            return T.Cast("float32", parts["codebook"][tile, g, code, lane])
        value = code_values(four, byte, self.fmt, self.isa, lambda _level: None)
        return (value if self.fmt.element is not None else value - factor[1]) * factor[0]
