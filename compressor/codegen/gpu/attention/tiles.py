"""Attention of many tokens: tiles of queries by tiles of keys in shared memory, with one pass over the keys.

A tile holds rows that share a head of keys, of all its query heads and several tokens.  Scores of a tile of keys become
weights at once; when a larger score comes, what was summed so far is scaled down (online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3; over tiles: Dao et al. 2022, FlashAttention, arXiv 2205.14135).

The 256 threads are a square of 16 x 16.  A thread computes a few rows by a few keys of the scores, and the same rows by
some channels of the outputs, so that a row's largest score and sum stay in the registers of its 16 threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.attention.heads import LOWEST, Heads
from compressor.codegen.gpu.intrinsics import barrier, lane_max, lane_sum
from compressor.codegen.kernels.vector import ramp, splat_float

SIDE = 16
THREADS = SIDE * SIDE
_RUN = 32  # vectors of a row that are summed one after another: sums of sums are nearer to the truth
_APART = 4  # floats between rows in shared memory, so that neighbours lie in different banks


@dataclass(frozen=True)
class Tiles(Heads):
    """What a block computes of several tokens; see the module."""

    @cached_property
    def rows(self) -> int:
        """Return the rows of a tile of queries, and of one of keys: what shared memory has room for."""
        return 64 if self.width <= 128 else 32 if self.width <= 256 else 16

    @cached_property
    def each(self) -> int:
        """Return how many rows, and how many keys, a thread has."""
        return self.rows // SIDE

    @cached_property
    def steps(self) -> int:
        """Return how many of these a thread sums."""
        return -(-self.columns // SIDE)

    def blocks(self, new: Any) -> Any:
        """Return the tiles of the queries of one head of keys."""
        return (new * self.repeat + (self.rows - 1)) // self.rows

    def tokens(self, block: Any, new: Any) -> tuple[Any, Any]:
        """Return the first and the last token of a tile."""
        last = T.min((block + 1) * self.rows, new * self.repeat) - 1
        return block * self.rows // self.repeat, last // self.repeat

    def attend(self) -> Any:
        """Make a macro ``attend(q, keys, values, out, order, limits, added, seen, sinks, blind, sizes)``: one launch.

        ``q``, ``keys`` and ``values`` are :class:`compressor.codegen.gpu.attention.rows.Rows`; out [B, S, H, D], whose
        channels ``order`` [Hkv, D] names, or None; ``limits(first, last)`` gives the keys from the first that some of
        these tokens may see to the one behind the last; ``added(b, head, token, key)`` is added to a score;
        ``seen(b, token, key)`` tells which of these they see; ``sinks`` [H] or None; where ``blind``, the outputs of
        tokens that see nothing are 0; ``sizes`` are batch and S.
        """
        rows, each, size = self.rows, self.each, self.steps * self.vec
        copy, score, add, finish = self._copy(), self._score(), self._add(), self._finish()

        @T.inline
        def visit(query, held, weights, acc, stats, bounds, keys, values, added, seen, place, b, kv, t):
            token = T.meta_var(lambda r: (kv, bounds[2] + r))
            is_there = T.meta_var(lambda r: bounds[2] + r < bounds[1])
            copy(held, keys, token, is_there, b, t)
            barrier()
            score(query, held, weights, acc, stats, bounds, added, seen, place, b, t)
            barrier()
            copy(held, values, token, is_there, b, t)
            barrier()
            add(weights, held, acc, t)
            barrier()

        @T.inline
        def attend(q, keys, values, out, order, limits, added, seen, sinks, blind, sizes):
            count = T.meta_var(self.blocks(sizes[1]))
            with T.launch_thread("blockIdx.x", count) as x, T.launch_thread("blockIdx.y", self.kv_heads) as kv:
                with T.launch_thread("blockIdx.z", sizes[0]) as b, T.launch_thread("threadIdx.x", THREADS) as t:
                    query = T.alloc_buffer((rows, self.width + _APART), "float32", scope="shared.dyn")
                    held = T.alloc_buffer((rows, self.width + _APART), "float32", scope="shared.dyn")
                    weights = T.alloc_buffer((rows, rows + _APART), "float32", scope="shared.dyn")
                    acc = T.alloc_buffer((each * size,), "float32", scope="local")
                    stats = T.alloc_buffer((2 * each,), "float32", scope="local")  # maxima, sums
                    bounds = T.alloc_buffer((3,), "int64", scope="local")  # begin, end, the tile's first
                    block = T.meta_var(count - 1 - x)  # those that see most keys begin first
                    span = T.meta_var(limits(*self.tokens(block, sizes[1])))
                    bounds[0] = span[0]
                    bounds[1] = span[1]
                    last = T.meta_var(sizes[1] * self.repeat - 1)
                    row = T.meta_var(lambda r: T.min(block * rows + r, last))
                    place = T.meta_var(lambda r: (kv * self.repeat + row(r) % self.repeat, row(r) // self.repeat))
                    copy(query, q, place, None, b, t)
                    for i in T.unroll(each):
                        head = T.meta_var(place(t // SIDE * each + i)[0])
                        stats[i] = T.float32(LOWEST) if sinks is None else sinks[head]
                        stats[each + i] = T.float32(0 if sinks is None else 1)
                    for i in T.unroll(each * size):
                        acc[i] = T.float32(0)
                    for tile in range((bounds[1] - bounds[0] + (rows - 1)) // rows):
                        bounds[2] = bounds[0] + tile * rows
                        visit(query, held, weights, acc, stats, bounds, keys, values, added, seen, place, b, kv, t)
                    is_own = T.meta_var(lambda r: block * rows + r <= last)
                    finish(acc, stats, out, order, kv, place, is_own, blind, b, t)

        return attend

    def _copy(self) -> Any:
        """Make a macro that loads rows into shared memory; zeros, which weigh nothing, for those that are not there."""
        rows, vec, columns = self.rows, self.vec, self.columns

        @T.inline
        def copy(to, source, place, is_there, b, t):
            for n in range(-(-rows * columns // THREADS)):
                r = T.meta_var((n * THREADS + t) // columns)
                at = T.meta_var((n * THREADS + t) % columns * vec)
                head, token = T.meta_var(place(r))
                if n * THREADS + t < rows * columns:
                    if is_there is None:
                        source.emit_load(to, (r, at), b, head, token, at, vec)
                    else:
                        if is_there(r):
                            source.emit_load(to, (r, at), b, head, token, at, vec)
                        else:
                            to[r, ramp(at, vec)] = splat_float(0, vec)

        return copy

    def _multiply(self) -> Any:
        """Make a macro that computes the products of rows and keys over some columns."""
        each, vec = self.each, self.vec

        @T.inline
        def multiply(query, held, dot, first, count, t):
            left = T.alloc_buffer((each * vec,), "float32", scope="local")
            right = T.alloc_buffer((vec,), "float32", scope="local")
            for n in T.unroll(each * each):
                dot[n] = T.float32(0)
            for c in range(count):
                at = T.meta_var(ramp((first + c) * vec, vec))
                for i in T.unroll(each):
                    left[ramp(i * vec, vec)] = query[t // SIDE * each + i, at]
                for j in T.unroll(each):
                    right[ramp(0, vec)] = held[j * SIDE + t % SIDE, at]
                    for i in T.unroll(each):
                        for e in T.unroll(vec):
                            dot[i * each + j] = dot[i * each + j] + left[i * vec + e] * right[e]

        return multiply

    def _score(self) -> Any:
        """Make a macro that computes the weights of a tile of keys, and scales what was summed so far."""
        each, size, multiply = self.each, self.steps * self.vec, self._multiply()

        @T.inline
        def score(query, held, weights, acc, stats, bounds, added, seen, place, b, t):
            dot = T.alloc_buffer((each * each,), "float32", scope="local")
            top = T.alloc_buffer((2,), "float32", scope="local")  # largest score, factor of what was summed
            multiply(query, held, dot, 0, T.min(_RUN, self.columns), t)
            if self.columns > _RUN:
                run = T.alloc_buffer((each * each,), "float32", scope="local")
                for n in range(1, -(-self.columns // _RUN)):
                    multiply(query, held, run, n * _RUN, T.min(_RUN, self.columns - n * _RUN), t)
                    for i in T.unroll(each * each):
                        dot[i] = dot[i] + run[i]
            for i in T.unroll(each):
                own = T.meta_var(place(t // SIDE * each + i))
                top[0] = stats[i]
                for j in T.unroll(each):
                    key = T.meta_var(bounds[2] + (j * SIDE + t % SIDE))
                    if key < bounds[1] and seen(b, own[1], key):
                        dot[i * each + j] = self.score(dot[i * each + j])
                        if added is not None:
                            dot[i * each + j] = dot[i * each + j] + added(b, own[0], own[1], key)
                        top[0] = T.max(top[0], dot[i * each + j])
                    else:
                        dot[i * each + j] = T.float32(-math.inf)
                top[0] = lane_max(top[0], SIDE)
                top[1] = T.exp(stats[i] - top[0])
                stats[i] = top[0]
                top[0] = T.float32(0)
                for j in T.unroll(each):
                    dot[i * each + j] = T.exp(dot[i * each + j] - stats[i])
                    top[0] = top[0] + dot[i * each + j]
                    weights[t // SIDE * each + i, j * SIDE + t % SIDE] = dot[i * each + j]
                stats[each + i] = stats[each + i] * top[1] + lane_sum(top[0], SIDE)
                for e in T.unroll(size):
                    acc[i * size + e] = acc[i * size + e] * top[1]

        return score

    def _add(self) -> Any:
        """Make a macro that adds a tile's weighted values."""
        each, vec, size = self.each, self.vec, self.steps * self.vec

        @T.inline
        def add(weights, held, acc, t):
            own = T.alloc_buffer((each,), "float32", scope="local")
            value = T.alloc_buffer((vec,), "float32", scope="local")
            for key in range(self.rows):
                for i in T.unroll(each):
                    own[i] = weights[t // SIDE * each + i, key]
                for step in T.unroll(self.steps):
                    c = T.meta_var(step * SIDE + t % SIDE)
                    if c < self.columns:
                        value[ramp(0, vec)] = held[key, ramp(c * vec, vec)]
                        for i in T.unroll(each):
                            for e in T.unroll(vec):
                                at = T.meta_var(i * size + step * vec + e)
                                acc[at] = acc[at] + own[i] * value[e]

        return add

    def _finish(self) -> Any:
        """Make a macro that writes the outputs."""
        each, vec, size = self.each, self.vec, self.steps * self.vec

        @T.inline
        def finish(acc, stats, out, order, kv, place, is_own, blind, b, t):
            for i in T.unroll(each):
                r = T.meta_var(t // SIDE * each + i)
                stats[i] = T.float32(1) / stats[each + i]
                if blind:
                    stats[i] = T.Select(stats[each + i] == T.float32(0), T.float32(0), stats[i])
                if is_own(r):
                    for step in T.unroll(self.steps):
                        c = T.meta_var(step * SIDE + t % SIDE)
                        if c < self.columns:
                            for e in T.unroll(vec):
                                head, token = T.meta_var(place(r))
                                value = T.meta_var(acc[i * size + step * vec + e] * stats[i])
                                channel = T.meta_var(c * vec + e if order is None else order[kv, c * vec + e])
                                out[b, token, head, channel] = value

        return finish
