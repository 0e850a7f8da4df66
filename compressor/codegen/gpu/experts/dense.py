"""The routed linear of stored floats on a GPU: a warp an output, pair after pair of token and expert."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.experts.packed import is_expert
from compressor.codegen.gpu.intrinsics import WARP, warp_sum
from compressor.codegen.kernels.codes import to_float
from compressor.codegen.kernels.experts import Routing
from compressor.codegen.kernels.linear.weights import parameter

_WARPS = 8  # of a block


def dense_routed_linear(routing: Routing, rows: int, columns: int, storage: str, has_bias: bool) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.routed_linear`.

    Parameters of the result: as those of :func:`compressor.codegen.kernels.experts.dense_routed_linear`.
    """
    experts, each = routing.experts, routing.each

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        t = T.int64()
        given = T.meta_var(parameter(routing.inputs(t, columns), "float32"))
        index = T.meta_var(parameter((t, each), "int64"))
        weight = T.meta_var(parameter((experts, rows, columns), storage))
        bias = T.meta_var(parameter((experts, rows), "float32") if has_bias else None)
        y3 = T.meta_var(parameter((t, each, rows), "float32"))
        pairs = T.meta_var(t * each)
        x = T.decl_buffer((pairs if routing.own_rows else t, columns), "float32", data=given.data)
        y = T.decl_buffer((pairs, rows), "float32", data=y3.data)
        chosen = T.decl_buffer((pairs,), "int64", data=index.data)
        with (
            T.launch_thread("blockIdx.x", pairs) as pair,
            T.launch_thread("blockIdx.y", -(-rows // _WARPS)) as part,
            T.launch_thread("threadIdx.x", WARP * _WARPS) as thread,
        ):
            row = T.meta_var(part * _WARPS + thread // WARP)
            total = T.alloc_buffer((1,), "float32", scope="local")
            total[0] = T.float32(0)
            if row < rows:
                if is_expert(chosen[pair], experts):
                    for i in range(-(-columns // WARP)):
                        at = T.meta_var(i * WARP + thread % WARP)
                        if at < columns:
                            value = T.meta_var(to_float(weight[chosen[pair], row, at], storage, 1))
                            total[0] = total[0] + value * x[routing.source(pair), at]
                    total[0] = warp_sum(total[0])
                    if bias is not None:
                        total[0] = total[0] + bias[chosen[pair], row]
                if thread % WARP == 0:
                    y[pair, row] = total[0]

    return kernel
