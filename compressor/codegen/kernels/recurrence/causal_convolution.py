"""Depthwise convolution of each token and those before it, whose inputs are the state."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import VECTOR, ramp, registers, splat_float


def causal_convolution(channels: int, width: int, has_bias: bool) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.recurrence.causal_convolution`, which also stores the new state.

    Parameters of the result: x [B, S, C], weight [C, K], bias [C] (where there is one), state [B, K - 1, C] (written),
    y [B, S, C]; all float32.
    """
    lanes = gcd(VECTOR, channels)
    emit = partial(_emit, lanes, channels // lanes, width)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, weight_: T.handle, bias_: T.handle, state_: T.handle, y_: T.handle) -> None:
        batch = T.int64()
        new = T.int64()
        x = T.match_buffer(x_, (batch, new, channels), "float32")
        weight = T.match_buffer(weight_, (channels, width), "float32")
        bias = T.meta_var(T.match_buffer(bias_, (channels,), "float32") if has_bias else None)
        state = T.match_buffer(state_, (batch, width - 1, channels), "float32")
        y = T.match_buffer(y_, (batch, new, channels), "float32")
        factors = T.decl_buffer((channels * width,), "float32", data=weight.data)
        tasks = T.meta_var(batch * (channels // lanes))
        if batch * new * channels >= PARALLEL_FROM:
            for task in T.parallel(tasks):
                emit(x, factors, bias, state, y, task, new)
        else:
            for task in range(tasks):
                emit(x, factors, bias, state, y, task, new)

    x, weight, bias, state, y = kernel.params
    params = [x, weight, *([bias] if has_bias else []), state, y]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def _emit(
    lanes: int, blocks: int, width: int, x: Any, weight: Any, bias: Any, state: Any, y: Any, task: Any, new: Any
) -> None:
    """Emit all tokens of ``lanes`` channels of one batch entry; their window stays in registers."""
    b, first, every = task // blocks, task % blocks * lanes, ramp(0, lanes)
    at = ramp(first, lanes)
    factors, window, total = registers(width, (lanes,)), registers(width - 1, (lanes,)), registers(1, (lanes,))[0]
    for k in range(width):
        place = T.ramp(first * width + k, width, lanes) if lanes > 1 else first * width + k
        T.buffer_store(factors[k], weight[place], [every])
    for k in range(width - 1):
        T.buffer_store(window[k], state[b, k, at], [every])
    with T.serial(0, new) as t:
        T.buffer_store(total, splat_float(0, lanes), [every])
        for k in range(width - 1):
            T.buffer_store(total, total[every] + window[k][every] * factors[k][every], [every])
        T.buffer_store(total, total[every] + x[b, t, at] * factors[width - 1][every], [every])
        value = total[every] if bias is None else total[every] + bias[at]
        T.buffer_store(y, value, [b, t, at])
        for k in range(width - 2):
            T.buffer_store(window[k], window[k + 1][every], [every])
        T.buffer_store(window[width - 2], x[b, t, at], [every])
    for k in range(width - 1):
        T.buffer_store(state, window[k][every], [b, k, at])
