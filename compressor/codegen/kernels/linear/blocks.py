"""Several tokens by vector instructions: a block of them shares each code that is read and unpacked.

Up to :data:`compressor.codegen.isa.INDEPENDENT_ROWS` tokens take blocks of their number (:class:`FewRows`), so that
they take about one token's time while memory bounds it; more take the tuner's.  Where AMX multiplies integers, up to
eight take them.  A token's sums are the same in every block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.expand import ExpandedProducts
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.squeeze import ROOM, KeptProducts, squeezing
from compressor.codegen.kernels.vector import registers
from compressor.formats.parts import TILE_ROWS

_TOKENS, _TOKENS_OF_LONG, _TOKENS_OF_DIGITS = (8, 4, 2), (8, 4), (2,)
"""Tokens of blocks; fewer blocks where a chunk takes so many statements that they would double the time to compile."""
_MOST_TILES = 4
_MOST_STATEMENTS = 64  # of a chunk: LLVM's time grows with their square
_SLOW_TOKENS = 8
"""Tokens from which on a page takes longer than the processor fetches ahead of it; for fewer, asking costs more."""


@dataclass(frozen=True)
class Block:
    """So many tokens by so many tiles, whose sums stay in registers."""

    tokens: int
    tiles: int


def supports(isa: Isa) -> str:
    """Say why several tokens do not take blocks of their number; an empty text where they do."""
    return "" if isa.registers * isa.lanes >= 128 else f"{isa.name} has registers for the sums of too few tokens"


def _sums(isa: Isa) -> int:
    """Return how many registers hold sums; codes, activations and outputs take the others."""
    return 16 if isa.lanes == 16 else isa.registers * 3 // 4


def blocks(body: Products, tiles: int) -> list[Block]:
    """Return the blocks of few tokens, the smallest first: as many tiles of ``tiles`` as registers have sums for."""
    each, quads = body.accumulators * TILE_ROWS // body.isa.lanes, body.fmt.chunk_columns // 4
    is_long = quads > 2 or body.fmt.codebook or (body.integer and body.isa.matrix_unit == "amx")
    found = []
    for tokens in _TOKENS_OF_DIGITS if body.digits > 1 else _TOKENS_OF_LONG if is_long else _TOKENS:
        most = min(_sums(body.isa) // (tokens * each), _MOST_STATEMENTS // (tokens * quads))
        if most:
            counts = (n for n in (_MOST_TILES, 2, 1) if n <= most and tiles % n == 0)
            found.append(Block(tokens, 1 if body.fmt.codebook else max(counts)))  # its values are in registers as well
    return found[::-1] or [Block(2, 1)]


class FewRows:
    """Loops over blocks that fit the number of tokens.

    Attributes:
        tiles: of a task.
        spare: tokens that may be read, and are not stored, behind the last.
        multiply: macro ``multiply(at, end, weight, first, begin)`` that computes the tokens from ``begin`` to ``end``
            of a task.
    """

    def __init__(self, shape: Any, block: Any) -> None:
        sizes = blocks(shape.body, gcd(*shape.weights.tiles))
        self.tiles, self.spare = max(size.tiles for size in sizes), sizes[-1].tokens
        self.multiply = self._sharing(sizes, block)
        self._weights = shape.weights

    def _sharing(self, sizes: list[Block], block: Any) -> Any:
        most, by_share = sizes[-1].tokens, self._by_share(sizes, block)

        @T.inline
        def multiply(at, end, weight, first, begin):
            count = T.meta_var((end - begin + (most - 1)) // most)  # blocks, as equal as possible
            if end > begin:
                by_share(at, end, weight, first, begin, (end - begin + (count - 1)) // count)

        return multiply

    def _by_share(self, sizes: list[Block], block: Any) -> Any:
        size, each = sizes[0], self.tiles
        larger = self._by_share(sizes[1:], block) if len(sizes) > 1 else None

        @T.inline
        def go(at, end, weight, first, begin):
            for part in range(each // size.tiles):
                for j in range((end - begin + (size.tokens - 1)) // size.tokens):
                    tile, m0 = T.meta_var((first.behind(part * size.tiles), begin + j * size.tokens))
                    block(at, end, weight, tile, size.tiles, m0, size.tokens)

        @T.inline
        def last(at, end, weight, first, begin, _share):
            go(at, end, weight, first, begin)

        @T.inline
        def choose(at, end, weight, first, begin, share):
            if share <= size.tokens:
                go(at, end, weight, first, begin)
            else:
                larger(at, end, weight, first, begin, share)  # type: ignore[misc]

        return last if larger is None else choose

    def loop(self) -> Any:
        """Make a macro ``few(at, tokens, _)`` that computes all outputs of several tokens."""
        weights, each, multiply = self._weights, self.tiles, self.multiply

        @T.inline
        def few(at, tokens, _turned):
            for i in T.parallel(weights.steps(each)):
                weight, first = T.meta_var(weights.apart(i, each))
                multiply(at, tokens, weight, first, T.int64(0))

        return few


def vector_block(shape: Any, store: Any) -> Any:
    """Make a macro that computes some tiles of a weight for some tokens, by vector instructions."""
    body = shape.body
    groups, chunks, by_group = body.groups, body.chunks, body.act_groups > 1
    gathers, kept = body is not shape.given, body.chunks * body.fmt.chunk_columns
    squeeze = squeezing(body, shape.columns, shape.kept, body.isa) if isinstance(body, KeptProducts) else None
    kind = "int8" if body.integer else "float32"
    ahead = 0 if isinstance(body, ExpandedProducts) else body.isa.ahead_bytes

    def ask(codes: Any, first: Any, chunk: Any, n_tokens: int, n_tiles: int) -> None:
        for n in range(n_tiles if ahead and n_tokens >= _SLOW_TOKENS else 0):
            for word in range(body.fmt.chunk_words):  # of 16 rows, a line
                prefetch(codes[first + n, chunk, word, 0], ahead, level=2)

    @T.inline
    def store_token(at, tokens, weight, out, first, n_tiles, token):
        if token < tokens:
            for n in T.unroll(n_tiles):
                store(at, weight, out, first + n, token, 0, n)

    def store_all(at: Any, tokens: Any, weight: Any, out: list[Any], first: Any, n_tiles: int, m0: Any) -> None:
        for t, own in enumerate(out):
            store_token(at, tokens, weight, own, first, n_tiles, m0 + t)

    @T.inline
    def block(at, tokens, weight, first, n_tiles, m0, n_tokens):
        scales, zeros, codebook = T.meta_var([weight.parts.get(name) for name in ("scales", "zeros", "codebook")])
        codes = T.meta_var(weight.codes)
        sizes = T.meta_var((1, n_tiles, TILE_ROWS))
        partial = T.meta_var((body.accumulators * n_tiles, TILE_ROWS))
        acc = T.meta_var(registers(n_tokens, partial, shape.kind))
        out = T.meta_var(registers(n_tokens, sizes))
        values = T.alloc_buffer((4, TILE_ROWS), "float32")  # of four columns
        table = T.alloc_buffer((n_tiles, body.table_size, TILE_ROWS), "float32")  # of a group
        factor = T.meta_var(at.factor if by_group else None)
        # Of this block alone where its tiles gather what they keep.
        a = T.meta_var(T.alloc_buffer((n_tokens, n_tiles, kept + ROOM), kind) if gathers else at.planes)
        sums = T.meta_var(T.alloc_buffer((n_tokens, n_tiles, groups), shape.kind) if gathers else at.sums)
        m = T.meta_var(T.int64(0) if gathers else m0)
        if gathers:
            squeeze(a, sums, at.a, weight.parts, first, m0, n_tokens, n_tiles)  # type: ignore[misc]
        body.clear(out, n_tokens, n_tiles)
        for g in range(groups):
            body.start_group(acc, sums, zeros, first, m, g, n_tokens, n_tiles)
            body.load_table(table, codebook, first, g, n_tiles)
            for c in range(T.min(body.group_chunks, chunks - g * body.group_chunks)):
                chunk = T.meta_var(g * body.group_chunks + c)
                ask(codes, first, chunk, n_tokens, n_tiles)
                body.add_chunk(acc, a, codes, values, table, first, m, chunk, n_tokens, n_tiles)
            body.end_group(out, acc, sums, scales, factor, first, m, g, n_tokens, n_tiles)
        store_all(at, tokens, weight, out, first, n_tiles, m0)

    return block


def by_vectors(shape: Any, block: Any) -> Any:
    """Make a macro that computes all outputs of many tokens, by vector instructions."""
    weights, step, tiles = shape.weights, shape.step, shape.schedule.gemm_tiles

    @T.inline
    def many(at, tokens, _turned):
        for i in T.parallel(weights.steps(tiles)):
            weight, first = T.meta_var(weights.of_task(i, tiles))
            for j in range((tokens + (step - 1)) // step):
                block(at, tokens, weight, first, tiles, j * step, step)

    return many
