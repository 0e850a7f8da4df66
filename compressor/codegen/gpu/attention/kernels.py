"""Attention kernels: causal over a cache that they extend, bidirectional with padding, and over a source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.attention.merge import NewToken, merge_parts
from compressor.codegen.gpu.attention.one_token import OneToken
from compressor.codegen.gpu.attention.rows import DenseRows
from compressor.codegen.gpu.attention.tiles import Tiles
from compressor.codegen.kernels.attention.biases import DistanceBiases
from compressor.codegen.kernels.attention.parameters import Parameters
from compressor.codegen.kernels.linear.weights import parameter

_THREADS = 256


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
    """Write TIR for :func:`compressor.ops.attention.cached_attention`, which also stores the new keys and values.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], k_cache, v_cache [B, Hkv, T, D] (written at
    ``position``), position int64 [S], sinks [H], slopes [H] and biases [distances * H] (where there are any), out
    [B, S, H, D]; floats are float32.
    """
    parameters = Parameters(heads, kv_heads, head_dim)
    one = OneToken(heads, kv_heads, head_dim, scale, softcap)
    many = Tiles(heads, kv_heads, head_dim, scale, softcap)
    part, merge, attend = one.partial(), merge_parts(one), many.attend()

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        batch = T.int64()
        tokens = T.int64()
        capacity = T.int64()
        held = T.meta_var(parameters.held(batch, tokens, tokens, batch, capacity))
        position = T.meta_var(parameter((tokens,), "int64"))
        sinks = T.meta_var(parameters.sinks(has_sinks))
        biases = T.meta_var(parameters.biases(has_slopes, distances))
        out = T.meta_var(parameters.out(batch, tokens))
        place = T.meta_var(position[0])
        rows = T.meta_var([DenseRows(x) for x in (held.q, held.k_cache, held.v_cache)])
        stored = T.meta_var([(held.k, held.k_cache), (held.v, held.v_cache)])

        if tokens == 1:
            splits = T.meta_var(one.splits(capacity, batch))
            sums, stats = T.meta_var(one.results(batch, splits))
            past = T.meta_var(partial(before, position, window, chunk))
            added = T.meta_var(None if biases is None else lambda head, key: biases.one(head, key - place))
            part(*rows, past, added, None, splits, sums, stats, batch)
            token = T.meta_var(NewToken(DenseRows(held.k), DenseRows(held.v), stored, place))
            merge(rows[0], token, out, None, past, added, sinks, splits, sums, stats, batch)
        else:
            store(*stored, place)
            limits = T.meta_var(partial(limits_of_tokens, place, window, chunk))
            masks = T.meta_var((partial(causal, place, window, chunk), partial(all_see, place, window, chunk)))
            many_added = T.meta_var(None if biases is None else partial(_distance_bias, biases, place))
            attend(*rows, out, None, limits, many_added, masks, sinks, False, (batch, tokens))

    return kernel


@T.inline
def store(keys, values, place):
    """Copy new rows into the caches, from a place on."""
    batch, heads, new, width = T.meta_var(keys[0].shape)
    total = T.meta_var(batch * heads * new * width)
    with T.launch_thread("blockIdx.x", (total + (_THREADS - 1)) // _THREADS) as x:
        with T.launch_thread("threadIdx.x", _THREADS) as t:
            at = T.meta_var(x * _THREADS + t)
            if at < total:
                d, s = T.meta_var((at % width, at // width % new))
                h, b = T.meta_var((at // width // new % heads, at // width // new // heads))
                keys[1][b, h, place + s, d] = keys[0][b, h, s, d]
                values[1][b, h, place + s, d] = values[0][b, h, s, d]


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
    """Write TIR for :func:`compressor.ops.attention.masked_attention`.

    Args:
        tokens_first: of q, k and v: whether it is given as [B, S, H, D], as linears leave it.
        bias: of batch, heads and queries: whether the bias has one for each, or one for all; None without a bias.
    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, S, D], mask [B, S], bias (where there is one) flat, out
    [B, S, H, D], all float32.
    """
    attend = Tiles(heads, kv_heads, head_dim, scale, softcap).attend()

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        batch = T.int64()
        length = T.int64()
        dims = T.meta_var(lambda n, first: (batch, length, n, head_dim) if first else (batch, n, length, head_dim))
        q = T.meta_var(parameter(dims(heads, tokens_first[0]), "float32"))
        k = T.meta_var(parameter(dims(kv_heads, tokens_first[1]), "float32"))
        v = T.meta_var(parameter(dims(kv_heads, tokens_first[2]), "float32"))
        mask = T.meta_var(parameter((batch, length), "float32"))
        biases = T.meta_var(None if bias is None else parameter((_biases((batch, heads, length), bias),), "float32"))
        out = T.meta_var(parameter((batch, length, heads, head_dim), "float32"))
        limits = T.meta_var(partial(_around, window, length))
        added = T.meta_var(None if bias is None else partial(_pair_bias, biases, bias, heads, length))
        rows = T.meta_var([DenseRows(x, first) for x, first in zip((q, k, v), tokens_first, strict=True)])
        masks = T.meta_var((partial(_unpadded, mask, window), None))
        attend(*rows, out, None, limits, added, masks, None, window > 0, (batch, length))

    return kernel


def cross_attention(heads: int, kv_heads: int, head_dim: int, scale: float, softcap: float = 0.0) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.attention.masked_attention` where queries and keys are of different tokens.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, N, D], mask [B, N], out [B, S, H, D], all float32.
    """
    one = OneToken(heads, kv_heads, head_dim, scale, softcap)
    many = Tiles(heads, kv_heads, head_dim, scale, softcap)
    part, merge, attend = one.partial(), merge_parts(one), many.attend()

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        batch = T.int64()
        tokens = T.int64()
        length = T.int64()
        q = T.meta_var(parameter((batch, heads, tokens, head_dim), "float32"))
        k = T.meta_var(parameter((batch, kv_heads, length, head_dim), "float32"))
        v = T.meta_var(parameter((batch, kv_heads, length, head_dim), "float32"))
        mask = T.meta_var(parameter((batch, length), "float32"))
        out = T.meta_var(parameter((batch, tokens, heads, head_dim), "float32"))
        rows = T.meta_var([DenseRows(x) for x in (q, k, v)])

        if tokens == 1:
            splits = T.meta_var(one.splits(length, batch))
            sums, stats = T.meta_var(one.results(batch, splits))
            every = T.meta_var(lambda: (T.int64(0), length))
            shown = T.meta_var(lambda b, key: mask[b, key] != T.float32(0))
            part(*rows, every, None, shown, splits, sums, stats, batch)
            merge(rows[0], None, out, None, every, None, None, splits, sums, stats, batch)
        else:
            limits = T.meta_var(lambda _first, _last: (T.int64(0), length))
            masks = T.meta_var((partial(_unpadded, mask, 0), None))
            attend(*rows, out, None, limits, None, masks, None, False, (batch, tokens))

    return kernel


def _first_seen(query: Any, window: int, chunk: int) -> Any:
    """Return the first key that the query at a position sees."""
    first = T.max(query - (window - 1), T.int64(0)) if window else T.int64(0)
    return T.max(first, query - query % chunk) if chunk else first


def before(position: Any, window: int, chunk: int) -> tuple[Any, Any]:
    """Return the first key in the cache that one new token sees, and how many there are up to itself."""
    first = _first_seen(position[0], window, chunk)
    return first, position[0] - first


def limits_of_tokens(place: Any, window: int, chunk: int, early: Any, late: Any) -> tuple[Any, Any]:
    """Return the keys from the first that new tokens may see to the one behind the last."""
    return _first_seen(place + early, window, chunk), place + late + 1


def causal(place: Any, window: int, chunk: int, _b: Any, token: Any, key: Any) -> Any:
    """Tell whether a new token sees a key."""
    return T.And(key <= place + token, key >= _first_seen(place + token, window, chunk))


def all_see(place: Any, window: int, chunk: int, early: Any, late: Any, key: Any, end: Any) -> Any:
    """Tell whether all new tokens from the early to the late one see all keys from one to an end."""
    return T.And(end <= place + early + 1, key >= _first_seen(place + late, window, chunk))


def _distance_bias(biases: DistanceBiases, place: Any, _b: Any, head: Any, token: Any, key: Any) -> Any:
    return biases.one(head, key - place - token)


def _around(window: int, length: Any, early: Any, late: Any) -> tuple[Any, Any]:
    """Return the keys that tokens of a text may see, within a window to both sides."""
    if not window:
        return T.int64(0), length
    return T.max(early - (window - 1), T.int64(0)), T.min(late + window, length)


def _unpadded(mask: Any, window: int, b: Any, token: Any, key: Any) -> Any:
    """Tell whether a key is not padding and within the window."""
    shown = mask[b, key] != T.float32(0)
    return T.And(shown, T.And(key < token + window, key > token - window)) if window else shown


def _biases(sizes: tuple[Any, Any, Any], own: tuple[bool, bool, bool]) -> Any:
    """Return how many numbers a bias has."""
    count = sizes[2]
    for size, each in zip(sizes, own, strict=True):
        count = count * size if each else count
    return count


def _pair_bias(
    biases: Any, own: tuple[bool, bool, bool], heads: int, length: Any, b: Any, head: Any, token: Any, key: Any
) -> Any:
    """Return the bias of a pair of tokens."""
    at = b if own[0] else T.int64(0)
    at = at * heads + head if own[1] else at
    at = at * length + token if own[2] else at
    return biases[at * length + key]
