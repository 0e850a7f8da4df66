"""Attention kernels: causal over a cache that the kernel itself extends, and bidirectional with padding.

A single token is one query (:mod:`compressor.codegen.kernels.attention.single`); several are attended to in blocks
(:mod:`compressor.codegen.kernels.attention.prompt`).  Heads and blocks are divided over threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.biases import pair_biases
from compressor.codegen.kernels.attention.parameters import Held, Parameters
from compressor.codegen.kernels.attention.prompt import Heads, PromptBlocks, at_most
from compressor.codegen.kernels.attention.rows import first_seen
from compressor.codegen.kernels.attention.single import Further, Single, store_row
from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.kernels.vector import VECTOR, splat


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
    parameters = Parameters(heads, kv_heads, head_dim)
    single = Single(parameters, scale, softcap, window, has_sinks, chunk, has_slopes, distances)
    prompt = PromptBlocks(head_dim, heads // kv_heads, scale, softcap)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        batch = T.int64()
        new = T.int64()
        capacity = T.int64()
        held = T.meta_var(parameters.held(batch, new, new, batch, capacity))
        position = T.meta_var(parameter((new,), "int64"))
        further = T.meta_var(single.declare())
        out = T.meta_var(parameters.out(batch, new))

        for b, h, s in T.grid(batch, kv_heads, new):
            store_row(held, b, h, s, b, position[0] + s)
        if new == 1:
            for task in T.parallel(batch * heads):
                h = T.meta_var(task % heads)
                b = T.meta_var(task // heads)
                single.attend(held, further, out, (b, h, T.int64(0)), b, position[0] + new)
        else:
            attend_causally(single, prompt, held, further, out, position, batch, new)

    return kernel


def attend_causally(
    single: Single, prompt: PromptBlocks, held: Held, further: Further, out: Any, position: Any, batch: Any, new: Any
) -> None:
    """Emit the attention of all new tokens, in blocks of queries.

    Args:
        position: buffer int64 [S], of which the first says where the tokens begin.
    """
    kv_heads, window, chunk = single.parameters.kv_heads, single.window, single.chunk
    count = prompt.blocks(new)
    seen = partial(causal, position, window, chunk)
    with T.parallel(0, batch * kv_heads * count) as task:
        block, kv, b = prompt.place(task % count, count), task // count % kv_heads, task // count // kv_heads
        early, late = prompt.tokens(block, new)
        begin, end = first_seen(position[0] + early, window, chunk), position[0] + late + 1
        sink = further.sink if single.has_sinks else None
        added = partial(further.biases.many, position) if further.biases is not None else None
        prompt.attend(single.heads_of(held, further), out, b, kv, block, new, begin, end, seen, sink, added)


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


def causal(position: Any, window: int, chunk: int, tokens: Any, key: Any) -> Any:
    """Return which of 16 new tokens see a key."""
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
