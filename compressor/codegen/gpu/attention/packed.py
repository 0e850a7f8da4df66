"""Packed key-value caches: new rows are quantised, and attention reads the rows as they are stored.

The layout is that of :mod:`compressor.formats.cache`; codes and scales become floats where they are loaded.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.attention.kernels import all_see, before, causal, limits_of_tokens, store
from compressor.codegen.gpu.attention.merge import NewToken, merge_parts
from compressor.codegen.gpu.attention.one_token import OneToken
from compressor.codegen.gpu.attention.rows import CodedRows, DenseRows, PermutedRows
from compressor.codegen.gpu.attention.split import RUN
from compressor.codegen.gpu.attention.tiles import Tiles
from compressor.codegen.gpu.intrinsics import WARP, atomic_max, barrier
from compressor.codegen.kernels.attention.packed import Packer
from compressor.codegen.kernels.attention.parameters import Parameters
from compressor.codegen.kernels.attention.rows import Place
from compressor.codegen.kernels.linear.weights import parameter
from compressor.formats.cache import CacheFormat

_MOST_THREADS = 256


def pack_cache(kv_heads: int, width: int, fmt: CacheFormat, has_order: bool) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.packed_cache.pack_cache`, one block a row.

    Parameters of the result: x float32 [B, Hkv, S, D], order int32 [Hkv, D] (where there is one), out uint8
    [B, Hkv, S, row_bytes].
    """
    threads = min(_MOST_THREADS, -(-width // WARP) * WARP)
    groups, span, octets = fmt.groups(width), fmt.span(width), fmt.code_bytes(width)

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        batch = T.int64()
        tokens = T.int64()
        x = T.meta_var(parameter((batch, kv_heads, tokens, width), "float32"))
        order = T.meta_var(parameter((kv_heads, width), "int32") if has_order else None)
        out = T.meta_var(parameter((batch, kv_heads, tokens, fmt.row_bytes(width)), "uint8"))
        # Of a function with one input, TVM wants to know whether it is a reshape, and expects a block.
        with T.sblock("root"):
            with T.launch_thread("blockIdx.x", batch * kv_heads * tokens) as m:
                with T.launch_thread("threadIdx.x", threads) as t:
                    row = T.alloc_buffer((width,), "float32", scope="shared")
                    tops = T.alloc_buffer((groups,), "int32", scope="shared")
                    divisors = T.alloc_buffer((groups,), "float32", scope="shared")
                    s = T.meta_var(m % tokens)
                    h = T.meta_var(m // tokens % kv_heads)
                    b = T.meta_var(m // tokens // kv_heads)
                    pack = T.meta_var(Packer(width, fmt, row))
                    for n in range(-(-groups // threads)):
                        if n * threads + t < groups:
                            tops[n * threads + t] = T.int32(0)
                    barrier()
                    for n in range(-(-width // threads)):
                        d = T.meta_var(n * threads + t)
                        if d < width:
                            row[d] = x[b, h, s, d if order is None else order[h, d]]
                            T.evaluate(atomic_max(T.address_of(tops[d // span]), pack.size(d)))
                    barrier()
                    for n in range(-(-groups // threads)):
                        g = T.meta_var(n * threads + t)
                        if g < groups:
                            pack.emit_scale(tops[g], g, divisors, g, Place(out, b, h, s))
                    barrier()
                    for n in range(-(-octets // threads)):
                        j = T.meta_var(n * threads + t)
                        if j < octets:
                            if fmt.bits == 8:
                                out[b, h, s, j] = T.Cast("uint8", pack.round(j, divisors[j // span]))
                            else:
                                high = T.meta_var(T.min(octets + j, width - 1))
                                upper = T.meta_var(T.shift_left(pack.round(high, divisors[high // span]), T.int32(4)))
                                past = T.meta_var(T.Select(octets + j < width, upper, T.int32(0)))
                                lower = T.meta_var(T.bitwise_and(pack.round(j, divisors[j // span]), T.int32(15)))
                                out[b, h, s, j] = T.Cast("uint8", T.bitwise_or(lower, past))

    return kernel


def packed_attention(
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
    """Write TIR for :func:`compressor.ops.packed_cache.packed_attention`, which also stores the new rows.

    Parameters of the result: q float32 [B, H, S, D], k, v uint8 [B, Hkv, S, row_bytes], k_cache, v_cache uint8
    [B, Hkv, T, row_bytes] (written at ``position``), position int64 [S], sinks float32 [H] (where there are any),
    k_order, v_order int32 [Hkv, D] (where there are any), out float32 [B, S, H, D].
    """
    parameters, repeat = Parameters(heads, kv_heads, width, fmt), heads // kv_heads
    coded = partial(CodedRows, width=width, fmt=fmt)
    one = OneToken(heads, kv_heads, width, scale, softcap, coded(None).unit)
    many = Tiles(heads, kv_heads, width, scale, softcap, min(coded(None).unit, RUN))
    part, merge, attend = one.partial(), merge_parts(one), many.attend()

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        batch = T.int64()
        tokens = T.int64()
        capacity = T.int64()
        held = T.meta_var(parameters.held(batch, tokens, tokens, batch, capacity))
        position = T.meta_var(parameter((tokens,), "int64"))
        sinks = T.meta_var(parameters.sinks(has_sinks))
        k_order, v_order = T.meta_var(parameters.orders(has_order))
        out = T.meta_var(parameters.out(batch, tokens))
        place = T.meta_var(position[0])
        query = T.meta_var(PermutedRows(held.q, k_order, repeat) if has_order else DenseRows(held.q))
        rows = T.meta_var([query, coded(held.k_cache), coded(held.v_cache)])
        stored = T.meta_var([(held.k, held.k_cache), (held.v, held.v_cache)])

        if tokens == 1:
            splits = T.meta_var(one.splits(capacity, batch))
            sums, stats = T.meta_var(one.results(batch, splits))
            past = T.meta_var(partial(before, position, window, 0))
            part(*rows, past, None, None, splits, sums, stats, batch)
            token = T.meta_var(NewToken(coded(held.k), coded(held.v), stored, place))
            merge(query, token, out, v_order, past, None, sinks, splits, sums, stats, batch)
        else:
            store(*stored, place)
            masks = T.meta_var((partial(causal, place, window, 0), partial(all_see, place, window, 0)))
            limits = T.meta_var(partial(limits_of_tokens, place, window, 0))
            attend(*rows, out, v_order, limits, None, masks, sinks, False, (batch, tokens))

    return kernel
