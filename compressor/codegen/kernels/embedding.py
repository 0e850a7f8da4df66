"""Embedding: gathers rows of a table in its storage type and widens them to float32."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.codes import to_float
from compressor.codegen.kernels.vector import VECTOR


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
