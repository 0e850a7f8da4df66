"""Kernels of rows: norms, rows of tables, and the largest elements of rows."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import WARP, barrier, warp_best, warp_sum
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import to_float
from compressor.codegen.kernels.embedding import PackedRow
from compressor.codegen.kernels.linear.weights import by_token, parameter
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

THREADS = 256
"""Threads of a block, where nothing asks for another number."""

_MOST_THREADS = 1024
_EACH = 4  # elements of a row that one thread should have, where the row is long enough


def row_threads(width: int) -> int:
    """Return how many threads share a row of ``width`` elements: whole warps, at most 1024."""
    return min(_MOST_THREADS, -(-width // (_EACH * WARP)) * WARP)


def norm(width: int, eps: float, centred: bool, has_bias: bool) -> tvm.tirx.PrimFunc:
    """Write TIR for ``(x - mean?) / sqrt(mean((x - mean?) ** 2) + eps) * weight + bias``, one block a row.

    Args:
        centred: layer norm (subtract the mean) or RMS norm.
    Parameters of the result: x float32 [d0, d1, width], weight [width], bias [width] (where there is one),
    y like x.
    """
    threads = row_threads(width)
    each = -(-width // threads)
    total = block_sum(threads)

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        d0 = T.int64()
        d1 = T.int64()
        x3 = T.meta_var(parameter((d0, d1, width), "float32"))
        weight = T.meta_var(parameter((width,), "float32"))
        bias = T.meta_var(parameter((width,), "float32") if has_bias else None)
        y3 = T.meta_var(parameter((d0, d1, width), "float32"))
        x = T.meta_var(by_token(x3))
        y = T.meta_var(by_token(y3))
        with T.launch_thread("blockIdx.x", d0 * d1) as m, T.launch_thread("threadIdx.x", threads) as t:
            scratch = T.alloc_buffer((2, threads // WARP), "float32", scope="shared")
            mean = T.alloc_buffer((1,), "float32", scope="local")
            squares = T.alloc_buffer((1,), "float32", scope="local")
            mean[0] = T.float32(0)
            if centred:
                for k in range(each):
                    if k * threads + t < width:
                        mean[0] = mean[0] + x[m, k * threads + t]
                total(mean, scratch, 0, t)
                mean[0] = mean[0] / T.float32(width)
            squares[0] = T.float32(0)
            for k in range(each):
                if k * threads + t < width:
                    d = T.meta_var(x[m, k * threads + t] - mean[0])
                    squares[0] = squares[0] + d * d
            total(squares, scratch, 1, t)
            factor = T.alloc_buffer((1,), "float32", scope="local")
            factor[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(width) + T.float32(eps))
            if centred:  # a variance that overflows has no inverse
                factor[0] = T.if_then_else(squares[0] < T.float32(math.inf), factor[0], T.float32(math.nan))
            for k in range(each):
                if k * threads + t < width:
                    at = T.meta_var(k * threads + t)
                    scaled = T.meta_var((x[m, at] - mean[0]) * factor[0] * weight[at])
                    y[m, at] = scaled if bias is None else scaled + bias[at]

    return kernel


def block_sum(threads: int) -> Any:
    """Make a macro ``total(value, scratch, row, t)`` that gives every thread of a block the sum of ``value[0]``.

    It uses a row of ``scratch`` float32 [., threads // 32], shared: each use its own, so that one barrier is enough.
    """
    warps = threads // WARP

    @T.inline
    def total(value, scratch, row, t):
        value[0] = warp_sum(value[0])
        if warps > 1:
            if t % WARP == 0:
                scratch[row, t // WARP] = value[0]
            barrier()
            value[0] = T.float32(0)
            for w in range(warps):
                value[0] = value[0] + scratch[row, w]

    return total


def embedding(rows: int, width: int, storage: str) -> tvm.tirx.PrimFunc:
    """Write TIR for ``y[i, j] = table[ids[i, j]]``, one block a row.

    Parameters of the result: table [rows, width] of dtype ``storage`` (as in ``dense_linear``), ids int64 [d0, d1], y
    float32 [d0, d1, width].  The run-time checks that ids lie in the table.
    """
    threads = row_threads(width)

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        d0 = T.int64()
        d1 = T.int64()
        table = T.meta_var(parameter((rows, width), storage))
        ids = T.meta_var(parameter((d0, d1), "int64"))
        y3 = T.meta_var(parameter((d0, d1, width), "float32"))
        y = T.meta_var(by_token(y3))
        with T.launch_thread("blockIdx.x", d0 * d1) as m, T.launch_thread("threadIdx.x", threads) as t:
            for k in range(-(-width // threads)):
                if k * threads + t < width:
                    y[m, k * threads + t] = to_float(table[ids[m // d1, m % d1], k * threads + t], storage, 1)

    return kernel


def packed_embedding(rows: int, width: int, fmt: Format) -> tvm.tirx.PrimFunc:
    """Write TIR for the rows of a packed table: a block a row, and a thread a chunk of columns.

    Parameters of the result: ids int64 [d0, d1], the parts of the table (:mod:`compressor.formats.format`), y float32
    [d0, d1, width].  Ids outside the table, which the run-time refuses, read its first or last row.
    """
    row = PackedRow(fmt, width, Isa("cuda", 1))
    stored, span, groups = fmt.parts(rows, width), fmt.chunk_columns, fmt.groups(width)
    group_chunks, (whole, rest) = -(-fmt.columns(width) // span), divmod(width, span)
    threads = row_threads(_EACH * (whole + (rest > 0)))

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        d0 = T.int64()
        d1 = T.int64()
        ids = T.meta_var(parameter((d0, d1), "int64"))
        parts = T.meta_var({name: parameter(shape, kind) for name, (kind, shape) in stored.items()})
        y3 = T.meta_var(parameter((d0, d1, width), "float32"))
        y = T.meta_var(by_token(y3))
        with T.launch_thread("blockIdx.x", d0 * d1) as m, T.launch_thread("threadIdx.x", threads) as t:
            factor = T.alloc_buffer((2,), "float32", scope="local")  # scale and zero of a group
            place = T.meta_var(T.max(T.min(ids[m // d1, m % d1], T.int64(rows - 1)), T.int64(0)))
            tile, lane = T.meta_var((place // TILE_ROWS, place % TILE_ROWS))
            for k in range(-(-whole // threads)):
                c = T.meta_var(k * threads + t)
                if c < whole:
                    row.start_group(parts, factor, tile, c // group_chunks, lane)
                    row.chunk(parts, factor, y, m, tile, c // group_chunks, c, lane, span)
            if rest > 0 and t == 0:
                row.start_group(parts, factor, tile, groups - 1, lane)
                row.chunk(parts, factor, y, m, tile, groups - 1, whole, lane, rest)

    return kernel


def top_k(n: int, k: int) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.top_k`: a warp a row, which searches for the largest k times.

    Parameters of the result: x float32 [rows, n], index int64 [rows, k].
    """
    each = -(-n // WARP)

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        rows = T.int64()
        x = T.meta_var(parameter((rows, n), "float32"))
        index = T.meta_var(parameter((rows, k), "int64"))
        # TVM asks of every kernel of one operand whether it only reshapes, and expects a block.
        with T.sblock("root"):
            with T.launch_thread("blockIdx.x", rows) as m, T.launch_thread("threadIdx.x", WARP) as t:
                taken = T.alloc_buffer((each,), "int32", scope="local")
                best = T.alloc_buffer((2,), "int32", scope="local")  # of this lane, of all
                for i in range(each):
                    taken[i] = T.Cast("int32", i * WARP + t >= n)
                for j in range(k):
                    best[0] = T.int32(-1)
                    for i in range(each):
                        if taken[i] == 0:
                            if best[0] < 0 or _is_above(x[m, i * WARP + t], x[m, T.max(best[0], 0)]):
                                best[0] = i * WARP + t
                    best[1] = warp_best(x[m, T.max(best[0], 0)], best[0])
                    if best[1] % WARP == t:
                        taken[best[1] // WARP] = T.int32(1)
                    if t == 0:
                        index[m, j] = T.Cast("int64", best[1])

    return kernel


def _is_above(value: Any, other: Any) -> Any:
    """Compare as PyTorch sorts: NaN is above all numbers."""
    return T.Or(value > other, T.And(T.isnan(value), T.Not(T.isnan(other))))
