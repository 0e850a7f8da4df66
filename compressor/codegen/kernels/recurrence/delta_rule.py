"""Gated delta rule: a state from keys to values, corrected by what it gets wrong."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import VECTOR, exp, ramp, registers, splat_float, widen


def gated_delta_rule(
    key_heads: int, heads: int, key_width: int, value_width: int, own_decays: bool
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.recurrence.gated_delta_rule`, which also stores the new state.

    Args:
        own_decays: each channel of the keys has a decay of its own.
    Parameters of the result: q, k [B, S, Hk, Dk], v [B, S, H, Dv], decay [B, S, H, Dk or 1], beta [B, S, H], state
    [B, H, Dk, Dv] (written), y [B, S, H, Dv]; all float32.
    """
    lanes = gcd(VECTOR, value_width)
    blocks = value_width // lanes
    emit = partial(_emit, lanes, (heads, blocks, key_width, heads // key_heads), own_decays)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        q_: T.handle, k_: T.handle, v_: T.handle, decay_: T.handle, beta_: T.handle, state_: T.handle, y_: T.handle
    ) -> None:
        batch = T.int64()
        new = T.int64()
        q = T.match_buffer(q_, (batch, new, key_heads, key_width), "float32")
        k = T.match_buffer(k_, (batch, new, key_heads, key_width), "float32")
        v = T.match_buffer(v_, (batch, new, heads, value_width), "float32")
        decay = T.match_buffer(decay_, (batch, new, heads, key_width if own_decays else 1), "float32")
        beta = T.match_buffer(beta_, (batch, new, heads), "float32")
        state = T.match_buffer(state_, (batch, heads, key_width, value_width), "float32")
        y = T.match_buffer(y_, (batch, new, heads, value_width), "float32")
        buffers = T.meta_var((q, k, v, decay, beta, state, y))
        tasks = T.meta_var(batch * (heads * blocks))
        if batch * new * (heads * key_width * value_width) >= PARALLEL_FROM:
            for task in T.parallel(tasks):
                emit(buffers, task, new)
        else:
            for task in range(tasks):
                emit(buffers, task, new)

    return kernel


def _emit(lanes: int, sizes: tuple[int, int, int, int], own_decays: bool, buffers: Any, task: Any, new: Any) -> None:
    """Emit all tokens of ``lanes`` channels of one head's values of one batch entry."""
    (heads, blocks, key_width, repeat), (q, k, v, decay, beta, state, y) = sizes, buffers
    entry, h = task // (heads * blocks), task // blocks % heads
    at, every = ramp(task % blocks * lanes, lanes), ramp(0, lanes)
    known, change, total, factor = registers(4, (lanes,))
    with T.serial(0, new) as t:
        T.buffer_store(known, splat_float(0, lanes), [every])
        T.buffer_store(total, splat_float(0, lanes), [every])
        if not own_decays:
            T.buffer_store(factor, widen(exp(decay[entry, t, h, 0], 1), lanes), [every])
        with T.serial(0, key_width) as d:
            kept = widen(exp(decay[entry, t, h, d], 1), lanes) if own_decays else factor[every]
            T.buffer_store(state, state[entry, h, d, at] * kept, [entry, h, d, at])
            seen = state[entry, h, d, at] * widen(k[entry, t, h // repeat, d], lanes)
            T.buffer_store(known, known[every] + seen, [every])
        T.buffer_store(change, (v[entry, t, h, at] - known[every]) * widen(beta[entry, t, h], lanes), [every])
        with T.serial(0, key_width) as d:
            value = state[entry, h, d, at] + change[every] * widen(k[entry, t, h // repeat, d], lanes)
            T.buffer_store(state, value, [entry, h, d, at])
            read = state[entry, h, d, at] * widen(q[entry, t, h // repeat, d], lanes)
            T.buffer_store(total, total[every] + read, [every])
        T.buffer_store(y, total[every], [entry, t, h, at])
