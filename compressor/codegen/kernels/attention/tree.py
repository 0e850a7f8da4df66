"""Attention of tokens in trees: each attends as a single token does, over the rows that lie on its path.

The statements of a query are those of :mod:`compressor.codegen.kernels.attention.single`, so that a verified token has
the bits of a token that was decoded alone.  Only the place of a key in the cache is looked up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.parameters import Parameters
from compressor.codegen.kernels.attention.rows import Place, Rows
from compressor.codegen.kernels.attention.single import Single, store_row
from compressor.codegen.kernels.linear.weights import parameter
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
    """Write TIR for :func:`compressor.ops.tree_attention.tree_attention`, which first stores the new keys and values.

    Parameters of the result: q [1, H, T, D], k, v [1, Hkv, T, D], k_cache, v_cache [N, Hkv, C, D] (written at ``slot``
    and ``row``), position, parent, slot, row int64 [T], sinks [H], slopes [H] and biases [distances * H] (where there
    are any), out [1, T, H, D]; floats are float32.
    """
    parameters, more = Parameters(heads, kv_heads, head_dim), (chunk, has_slopes, distances)
    return _of_trees(Single(parameters, scale, softcap, window, has_sinks, *more))


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
    """Write TIR for :func:`compressor.ops.tree_attention.packed_tree_attention`, which first stores the new rows.

    Parameters of the result: q float32 [1, H, T, D], k, v uint8 [1, Hkv, T, row_bytes], k_cache, v_cache uint8
    [N, Hkv, C, row_bytes] (written at ``slot`` and ``row``), position, parent, slot, row int64 [T], sinks float32 [H]
    (where there are any), k_order, v_order int32 [Hkv, D] (where there are any), out float32 [1, T, H, D].
    """
    parameters = Parameters(heads, kv_heads, width, fmt)
    return _of_trees(Single(parameters, scale, softcap, window, has_sinks, has_order=has_order))


def _of_trees(single: Single) -> tvm.tirx.PrimFunc:
    """Write the kernel for caches of either kind."""
    parameters = single.parameters
    heads, kv_heads = parameters.heads, parameters.kv_heads

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        tokens = T.int64()
        slots = T.int64()
        capacity = T.int64()
        held = T.meta_var(parameters.held(1, tokens, tokens, slots, capacity))
        position, parent, slot, row = T.meta_var([parameter((tokens,), "int64") for _ in range(4)])
        further = T.meta_var(single.declare())
        out = T.meta_var(parameters.out(1, tokens))

        for t, h in T.grid(tokens, kv_heads):
            store_row(held, 0, h, t, slot[t], row[t])
        for task in T.parallel(tokens * heads):
            h = T.meta_var(task % heads)
            t = T.meta_var(task // heads)
            on_path = T.meta_var(partial(PathRows, t=t, position=position, parent=parent, row=row))
            single.attend(held, further, out, (0, h, t), slot[t], position[t] + 1, on_path)

    return kernel


class PathRows:
    """Rows that one token sees, by their virtual places; see
    :class:`compressor.codegen.kernels.attention.rows.Rows`.

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
        """See :class:`compressor.codegen.kernels.attention.rows.Rows`."""
        return self.held.products(query, self._stored(row))

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """See :class:`compressor.codegen.kernels.attention.rows.Rows`."""
        self.held.emit_weighed(acc, weight, self._stored(row))
