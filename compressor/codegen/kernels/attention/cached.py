"""Attention kernels: causal over a cache that the kernel itself extends, and bidirectional with padding.

Of a single token the scores of each head are kept whole (two passes); several tokens are attended to in blocks
(:mod:`compressor.codegen.kernels.attention.prompt`).  Heads and blocks are divided over threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any, Protocol

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.biases import DistanceBiases, pair_biases
from compressor.codegen.kernels.attention.prompt import Heads, PromptBlocks, at_most
from compressor.codegen.kernels.vector import VECTOR, emit_tree_sum, exp, ramp, splat, splat_float, widen


def cached_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    softcap: float,
    has_sinks: bool,
    chunk: int = 0,
    has_slopes: bool = False,
    distances: int = 0,
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.attention.cached_attention`, which also stores the new keys and values.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], k_cache, v_cache [B, Hkv, T, D] (written at
    ``position``), position int64 [S], sinks [H], slopes [H] and biases [distances * H] (where there are any), out
    [B, S, H, D]; floats are float32.
    """
    repeat = heads // kv_heads
    has_table = distances > 0
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
        slopes_: T.handle,
        biases_: T.handle,
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
        slopes = T.meta_var(T.match_buffer(slopes_, (heads,), "float32") if has_slopes else None)
        table = T.meta_var(T.match_buffer(biases_, (distances * heads,), "float32") if has_table else None)
        biases = T.meta_var(DistanceBiases(slopes, table, heads, distances) if has_slopes or has_table else None)
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
                first = T.meta_var(first_seen(end - 1, window, chunk))
                # Filled up to whole vectors, so that the exponentials need no scalar tail.
                scores = T.alloc_buffer((end - first + VECTOR,), "float32")
                held = T.meta_var(DenseRows(k_cache, v_cache, b, h // repeat, head_dim))
                query, result = T.meta_var((Place(q, b, h, T.int64(0)), Place(out, b, T.int64(0), h)))
                added = T.meta_var(partial(biases.one, h) if biases is not None else None)
                row.emit(held, query, result, scores, sinks[h] if has_sinks else None, first, end - first, added)
        else:
            for b, h in T.grid(batch, kv_heads):
                store(b, h)
            count = T.meta_var(prompt.blocks(new))
            for task in T.parallel(batch * kv_heads * count):
                block = T.meta_var(prompt.place(task % count, count))
                kv = T.meta_var(task // count % kv_heads)
                b = T.meta_var(task // count // kv_heads)
                early, late = T.meta_var(prompt.tokens(block, new))
                begin = T.meta_var(first_seen(position[0] + early, window, chunk))
                seen = T.meta_var(partial(_causal, position, window, chunk))
                sink = T.meta_var((lambda head: sinks[head]) if has_sinks else None)
                rows, end = T.meta_var(([Heads(q), Heads(k_cache), Heads(v_cache)], position[0] + late + 1))
                added = T.meta_var(partial(biases.many, position) if biases is not None else None)
                prompt.attend(rows, out, b, kv, block, new, begin, end, seen, sink, added)

    *params, sinks, slopes, biases, out = kernel.params
    given = ((sinks, has_sinks), (slopes, has_slopes), (biases, has_table))
    params += [*(part for part, is_there in given if is_there), out]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def masked_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    tokens_first: Sequence[bool],
    window: int = 0,
    bias: tuple[bool, bool, bool] | None = None,
    softcap: float = 0.0,
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.attention.masked_attention`.

    Args:
        tokens_first: of q, k and v: whether it is given as [B, S, H, D], as linears leave it.
        bias: of batch, heads and queries: whether the bias has one for each, or one for all; None without a bias.
    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], mask [B, S], bias (where there is one) flat, out
    [B, S, H, D], all float32.
    """
    prompt = PromptBlocks(head_dim, heads // kv_heads, scale, softcap)
    windowed, has_bias, own = window > 0, bias is not None, bias or (False, False, False)

    @T.prim_func(s_tir=True, private=True)
    def kernel(q_: T.handle, k_: T.handle, v_: T.handle, mask_: T.handle, bias_: T.handle, out_: T.handle) -> None:
        batch = T.int64()
        length = T.int64()
        dims = T.meta_var(lambda n, first: (batch, length, n, head_dim) if first else (batch, n, length, head_dim))
        q = T.match_buffer(q_, dims(heads, tokens_first[0]), "float32")
        k = T.match_buffer(k_, dims(kv_heads, tokens_first[1]), "float32")
        v = T.match_buffer(v_, dims(kv_heads, tokens_first[2]), "float32")
        mask = T.match_buffer(mask_, (batch, length), "float32")
        count_biases = T.meta_var(_sizes((batch, T.int64(heads), length), bias))
        biases = T.meta_var(T.match_buffer(bias_, (count_biases * length,), "float32") if has_bias else None)
        out = T.match_buffer(out_, (batch, length, heads, head_dim), "float32")
        count = T.meta_var(prompt.blocks(length))
        for task in T.parallel(batch * kv_heads * count):
            kv = T.meta_var(task // count % kv_heads)
            b = T.meta_var(task // count // kv_heads)
            seen = T.meta_var(partial(unpadded, mask, b, window))
            block = T.meta_var(task % count)
            early, late = T.meta_var(prompt.tokens(block, length))
            begin = T.meta_var(T.max(early - (window - 1), T.int64(0)) if windowed else T.int64(0))
            end = T.meta_var(T.min(late + window, length) if windowed else length)
            added = T.meta_var(partial(pair_biases, biases, own, heads, length, b) if has_bias else None)
            rows = T.meta_var([Heads(x, first) for x, first in zip((q, k, v), tokens_first, strict=True)])
            prompt.attend(rows, out, b, kv, block, length, begin, end, seen, None, added, windowed)

    *params, given, out = kernel.params
    params += [given, out] if has_bias else [out]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def _sizes(all_sizes: tuple[Any, ...], own: tuple[bool, bool, bool] | None) -> Any:
    """Return the number of a bias's rows."""
    return math.prod([n for n, each in zip(all_sizes, own or (False,) * 3, strict=True) if each], start=T.int64(1))


def first_seen(query: Any, window: int, chunk: int) -> Any:
    """Return the first key that the query at a position sees."""
    first = T.max(query - (window - 1), T.int64(0)) if window else T.int64(0)
    return T.max(first, query - query % chunk) if chunk else first


def _causal(position: Any, window: int, chunk: int, tokens: Any, key: Any) -> Any:
    """Which of 16 new tokens see a key."""
    last = T.broadcast(T.Cast("int32", position[0]), VECTOR) + tokens
    seen = at_most(key, last)
    if window:
        seen = T.And(seen, T.Not(at_most(key, last - splat(window, VECTOR))))
    if chunk:
        seen = T.And(seen, T.Not(at_most(key, last - last % splat(chunk, VECTOR) - splat(1, VECTOR))))
    return seen


def unpadded(mask: Any, b: Any, window: int, tokens: Any, key: Any) -> Any:
    """Tell whether a key is not padding and within the window, for 16 tokens."""
    seen = T.broadcast(mask[b, key], VECTOR) != T.broadcast(T.float32(0), VECTOR)
    if window:
        seen = T.And(seen, at_most(key, tokens + splat(window - 1, VECTOR)))
        seen = T.And(seen, T.Not(at_most(key, tokens - splat(window, VECTOR))))
    return seen


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
        added: Callable[[Any], Any] | None = None,
    ) -> None:
        """Attend to ``count`` keys from ``first``.

        Args:
            query, result: where the row is read from and written to.
            scores: a buffer for them, filled up to whole vectors.
            added: how far the key lies ahead of the last, 0 or less -> what is added to its score; None for nothing.
        """
        lowest, lanes = T.float32(-3.0e38), held.lanes
        stat = T.alloc_buffer((2,), "float32")  # maximum, sum
        T.buffer_store(stat, T.max(sink, lowest) if self.has_sinks else lowest, [0])
        with T.serial(0, count) as j:
            score = self._score(held, query, first + j)
            if added is not None:
                score = score + added(j + 1 - count)
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
