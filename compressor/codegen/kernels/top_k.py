"""The largest elements of rows, by repeated search: routers choose a few of at most some hundreds of experts."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T


def top_k(n: int, k: int) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.top_k`.

    Parameters of the result: x float32 [rows, n], index int64 [rows, k].
    """

    @T.inline
    def choose(x, index, m):
        taken = T.alloc_buffer((n,), "int8")
        best = T.alloc_buffer((1,), "int32")
        for i in range(n):
            taken[i] = T.int8(0)
        for j in range(k):
            best[0] = T.int32(-1)
            for i in range(n):
                if taken[i] == T.int8(0):  # noqa: SIM102  (TVM reads both sides of `and`)
                    if best[0] < 0 or T.Or(
                        x[m, i] > x[m, T.max(best[0], 0)],
                        T.And(T.isnan(x[m, i]), T.Not(T.isnan(x[m, T.max(best[0], 0)]))),
                    ):
                        best[0] = i
            taken[best[0]] = T.int8(1)
            index[m, j] = T.Cast("int64", best[0])

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, index_: T.handle) -> None:
        rows = T.int64()
        x = T.match_buffer(x_, (rows, n), "float32")
        index = T.match_buffer(index_, (rows, k), "int64")
        with T.sblock("root"):  # TVM asks of every kernel of one operand whether it only reshapes, and expects a block
            if rows == 1:
                choose(x, index, T.int64(0))
            else:
                for m in T.parallel(rows):
                    choose(x, index, m)

    return kernel
