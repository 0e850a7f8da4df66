"""Attention of many queries at once: blocks of queries by blocks of keys, with one pass over the keys.

A block holds rows that share a head of keys, of all its query heads and several tokens.  Scores of a block of keys
become weights at once; when a larger score comes, what was summed so far is scaled down (online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3; over blocks: Dao et al. 2022, FlashAttention, arXiv 2205.14135).

A vector holds what one key or channel has with each query of the block.  So keys are read where they are, and largest
scores and sums of weights need no steps across a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Protocol

from tvm.script import tirx as T

from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.vector import VECTOR, exp, ramp, registers, splat_float, widen

_VECTORS = 2
ROWS = VECTOR * _VECTORS
"""Queries of a block, one in each lane."""
KEYS = 64
"""Keys of a block."""
BEFORE = _TILE = 8  # keys whose scores are in registers at once; the last of them may begin in front of their block
_LINE = 16  # floats of a cache line
_LOWEST = -3.0e38


class Channels(Protocol):
    """Rows of heads, as blocks of queries read them."""

    def at(self, b: Any, head: Any, token: Any, channels: Any) -> Any:
        """Load some channels of a row, float32."""

    def ask(self, b: Any, head: Any, token: Any) -> None:
        """Ask for a row's cache lines, if the processor does not see them coming."""

    def load(self, b: Any, head: Any, first: Any, count: Any) -> None:
        """Make ready to read rows of a head: ``count`` from ``first``, and up to ``BEFORE`` in front of these."""


@dataclass(frozen=True)
class Heads:
    """Rows of heads in a buffer float32 [B, H, S, D], or [B, S, H, D] where ``tokens_first``."""

    buffer: Any
    tokens_first: bool = False

    def at(self, b: Any, head: Any, token: Any, channels: Any) -> Any:
        """Load some channels of a row."""
        return self.buffer[(b, token, head, channels) if self.tokens_first else (b, head, token, channels)]

    def ask(self, b: Any, head: Any, token: Any) -> None:
        """Ask for a row's cache lines where rows lie apart, so that the processor does not see them coming."""
        for channel in range(0, int(self.buffer.shape[3]), _LINE) if self.tokens_first else ():
            prefetch(self.at(b, head, token, channel), 0)

    def load(self, b: Any, head: Any, first: Any, count: Any) -> None:
        """Do nothing: rows are read where they are."""


class PromptBlocks:
    """Statements over one block of queries.

    Args:
        repeat: query heads that share a head of keys.
    """

    def __init__(self, head_dim: int, repeat: int, scale: float, softcap: float) -> None:
        self.head_dim, self.repeat, self.scale, self.softcap = head_dim, repeat, scale, softcap
        self.lanes = gcd(VECTOR, head_dim)
        vectors = head_dim // self.lanes
        self.weighed = next(n for n in (8, 4, 2, 1) if n * vectors <= 16 or n == 1)  # rows of sums in registers

    def blocks(self, new: Any) -> Any:
        """Blocks of the queries of one head of keys."""
        return (new * self.repeat + (ROWS - 1)) // ROWS

    def place(self, task: Any, count: Any) -> Any:
        """Return the block at a place of the order: early blocks, which see few keys, alternate with late ones."""
        return T.Select(task % 2 == 0, task // 2, count - 1 - task // 2)

    def tokens(self, block: Any, new: Any) -> tuple[Any, Any]:
        """First and last token of a block."""
        last = T.min((block + 1) * ROWS, new * self.repeat) - 1
        return block * ROWS // self.repeat, last // self.repeat

    def attend(
        self,
        rows: Sequence[Channels],
        out: Any,
        b: Any,
        kv: Any,
        block: Any,
        new: Any,
        begin: Any,
        end: Any,
        visible: Callable[[Any, Any], Any],
        sink: Callable[[Any], Any] | None,
        added: Callable[[Any, Any, Any], Any] | None = None,
        may_be_blind: bool = False,
        place: Callable[[Any], Any] = lambda token: token,
    ) -> None:
        """Attend with one block of queries to keys ``begin`` to ``end``.

        Args:
            rows: queries, keys and values.
            out: [B, S, H, D].
            visible: (16 tokens, int32x16, key) -> which of the tokens see the key; a vector of bool.
            sink: head -> one more logit, which takes part in the softmax only.
            added: (16 heads, int32x16, 16 tokens, key) -> what is added to the scores, float32x16.
            may_be_blind: a query may see no key; its output is 0.
            place: a query's token -> the one that ``visible`` and ``added`` are asked of.
        """
        (q, keys, values), width, repeat = rows, self.head_dim, self.repeat
        places = [ramp(d, self.lanes) for d in range(0, width, self.lanes)]
        queries = T.alloc_buffer((width, ROWS), "float32")  # turned
        weights = T.alloc_buffer((_TILE + KEYS, ROWS), "float32")  # the first tile is scratch, see _score
        sums = T.alloc_buffer((ROWS, width), "float32")
        tokens, heads = T.alloc_buffer((ROWS,), "int32"), T.alloc_buffer((ROWS,), "int32")
        top, total, factor = (T.alloc_buffer((ROWS,), "float32") for _ in range(3))
        bounds = T.alloc_buffer((5,), "int64")  # TVM would say the expressions again wherever they are used
        for i, bound in enumerate((block, begin, end)):
            T.buffer_store(bounds, T.Cast("int64", bound), [i])
        block, begin, end, first, count = (bounds[i] for i in range(5))

        def row(r: Any) -> tuple[Any, Any]:
            """Head and token of a row; rows over the end repeat the last."""
            at = T.min(block * ROWS + r, new * repeat - 1)
            return kv * repeat + at % repeat, at // repeat

        with T.serial(0, ROWS) as r:
            head, token = row(r)
            with T.serial(0, width) as d:
                T.buffer_store(queries, q.at(b, head, token, d) * T.float32(self.scale), [d, r])
            for at in places:
                T.buffer_store(sums, splat_float(0, self.lanes), [r, at])
            T.buffer_store(tokens, T.Cast("int32", place(token)), [r])
            if added is not None:
                T.buffer_store(heads, T.Cast("int32", head), [r])
            T.buffer_store(top, T.float32(_LOWEST) if sink is None else sink(head), [r])
            T.buffer_store(total, T.float32(0 if sink is None else 1), [r])
        with T.serial(0, (end - begin + (KEYS - 1)) // KEYS) as i:
            T.buffer_store(bounds, begin + i * KEYS, [3])
            T.buffer_store(bounds, T.min(T.int64(KEYS), end - first), [4])
            for each in (keys, values):
                each.load(b, kv, first, count)
            self._score(weights, queries, keys, values, b, kv, first, count, end)
            for lanes in _vectors():
                bias = None if added is None else partial(added, heads[lanes], tokens[lanes])
                self._weigh(weights, lanes, top, total, factor, partial(visible, tokens[lanes]), bias, first, count)
            with T.serial(0, ROWS // self.weighed) as part:
                self._sum(sums, factor, weights, partial(values.at, b, kv), first, count, part * self.weighed)
        with T.serial(0, ROWS) as r, T.If(block * ROWS + r < new * repeat), T.Then():
            head, token = row(r)
            share = T.float32(1) / total[r]
            if may_be_blind:
                share = T.Select(total[r] == T.float32(0), T.float32(0), share)
            for at in places:
                T.buffer_store(out, sums[r, at] * widen(share, self.lanes), [b, token, head, at])

    def _score(
        self,
        weights: Any,
        queries: Any,
        keys: Channels,
        values: Channels,
        b: Any,
        kv: Any,
        first: Any,
        count: Any,
        end: Any,
    ) -> None:
        """Scores of a block.  The last tile begins early, where it would reach over the end of all keys."""

        def tile(at: Any, size: int) -> None:
            acc = registers(size, (ROWS,))
            for j in range(size):
                keys.ask(b, kv, at + (j + size))
                values.ask(b, kv, at + j)
            for j in range(size):
                for lanes in _vectors():
                    T.buffer_store(acc[j], splat_float(0, VECTOR), [lanes])
            with T.serial(0, self.head_dim) as d:
                for j in range(size):
                    for lanes in _vectors():
                        product = queries[d, lanes] * T.broadcast(keys.at(b, kv, at + j, d), VECTOR)
                        T.buffer_store(acc[j], acc[j][lanes] + product, [lanes])
            for j in range(size):
                for lanes in _vectors():
                    T.buffer_store(weights, acc[j][lanes], [at - first + (_TILE + j), lanes])

        with T.If(end >= _TILE):
            with T.Then(), T.serial(0, (count + (_TILE - 1)) // _TILE) as i:
                tile(T.min(first + i * _TILE, end - _TILE), _TILE)
            with T.Else(), T.serial(0, count) as i:
                tile(first + i, 1)

    def _weigh(
        self,
        weights: Any,
        lanes: Any,
        top: Any,
        total: Any,
        factor: Any,
        visible: Callable[[Any], Any],
        bias: Callable[[Any], Any] | None,
        first: Any,
        count: Any,
    ) -> None:
        """Scores of some rows become weights; ``factor`` is what was summed before is to be scaled by.

        Args:
            top, total: largest score and sum of weights of each row.
        """
        every, hidden = T.ramp(0, 1, VECTOR), splat_float(-math.inf, VECTOR)
        largest, sum_ = registers(2, (VECTOR,))
        T.buffer_store(largest, top[lanes], [every])
        with T.serial(0, count) as i:
            score = weights[_TILE + i, lanes]
            if self.softcap:
                score = splat_float(self.softcap, VECTOR) * T.tanh(score * splat_float(1 / self.softcap, VECTOR))
            if bias is not None:
                score = score + bias(first + i)
            T.buffer_store(weights, T.Select(visible(first + i), score, hidden), [_TILE + i, lanes])
            T.buffer_store(largest, T.max(largest[every], weights[_TILE + i, lanes]), [every])
        T.buffer_store(factor, _power(top[lanes] - largest[every]), [lanes])
        T.buffer_store(top, largest[every], [lanes])
        T.buffer_store(sum_, total[lanes] * factor[lanes], [every])
        with T.serial(0, count) as i:
            T.buffer_store(weights, _power(weights[_TILE + i, lanes] - largest[every]), [_TILE + i, lanes])
            T.buffer_store(sum_, sum_[every] + weights[_TILE + i, lanes], [every])
        T.buffer_store(total, sum_[every], [lanes])

    def _sum(
        self, sums: Any, factor: Any, weights: Any, value: Callable[[Any, Any], Any], first: Any, count: Any, r0: Any
    ) -> None:
        """Scale the sums of some rows, and add the block's values, weighed."""
        rows, acc = range(self.weighed), registers(self.weighed, (self.head_dim,))
        places = [ramp(d, self.lanes) for d in range(0, self.head_dim, self.lanes)]
        for r in rows:
            for at in places:
                T.buffer_store(acc[r], sums[r0 + r, at] * widen(factor[r0 + r], self.lanes), [at])
        with T.serial(0, count) as t:
            for at in places:
                for r in rows:
                    product = value(first + t, at) * widen(weights[_TILE + t, r0 + r], self.lanes)
                    T.buffer_store(acc[r], acc[r][at] + product, [at])
        for r in rows:
            for at in places:
                T.buffer_store(sums, acc[r][at], [r0 + r, at])


def at_most(key: Any, last: Any) -> Any:
    """Tell for which of 16 tokens a key is not later than their last, int32x16."""
    return T.broadcast(T.Cast("int32", key), VECTOR) <= last


def _vectors() -> list[Any]:
    """Yield the indices of a block's rows, a vector at a time."""
    return [T.ramp(v * VECTOR, 1, VECTOR) for v in range(_VECTORS)]


def _power(x: Any) -> Any:
    """``e ** x`` for x up to 0, and 0 below -80, where :func:`exp` goes on to -87."""
    return T.Select(x <= splat_float(-80, VECTOR), splat_float(0, VECTOR), exp(x, VECTOR))  # NaN of NaN
