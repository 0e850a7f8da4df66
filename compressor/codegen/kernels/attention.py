"""Attention kernels: causal over a cache that the kernel itself extends, and bidirectional with padding.

Scores of one query row are kept whole (two passes); rows and heads are divided over threads.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.vector import emit_tree_sum, exp

VECTOR = 16


def cached_attention(
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, softcap: float, has_sinks: bool
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.cached_attention`, which also stores the new keys and values.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], k_cache, v_cache [B, Hkv, T, D] (written at
    ``position``), position int64 [S], sinks [H] (where there are any), out [B, S, H, D]; floats are float32.
    """
    repeat, windowed = heads // kv_heads, window > 0
    row = _Row(head_dim, scale, softcap, has_sinks)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        k_cache_: T.handle,
        v_cache_: T.handle,
        position_: T.handle,
        sinks_: T.handle,
        out_: T.handle,
    ) -> None:
        batch = T.int64()
        new = T.int64()
        capacity = T.int64()
        q = T.match_buffer(q_, (batch, heads, new, head_dim), "float32")
        k = T.match_buffer(k_, (batch, kv_heads, new, head_dim), "float32")
        v = T.match_buffer(v_, (batch, kv_heads, new, head_dim), "float32")
        k_cache = T.match_buffer(k_cache_, (batch, kv_heads, capacity, head_dim), "float32")
        v_cache = T.match_buffer(v_cache_, (batch, kv_heads, capacity, head_dim), "float32")
        position = T.match_buffer(position_, (new,), "int64")
        sinks = T.meta_var(T.match_buffer(sinks_, (heads,), "float32") if has_sinks else None)
        out = T.match_buffer(out_, (batch, new, heads, head_dim), "float32")

        for b, h, s in T.grid(batch, kv_heads, new):
            for d in T.vectorized(head_dim):
                k_cache[b, h, position[0] + s, d] = k[b, h, s, d]
            for d in T.vectorized(head_dim):
                v_cache[b, h, position[0] + s, d] = v[b, h, s, d]
        for task in T.parallel(batch * new * heads):
            h = T.meta_var(task % heads)
            s = T.meta_var(task // heads % new)
            b = T.meta_var(task // heads // new)
            last = T.meta_var(position[0] + s + 1)
            first = T.meta_var(T.max(last - window, T.int64(0)) if windowed else T.int64(0))
            # Filled up to whole vectors, so that the exponentials need no scalar tail.
            scores = T.alloc_buffer((last - first + VECTOR,), "float32")
            row.emit(q, k_cache, v_cache, out, scores, sinks, None, b, h, h // repeat, s, first, last - first)

    *params, sinks, out = kernel.params
    params += [sinks, out] if has_sinks else [out]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def masked_attention(heads: int, kv_heads: int, head_dim: int, scale: float) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.masked_attention`.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], mask [B, S], out [B, S, H, D], all float32.
    """
    repeat = heads // kv_heads
    row = _Row(head_dim, scale, 0.0, False)

    @T.prim_func(s_tir=True, private=True)
    def kernel(q_: T.handle, k_: T.handle, v_: T.handle, mask_: T.handle, out_: T.handle) -> None:
        batch = T.int64()
        length = T.int64()
        q = T.match_buffer(q_, (batch, heads, length, head_dim), "float32")
        k = T.match_buffer(k_, (batch, kv_heads, length, head_dim), "float32")
        v = T.match_buffer(v_, (batch, kv_heads, length, head_dim), "float32")
        mask = T.match_buffer(mask_, (batch, length), "float32")
        out = T.match_buffer(out_, (batch, length, heads, head_dim), "float32")
        for task in T.parallel(batch * length * heads):
            h = T.meta_var(task % heads)
            s = T.meta_var(task // heads % length)
            b = T.meta_var(task // heads // length)
            scores = T.alloc_buffer((length + VECTOR,), "float32")
            row.emit(q, k, v, out, scores, None, mask, b, h, h // repeat, s, T.int64(0), length)

    return kernel


class _Row:
    """One query row: scores, softmax and the weighted sum of values, emitted into the current function."""

    def __init__(self, head_dim: int, scale: float, softcap: float, has_sinks: bool) -> None:
        self.head_dim, self.scale, self.softcap, self.has_sinks = head_dim, scale, softcap, has_sinks
        self.vector = next(n for n in (16, 8, 4, 2, 1) if head_dim % n == 0)

    def _at(self, d: int) -> Any:
        return T.ramp(d, 1, self.vector) if self.vector > 1 else d

    def _zero(self) -> Any:
        return T.broadcast(T.float32(0), self.vector) if self.vector > 1 else T.float32(0)

    def emit(
        self,
        q: Any,
        keys: Any,
        values: Any,
        out: Any,
        scores: Any,
        sinks: Any,
        mask: Any,
        b: Any,
        h: Any,
        kv: Any,
        s: Any,
        first: Any,
        count: Any,
    ) -> None:
        """Attend with query (b, h, s) to ``count`` keys from ``first`` of head ``kv``."""
        lowest = T.float32(-3.0e38)
        stat = T.alloc_buffer((2,), "float32", scope="local")  # maximum, sum
        T.buffer_store(stat, T.max(sinks[h], lowest) if self.has_sinks else lowest, [0])
        with T.serial(0, count) as j:
            self._score(q, keys, scores, mask, b, h, kv, s, first, j)
            T.buffer_store(stat, T.max(stat[0], scores[j]), [0])
        with T.serial(0, VECTOR) as j:
            T.buffer_store(scores, lowest, [count + j])
        self._softmax(scores, stat, sinks, h, count)
        acc = T.alloc_buffer((self.head_dim,), "float32", scope="local")
        for d in range(0, self.head_dim, self.vector):
            T.buffer_store(acc, self._zero(), [self._at(d)])
        with T.serial(0, count) as j:
            p = T.broadcast(scores[j], self.vector) if self.vector > 1 else scores[j]
            for d in range(0, self.head_dim, self.vector):
                T.buffer_store(acc, acc[self._at(d)] + p * values[b, kv, first + j, self._at(d)], [self._at(d)])
        for d in range(0, self.head_dim, self.vector):
            inverse = T.float32(1) / stat[1]
            factor = T.broadcast(inverse, self.vector) if self.vector > 1 else inverse
            T.buffer_store(out, acc[self._at(d)] * factor, [b, s, h, self._at(d)])

    def _score(
        self, q: Any, keys: Any, scores: Any, mask: Any, b: Any, h: Any, kv: Any, s: Any, first: Any, j: Any
    ) -> None:
        dot = T.alloc_buffer((self.vector,), "float32", scope="local")
        value = self._zero()
        for d in range(0, self.head_dim, self.vector):
            value = value + q[b, h, s, self._at(d)] * keys[b, kv, first + j, self._at(d)]
        T.buffer_store(dot, value, [self._at(0)])
        emit_tree_sum(dot, self.vector)
        score = dot[0] * T.float32(self.scale)
        if self.softcap:
            score = T.float32(self.softcap) * T.tanh(score / T.float32(self.softcap))
        if mask is not None:
            score = T.if_then_else(mask[b, first + j] == T.float32(0), T.float32(-3.0e38), score)
        T.buffer_store(scores, score, [j])

    def _softmax(self, scores: Any, stat: Any, sinks: Any, h: Any, count: Any) -> None:
        """Scores become exp(score - maximum); their sum goes to ``stat[1]``.  Filling scores become 0."""
        every = T.ramp(0, 1, VECTOR)
        total = T.alloc_buffer((VECTOR,), "float32", scope="local")
        T.buffer_store(total, T.broadcast(T.float32(0), VECTOR), [every])
        with T.serial(0, (count + (VECTOR - 1)) // VECTOR) as block:
            at = T.ramp(block * VECTOR, 1, VECTOR)
            far = scores[at] - T.broadcast(stat[0], VECTOR)
            kept = T.Cast(f"float32x{VECTOR}", far > T.broadcast(T.float32(-80), VECTOR))
            T.buffer_store(scores, exp(far, VECTOR) * kept, [at])
            T.buffer_store(total, total[every] + scores[at], [every])
        T.buffer_store(stat, T.exp(sinks[h] - stat[0]) if self.has_sinks else T.float32(0), [1])
        emit_tree_sum(total, VECTOR)
        T.buffer_store(stat, stat[1] + total[0], [1])
