"""Put the parts of one token's attention together, with the token's own key and value, which go to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.attention.heads import LOWEST
from compressor.codegen.gpu.attention.one_token import OneToken
from compressor.codegen.gpu.intrinsics import WARP
from compressor.codegen.gpu.rows import block_sum


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
    threads = -(-one.width // WARP) * WARP
    dot = block_sum(threads)

    @T.inline
    def merge(q, new, out, order, limits, added, sinks, splits, sums, stats, batch):
        with T.launch_thread("blockIdx.x", one.heads) as h, T.launch_thread("blockIdx.y", batch) as b:
            with T.launch_thread("threadIdx.x", threads) as t:
                scratch = T.alloc_buffer((1, threads // WARP), "float32", scope="shared")
                own = T.alloc_buffer((4,), "float32", scope="local")  # the new key's score, maximum, sums
                kv, d = T.meta_var((h // one.repeat, T.min(t, one.width - 1)))
                own[1] = sinks[h] if sinks is not None else T.float32(LOWEST)
                if new is not None:
                    product = T.meta_var(q.one(b, h, T.int64(0), d) * new.keys.one(b, kv, T.int64(0), d))
                    own[0] = T.Select(t < one.width, product, T.float32(0))
                    dot(own, scratch, 0, t)
                    own[0] = one.score(own[0])
                    if added is not None:
                        own[0] = own[0] + added(h, new.place)
                    own[1] = T.max(own[1], own[0])
                first, parts = T.meta_var(((b * one.heads + h) * splits, one.parts(limits()[1], splits)))
                for s in range(parts):
                    own[1] = T.max(own[1], stats[first + s, 0])
                own[2] = T.exp(sinks[h] - own[1]) if sinks is not None else T.float32(0)
                own[3] = T.float32(0)
                if new is not None:
                    own[0] = T.exp(own[0] - own[1])
                    own[2] = own[2] + own[0]
                    own[3] = own[0] * new.values.one(b, kv, T.int64(0), d)
                for s in range(parts):
                    own[0] = T.exp(stats[first + s, 0] - own[1])
                    own[2] = own[2] + own[0] * stats[first + s, 1]
                    own[3] = own[3] + own[0] * sums[first + s, d]
                if t < one.width:
                    channel = T.meta_var(t if order is None else order[kv, t])
                    out[b, T.int64(0), h, channel] = own[3] / own[2]
                if new is not None:
                    if h % one.repeat == 0:
                        new.emit_store(b, kv, t, threads)

    return merge
