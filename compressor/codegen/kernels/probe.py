"""A kernel that only reads memory: what a decode step's bandwidth is compared with."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

PARTS = 64
"""Slices that threads divide among themselves."""


def read_bandwidth() -> tvm.tirx.PrimFunc:
    """TIR that adds up x int32 [64, n, 4, 16] into y int32 [64, 16], each slice by one thread.

    Four independent sums a thread keep enough loads in flight.
    """
    every = T.ramp(0, 1, 16)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, y_: T.handle) -> None:
        n = T.int64()
        x = T.match_buffer(x_, (PARTS, n, 4, 16), "int32")
        y = T.match_buffer(y_, (PARTS, 16), "int32")
        for part in T.parallel(PARTS):
            acc = T.alloc_buffer((4, 16), "int32")
            for i in T.unroll(4):
                acc[i, every] = T.broadcast(0, 16)
            for k in range(n):
                for i in T.unroll(4):
                    acc[i, every] = acc[i, every] + x[part, k, i, every]
            y[part, every] = acc[0, every] + acc[1, every] + acc[2, every] + acc[3, every]

    return kernel
