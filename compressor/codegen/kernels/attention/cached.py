"""Attention kernels: causal over a cache that the kernel itself extends, and bidirectional with padding.

Of a single token the scores of each head are kept whole (two passes); several tokens are attended to in blocks
(:mod:`compressor.codegen.kernels.attention.prompt`).  Heads and blocks are divided over threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any, Protocol

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.prompt import Heads, PromptBlocks, at_most
from compressor.codegen.kernels.vector import VECTOR, emit_tree_sum, exp, ramp, splat, splat_float, widen


def cached_attention(
    heads: int, kv_heads: int, head_dim: int, scale: float, window: int, softcap: float, has_sinks: bool
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.attention.cached_attention`, which also stores the new keys and values.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], k_cache, v_cache [B, Hkv, T, D] (written at
    ``position``), position int64 [S], sinks [H] (where there are any), out [B, S, H, D]; floats are float32.
    """
    repeat, windowed = heads // kv_heads, window > 0
    row, prompt = Row(head_dim, scale, softcap, has_sinks), PromptBlocks(head_dim, repeat, scale, softcap)

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

        end = T.meta_var(position[0] + new)

        @T.inline
        def store(b, h):
            for s in range(new):
                for d in T.vectorized(head_dim):
                    k_cache[b, h, position[0] + s, d] = k[b, h, s, d]
                for d in T.vectorized(head_dim):
                    v_cache[b, h, position[0] + s, d] = v[b, h, s, d]

        if new == 1:
            for b, h in T.grid(batch, kv_heads):
                store(b, h)
            for task in T.parallel(batch * heads):
                h = T.meta_var(task % heads)
                b = T.meta_var(task // heads)
                first = T.meta_var(T.max(end - window, T.int64(0)) if windowed else T.int64(0))
                # Filled up to whole vectors, so that the exponentials need no scalar tail.
                scores = T.alloc_buffer((end - first + VECTOR,), "float32")
                held = T.meta_var(DenseRows(k_cache, v_cache, b, h // repeat, head_dim))
                query, result = T.meta_var((Place(q, b, h, T.int64(0)), Place(out, b, T.int64(0), h)))
                row.emit(held, query, result, scores, sinks[h] if has_sinks else None, first, end - first)
        else:
            for b, h in T.grid(batch, kv_heads):
                store(b, h)
            count = T.meta_var(prompt.blocks(new))
            for task in T.parallel(batch * kv_heads * count):
                block = T.meta_var(prompt.place(task % count, count))
                kv = T.meta_var(task // count % kv_heads)
                b = T.meta_var(task // count // kv_heads)
                early, late = T.meta_var(prompt.tokens(block, new))
                begin = T.meta_var(T.max(position[0] + early + 1 - window, T.int64(0)) if windowed else T.int64(0))
                seen = T.meta_var(partial(_causal, position, window))
                sink = T.meta_var((lambda head: sinks[head]) if has_sinks else None)
                rows, end = T.meta_var(([Heads(q), Heads(k_cache), Heads(v_cache)], position[0] + late + 1))
                prompt.attend(rows, out, b, kv, block, new, begin, end, seen, sink)

    *params, sinks, out = kernel.params
    params += [sinks, out] if has_sinks else [out]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def masked_attention(
    heads: int, kv_heads: int, head_dim: int, scale: float, tokens_first: Sequence[bool]
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.attention.masked_attention`.

    Args:
        tokens_first: of q, k and v: whether it is given as [B, S, H, D], as linears leave it.
    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], mask [B, S], out [B, S, H, D], all float32.
    """
    prompt = PromptBlocks(head_dim, heads // kv_heads, scale, 0.0)

    @T.prim_func(s_tir=True, private=True)
    def kernel(q_: T.handle, k_: T.handle, v_: T.handle, mask_: T.handle, out_: T.handle) -> None:
        batch = T.int64()
        length = T.int64()
        dims = T.meta_var(lambda n, first: (batch, length, n, head_dim) if first else (batch, n, length, head_dim))
        q = T.match_buffer(q_, dims(heads, tokens_first[0]), "float32")
        k = T.match_buffer(k_, dims(kv_heads, tokens_first[1]), "float32")
        v = T.match_buffer(v_, dims(kv_heads, tokens_first[2]), "float32")
        mask = T.match_buffer(mask_, (batch, length), "float32")
        out = T.match_buffer(out_, (batch, length, heads, head_dim), "float32")
        count = T.meta_var(prompt.blocks(length))
        for task in T.parallel(batch * kv_heads * count):
            kv = T.meta_var(task // count % kv_heads)
            b = T.meta_var(task // count // kv_heads)
            seen = T.meta_var(partial(_kept, mask, b))
            rows = T.meta_var([Heads(x, first) for x, first in zip((q, k, v), tokens_first, strict=True)])
            prompt.attend(rows, out, b, kv, task % count, length, T.int64(0), length, seen, None)

    return kernel


def _causal(position: Any, window: int, tokens: Any, key: Any) -> Any:
    """Which of 16 new tokens see a key."""
    last = T.broadcast(T.Cast("int32", position[0]), VECTOR) + tokens
    seen = at_most(key, last)
    return T.And(seen, T.Not(at_most(key, last - splat(window, VECTOR)))) if window else seen


def _kept(mask: Any, b: Any, _tokens: Any, key: Any) -> Any:
    """Tell whether a key is not padding, for 16 tokens."""
    return T.broadcast(mask[b, key], VECTOR) != T.broadcast(T.float32(0), VECTOR)


class Place:
    """The last dimension of a buffer at fixed indices of the others."""

    def __init__(self, buffer: Any, *indices: Any) -> None:
        self.buffer, self.indices = buffer, indices

    def __getitem__(self, at: Any) -> Any:
        return self.buffer[(*self.indices, at)]

    def emit_store(self, at: Any, value: Any) -> None:
        """Emit a store."""
        T.buffer_store(self.buffer, value, [*self.indices, at])


class Rows(Protocol):
    """Keys and values of one head, as an attention row reads them.

    Attributes:
        lanes: of all vectors; divides the head's width.
    """

    lanes: int

    def products(self, query: Place, row: Any) -> Any:
        """Return a vector whose elements add up to the product of the query and a row's key."""

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """Emit ``acc += weight * value`` of a row."""


class DenseRows:
    """Rows of float32 [B, Hkv, T, D]: those of batch entry ``b`` and key-value head ``kv``."""

    def __init__(self, keys: Any, values: Any, b: Any, kv: Any, head_dim: int) -> None:
        self.keys, self.values, self.b, self.kv, self.head_dim = keys, values, b, kv, head_dim
        self.lanes = gcd(VECTOR, head_dim)

    def products(self, query: Place, row: Any) -> Any:
        """See :class:`Rows`."""
        value = splat_float(0, self.lanes)
        for d in range(0, self.head_dim, self.lanes):
            at = ramp(d, self.lanes)
            value = value + query[at] * self.keys[self.b, self.kv, row, at]
        return value

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """See :class:`Rows`."""
        p = widen(weight, self.lanes)
        for d in range(0, self.head_dim, self.lanes):
            at = ramp(d, self.lanes)
            T.buffer_store(acc, acc[at] + p * self.values[self.b, self.kv, row, at], [at])


class Row:
    """One query row: scores, softmax and the weighted sum of values, emitted into the current function."""

    def __init__(self, head_dim: int, scale: float, softcap: float, has_sinks: bool) -> None:
        self.head_dim, self.scale, self.softcap, self.has_sinks = head_dim, scale, softcap, has_sinks

    def emit(
        self,
        held: Rows,
        query: Place,
        result: Place,
        scores: Any,
        sink: Any,
        first: Any,
        count: Any,
    ) -> None:
        """Attend to ``count`` keys from ``first``.

        Args:
            query, result: where the row is read from and written to.
            scores: a buffer for them, filled up to whole vectors.
        """
        lowest, lanes = T.float32(-3.0e38), held.lanes
        stat = T.alloc_buffer((2,), "float32")  # maximum, sum
        T.buffer_store(stat, T.max(sink, lowest) if self.has_sinks else lowest, [0])
        with T.serial(0, count) as j:
            score = self._score(held, query, first + j)
            T.buffer_store(scores, score, [j])
            T.buffer_store(stat, T.max(stat[0], scores[j]), [0])
        with T.serial(0, VECTOR) as j:
            T.buffer_store(scores, T.float32(-math.inf), [count + j])
        self._softmax(scores, stat, sink, count)
        acc = T.alloc_buffer((self.head_dim,), "float32")
        for d in range(0, self.head_dim, lanes):
            T.buffer_store(acc, splat_float(0, lanes), [ramp(d, lanes)])
        with T.serial(0, count) as j:
            held.emit_weighed(acc, scores[j], first + j)
        for d in range(0, self.head_dim, lanes):
            factor = widen(T.float32(1) / stat[1], lanes)
            result.emit_store(ramp(d, lanes), acc[ramp(d, lanes)] * factor)

    def _score(self, held: Rows, query: Place, row: Any) -> Any:
        dot = T.alloc_buffer((held.lanes,), "float32")
        T.buffer_store(dot, held.products(query, row), [ramp(0, held.lanes)])
        emit_tree_sum(dot, held.lanes)
        score = dot[0] * T.float32(self.scale)
        if self.softcap:
            score = T.float32(self.softcap) * T.tanh(score / T.float32(self.softcap))
        return score

    def _softmax(self, scores: Any, stat: Any, sink: Any, count: Any) -> None:
        """Scores become exp(score - maximum); their sum goes to ``stat[1]``.  Filling scores become 0."""
        every = T.ramp(0, 1, VECTOR)
        total = T.alloc_buffer((VECTOR,), "float32")
        T.buffer_store(total, T.broadcast(T.float32(0), VECTOR), [every])
        with T.serial(0, (count + (VECTOR - 1)) // VECTOR) as block:
            at = T.ramp(block * VECTOR, 1, VECTOR)
            far = scores[at] - T.broadcast(stat[0], VECTOR)
            kept = T.Cast(f"float32x{VECTOR}", far > T.broadcast(T.float32(-80), VECTOR))
            T.buffer_store(scores, exp(far, VECTOR) * kept, [at])
            T.buffer_store(total, total[every] + scores[at], [every])
        T.buffer_store(stat, T.exp(sink - stat[0]) if self.has_sinks else T.float32(0), [1])
        emit_tree_sum(total, VECTOR)
        T.buffer_store(stat, stat[1] + total[0], [1])
