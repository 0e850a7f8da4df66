"""Attention of many queries at once: blocks of queries by blocks of keys, with one pass over the keys.

A block holds rows that share a head of keys, of all its query heads and several tokens.  Scores of a block of keys
become weights at once; when a larger score comes, what was summed so far is scaled down (online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3; over blocks: Dao et al. 2022, FlashAttention, arXiv 2205.14135).  Keys
are turned first, so that a vector holds one channel of neighbouring keys and scores need no sums across a vector.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.vector import emit_tree, exp, ramp, registers, widen

ROWS = 16
"""Queries of a block."""
KEYS = 32
"""Keys of a block."""
_LANES = 16
_SCORED = 8  # rows of scores in registers at once
_LOWEST = -3.0e38


class PromptBlocks:
    """Statements over one block of queries.

    Args:
        repeat: query heads that share a head of keys.
    """

    def __init__(self, head_dim: int, repeat: int, scale: float, softcap: float) -> None:
        self.head_dim, self.repeat, self.scale, self.softcap = head_dim, repeat, scale, softcap
        self.lanes = gcd(_LANES, head_dim)
        vectors = head_dim // self.lanes
        self.weighed = next(n for n in (8, 4, 2, 1) if n * vectors <= 16 or n == 1)  # rows of sums in registers

    def blocks(self, new: Any) -> Any:
        """Blocks of the queries of one head of keys."""
        return (new * self.repeat + (ROWS - 1)) // ROWS

    def place(self, task: Any, count: Any) -> Any:
        """The block that comes at a place: early ones, which see few keys, alternate with late ones."""
        return T.Select(task % 2 == 0, task // 2, count - 1 - task // 2)

    def tokens(self, block: Any, new: Any) -> tuple[Any, Any]:
        """First and last token of a block."""
        last = T.min((block + 1) * ROWS, new * self.repeat) - 1
        return block * ROWS // self.repeat, last // self.repeat

    def turn(self, turned: Any, keys: Any, b: Any, kv: Any, count: Any) -> None:
        """``turned[b, kv, d, t] = keys[b, kv, t, d]`` of the first ``count`` keys."""
        with T.serial(0, count) as t:
            for d in range(self.head_dim):
                T.buffer_store(turned, keys[b, kv, t, d], [b, kv, d, t])

    def attend(
        self,
        q: Any,
        turned: Any,
        values: Any,
        out: Any,
        b: Any,
        kv: Any,
        block: Any,
        new: Any,
        begin: Any,
        end: Any,
        visible: Callable[[Any, Any], Any],
        sink: Callable[[Any], Any] | None,
    ) -> None:
        """Attend with one block of queries to keys ``begin`` to ``end``.

        Args:
            q: [B, H, S, D];  turned: [B, Hkv, D, keys filled up to whole blocks];  values: [B, Hkv, T, D].
            out: [B, S, H, D].
            visible: (token, first of 16 keys) -> which of them the token sees; a vector of bool.
            sink: head -> one more logit, which takes part in the softmax only.
        """
        lanes, width, repeat = self.lanes, self.head_dim, self.repeat
        queries = T.alloc_buffer((ROWS, width), "float32")
        weights = T.alloc_buffer((ROWS, KEYS), "float32")
        sums = T.alloc_buffer((ROWS, width), "float32")
        stat = T.alloc_buffer((2, ROWS), "float32")  # largest score, sum of weights

        def row(r: Any) -> tuple[Any, Any]:
            """Head and token of a row; rows over the end repeat the last."""
            at = T.min(block * ROWS + r, new * repeat - 1)
            return kv * repeat + at % repeat, at // repeat

        with T.serial(0, ROWS) as r:
            head, token = row(r)
            for d in range(0, width, lanes):
                loaded = q[b, head, token, ramp(d, lanes)] * widen(T.float32(self.scale), lanes)
                T.buffer_store(queries, loaded, [r, ramp(d, lanes)])
                T.buffer_store(sums, widen(T.float32(0), lanes), [r, ramp(d, lanes)])
            T.buffer_store(stat, T.float32(_LOWEST) if sink is None else sink(head), [0, r])
            T.buffer_store(stat, T.float32(0 if sink is None else 1), [1, r])
        with T.serial(0, (end - begin // KEYS * KEYS + (KEYS - 1)) // KEYS) as i:
            first = (begin // KEYS + i) * KEYS
            with T.serial(0, ROWS // _SCORED) as part:
                self._score(weights, queries, turned, b, kv, first, part * _SCORED)
            with T.serial(0, ROWS) as r:
                self._weigh(weights, sums, stat, r, partial(visible, row(r)[1]), first)
            with T.serial(0, ROWS // self.weighed) as part:
                self._sum(sums, weights, values, b, kv, first, end, part * self.weighed)
        with T.serial(0, ROWS) as r, T.If(block * ROWS + r < new * repeat), T.Then():
            head, token = row(r)
            for d in range(0, width, lanes):
                value = sums[r, ramp(d, lanes)] * widen(T.float32(1) / stat[1, r], lanes)
                T.buffer_store(out, value, [b, token, head, ramp(d, lanes)])

    def _score(self, weights: Any, queries: Any, turned: Any, b: Any, kv: Any, first: Any, r0: Any) -> None:
        """Scores of some rows."""
        vectors = range(KEYS // _LANES)
        acc = registers(_SCORED, (KEYS,))
        for r in range(_SCORED):
            for v in vectors:
                T.buffer_store(acc[r], T.broadcast(T.float32(0), _LANES), [T.ramp(v * _LANES, 1, _LANES)])
        with T.serial(0, self.head_dim) as d:
            for r in range(_SCORED):
                for v in vectors:
                    at = T.ramp(v * _LANES, 1, _LANES)
                    keys = turned[b, kv, d, T.ramp(first + v * _LANES, 1, _LANES)]
                    T.buffer_store(acc[r], acc[r][at] + keys * T.broadcast(queries[r0 + r, d], _LANES), [at])
        for r in range(_SCORED):
            for v in vectors:
                at = T.ramp(v * _LANES, 1, _LANES)
                T.buffer_store(weights, acc[r][at], [r0 + r, at])

    def _weigh(self, weights: Any, sums: Any, stat: Any, r: Any, visible: Callable[[Any], Any], first: Any) -> None:
        """Scores of one row become weights; what was summed before is scaled to the new largest score."""
        top = T.alloc_buffer((_LANES,), "float32")
        every, factor = T.ramp(0, 1, _LANES), T.alloc_buffer((1,), "float32")
        T.buffer_store(top, T.broadcast(stat[0, r], _LANES), [every])
        for v in range(0, KEYS, _LANES):
            at, score = T.ramp(v, 1, _LANES), weights[r, T.ramp(v, 1, _LANES)]
            if self.softcap:
                capped = T.tanh(score * T.broadcast(T.float32(1 / self.softcap), _LANES))
                score = capped * T.broadcast(T.float32(self.softcap), _LANES)
            hidden = T.Select(visible(first + v), score, T.broadcast(T.float32(_LOWEST), _LANES))
            T.buffer_store(weights, hidden, [r, at])
            T.buffer_store(top, T.max(top[every], weights[r, at]), [every])
        emit_tree(T.max, top, _LANES)
        # What is far below counts as nothing: as there, the exponential ends at -87.
        T.buffer_store(factor, _power(stat[0, r] - top[0], 1), [0])
        T.buffer_store(stat, top[0], [0, r])
        total = T.alloc_buffer((_LANES,), "float32")
        T.buffer_store(total, T.broadcast(T.float32(0), _LANES), [every])
        for v in range(0, KEYS, _LANES):
            at = T.ramp(v, 1, _LANES)
            T.buffer_store(weights, _power(weights[r, at] - T.broadcast(stat[0, r], _LANES), _LANES), [r, at])
            T.buffer_store(total, total[every] + weights[r, at], [every])
        emit_tree(operator.add, total, _LANES)
        T.buffer_store(stat, stat[1, r] * factor[0] + total[0], [1, r])
        for d in range(0, self.head_dim, self.lanes):
            at = ramp(d, self.lanes)
            T.buffer_store(sums, sums[r, at] * widen(factor[0], self.lanes), [r, at])

    def _sum(self, sums: Any, weights: Any, values: Any, b: Any, kv: Any, first: Any, end: Any, r0: Any) -> None:
        """Add the block's values, weighed, to the sums of some rows."""
        lanes, rows = self.lanes, range(self.weighed)
        acc = registers(self.weighed, (self.head_dim,))
        places = [ramp(d, lanes) for d in range(0, self.head_dim, lanes)]
        for r in rows:
            for at in places:
                T.buffer_store(acc[r], sums[r0 + r, at], [at])
        with T.serial(0, T.min(KEYS, end - first)) as t:
            for at in places:
                for r in rows:
                    product = values[b, kv, first + t, at] * widen(weights[r0 + r, t], lanes)
                    T.buffer_store(acc[r], acc[r][at] + product, [at])
        for r in rows:
            for at in places:
                T.buffer_store(sums, acc[r][at], [r0 + r, at])


def keys_from(first: Any) -> Any:
    """Indices of 16 keys."""
    return T.broadcast(T.Cast("int32", first), _LANES) + T.ramp(T.int32(0), 1, _LANES)


def at_most(keys: Any, last: Any) -> Any:
    """Which keys are no later than ``last``."""
    return keys <= T.broadcast(T.Cast("int32", last), _LANES)


def _power(x: Any, lanes: int) -> Any:
    """``e ** x`` for x up to 0, and 0 below -80."""
    near = x > widen(T.float32(-80), lanes)
    return T.Select(near, exp(x, lanes), widen(T.float32(0), lanes))
