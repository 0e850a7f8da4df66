"""Selective scan of Mamba and Mamba 2: a state that decays and is written to as the tokens say."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import VECTOR, exp, ramp, registers, splat_float, widen


def selective_scan(
    heads: int, width: int, states: int, groups: int, own_steps: bool, decays: tuple[bool, bool]
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.recurrence.selective_scan`, which also stores the new state.

    Args:
        heads, width, states, groups: H, P, N and G.
        own_steps: each channel of a head has a time step of its own.
        decays: whether each state, and each channel, has a decay of its own.
    Parameters of the result: x [B, S, H, P], dt [B, S, H, P or 1], a [H, N or 1, P or 1], b, c [B, S, G, N], state
    [B, H, N, P] (written), y [B, S, H, P]; all float32.
    """
    lanes = gcd(VECTOR, width)
    blocks = width // lanes
    emit = partial(_emit, lanes, (heads, blocks, states, heads // groups), own_steps, decays)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        x_: T.handle, dt_: T.handle, a_: T.handle, b_: T.handle, c_: T.handle, state_: T.handle, y_: T.handle
    ) -> None:
        batch = T.int64()
        new = T.int64()
        x = T.match_buffer(x_, (batch, new, heads, width), "float32")
        dt = T.match_buffer(dt_, (batch, new, heads, width if own_steps else 1), "float32")
        a = T.match_buffer(a_, (heads, states if decays[0] else 1, width if decays[1] else 1), "float32")
        b = T.match_buffer(b_, (batch, new, groups, states), "float32")
        c = T.match_buffer(c_, (batch, new, groups, states), "float32")
        state = T.match_buffer(state_, (batch, heads, states, width), "float32")
        y = T.match_buffer(y_, (batch, new, heads, width), "float32")
        buffers = T.meta_var((x, dt, a, b, c, state, y))
        tasks = T.meta_var(batch * (heads * blocks))
        if batch * new * (heads * width * states) >= PARALLEL_FROM:
            for task in T.parallel(tasks):
                emit(buffers, task, new)
        else:
            for task in range(tasks):
                emit(buffers, task, new)

    return kernel


def _emit(
    lanes: int,
    sizes: tuple[int, int, int, int],
    own_steps: bool,
    decays: tuple[bool, bool],
    buffers: Any,
    task: Any,
    new: Any,
) -> None:
    """Emit all tokens of ``lanes`` channels of one head of one batch entry."""
    (heads, blocks, states, repeat), (x, dt, a, b, c, state, y) = sizes, buffers
    entry, h = task // (heads * blocks), task // blocks % heads
    at, every = ramp(task % blocks * lanes, lanes), ramp(0, lanes)
    step, written, total, factor = registers(4, (lanes,))

    def decay(n: Any) -> Any:
        """Return ``exp(dt * a)`` of state ``n``, of one number where all channels share it."""
        rate = a[h, n if decays[0] else 0, at if decays[1] else 0]
        if own_steps or decays[1]:
            return exp(step[every] * (rate if decays[1] else widen(rate, lanes)), lanes)
        return widen(exp(dt[entry, t, h, 0] * rate, 1), lanes)

    with T.serial(0, new) as t:
        T.buffer_store(step, dt[entry, t, h, at] if own_steps else widen(dt[entry, t, h, 0], lanes), [every])
        T.buffer_store(written, step[every] * x[entry, t, h, at], [every])
        T.buffer_store(total, splat_float(0, lanes), [every])
        if not decays[0]:
            T.buffer_store(factor, decay(0), [every])
        with T.serial(0, states) as n:
            kept = state[entry, h, n, at] * (decay(n) if decays[0] else factor[every])
            value = kept + written[every] * widen(b[entry, t, h // repeat, n], lanes)
            T.buffer_store(state, value, [entry, h, n, at])
            read = state[entry, h, n, at] * widen(c[entry, t, h // repeat, n], lanes)
            T.buffer_store(total, total[every] + read, [every])
        T.buffer_store(y, total[every], [entry, t, h, at])
