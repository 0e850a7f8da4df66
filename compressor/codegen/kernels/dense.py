"""The dense linear: float weights in their storage type, row-major, float32 arithmetic.

Weights stay as the checkpoint has them, [out, in], because a tied embedding reads the same bytes.  A step takes
``rows`` weight rows by ``tokens`` tokens; each pair has one vector accumulator over the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.codes import to_float
from compressor.codegen.kernels.vector import VECTOR, emit_tree_sum


@dataclass(frozen=True)
class Schedule:
    """What the tuner chooses: weight rows a step for one token, and rows by tokens for many."""

    gemv_rows: int
    gemm_rows: int
    gemm_tokens: int


_GEMM_DEFAULT = (4, 3)  # sums of less than 1 KB: see vector.registers


def gemv_space() -> list[Schedule]:
    """Schedules that differ in what one token takes; the default first."""
    return [Schedule(rows, *_GEMM_DEFAULT) for rows in (8, 4, 15)]


def gemm_space(gemv_rows: int) -> list[Schedule]:
    """Schedules that differ in what several tokens take; the default first."""
    return [Schedule(gemv_rows, rows, tokens) for rows, tokens in (_GEMM_DEFAULT, (3, 5), (2, 6), (6, 2))]


def dense_linear(
    out_features: int, in_features: int, storage: str, has_bias: bool, schedule: Schedule
) -> tvm.tirx.PrimFunc:
    """TIR for ``y = x @ weight.T + bias``.

    Parameters of the result: x float32 [d0, d1, in], weight [out, in] of dtype ``storage`` ("float32",
    "float16", or "uint16" for the bits of bfloat16), bias float32 [out] (where there is one), y float32
    [d0, d1, out].
    """
    rows, columns, step, every = out_features, in_features, schedule.gemm_tokens, T.ramp(0, 1, VECTOR)
    vectors, tail = columns // VECTOR, columns % VECTOR

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, weight_: T.handle, bias_: T.handle, y_: T.handle) -> None:
        d0 = T.int64()
        d1 = T.int64()
        x3 = T.match_buffer(x_, (d0, d1, columns), "float32")
        weight = T.match_buffer(weight_, (rows, columns), storage)
        bias = T.meta_var(T.match_buffer(bias_, (rows,), "float32") if has_bias else None)
        y3 = T.match_buffer(y_, (d0, d1, rows), "float32")
        tokens = T.meta_var(d0 * d1)
        x = T.decl_buffer((tokens, columns), "float32", data=x3.data)
        y = T.decl_buffer((tokens, rows), "float32", data=y3.data)

        @T.inline
        def block(row0, n_rows, m0, n_tokens):
            # Rows and tokens over the end repeat the last one, and are not stored.
            acc = T.alloc_buffer((n_tokens, n_rows, VECTOR), "float32")
            for t in T.unroll(n_tokens):
                for r in T.unroll(n_rows):
                    acc[t, r, every] = T.broadcast(T.float32(0), VECTOR)
            for k in range(vectors):
                add_vector(acc, x, weight, row0, rows, m0, tokens, n_rows, n_tokens, k, storage)
            for t in T.unroll(n_tokens):
                for r in T.unroll(n_rows):
                    emit_tree_sum(acc, VECTOR, t, r)
                    if m0 + t < tokens and row0 + r < rows:
                        for k in range(tail):
                            at = T.meta_var(vectors * VECTOR + k)
                            single = T.meta_var(to_float(weight[row0 + r, at], storage, 1))
                            acc[t, r, 0] = acc[t, r, 0] + single * x[m0 + t, at]
                        y[m0 + t, row0 + r] = acc[t, r, 0] + bias[row0 + r] if has_bias else acc[t, r, 0]

        if tokens == 1:
            for i in T.parallel((rows + schedule.gemv_rows - 1) // schedule.gemv_rows):
                block(i * schedule.gemv_rows, schedule.gemv_rows, T.int64(0), 1)
        else:
            for i in T.parallel((rows + schedule.gemm_rows - 1) // schedule.gemm_rows):
                for j in range((tokens + (step - 1)) // step):
                    block(i * schedule.gemm_rows, schedule.gemm_rows, j * step, step)

    x, weight, bias, y = kernel.params
    params = [x, weight, *([bias] if has_bias else []), y]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def add_vector(
    acc: Any,
    x: Any,
    weight: Any,
    row0: Any,
    rows: int,
    m0: Any,
    tokens: Any,
    n_rows: int,
    n_tokens: int,
    k: Any,
    storage: str,
) -> None:
    """Emit one vector of columns for every pair of token and row."""
    every, at = T.ramp(0, 1, VECTOR), T.ramp(k * VECTOR, 1, VECTOR)
    for r in range(n_rows):
        row = T.min(row0 + r, rows - 1) if rows % n_rows else row0 + r
        wide = to_float(weight[row, at], storage, VECTOR)
        for t in range(n_tokens):
            token = T.min(m0 + t, tokens - 1) if n_tokens > 1 else m0
            T.buffer_store(acc, acc[t, r, every] + wide * x[token, at], [t, r, every])
