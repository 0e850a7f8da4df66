"""RWKV's average of values, whose weights fall with the distance, channel by channel."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import VECTOR, exp, larger, ramp, registers, splat_float

_LOWEST = -1e38


def wkv(channels: int) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.recurrence.wkv`, which also stores the new state.

    Parameters of the result: k, v [B, S, C], decay, first [C], state [B, 3, C] (written), y [B, S, C]; all float32.
    """
    lanes = gcd(VECTOR, channels)
    emit = partial(_emit, lanes, channels // lanes)

    @T.prim_func(s_tir=True, private=True)
    def kernel(k_: T.handle, v_: T.handle, decay_: T.handle, first_: T.handle, state_: T.handle, y_: T.handle) -> None:
        batch = T.int64()
        new = T.int64()
        k = T.match_buffer(k_, (batch, new, channels), "float32")
        v = T.match_buffer(v_, (batch, new, channels), "float32")
        decay = T.match_buffer(decay_, (channels,), "float32")
        first = T.match_buffer(first_, (channels,), "float32")
        state = T.match_buffer(state_, (batch, 3, channels), "float32")
        y = T.match_buffer(y_, (batch, new, channels), "float32")
        buffers = T.meta_var((k, v, decay, first, state, y))
        tasks = T.meta_var(batch * (channels // lanes))
        if batch * new * channels >= PARALLEL_FROM:
            for task in T.parallel(tasks):
                emit(buffers, task, new)
        else:
            for task in range(tasks):
                emit(buffers, task, new)

    return kernel


def _emit(lanes: int, blocks: int, buffers: Any, task: Any, new: Any) -> None:
    """Emit all tokens of ``lanes`` channels of one batch entry; their state stays in registers."""
    k, v, decay, first, state, y = buffers
    b, at, every = task // blocks, ramp(task % blocks * lanes, lanes), ramp(0, lanes)
    top, bottom, largest, now, before, own = registers(6, (lanes,))
    T.buffer_store(top, state[b, 0, at], [every])
    T.buffer_store(bottom, state[b, 1, at], [every])
    empty = state[b, 1, at] == splat_float(0, lanes)
    T.buffer_store(largest, T.Select(empty, splat_float(_LOWEST, lanes), state[b, 2, at]), [every])

    def weigh(exponent: Any, new_exponent: Any) -> None:
        """Store the weights of what was there and of a token, relative to the larger exponent."""
        T.buffer_store(now, larger(exponent, new_exponent, lanes), [every])
        T.buffer_store(before, exp(exponent - now[every], lanes), [every])
        T.buffer_store(own, exp(new_exponent - now[every], lanes), [every])

    with T.serial(0, new) as t:
        weigh(largest[every], k[b, t, at] + first[at])
        average = before[every] * top[every] + own[every] * v[b, t, at]
        T.buffer_store(y, average / (before[every] * bottom[every] + own[every]), [b, t, at])
        weigh(largest[every] + decay[at], k[b, t, at])
        T.buffer_store(top, before[every] * top[every] + own[every] * v[b, t, at], [every])
        T.buffer_store(bottom, before[every] * bottom[every] + own[every], [every])
        T.buffer_store(largest, now[every], [every])
    for place, part in enumerate((top, bottom, largest)):
        T.buffer_store(state, part[every], [b, place, at])
