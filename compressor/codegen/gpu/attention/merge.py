"""Put the parts of one token's attention together, with the token's own key and value, which go to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.attention.heads import LOWEST
from compressor.codegen.gpu.attention.one_token import OneToken
from compressor.codegen.gpu.intrinsics import WARP, barrier, warp_max, warp_sum
from compressor.codegen.gpu.memory import shared
from compressor.codegen.gpu.rows import block_sum

_MOST_THREADS = 1024
_BESIDE = 8  # at most, threads that share a channel
_AT_ONCE = 8  # parts that a thread waits for


@dataclass(frozen=True)
class NewToken:
    """The keys and values of the token that attends.

    Attributes:
        keys, values: :class:`compressor.codegen.gpu.attention.rows.Rows`, of one token.
        stored: pairs of buffers: new rows [B, Hkv, 1, .], and the cache [B, Hkv, T, .] that they go to.
        place: where in the cache; in device memory.
    """

    keys: Any
    values: Any
    stored: Sequence[tuple[Any, Any]]
    place: Any

    def emit_store(self, b: Any, kv: Any, t: Any, threads: int) -> None:
        """Emit stores of one head's rows by ``threads`` threads."""
        for rows, cache in self.stored:
            width = int(rows.shape[3])
            with T.serial(0, -(-width // threads)) as n:
                at = n * threads + t
                with T.If(at < width), T.Then():
                    T.buffer_store(cache, rows[b, kv, T.int64(0), at], [b, kv, self.place, at])


def merge_parts(one: OneToken) -> Any:
    """Make a macro ``merge(q, new, out, order, limits, added, sinks, splits, sums, stats, batch)``: the second.

    ``new`` is the :class:`NewToken`, one more part of the keys, or None; ``order`` [Hkv, D] tells which channel of
    ``out`` each sum is, or is None.
    """
    across = -(-one.width // WARP) * WARP
    beside = max(1, min(_MOST_THREADS // across, _BESIDE))  # threads that share a channel
    threads = across * beside
    buffers = [(shape, "float32") for shape in ((1, threads // WARP), (one.most_splits,), (beside, across))]
    dot, weigh, total = block_sum(threads), _weigh(one, threads), _total(threads, across)

    @T.inline
    def merge(q, new, out, order, limits, added, sinks, splits, sums, stats, batch):
        with T.launch_thread("blockIdx.x", one.heads) as h, T.launch_thread("blockIdx.y", batch) as b:
            with T.launch_thread("threadIdx.x", threads) as t:
                memory = T.meta_var(shared(*buffers))
                scratch, factors, shares = T.meta_var((memory[0], memory[1], memory[2]))
                count = T.alloc_buffer((1,), "int64", scope="local")
                own = T.alloc_buffer((4,), "float32", scope="local")  # the new key's score, maximum, sums
                kv, d = T.meta_var((h // one.repeat, T.min(t % across, one.width - 1)))
                own[1] = sinks[h] if sinks is not None else T.float32(LOWEST)
                if new is not None:
                    product = T.meta_var(q.one(b, h, T.int64(0), d) * new.keys.one(b, kv, T.int64(0), d))
                    own[0] = T.Select(t < one.width, product, T.float32(0))
                    dot(own, scratch, 0, t)
                    own[0] = one.score(own[0])
                    if added is not None:
                        own[0] = own[0] + added(h, new.place)
                    own[1] = T.max(own[1], own[0])
                count[0] = one.parts(limits()[1], splits)
                first, parts = T.meta_var(((b * one.heads + h) * splits, count[0]))
                weigh(own, factors, stats, first, parts, t)
                own[2] = own[2] + (T.exp(sinks[h] - own[1]) if sinks is not None else T.float32(0))
                barrier()
                total(own, factors, shares, sums, first, parts, d, t)
                barrier()
                if new is not None:
                    own[0] = T.exp(own[0] - own[1])
                    own[2] = own[2] + own[0]
                    own[3] = own[0] * new.values.one(b, kv, T.int64(0), d)
                else:
                    own[3] = T.float32(0)
                if t < one.width:
                    for n in T.unroll(beside):
                        own[3] = own[3] + shares[n, t]
                    channel = T.meta_var(t if order is None else order[kv, t])
                    out[b, T.int64(0), h, channel] = own[3] / own[2]
                if new is not None:
                    if h % one.repeat == 0:
                        new.emit_store(b, kv, t, threads)

    return merge


def _weigh(one: OneToken, threads: int) -> Any:
    """Make a macro that gives each part its factor, in shared memory, and each thread their largest score and sum."""

    @T.inline
    def weigh(own, factors, stats, first, parts, t):
        for n in range((parts + (WARP - 1)) // WARP):  # each warp for itself
            own[1] = T.max(own[1], stats[first + T.min(n * WARP + t % WARP, parts - 1), 0])
        own[1] = warp_max(own[1])
        own[2] = T.float32(0)
        for n in range((parts + (WARP - 1)) // WARP):
            s = T.meta_var(n * WARP + t % WARP)
            if s < parts:
                own[2] = own[2] + T.exp(stats[first + s, 0] - own[1]) * stats[first + s, 1]
        own[2] = warp_sum(own[2])
        for n in range(-(-one.most_splits // threads)):
            s = T.meta_var(n * threads + t)
            if T.Cast("int64", s) < parts:
                factors[s] = T.exp(stats[first + s, 0] - own[1])

    return weigh


def _total(threads: int, across: int) -> Any:
    """Make a macro that leaves, in shared memory, shares of the sum of all parts; several are on their way at once."""
    beside = threads // across
    round_parts = beside * _AT_ONCE

    @T.inline
    def total(own, factors, shares, sums, first, parts, d, t):
        held = T.alloc_buffer((_AT_ONCE,), "float32", scope="local")
        own[3] = T.float32(0)
        for n in range((parts + (round_parts - 1)) // round_parts):
            s = T.meta_var(partial(_next_part, n * round_parts + t // across, beside))
            for u in T.unroll(_AT_ONCE):
                held[u] = sums[first + T.min(s(u), parts - 1), d]
            for u in T.unroll(_AT_ONCE):
                if s(u) < parts:
                    own[3] = own[3] + held[u] * factors[s(u)]
        shares[t // across, t % across] = own[3]

    return total


def _next_part(first: Any, step: int, n: int) -> Any:
    return first + n * step
