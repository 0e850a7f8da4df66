"""Attention of kept tokens to all new ones: few queries as a single token each, many in blocks.

The statements of a single query are those of :mod:`compressor.codegen.kernels.attention.single`, so that the one token
of a step has the bits that it has where all tokens are kept, and up to 32 kept tokens do not depend on each other.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import INDEPENDENT_ROWS
from compressor.codegen.kernels.attention.cached import causal
from compressor.codegen.kernels.attention.parameters import Parameters
from compressor.codegen.kernels.attention.prompt import PromptBlocks
from compressor.codegen.kernels.attention.rows import first_seen
from compressor.codegen.kernels.attention.single import Single, store_row
from compressor.codegen.kernels.linear.weights import parameter
from compressor.formats.cache import CacheFormat


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
    """Write TIR for :func:`compressor.ops.kept_attention.kept_attention`, which also stores the new keys and values.

    Parameters of the result: q [B, H, R, D], k, v [B, Hkv, S, D], k_cache, v_cache [B, Hkv, T, D] (written at
    ``position``), position int64 [S], keep int64 [R], sinks [H], slopes [H] and biases [distances * H] (where there
    are any), out [B, R, H, D]; floats are float32.
    """
    parameters, more = Parameters(heads, kv_heads, head_dim), (chunk, has_slopes, distances)
    single = Single(parameters, scale, softcap, window, has_sinks, *more)
    return _of_kept(single, PromptBlocks(head_dim, heads // kv_heads, scale, softcap))


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
    """Write TIR for :func:`compressor.ops.kept_attention.packed_kept_attention`, which also stores the new rows.

    Parameters of the result: q float32 [B, H, R, D], k, v uint8 [B, Hkv, S, row_bytes], k_cache, v_cache uint8
    [B, Hkv, T, row_bytes] (written at ``position``), position int64 [S], keep int64 [R], sinks float32 [H] (where there
    are any), k_order, v_order int32 [Hkv, D] (where there are any), out float32 [B, R, H, D].
    """
    parameters = Parameters(heads, kv_heads, width, fmt)
    single = Single(parameters, scale, softcap, window, has_sinks, has_order=has_order)
    return _of_kept(single, PromptBlocks(width, heads // kv_heads, scale, softcap))


def _of_kept(single: Single, blocks: PromptBlocks) -> tvm.tirx.PrimFunc:
    """Write the kernel for caches of either kind."""
    parameters, window, chunk, has_sinks = single.parameters, single.window, single.chunk, single.has_sinks
    heads, kv_heads = parameters.heads, parameters.kv_heads

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        batch = T.int64()
        new = T.int64()
        rows = T.int64()
        capacity = T.int64()
        held = T.meta_var(parameters.held(batch, rows, new, batch, capacity))
        position = T.meta_var(parameter((new,), "int64"))
        keep = T.meta_var(parameter((rows,), "int64"))
        further = T.meta_var(single.declare())
        out = T.meta_var(parameters.out(batch, rows))

        @T.inline
        def singly():
            for task in T.parallel(batch * rows * heads):
                h = T.meta_var(task % heads)
                r = T.meta_var(task // heads % rows)
                b = T.meta_var(task // heads // rows)
                single.attend(held, further, out, (b, h, r), b, position[0] + keep[r] + 1)

        @T.inline
        def by_blocks():
            count = T.meta_var(blocks.blocks(rows))
            for task in T.parallel(batch * kv_heads * count):
                block = T.meta_var(blocks.place(task % count, count))
                kv = T.meta_var(task // count % kv_heads)
                b = T.meta_var(task // count // kv_heads)
                early, late = T.meta_var(blocks.tokens(block, rows))
                span = T.alloc_buffer((2,), "int64")  # the first and the last of the block's tokens, in any order
                span[0] = new
                span[1] = T.int64(0)
                for r in range(late + 1 - early):
                    span[0] = T.min(span[0], keep[early + r])
                    span[1] = T.max(span[1], keep[early + r])
                begin = T.meta_var(first_seen(position[0] + span[0], window, chunk))
                seen = T.meta_var(partial(causal, position, window, chunk))
                sink = T.meta_var(further.sink if has_sinks else None)
                added = T.meta_var(partial(further.biases.many, position) if further.biases is not None else None)
                after, kept = T.meta_var((position[0] + span[1] + 1, lambda row: keep[row]))
                blocks.attend(
                    single.heads_of(held, further), out, b, kv, block, rows, begin, after, seen, sink, added, place=kept
                )

        for b, h, s in T.grid(batch, kv_heads, new):
            store_row(held, b, h, s, b, position[0] + s)
        if rows <= INDEPENDENT_ROWS:
            singly()
        else:
            by_blocks()

    return kernel
