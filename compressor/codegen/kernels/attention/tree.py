"""Attention of tokens in trees: each attends as a single token does, over the rows that lie on its path.

The statements of one query row are those of :mod:`compressor.codegen.kernels.attention.cached` and of
:mod:`compressor.codegen.kernels.attention.packed`, in the same order, so that a verified token has the bits of a token
that was decoded alone.  Only the place of a key in the cache is looked up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.biases import DistanceBiases
from compressor.codegen.kernels.attention.cached import DenseRows, Place, Row, Rows, first_seen
from compressor.codegen.kernels.attention.packed import PackedRow, PackedRows, without
from compressor.codegen.kernels.vector import VECTOR
from compressor.formats.cache import CacheFormat

DEEPEST = 64
"""Tokens of the longest path; the run-time refuses longer ones."""


def tree_attention(
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
    """TIR for :func:`compressor.ops.tree_attention.tree_attention`, which first stores the new keys and values.

    Parameters of the result: q [1, H, T, D], k, v [1, Hkv, T, D], k_cache, v_cache [N, Hkv, C, D] (written at ``slot``
    and ``row``), position, parent, slot, row int64 [T], sinks [H], slopes [H] and biases [distances * H] (where there
    are any), out [1, T, H, D]; floats are float32.
    """
    repeat, has_table = heads // kv_heads, distances > 0
    one = Row(head_dim, scale, softcap, has_sinks)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        k_cache_: T.handle,
        v_cache_: T.handle,
        position_: T.handle,
        parent_: T.handle,
        slot_: T.handle,
        row_: T.handle,
        sinks_: T.handle,
        slopes_: T.handle,
        biases_: T.handle,
        out_: T.handle,
    ) -> None:
        tokens = T.int64()
        slots = T.int64()
        capacity = T.int64()
        q = T.match_buffer(q_, (1, heads, tokens, head_dim), "float32")
        k = T.match_buffer(k_, (1, kv_heads, tokens, head_dim), "float32")
        v = T.match_buffer(v_, (1, kv_heads, tokens, head_dim), "float32")
        k_cache = T.match_buffer(k_cache_, (slots, kv_heads, capacity, head_dim), "float32")
        v_cache = T.match_buffer(v_cache_, (slots, kv_heads, capacity, head_dim), "float32")
        position = T.match_buffer(position_, (tokens,), "int64")
        parent = T.match_buffer(parent_, (tokens,), "int64")
        slot = T.match_buffer(slot_, (tokens,), "int64")
        row = T.match_buffer(row_, (tokens,), "int64")
        sinks = T.meta_var(T.match_buffer(sinks_, (heads,), "float32") if has_sinks else None)
        slopes = T.meta_var(T.match_buffer(slopes_, (heads,), "float32") if has_slopes else None)
        table = T.meta_var(T.match_buffer(biases_, (distances * heads,), "float32") if has_table else None)
        biases = T.meta_var(DistanceBiases(slopes, table, heads, distances) if has_slopes or has_table else None)
        out = T.match_buffer(out_, (1, tokens, heads, head_dim), "float32")

        for t, h in T.grid(tokens, kv_heads):
            for d in T.vectorized(head_dim):
                k_cache[slot[t], h, row[t], d] = k[0, h, t, d]
            for d in T.vectorized(head_dim):
                v_cache[slot[t], h, row[t], d] = v[0, h, t, d]
        for task in T.parallel(tokens * heads):
            h = T.meta_var(task % heads)
            t = T.meta_var(task // heads)
            end = T.meta_var(position[t] + 1)
            first = T.meta_var(first_seen(end - 1, window, chunk))
            scores = T.alloc_buffer((end - first + VECTOR,), "float32")
            held = T.meta_var(DenseRows(k_cache, v_cache, slot[t], h // repeat, head_dim))
            seen = T.meta_var(PathRows(held, t, position, parent, row))
            query, result = T.meta_var((Place(q, 0, h, t), Place(out, 0, t, h)))
            added = T.meta_var(partial(biases.one, h) if biases is not None else None)
            one.emit(seen, query, result, scores, sinks[h] if has_sinks else None, first, end - first, added)

    return without(kernel, {9: has_sinks, 10: has_slopes, 11: has_table})


def packed_tree_attention(
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
    """TIR for :func:`compressor.ops.tree_attention.packed_tree_attention`, which first stores the new rows.

    Parameters of the result: q float32 [1, H, T, D], k, v uint8 [1, Hkv, T, row_bytes], k_cache, v_cache uint8
    [N, Hkv, C, row_bytes] (written at ``slot`` and ``row``), position, parent, slot, row int64 [T], sinks float32 [H]
    (where there are any), k_order, v_order int32 [Hkv, D] (where there are any), out float32 [1, T, H, D].
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
        parent_: T.handle,
        slot_: T.handle,
        row_: T.handle,
        sinks_: T.handle,
        k_order_: T.handle,
        v_order_: T.handle,
        out_: T.handle,
    ) -> None:
        tokens = T.int64()
        slots = T.int64()
        capacity = T.int64()
        q = T.match_buffer(q_, (1, heads, tokens, width), "float32")
        k = T.match_buffer(k_, (1, kv_heads, tokens, size), "uint8")
        v = T.match_buffer(v_, (1, kv_heads, tokens, size), "uint8")
        k_cache = T.match_buffer(k_cache_, (slots, kv_heads, capacity, size), "uint8")
        v_cache = T.match_buffer(v_cache_, (slots, kv_heads, capacity, size), "uint8")
        position = T.match_buffer(position_, (tokens,), "int64")
        parent = T.match_buffer(parent_, (tokens,), "int64")
        slot = T.match_buffer(slot_, (tokens,), "int64")
        row = T.match_buffer(row_, (tokens,), "int64")
        sinks = T.meta_var(T.match_buffer(sinks_, (heads,), "float32") if has_sinks else None)
        k_order = T.meta_var(T.match_buffer(k_order_, (kv_heads, width), "int32") if has_order else None)
        v_order = T.meta_var(T.match_buffer(v_order_, (kv_heads, width), "int32") if has_order else None)
        out = T.match_buffer(out_, (1, tokens, heads, width), "float32")

        for t, h in T.grid(tokens, kv_heads):
            for d in T.vectorized(size):
                k_cache[slot[t], h, row[t], d] = k[0, h, t, d]
            for d in T.vectorized(size):
                v_cache[slot[t], h, row[t], d] = v[0, h, t, d]
        for task in T.parallel(tokens * heads):
            h = T.meta_var(task % heads)
            t = T.meta_var(task // heads)
            kv = T.meta_var(h // repeat)
            end = T.meta_var(position[t] + 1)
            first = T.meta_var(first_seen(end - 1, window, 0))
            scores = T.alloc_buffer((end - first + VECTOR,), "float32")
            held = T.meta_var(PackedRows(k_cache, v_cache, slot[t], kv, width, fmt))
            seen = T.meta_var(PathRows(held, t, position, parent, row))
            query, result = T.meta_var((Place(q, 0, h, t), Place(out, 0, t, h)))
            orders = T.meta_var((Place(k_order, kv), Place(v_order, kv)) if has_order else None)
            one.emit(seen, query, result, orders, scores, sinks[h] if has_sinks else None, first, end - first)

    return without(kernel, {9: has_sinks, 10: has_order, 11: has_order})


class PathRows:
    """Rows that one token sees, by their virtual places; see
    :class:`compressor.codegen.kernels.attention.cached.Rows`.

    Making one emits the walk from the token to its root, which keeps the row of each ancestor at its position's
    remainder by :data:`DEEPEST`.

    Args:
        held: the rows of the token's sequence.
        t: the token.
        position, parent, row: buffers int64 [T].
    """

    def __init__(self, held: Rows, t: Any, position: Any, parent: Any, row: Any) -> None:
        self.held, self.lanes = held, held.lanes
        self.path = T.alloc_buffer((DEEPEST,), "int64")
        self.walk = T.alloc_buffer((3,), "int64")  # the next token, its depth, the position of the one before
        T.buffer_store(self.walk, t, [0])
        T.buffer_store(self.walk, T.int64(0), [1])
        with T.While(T.And(self.walk[0] >= T.int64(0), self.walk[1] < T.int64(DEEPEST))):
            T.buffer_store(self.walk, position[self.walk[0]], [2])
            T.buffer_store(self.path, row[self.walk[0]], [self.walk[2] % DEEPEST])
            T.buffer_store(self.walk, parent[self.walk[0]], [0])
            T.buffer_store(self.walk, self.walk[1] + T.int64(1), [1])

    def _stored(self, place: Any) -> Any:
        """Return the row of a virtual key: its own number before the root's position, and an ancestor's from there."""
        return T.Select(place < self.walk[2], place, self.path[place % DEEPEST])

    def products(self, query: Place, row: Any) -> Any:
        """See :class:`compressor.codegen.kernels.attention.cached.Rows`."""
        return self.held.products(query, self._stored(row))

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """See :class:`compressor.codegen.kernels.attention.cached.Rows`."""
        self.held.emit_weighed(acc, weight, self._stored(row))
