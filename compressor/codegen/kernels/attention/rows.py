"""Attend with one query row to rows of keys and values, wherever these lie: scores, softmax, weighted sum.

The scores of the row are kept whole (two passes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import gcd
from typing import Any, Protocol

from tvm.script import tirx as T

from compressor.codegen.kernels.vector import VECTOR, emit_tree_sum, exp, ramp, splat_float, widen


def first_seen(query: Any, window: int, chunk: int) -> Any:
    """Return the first key that the query at a position sees."""
    first = T.max(query - (window - 1), T.int64(0)) if window else T.int64(0)
    return T.max(first, query - query % chunk) if chunk else first


class Place:
    """The last dimension of a buffer at fixed indices of the others."""

    def __init__(self, buffer: Any, *indices: Any) -> None:
        self.buffer, self.indices = buffer, indices

    def __getitem__(self, at: Any) -> Any:
        return self.buffer[(*self.indices, at)]

    def emit_store(self, at: Any, value: Any) -> None:
        """Emit a store."""
        T.buffer_store(self.buffer, value, [*self.indices, at])


class Rows(Protocol):
    """Keys and values of one head, as an attention row reads them.

    Attributes:
        lanes: of all vectors; divides the head's width.
    """

    lanes: int

    def products(self, query: Place, row: Any) -> Any:
        """Return a vector whose elements add up to the product of the query and a row's key."""

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """Emit ``acc += weight * value`` of a row."""


class DenseRows:
    """Rows of float32 [B, Hkv, T, D]: those of batch entry ``b`` and key-value head ``kv``."""

    def __init__(self, keys: Any, values: Any, b: Any, kv: Any, head_dim: int) -> None:
        self.keys, self.values, self.b, self.kv, self.head_dim = keys, values, b, kv, head_dim
        self.lanes = gcd(VECTOR, head_dim)

    def products(self, query: Place, row: Any) -> Any:
        """See :class:`Rows`."""
        value = splat_float(0, self.lanes)
        for d in range(0, self.head_dim, self.lanes):
            at = ramp(d, self.lanes)
            value = value + query[at] * self.keys[self.b, self.kv, row, at]
        return value

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """See :class:`Rows`."""
        p = widen(weight, self.lanes)
        for d in range(0, self.head_dim, self.lanes):
            at = ramp(d, self.lanes)
            T.buffer_store(acc, acc[at] + p * self.values[self.b, self.kv, row, at], [at])


class Row:
    """One query row: scores, softmax and the weighted sum of values, emitted into the current function."""

    def __init__(self, head_dim: int, scale: float, softcap: float, has_sinks: bool) -> None:
        self.head_dim, self.scale, self.softcap, self.has_sinks = head_dim, scale, softcap, has_sinks

    def emit(
        self,
        held: Rows,
        query: Place,
        result: Place,
        scores: Any,
        sink: Any,
        first: Any,
        count: Any,
        added: Callable[[Any], Any] | None = None,
    ) -> None:
        """Attend to ``count`` keys from ``first``.

        Args:
            query, result: where the row is read from and written to.
            scores: a buffer for them, filled up to whole vectors.
            added: how far the key lies ahead of the last, 0 or less -> what is added to its score; None for nothing.
        """
        lowest, lanes = T.float32(-3.0e38), held.lanes
        stat = T.alloc_buffer((2,), "float32")  # maximum, sum
        T.buffer_store(stat, T.max(sink, lowest) if self.has_sinks else lowest, [0])
        with T.serial(0, count) as j:
            score = self._score(held, query, first + j)
            if added is not None:
                score = score + added(j + 1 - count)
            T.buffer_store(scores, score, [j])
            T.buffer_store(stat, T.max(stat[0], scores[j]), [0])
        with T.serial(0, VECTOR) as j:
            T.buffer_store(scores, T.float32(-math.inf), [count + j])
        self._softmax(scores, stat, sink, count)
        acc = T.alloc_buffer((self.head_dim,), "float32")
        for d in range(0, self.head_dim, lanes):
            T.buffer_store(acc, splat_float(0, lanes), [ramp(d, lanes)])
        with T.serial(0, count) as j:
            held.emit_weighed(acc, scores[j], first + j)
        for d in range(0, self.head_dim, lanes):
            factor = widen(T.float32(1) / stat[1], lanes)
            result.emit_store(ramp(d, lanes), acc[ramp(d, lanes)] * factor)

    def _score(self, held: Rows, query: Place, row: Any) -> Any:
        dot = T.alloc_buffer((held.lanes,), "float32")
        T.buffer_store(dot, held.products(query, row), [ramp(0, held.lanes)])
        emit_tree_sum(dot, held.lanes)
        score = dot[0] * T.float32(self.scale)
        if self.softcap:
            score = T.float32(self.softcap) * T.tanh(score / T.float32(self.softcap))
        return score

    def _softmax(self, scores: Any, stat: Any, sink: Any, count: Any) -> None:
        """Scores become exp(score - maximum); their sum goes to ``stat[1]``.  Filling scores become 0."""
        every = T.ramp(0, 1, VECTOR)
        total = T.alloc_buffer((VECTOR,), "float32")
        T.buffer_store(total, T.broadcast(T.float32(0), VECTOR), [every])
        with T.serial(0, (count + (VECTOR - 1)) // VECTOR) as block:
            at = T.ramp(block * VECTOR, 1, VECTOR)
            far = scores[at] - T.broadcast(stat[0], VECTOR)
            kept = T.Cast(f"float32x{VECTOR}", far > T.broadcast(T.float32(-80), VECTOR))
            T.buffer_store(scores, exp(far, VECTOR) * kept, [at])
            T.buffer_store(total, total[every] + scores[at], [every])
        T.buffer_store(stat, T.exp(sink - stat[0]) if self.has_sinks else T.float32(0), [1])
        emit_tree_sum(total, VECTOR)
        T.buffer_store(stat, stat[1] + total[0], [1])
