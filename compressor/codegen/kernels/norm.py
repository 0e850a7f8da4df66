"""Root-mean-square and layer normalisation over the last dimension."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.vector import VECTOR, emit_tree_sum

PARALLEL_FROM = 1 << 15
"""Elements from which splitting rows over threads pays for waking them."""


def norm(width: int, eps: float, centred: bool, has_bias: bool) -> tvm.tirx.PrimFunc:
    """TIR for ``(x - mean?) / sqrt(mean((x - mean?) ** 2) + eps) * weight + bias``.

    Args:
        centred: layer norm (subtract the mean) or RMS norm.
    Parameters of the result: x float32 [d0, d1, width], weight [width], bias [width] (where there is one),
    y like x.
    """
    row = norm_row(width, eps, centred)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, weight_: T.handle, bias_: T.handle, y_: T.handle) -> None:
        d0 = T.int64()
        d1 = T.int64()
        x3 = T.match_buffer(x_, (d0, d1, width), "float32")
        weight = T.match_buffer(weight_, (width,), "float32")
        bias = T.meta_var(T.match_buffer(bias_, (width,), "float32") if has_bias else None)
        y3 = T.match_buffer(y_, (d0, d1, width), "float32")
        tokens = T.meta_var(d0 * d1)
        x = T.decl_buffer((tokens, width), "float32", data=x3.data)
        y = T.decl_buffer((tokens, width), "float32", data=y3.data)

        if tokens * width >= PARALLEL_FROM:
            for m in T.parallel(tokens):
                row(x, weight, bias, m, y, m)
        else:
            for m in range(tokens):
                row(x, weight, bias, m, y, m)

    x, weight, bias, y = kernel.params
    params = [x, weight, *([bias] if has_bias else []), y]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def norm_row(width: int, eps: float, centred: bool) -> Any:
    """Make a macro ``row(x, weight, bias, m, y, r)`` that writes row ``r`` of ``y`` [., width] from row ``m`` of ``x``.

    ``bias`` may be None.
    """
    vectors, tail, every = width // VECTOR, width % VECTOR, T.ramp(0, 1, VECTOR)

    @T.inline
    def row(x, weight, bias, m, y, r):
        mean = T.alloc_buffer((1,), "float32")
        mean[0] = T.float32(0)
        if centred:
            sums = T.alloc_buffer((VECTOR,), "float32")
            sums[every] = T.broadcast(T.float32(0), VECTOR)
            for k in range(vectors):
                sums[every] = sums[every] + x[m, T.ramp(k * VECTOR, 1, VECTOR)]
            for k in range(tail):
                sums[0] = sums[0] + x[m, vectors * VECTOR + k]
            emit_tree_sum(sums, VECTOR)
            mean[0] = sums[0] / T.float32(width)
        squares = T.alloc_buffer((VECTOR,), "float32")
        squares[every] = T.broadcast(T.float32(0), VECTOR)
        for k in range(vectors):
            d = T.meta_var(x[m, T.ramp(k * VECTOR, 1, VECTOR)] - T.broadcast(mean[0], VECTOR))
            squares[every] = squares[every] + d * d
        for k in range(tail):
            d = T.meta_var(x[m, vectors * VECTOR + k] - mean[0])
            squares[0] = squares[0] + d * d
        emit_tree_sum(squares, VECTOR)
        factor = T.alloc_buffer((1,), "float32")
        factor[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(width) + T.float32(eps))
        if centred:  # a variance that overflows has no inverse
            factor[0] = T.if_then_else(squares[0] < T.float32(math.inf), factor[0], T.float32(math.nan))
        for k in range(vectors):
            at = T.meta_var(T.ramp(k * VECTOR, 1, VECTOR))
            scaled = T.meta_var((x[m, at] - T.broadcast(mean[0], VECTOR)) * T.broadcast(factor[0], VECTOR) * weight[at])
            y[r, at] = scaled if bias is None else scaled + bias[at]
        for k in range(tail):
            one = T.meta_var(vectors * VECTOR + k)
            single = T.meta_var((x[m, one] - mean[0]) * factor[0] * weight[one])
            y[r, one] = single if bias is None else single + bias[one]

    return row
