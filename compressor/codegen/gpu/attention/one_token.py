"""Attention of one token: its keys are divided over blocks, so that few heads and a long context still fill the GPU.

Each block attends to a part of the keys and leaves its largest score, the sum of its weights, and its weighted sum of
values; one block a head puts these together (the softmax of parts: Milakov and Gimelshein 2018, arXiv 1805.02867; over
blocks of a GPU: Dao et al. 2023, "Flash-Decoding").  How the keys are divided depends on the position, which is in
device memory; the number of blocks depends on shapes alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.attention.heads import LOWEST, Heads
from compressor.codegen.gpu.intrinsics import WARP, barrier, lane_sum, warp_barrier, warp_max, warp_sum
from compressor.codegen.kernels.vector import ramp

THREADS = 128
_HEADS = 8  # at most, which one block computes
_CHANNELS = 4096  # at most, of these heads: what shared memory has room for
_TILE = 64  # keys, at least
_PART = 16  # keys: parts of the context are multiples of it
_ROWS_EACH = 4  # of values, that a thread waits for
# Blocks for a long context: what some 130 multiprocessors have registers for, six blocks each of floats, and twice four
# of codes; a rest would run alone.
_BLOCKS, _BLOCKS_OF_CODES = 768, 1024
_KEYS_A_BLOCK = 64  # of the capacity, at least


@dataclass(frozen=True)
class OneToken(Heads):
    """How the threads of a block share the work of one token; see the module."""

    @cached_property
    def group(self) -> int:
        """Return how many heads that share a head of keys one block computes."""
        most = max(1, min(_HEADS, _CHANNELS // self.width))
        return max(n for n in range(1, most + 1) if self.repeat % n == 0)

    @cached_property
    def piece(self) -> int:
        """Return how many channels go through shared memory at once."""
        return math.gcd(self.vec, 4)

    @cached_property
    def lanes(self) -> int:
        """Return how many threads share a key's products."""
        return min(8, _power(self.columns))

    @cached_property
    def keys(self) -> int:
        """Return how many keys each thread has a share of, in a tile."""
        return max(1, _TILE * self.lanes // THREADS)

    @cached_property
    def tile(self) -> int:
        """Return the keys of a tile."""
        return self.keys * THREADS // self.lanes

    @cached_property
    def spread(self) -> int:
        """Return how many threads share a row of values."""
        return min(THREADS, _power(self.columns))

    @cached_property
    def rows_at_once(self) -> int:
        """Return how many rows of values the block reads at once."""
        return THREADS // self.spread

    @cached_property
    def steps(self) -> int:
        """Return how many vectors of a row of values each of these has."""
        return -(-self.columns // self.spread)

    @cached_property
    def most_splits(self) -> int:
        """Return how many parts the keys of a text that is alone have at most."""
        blocks = _BLOCKS_OF_CODES if self.unit > 4 else _BLOCKS
        return max(1, blocks // (self.heads // self.group))

    def splits(self, capacity: Any, batch: Any) -> Any:
        """Return how many parts the keys have at most."""
        most = T.max(T.truncdiv(T.int64(self.most_splits), batch), T.int64(1))
        return T.min((capacity + (_KEYS_A_BLOCK - 1)) // _KEYS_A_BLOCK, most)

    def results(self, batch: Any, splits: Any) -> tuple[Any, Any]:
        """Allocate what the parts leave: sums [B * H * splits, D], and maxima with sums of weights [., 2]."""
        rows = batch * self.heads * splits
        return T.alloc_buffer((rows, self.width), "float32"), T.alloc_buffer((rows, 2), "float32")

    def part(self, count: Any, splits: Any) -> Any:
        """Return how many keys a part of ``count`` has."""
        return (T.truncdiv(count + splits - 1, splits) + (_PART - 1)) // _PART * _PART

    def parts(self, count: Any, splits: Any) -> Any:
        """Return how many parts have keys."""
        part = T.max(self.part(count, splits), T.int64(1))
        return T.truncdiv(count + part - 1, part)

    def partial(self) -> Any:
        """Make a macro ``partial(q, keys, values, limits, added, seen, splits, sums, stats, batch)``: the first launch.

        ``q``, ``keys`` and ``values`` are :class:`compressor.codegen.gpu.attention.rows.Rows`; ``limits()`` gives the
        first key and how many follow; ``added(head, key)`` is added to a score; ``seen(b, key)`` tells whether a key is
        not hidden; both may be None.  ``sums`` [B * H * splits, D] and ``stats`` [B * H * splits, 2] get the results.
        """
        groups, warps = self.heads // self.group, THREADS // WARP
        load, score, softmax, weigh = self._load(), self._score(), self._softmax(warps), self._weigh()
        leave = self._leave()

        @T.inline
        def partial(q, keys, values, limits, added, seen, splits, sums, stats, batch):
            with T.launch_thread("blockIdx.x", splits) as split, T.launch_thread("blockIdx.y", groups) as y:
                with T.launch_thread("blockIdx.z", batch) as b, T.launch_thread("threadIdx.x", THREADS) as t:
                    query = T.alloc_buffer((self.group, self.width), "float32", scope="shared")
                    scores = T.alloc_buffer((self.group, self.tile), "float32", scope="shared")
                    found = T.alloc_buffer((self.group, 3), "float32", scope="shared")  # maximum, sum, factor
                    shares = T.alloc_buffer((self.rows_at_once, self.group, self.width), "float32", scope="shared")
                    acc = T.alloc_buffer((self.group * self.steps * self.vec,), "float32", scope="local")
                    bounds = T.alloc_buffer((4,), "int64", scope="local")  # first and end of the part, tile's, of all
                    bounds[3] = limits()[1]
                    bounds[0] = limits()[0] + split * self.part(bounds[3], splits)
                    bounds[1] = T.min(bounds[0] + self.part(bounds[3], splits), limits()[0] + bounds[3])
                    load(q, query, found, acc, b, y, t)
                    barrier()
                    for tile in range((T.max(bounds[1] - bounds[0], T.int64(0)) + (self.tile - 1)) // self.tile):
                        bounds[2] = bounds[0] + tile * self.tile
                        score(query, keys, scores, bounds, added, seen, b, y, t)
                        barrier()
                        softmax(scores, found, t)
                        barrier()
                        weigh(values, scores, found, acc, bounds, b, y, t)
                        barrier()
                    row = T.meta_var((b * self.heads + y * self.group) * splits + split)
                    leave(acc, shares, found, sums, stats, row, splits, t)

        return partial

    def _load(self) -> Any:
        @T.inline
        def load(q, query, found, acc, b, y, t):
            for n in range(-(-self.group * self.width // THREADS)):
                at = T.meta_var(n * THREADS + t)
                if at < self.group * self.width:
                    r, d = T.meta_var((at // self.width, at % self.width))
                    query[r, d] = q.one(b, y * self.group + r, T.int64(0), d)
            if t < self.group:
                found[t, 0] = T.float32(LOWEST)
                found[t, 1] = T.float32(0)
            for n in T.unroll(self.group * self.steps * self.vec):
                acc[n] = T.float32(0)

        return load

    def _score(self) -> Any:
        at_once, vec, piece = THREADS // self.lanes, self.vec, self.piece

        @T.inline
        def score(query, keys, scores, bounds, added, seen, b, y, t):
            dot = T.alloc_buffer((self.group * self.keys,), "float32", scope="local")
            rows = T.alloc_buffer((self.keys * vec,), "float32", scope="local")
            one = T.alloc_buffer((vec,), "float32", scope="local")
            kv = T.meta_var(y * self.group // self.repeat)
            for n in T.unroll(self.group * self.keys):
                dot[n] = T.float32(0)
            for i in range(-(-self.columns // self.lanes)):
                c = T.meta_var(i * self.lanes + t % self.lanes)
                if c < self.columns:
                    for j in T.unroll(self.keys):
                        key = T.meta_var(T.min(bounds[2] + (j * at_once + t // self.lanes), bounds[1] - 1))
                        keys.emit_load(rows, (j * vec,), b, kv, key, c * vec, vec)
                    for r in T.unroll(self.group):
                        for p in T.unroll(vec // piece):
                            one[ramp(p * piece, piece)] = query[r, ramp(c * vec + p * piece, piece)]
                        for j in T.unroll(self.keys):
                            for e in T.unroll(vec):
                                dot[r * self.keys + j] = dot[r * self.keys + j] + one[e] * rows[j * vec + e]
            for r in T.unroll(self.group):
                for j in T.unroll(self.keys):
                    place = T.meta_var(j * at_once + t // self.lanes)
                    key = T.meta_var(bounds[2] + place)
                    dot[r * self.keys + j] = self.score(lane_sum(dot[r * self.keys + j], self.lanes))
                    if t % self.lanes == 0:
                        if added is not None:
                            dot[r * self.keys + j] = dot[r * self.keys + j] + added(y * self.group + r, key)
                        if seen is not None:
                            hidden = T.meta_var(T.Not(seen(b, T.min(key, bounds[1] - 1))))
                            dot[r * self.keys + j] = T.Select(hidden, T.float32(LOWEST), dot[r * self.keys + j])
                        scores[r, place] = T.Select(key < bounds[1], dot[r * self.keys + j], T.float32(-math.inf))

        return score

    def _softmax(self, warps: int) -> Any:
        each = self.tile // WARP

        @T.inline
        def softmax(scores, found, t):
            held = T.alloc_buffer((each,), "float32", scope="local")
            stat = T.alloc_buffer((3,), "float32", scope="local")  # largest score, its predecessor, sum
            for i in range(-(-self.group // warps)):
                r = T.meta_var(i * warps + t // WARP)
                if r < self.group:
                    stat[0] = T.float32(LOWEST)
                    for j in T.unroll(each):
                        held[j] = scores[r, j * WARP + t % WARP]
                        stat[0] = T.max(stat[0], held[j])
                    stat[1] = found[r, 0]
                    stat[0] = T.max(warp_max(stat[0]), stat[1])
                    stat[2] = T.float32(0)
                    for j in T.unroll(each):
                        held[j] = T.exp(held[j] - stat[0])
                        scores[r, j * WARP + t % WARP] = held[j]
                        stat[2] = stat[2] + held[j]
                    stat[2] = warp_sum(stat[2])
                    warp_barrier()
                    if t % WARP == 0:
                        found[r, 0] = stat[0]
                        found[r, 2] = T.exp(stat[1] - stat[0])
                        found[r, 1] = found[r, 1] * found[r, 2] + stat[2]

        return softmax

    def _row(self, first: Any, t: Any, n: Any) -> Any:
        """Return the n-th row of values of a thread, from the first on."""
        return (first + n) * self.rows_at_once + t // self.spread

    def _weigh(self) -> Any:
        """Make a macro that adds a tile's weighted values; several rows are on their way at once."""
        vec, size, rows_at_once = self.vec, self.steps * self.vec, self.rows_at_once
        each = min(max(1, _ROWS_EACH // self.steps), self.tile // rows_at_once)

        @T.inline
        def weigh(values, scores, found, acc, bounds, b, y, t):
            rows = T.alloc_buffer((each * vec,), "float32", scope="local")
            kv = T.meta_var(y * self.group // self.repeat)
            for r in T.unroll(self.group):
                for e in T.unroll(size):
                    acc[r * size + e] = acc[r * size + e] * found[r, 2]
            for n in range(self.tile // (rows_at_once * each)):
                place = T.meta_var(functools.partial(self._row, n * each, t))
                if bounds[2] + n * each * rows_at_once < bounds[1]:
                    for step in T.unroll(self.steps):
                        c = T.meta_var(step * self.spread + t % self.spread)
                        if c < self.columns:
                            for u in T.unroll(each):  # the last row again for those behind it, whose weights are 0
                                key = T.meta_var(T.min(bounds[2] + place(u), bounds[1] - 1))
                                values.emit_load(rows, (u * vec,), b, kv, key, c * vec, vec)
                            for u in T.unroll(each):
                                for r in T.unroll(self.group):
                                    for e in T.unroll(vec):
                                        at = T.meta_var(r * size + step * vec + e)
                                        acc[at] = acc[at] + scores[r, place(u)] * rows[u * vec + e]

        return weigh

    def _leave(self) -> Any:
        vec, size, piece = self.vec, self.steps * self.vec, self.piece

        @T.inline
        def leave(acc, shares, found, sums, stats, row, splits, t):
            total = T.alloc_buffer((1,), "float32", scope="local")
            for r in T.unroll(self.group):
                for step in T.unroll(self.steps):
                    c = T.meta_var(step * self.spread + t % self.spread)
                    if c < self.columns:
                        for p in T.unroll(vec // piece):
                            to = T.meta_var(ramp(c * vec + p * piece, piece))
                            shares[t // self.spread, r, to] = acc[ramp(r * size + step * vec + p * piece, piece)]
            barrier()
            for n in range(-(-self.group * self.width // THREADS)):
                at = T.meta_var(n * THREADS + t)
                if at < self.group * self.width:
                    total[0] = T.float32(0)
                    for g in range(self.rows_at_once):
                        total[0] = total[0] + shares[g, at // self.width, at % self.width]
                    sums[row + at // self.width * splits, at % self.width] = total[0]
            if t < self.group:
                stats[row + t * splits, 0] = found[t, 0]
                stats[row + t * splits, 1] = found[t, 1]

        return leave


def _power(count: int) -> int:
    """Return the smallest power of two that is not below a count."""
    return 1 << (count - 1).bit_length()
