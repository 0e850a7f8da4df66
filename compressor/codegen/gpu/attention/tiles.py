"""Attention of many tokens: tiles of queries by tiles of keys on tensor cores, with one pass over the keys.

A tile holds rows that share a head of keys, of all its query heads and several tokens.  Scores of a tile of keys become
weights at once; when a larger score comes, what was summed so far is scaled down (online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3; over tiles: Dao et al. 2022, FlashAttention, arXiv 2205.14135).

Every number is two of 16 bits (:mod:`compressor.codegen.gpu.attention.split`), and a product of two numbers is three of
tensor cores, as the product of the low halves is below float32's rounding of the rest.  A warp has 16 rows, whose
scores and sums stay in its registers; of wide heads, warps share rows, and each sums some of the channels.  While a
warp multiplies a tile of keys, its values are on their way to registers, and the next keys while it adds values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.attention.heads import LOWEST, Heads
from compressor.codegen.gpu.attention.split import SHRINK, Carrier, SplitRows, emit_halves, load_matrices
from compressor.codegen.gpu.intrinsics import WARP, barrier, lane_max, lane_sum
from compressor.codegen.gpu.linear.tensor_cores import product_bfloats, product_halves
from compressor.codegen.gpu.memory import held as in_register
from compressor.codegen.gpu.memory import shared
from compressor.codegen.kernels.vector import ramp, widen

WARPS = 8
THREADS = WARPS * WARP
ROWS = 16
"""Rows of a warp."""
_WIDEST = 128  # channels that a warp sums
_BYTES = 96 << 10  # of tiles in shared memory: every GPU has so much, and some have little more
_AT_ONCE = 4  # blocks of 8 channels that a warp has loaded


@dataclass(frozen=True)
class Tiles(Heads):
    """Compute several tokens in a block of threads; see the module."""

    @cached_property
    def channels(self) -> int:
        """Return the channels of a row with those that fill it up."""
        return -(-self.width // 16) * 16

    @cached_property
    def sharers(self) -> int:
        """Return how many warps share rows."""
        return 1 << (-(-self.width // _WIDEST) - 1).bit_length()

    @cached_property
    def span(self) -> int:
        """Return how many blocks of 8 channels a warp sums."""
        return -(-(self.channels // 8) // self.sharers)

    @cached_property
    def rows(self) -> int:
        """Return the rows of a tile of queries."""
        return ROWS * WARPS // self.sharers

    @cached_property
    def keys(self) -> int:
        """Return the keys of a tile."""
        return 32 if self.width <= 2 * _WIDEST else 16

    @cached_property
    def query(self) -> SplitRows:
        """Return the tile of queries."""
        return SplitRows(self.rows, self.channels)

    @cached_property
    def held(self) -> SplitRows:
        """Return the tile of keys, and that of values."""
        return SplitRows(self.keys, self.channels)

    @cached_property
    def is_apart(self) -> bool:
        """Tell whether there is room for keys and values at once."""
        return 4 * (self.query.words + 2 * self.held.words) <= _BYTES

    @cached_property
    def carrier(self) -> Carrier:
        """Return how rows come into shared memory."""
        return Carrier(THREADS, self.keys, self.width, self.channels, self.vec)

    def blocks(self, new: Any) -> Any:
        """Return the tiles of the queries of one head of keys."""
        return (new * self.repeat + (self.rows - 1)) // self.rows

    def tokens(self, first: Any, count: int, new: Any) -> tuple[Any, Any]:
        """Return the first and the last token of ``count`` rows."""
        last = T.min(first + count, new * self.repeat) - 1
        return first // self.repeat, last // self.repeat

    def attend(self) -> Any:
        """Make a macro ``attend(q, keys, values, out, order, limits, added, masks, sinks, blind, sizes)``: one launch.

        ``q``, ``keys`` and ``values`` are :class:`compressor.codegen.gpu.attention.rows.Rows`; out [B, S, H, D], whose
        channels ``order`` [Hkv, D] names, or None; ``limits(first, last)`` gives the keys from the first that some of
        these tokens may see to the one behind the last; ``added(b, head, token, key)`` is added to a score; of
        ``masks``, ``seen(b, token, key)`` tells which of these they see, and ``whole(first, last, key, end)`` whether
        all these tokens see all keys from one to an end, or is None; ``sinks`` [H] or None; where ``blind``, the
        outputs of tokens that see nothing are 0; ``sizes`` are batch and S.
        """
        rows, carrier = self.rows, self.carrier

        @T.inline
        def attend(q, keys, values, out, order, limits, added, masks, sinks, blind, sizes):
            count = T.meta_var(self.blocks(sizes[1]))
            with T.launch_thread("blockIdx.y", count) as y, T.launch_thread("blockIdx.x", self.kv_heads) as kv:
                with T.launch_thread("blockIdx.z", sizes[0]) as b, T.launch_thread("threadIdx.x", THREADS) as t:
                    memory = T.meta_var(self.memory())
                    query, held, other = T.meta_var((memory[0], memory[1], memory[2]))
                    scales, key_scales = T.meta_var((memory[3], memory[4]))
                    fetched = T.alloc_buffer((carrier.registers,), "float32", scope="local")
                    dot = T.alloc_buffer((self.keys // 2,), "float32", scope="local")
                    acc = T.alloc_buffer((4 * self.span,), "float32", scope="local")
                    stats = T.alloc_buffer((4,), "float32", scope="local")  # maxima and sums of rows g and g + 8
                    bounds = T.alloc_buffer((5,), "int64", scope="local")  # begin, end, the tile's first; the warp's
                    block = T.meta_var(count - 1 - y)  # those that see most keys begin first, of all heads
                    total = T.meta_var(sizes[1] * self.repeat)
                    first = T.meta_var(block * rows + t // (WARP * self.sharers) * ROWS)
                    span = T.meta_var(limits(*self.tokens(block * rows, rows, sizes[1])))
                    own = T.meta_var(self.tokens(first, ROWS, sizes[1]))
                    place = T.meta_var(lambda row: self.place(kv, T.min(row, total - 1)))
                    token = T.meta_var(lambda row: (kv, bounds[2] + row))
                    next_token = T.meta_var(lambda row: (kv, bounds[2] + (row + self.keys)))
                    is_there = T.meta_var(lambda row: bounds[2] + row < bounds[1])
                    is_next = T.meta_var(lambda row: bounds[2] + (row + self.keys) < bounds[1])
                    is_mine = T.meta_var(
                        T.And(first < total, T.And(bounds[2] < bounds[4], bounds[2] + self.keys > bounds[3]))
                    )
                    bounds[0] = span[0]
                    bounds[1] = span[1]
                    bounds[2] = span[0]
                    bounds[3] = limits(*own)[0]
                    bounds[4] = limits(*own)[1]
                    self.load_queries(query, scales, q, fetched, block * rows, place, b, t)
                    self.begin(acc, stats, sinks, first, place, t)
                    self.fetch(fetched, keys, token, is_there, b, t)
                    self.store(fetched, held, key_scales, t)
                    self.fetch(fetched, values, token, is_there, b, t)
                    barrier()
                    for _n in range((bounds[1] - bounds[0] + (self.keys - 1)) // self.keys):
                        if is_mine:
                            self.multiply(query, held, dot, t)
                            self.to_scores(dot, scales, key_scales, t)
                            self.mask(dot, bounds, added, masks, own, first, place, b, t)
                            self.soften(dot, acc, stats)
                        if not self.is_apart:
                            barrier()
                        self.store(fetched, other, None, t)
                        self.fetch(fetched, keys, next_token, is_next, b, t)
                        barrier()
                        if is_mine:
                            self.add(other, dot, acc, t)
                        if not self.is_apart:
                            barrier()
                        self.store(fetched, held, key_scales, t)
                        self.fetch(fetched, values, next_token, is_next, b, t)
                        bounds[2] = bounds[2] + self.keys
                        barrier()
                    self.finish(acc, stats, out, order, kv, first, total, place, blind, b, t)

        return attend

    def place(self, kv: Any, row: Any) -> tuple[Any, Any]:
        """Return the head and the token of a row."""
        return kv * self.repeat + row % self.repeat, row // self.repeat

    def memory(self) -> list[Any]:
        """Allocate the tiles of queries, keys and values, and the factors of queries' and of keys' rows."""
        tiles = [((tile.words,), "uint32") for tile in (self.query, self.held, self.held)[: 2 + self.is_apart]]
        found = shared(*tiles, ((self.rows,), "float32"), ((self.keys,), "float32"))
        return found if self.is_apart else [*found[:2], *found[1:]]

    def fetch(self, to: Any, source: Any, place: Any, is_there: Any, b: Any, t: Any) -> None:
        """Emit loads of a tile of keys or values into registers."""
        self.carrier.emit_load(to, source, place, is_there, b, t)

    def store(self, held: Any, to: Any, scales: Any, t: Any) -> None:
        """Emit stores of these registers into shared memory, of keys with the factors of their rows."""
        self.carrier.emit_store(held, to, self.held, 0, scales, t)

    def load_queries(self, to: Any, scales: Any, q: Any, held: Any, first: Any, place: Any, b: Any, t: Any) -> None:
        """Emit the loads of the block's queries, as many rows at once as a tile of keys has."""
        with T.serial(0, self.rows // self.keys) as n:
            self.carrier.emit_load(held, q, lambda row: place(first + n * self.keys + row), None, b, t)
            self.carrier.emit_store(held, to, self.query, n * self.keys, scales, t)

    def begin(self, acc: Any, stats: Any, sinks: Any, first: Any, place: Any, t: Any) -> None:
        """Emit the start of all sums; a sink is a key without a value, which one of a row's four lanes has."""
        for n in range(4 * self.span):
            T.buffer_store(acc, T.float32(0), [n])
        for r in range(2):
            top, weight = T.float32(LOWEST), T.float32(0)
            if sinks is not None:
                top = sinks[place(first + self.row(r, t))[0]]
                weight = T.Select(t % 4 == 0, T.float32(1), T.float32(0))
            T.buffer_store(stats, top, [r])
            T.buffer_store(stats, weight, [2 + r])

    @staticmethod
    def row(r: int, t: Any) -> Any:
        """Return which of its warp's rows a lane's first or second one is."""
        return t % WARP // 4 + 8 * r

    def multiply(self, query: Any, held: Any, dot: Any, t: Any) -> None:
        """Emit the products of a warp's queries and a tile of keys."""
        left = T.alloc_buffer((8,), "uint32", scope="local")
        right = T.alloc_buffer((self.keys // 2,), "uint32", scope="local")
        lane, first = t % WARP, t // (WARP * self.sharers) * ROWS
        for n in range(self.keys // 2):
            T.buffer_store(dot, T.float32(0), [n])
        with T.serial(0, self.channels // 16) as s:
            for half in range(2):
                at = self.query.at(half, first + lane % 16, 2 * s + lane // 16)
                load_matrices(T.address_of(left[4 * half]), T.address_of(query[at]))
            for n in range(self.keys // 8):
                at = self.held.at(lane // 16, n * 8 + lane % 8, 2 * s + lane // 8 % 2)
                load_matrices(T.address_of(right[4 * n]), T.address_of(held[at]))
            for i, j in ((1, 0), (0, 1), (0, 0)):
                for n in range(self.keys // 8):
                    a, b = [left[4 * i + m] for m in range(4)], [right[4 * n + 2 * j + m] for m in range(2)]
                    product_halves(T.address_of(dot[4 * n]), a, b)

    def to_scores(self, dot: Any, scales: Any, key_scales: Any, t: Any) -> None:
        """Emit scores of products."""
        first = t // (WARP * self.sharers) * ROWS
        own = [in_register(scales[first + self.row(r, t)] * T.float32(SHRINK * self.scale)) for r in range(2)]
        for n in range(self.keys // 8):
            key = [in_register(key_scales[n * 8 + t % 4 * 2 + e]) for e in range(2)]
            for e in range(4):
                T.buffer_store(dot, self.cap(dot[4 * n + e] * own[e // 2] * key[e % 2]), [4 * n + e])

    def mask(
        self, dot: Any, bounds: Any, added: Any, masks: Any, own: Any, first: Any, place: Any, b: Any, t: Any
    ) -> None:
        """Emit what is added to scores, and minus infinity for keys that are not seen."""
        seen, whole = masks

        def emit() -> None:
            for i in range(self.keys // 2):
                n, e = divmod(i, 4)
                head, token = place(first + self.row(e // 2, t))
                key = bounds[2] + (n * 8 + t % 4 * 2 + e % 2)
                with T.If(T.And(key < bounds[1], seen(b, token, key))):
                    with T.Then():
                        T.buffer_store(dot, dot[i] if added is None else dot[i] + added(b, head, token, key), [i])
                    with T.Else():
                        T.buffer_store(dot, T.float32(-math.inf), [i])

        if added is not None or whole is None:
            emit()
            return
        end = bounds[2] + self.keys
        with T.If(T.Not(T.And(end <= bounds[1], whole(*own, bounds[2], end)))), T.Then():
            emit()

    def soften(self, dot: Any, acc: Any, stats: Any) -> None:
        """Emit weights of scores, and scale what was summed so far."""
        top = T.alloc_buffer((2,), "float32", scope="local")  # largest score, factor of what was summed
        for r in range(2):
            own = [4 * n + 2 * r + e for n in range(self.keys // 8) for e in range(2)]
            T.buffer_store(top, stats[r], [0])
            for i in own:
                T.buffer_store(top, T.max(top[0], dot[i]), [0])
            T.buffer_store(top, lane_max(top[0], 4), [0])
            T.buffer_store(top, power(stats[r] - top[0]), [1])
            T.buffer_store(stats, top[0], [r])
            T.buffer_store(stats, stats[2 + r] * top[1], [2 + r])
            for i in own:
                T.buffer_store(dot, power(dot[i] - top[0]), [i])
                T.buffer_store(stats, stats[2 + r] + dot[i], [2 + r])
            for i in range(self.span):
                for e in range(2):
                    T.buffer_store(acc, acc[4 * i + 2 * r + e] * top[1], [4 * i + 2 * r + e])

    def add(self, held: Any, dot: Any, acc: Any, t: Any) -> None:
        """Emit the sums of a tile's weighted values."""
        left = T.alloc_buffer((2 * (self.keys // 4),), "uint32", scope="local")
        right = T.alloc_buffer((4 * _AT_ONCE,), "uint32", scope="local")
        lane, first, words = t % WARP, t // WARP % self.sharers * self.span, self.keys // 4
        for w in range(words):
            emit_halves((dot[2 * w], dot[2 * w + 1]), (left, w), (left, words + w), True)
        for s in range(self.keys // 16):
            for n in range(0, self.span, _AT_ONCE):
                blocks = range(n, min(n + _AT_ONCE, self.span))
                for i in blocks:
                    chunk = T.min(first + i, self.held.chunks - 1) if self.sharers > 1 else i
                    at = self.held.at(lane // 16, s * 16 + lane % 16, chunk)
                    load_matrices(T.address_of(right[4 * (i - n)]), T.address_of(held[at]), transposed=True)
                for i, j in ((1, 0), (0, 1), (0, 0)):
                    for block in blocks:
                        a = [left[words * i + 4 * s + m] for m in range(4)]
                        b = [right[4 * (block - n) + 2 * j + m] for m in range(2)]
                        product_bfloats(T.address_of(acc[4 * block]), a, b)

    def finish(
        self, acc: Any, stats: Any, out: Any, order: Any, kv: Any, first: Any, total: Any, place: Any, blind: bool,
        b: Any, t: Any,
    ) -> None:  # fmt: skip
        """Emit stores of the outputs."""
        vec = 2 if order is None and self.width % 2 == 0 else 1
        for r in range(2):
            T.buffer_store(stats, lane_sum(stats[2 + r], 4), [2 + r])
            share = T.float32(1) / stats[2 + r]
            none = T.Select(stats[2 + r] == T.float32(0), T.float32(0), share)
            T.buffer_store(stats, none if blind else share, [r])
            row = first + self.row(r, t)
            head, token = place(row)
            for i in range(self.span):
                for e in range(0, 2, vec):
                    channel = (t // WARP % self.sharers * self.span + i) * 8 + t % 4 * 2 + e
                    with T.If(T.And(row < total, channel < self.width)), T.Then():
                        value = acc[ramp(4 * i + 2 * r + e, vec)] * widen(stats[r], vec)
                        at = ramp(channel, vec) if order is None else order[kv, channel]
                        T.buffer_store(out, value, [b, token, head, at])


def power(score: Any) -> Any:
    """Return e to the power of a score, through that of 2, which GPUs have an instruction for."""
    return T.exp2(score * T.float32(math.log2(math.e)))
