"""Attention of kept tokens to all new ones: few queries as a single token each, many in blocks.

The statements of one query row are those of :mod:`compressor.codegen.kernels.attention.cached` and of
:mod:`compressor.codegen.kernels.attention.packed`, in the same order, so that the one token of a step has the bits that
it has where all tokens are kept, and up to 32 kept tokens do not depend on each other.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.biases import DistanceBiases
from compressor.codegen.kernels.attention.cached import DenseRows, Place, Row, _causal, first_seen
from compressor.codegen.kernels.attention.packed import PackedRow, PackedRows, without
from compressor.codegen.kernels.attention.prompt import Heads, PromptBlocks
from compressor.codegen.kernels.vector import VECTOR
from compressor.formats.cache import CacheFormat

SINGLY = 32
"""Kept tokens up to which each is a row of its own."""


def kept_attention(
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
    """TIR for :func:`compressor.ops.kept_attention.kept_attention`, which also stores the new keys and values.

    Parameters of the result: q [B, H, R, D], k, v [B, Hkv, S, D], k_cache, v_cache [B, Hkv, T, D] (written at
    ``position``), position int64 [S], keep int64 [R], sinks [H], slopes [H] and biases [distances * H] (where there
    are any), out [B, R, H, D]; floats are float32.
    """
    repeat, has_table = heads // kv_heads, distances > 0
    one, prompt = Row(head_dim, scale, softcap, has_sinks), PromptBlocks(head_dim, repeat, scale, softcap)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        k_cache_: T.handle,
        v_cache_: T.handle,
        position_: T.handle,
        keep_: T.handle,
        sinks_: T.handle,
        slopes_: T.handle,
        biases_: T.handle,
        out_: T.handle,
    ) -> None:
        batch = T.int64()
        new = T.int64()
        rows = T.int64()
        capacity = T.int64()
        q = T.match_buffer(q_, (batch, heads, rows, head_dim), "float32")
        k = T.match_buffer(k_, (batch, kv_heads, new, head_dim), "float32")
        v = T.match_buffer(v_, (batch, kv_heads, new, head_dim), "float32")
        k_cache = T.match_buffer(k_cache_, (batch, kv_heads, capacity, head_dim), "float32")
        v_cache = T.match_buffer(v_cache_, (batch, kv_heads, capacity, head_dim), "float32")
        position = T.match_buffer(position_, (new,), "int64")
        keep = T.match_buffer(keep_, (rows,), "int64")
        sinks = T.meta_var(T.match_buffer(sinks_, (heads,), "float32") if has_sinks else None)
        slopes = T.meta_var(T.match_buffer(slopes_, (heads,), "float32") if has_slopes else None)
        table = T.meta_var(T.match_buffer(biases_, (distances * heads,), "float32") if has_table else None)
        biases = T.meta_var(DistanceBiases(slopes, table, heads, distances) if has_slopes or has_table else None)
        out = T.match_buffer(out_, (batch, rows, heads, head_dim), "float32")

        for b, h, s in T.grid(batch, kv_heads, new):
            for d in T.vectorized(head_dim):
                k_cache[b, h, position[0] + s, d] = k[b, h, s, d]
            for d in T.vectorized(head_dim):
                v_cache[b, h, position[0] + s, d] = v[b, h, s, d]
        if rows <= SINGLY:
            for task in T.parallel(batch * rows * heads):
                h = T.meta_var(task % heads)
                r = T.meta_var(task // heads % rows)
                b = T.meta_var(task // heads // rows)
                end = T.meta_var(position[0] + keep[r] + 1)
                first = T.meta_var(first_seen(end - 1, window, chunk))
                scores = T.alloc_buffer((end - first + VECTOR,), "float32")
                held = T.meta_var(DenseRows(k_cache, v_cache, b, h // repeat, head_dim))
                query, result = T.meta_var((Place(q, b, h, r), Place(out, b, r, h)))
                added = T.meta_var(partial(biases.one, h) if biases is not None else None)
                one.emit(held, query, result, scores, sinks[h] if has_sinks else None, first, end - first, added)
        else:
            count = T.meta_var(prompt.blocks(rows))
            for task in T.parallel(batch * kv_heads * count):
                block = T.meta_var(prompt.place(task % count, count))
                kv = T.meta_var(task // count % kv_heads)
                b = T.meta_var(task // count // kv_heads)
                early, late = T.meta_var(prompt.tokens(block, rows))
                span = T.alloc_buffer((2,), "int64")  # the first and the last of the block's tokens, in any order
                span[0] = new
                span[1] = T.int64(0)
                for r in range(late + 1 - early):
                    span[0] = T.min(span[0], keep[early + r])
                    span[1] = T.max(span[1], keep[early + r])
                begin = T.meta_var(first_seen(position[0] + span[0], window, chunk))
                seen = T.meta_var(partial(_causal, position, window, chunk))
                sink = T.meta_var((lambda head: sinks[head]) if has_sinks else None)
                read = T.meta_var([Heads(q), Heads(k_cache), Heads(v_cache)])
                added = T.meta_var(partial(biases.many, position) if biases is not None else None)
                after, kept = T.meta_var((position[0] + span[1] + 1, lambda row: keep[row]))
                prompt.attend(read, out, b, kv, block, rows, begin, after, seen, sink, added, place=kept)

    return without(kernel, {7: has_sinks, 8: has_slopes, 9: has_table})


def packed_kept_attention(
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    window: int,
    softcap: float,
    has_sinks: bool,
    fmt: CacheFormat,
    has_order: bool,
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.kept_attention.packed_kept_attention`, which also stores the new rows.

    Parameters of the result: q float32 [B, H, R, D], k, v uint8 [B, Hkv, S, row_bytes], k_cache, v_cache uint8
    [B, Hkv, T, row_bytes] (written at ``position``), position int64 [S], keep int64 [R], sinks float32 [H] (where there
    are any), k_order, v_order int32 [Hkv, D] (where there are any), out float32 [B, R, H, D].
    """
    repeat, size = heads // kv_heads, fmt.row_bytes(width)
    one = PackedRow(width, scale, softcap, has_sinks)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        k_cache_: T.handle,
        v_cache_: T.handle,
        position_: T.handle,
        keep_: T.handle,
        sinks_: T.handle,
        k_order_: T.handle,
        v_order_: T.handle,
        out_: T.handle,
    ) -> None:
        batch = T.int64()
        new = T.int64()
        rows = T.int64()
        capacity = T.int64()
        q = T.match_buffer(q_, (batch, heads, rows, width), "float32")
        k = T.match_buffer(k_, (batch, kv_heads, new, size), "uint8")
        v = T.match_buffer(v_, (batch, kv_heads, new, size), "uint8")
        k_cache = T.match_buffer(k_cache_, (batch, kv_heads, capacity, size), "uint8")
        v_cache = T.match_buffer(v_cache_, (batch, kv_heads, capacity, size), "uint8")
        position = T.match_buffer(position_, (new,), "int64")
        keep = T.match_buffer(keep_, (rows,), "int64")
        sinks = T.meta_var(T.match_buffer(sinks_, (heads,), "float32") if has_sinks else None)
        k_order = T.meta_var(T.match_buffer(k_order_, (kv_heads, width), "int32") if has_order else None)
        v_order = T.meta_var(T.match_buffer(v_order_, (kv_heads, width), "int32") if has_order else None)
        out = T.match_buffer(out_, (batch, rows, heads, width), "float32")

        for b, h, s in T.grid(batch, kv_heads, new):
            for d in T.vectorized(size):
                k_cache[b, h, position[0] + s, d] = k[b, h, s, d]
            for d in T.vectorized(size):
                v_cache[b, h, position[0] + s, d] = v[b, h, s, d]
        for task in T.parallel(batch * rows * heads):
            h = T.meta_var(task % heads)
            r = T.meta_var(task // heads % rows)
            b = T.meta_var(task // heads // rows)
            kv = T.meta_var(h // repeat)
            end = T.meta_var(position[0] + keep[r] + 1)
            first = T.meta_var(first_seen(end - 1, window, 0))
            scores = T.alloc_buffer((end - first + VECTOR,), "float32")
            held = T.meta_var(PackedRows(k_cache, v_cache, b, kv, width, fmt))
            query, result = T.meta_var((Place(q, b, h, r), Place(out, b, r, h)))
            orders = T.meta_var((Place(k_order, kv), Place(v_order, kv)) if has_order else None)
            one.emit(held, query, result, orders, scores, sinks[h] if has_sinks else None, first, end - first)

    return without(kernel, {7: has_sinks, 8: has_order, 9: has_order})
