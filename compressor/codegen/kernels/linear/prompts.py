"""Products of many tokens where blocks of 16 rows by one column are left out: time falls with what is left out.

Gathering a tile's columns for each token costs as much as is saved.  Here activations are turned, so that a column's 64
tokens lie in one register; a tile then gathers whole registers, four columns at a time, and mixes their bytes::

    prepared  int8   [tokens, columns]
    turned    int8   [blocks of 64 tokens, columns, 64]      by 16x16 bytes, once for all tiles
    picked    int32  [4, kept / 4, 16]                       a tile's columns, four bytes a token: 4 loads, 8 shuffles

and the products are those of one token: a register of codes, four columns of 16 rows, meets each token's four bytes.
What is gathered serves 16 rows, so that it takes an eighth of the products' time.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.codes import dot4, scale_values
from compressor.codegen.kernels.linear import tiles
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.squeeze import list_kept, list_room
from compressor.codegen.kernels.linear.weights import Weight, Weights
from compressor.codegen.kernels.vector import registers, splat
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

BLOCK = 64
"""Tokens of a register of a turned column."""
_SIDE = 16
LEAST_PERCENT, LEAST_PERCENT_AMX, LEAST_PERCENT_TILES = 40, 88, 30
"""Blocks left out from which on prompts take less time than those of a dense weight: by vectors; by vectors, where AMX
would multiply the dense weight; and by AMX, of blocks of its size.

By vectors with W8A8, 128 tokens, 2048x2048, one core of a Xeon: 1.27 times the dense time with 20% left out, 1.03 with
35%, 0.80 with 50%, 0.38 with 80%, 0.22 with 90%.  AMX's dense products take about 0.26 of the vectors' time.  By AMX,
4096x4096: 1.19 times with 10% left out, 0.91 with 30%, 0.43 with 80%, 0.30 with 90%.
"""
_PARTS = BLOCK // _SIDE
_QUADS = 64  # times four columns are gathered at once, at most: 16 KB
_SHARE = 2  # blocks of tokens of a task: 128, as many columns of which as a linear has stay in the second-level cache


def supports(fmt: Format, isa: Isa) -> str:
    """Say why a prompt's activations are not turned; an empty text where they are."""
    if fmt.extra(ColumnBlocks) is None:
        return "no blocks of columns are left out"
    if not fmt.integer_products:
        return "activations are floats"
    return "" if isa.squeeze is not None and isa.lanes == _SIDE else f"{isa.name} does not squeeze registers"


class TurnedProducts(Products):
    """Products of kept columns with activations and sums that lie by parts of 16 tokens.

    Sums are minus the zero point times the sum, where all codes share one.
    """

    def at(self, token: Any, tile: Any, place: Any) -> tuple[Any, ...]:
        """Return the index of a token's sum, of [parts, 16]: that of the columns that are gathered."""
        return token // _SIDE, token % _SIDE

    def four(self, a: Any, token: Any, tile: Any, column: Any) -> Any:
        """Return a token's activations of four columns; ``a``: gathered [parts, columns / 4, 16], from which on."""
        picked, first = a
        return picked[token // _SIDE, column // 4 - first, token % _SIDE]

    def minus_zeros(self, total: Any, zeros: Any, tile: Any, g: Any, at: Any) -> Any:
        """Return what a group's sums begin with."""
        return T.broadcast(total, self.isa.lanes) if zeros is None else super().minus_zeros(total, zeros, tile, g, at)

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Apply the group's scales; those of the only group give the outputs of 16 tokens, others are added up."""
        scale = None
        for t, n, at in self.lanes(n_tokens, n_tiles):
            if scale is None:
                scale = T.bind(scale_values(self.of_rows(scales, first, g, at), self.fmt, self.isa.lanes))
            value = self.scaled(acc[t][n, at], scale, sums, factor, m0 + t, g)
            place = [m0 + t if self.groups > 1 else t, n, at]
            T.buffer_store(out, out[tuple(place)] + value if self.groups > 1 else value, place)


def slower(fmt: Format, isa: Isa) -> str:
    """Say that prompts, convolutions or all calls would take less time stored dense; an empty text if not."""
    if (pattern := fmt.extra(KeptOfGroup)) is not None:
        return (
            f"{fmt.name}: {pattern.suffix[1:]} is stored sparse and executed dense: it saves bytes, and takes two to "
            f"three times as long as {fmt.of_kept.name}, prompts of 4 bits five times"
        )
    if fmt.extra(SingleZeros) is not None:
        return (
            f"{fmt.name}: single weights are stored sparse and executed dense: it saves bytes, and takes no less time "
            f"than {fmt.of_kept.name}, but where one token waits for memory"
        )
    blocks = fmt.extra(ColumnBlocks)
    if blocks is None:
        return ""
    if blocks.is_of_images:
        dense = f"convolutions would be quicker stored dense, in {fmt.of_kept.name}, whose products AMX has"
        return f"{fmt.name}: {dense}" if isa.matrix_unit and blocks.percent < LEAST_PERCENT_AMX else ""
    is_tiled = not tiles.supports(fmt, isa)
    least = LEAST_PERCENT_TILES if is_tiled else LEAST_PERCENT_AMX if isa.matrix_unit else LEAST_PERCENT
    why = ("" if is_tiled else supports(fmt, isa)) or (f"that pays from {least}% on" if blocks.percent < least else "")
    dense = f"prompts would be quicker stored dense, in {fmt.of_kept.name}"
    return f"{fmt.name}: one token reads what is kept, but {dense} on {isa.name}: {why}" if why else ""


def fewest(isa: Isa) -> int:
    """Return the tokens from which on activations are turned.

    With fewer, each token's are squeezed by themselves.  That is quicker up to two blocks of eight tokens where bytes
    are squeezed, and never otherwise (2048x2048, 50 and 80% left out, one core of a Xeon with VBMI2).
    """
    return 2 if isa.squeeze_bytes is None else 17


def blocks_of(tokens: Any, isa: Isa) -> Any:
    """Return the blocks of tokens that are turned; one, which nobody reads, for tokens that are too few."""
    return T.if_then_else(tokens >= fewest(isa), (tokens + (BLOCK - 1)) // BLOCK, T.int64(1))


def prompt_products(weights: Weights, shape: Any, store: Any, few: Any) -> Any:
    """Make a macro ``multiply(at, tokens, turned)`` that computes all outputs of several tokens.

    Args:
        shape: the kernel's :class:`compressor.codegen.kernels.linear.packed.Shape`.
        store: adds what a token's outputs still lack, and stores them.
        few: macro for fewer tokens than :func:`fewest`, with the same arguments; None if the kernel gets no fewer.
    """
    fmt, isa, kept, width = shape.body.fmt, shape.body.isa, shape.kept, shape.width
    steps, left = weights.steps(1), shape.body.blocks
    count = kept // left.width  # blocks that are kept
    products = _tile_products(TurnedProducts(weights.rows[0], kept, fmt, isa), kept, store, left.width)

    @T.inline
    def by_turning(at, tokens, turned):
        blocks = T.meta_var(blocks_of(tokens, isa))
        for task in T.parallel(blocks * (width // BLOCK)):
            turn(turned, at.a, task // (width // BLOCK), task % (width // BLOCK))
        for task in T.parallel((blocks + (_SHARE - 1)) // _SHARE * steps):
            weight, tile = T.meta_var(weights.of_task(task % steps, 1))
            which = T.alloc_buffer((list_room(count),), "int32")
            list_kept(which, weight.parts["kept"], tile // left.tiles, left.blocks(shape.columns), count, isa)
            for k in range(_SHARE):
                j = T.meta_var(task // steps * _SHARE + k)
                if j < blocks:
                    products(at, tokens, weight, tile, j, turned, which)

    @T.inline
    def by_number(at, tokens, turned):
        if tokens >= fewest(isa):
            by_turning(at, tokens, turned)
        else:
            few(at, tokens, turned)

    return by_turning if few is None or fewest(isa) <= 2 else by_number


def _tile_products(body: TurnedProducts, kept: int, store: Any, width: int) -> Any:
    """Make a macro that computes a tile's outputs of a block of tokens, some columns after another.

    What is gathered of them stays in the first-level cache; sums of a group wait in memory meanwhile.
    """
    gather, each = _gathering(body, kept, width), body.fmt.chunk_columns // 4
    spans = -(-body.group_chunks * each // _QUADS)
    span, carries = -(-body.group_chunks // spans), spans > 1
    lanes = T.ramp(0, 1, TILE_ROWS)

    def go_on(acc: Any, carried: Any, part: Any, s: Any) -> None:
        with T.If(s > 0), T.Then():
            for t in range(_SIDE if carries else 0):
                T.buffer_store(acc[t], acc[t][0, lanes] + carried[part * _SIDE + t, lanes], [0, lanes])

    def wait(acc: Any, carried: Any, part: Any) -> None:
        for t in range(_SIDE if carries else 0):
            T.buffer_store(carried, acc[t][0, lanes], [part * _SIDE + t, lanes])

    def ask(weight: Weight, tile: Any, token: Any, s: Any) -> None:
        """Emit prefetches of what is written next: rows of outputs are far apart."""
        with T.If(s == spans - 1), T.Then():
            for t in range(_SIDE if body.groups == 1 else 0):
                prefetch(weight.y[token + t, tile * TILE_ROWS], 0, writes=True)

    def count_of(g: Any, s: Any) -> Any:
        """Chunks of a span."""
        left = T.min(body.group_chunks - s * span, body.chunks - g * body.group_chunks - s * span)
        return T.max(T.min(span, left), 0)

    @T.inline
    def finish(at, tokens, weight, tile, token, acc, sums, begin):
        out = T.alloc_buffer((_SIDE, 1, TILE_ROWS), "float32")
        body.end_group(out, acc, sums, weight.parts["scales"], None, tile, begin, 0, _SIDE, 1)
        for t in T.unroll(_SIDE):
            if token + t < tokens:
                store(at, weight, out, tile, token + t, t, 0)

    @T.inline
    def part_of_tile(at, tokens, weight, tile, m0, part, g, s, picked, sums, carried, held):
        codes, scales, zeros = T.meta_var([weight.parts.get(name) for name in ("codes", "scales", "zeros")])
        acc = T.meta_var(registers(_SIDE, (1, TILE_ROWS), "int32"))
        begin, first = T.meta_var((T.Cast("int64", part) * _SIDE, g * body.group_chunks + s * span))
        ask(weight, tile, m0 + begin, s)
        body.start_group(acc, sums, zeros, tile, begin, g, _SIDE, 1)
        go_on(acc, carried, part, s)
        for c in range(count_of(g, s)):
            body.add_chunk(acc, (picked, first * each), codes, None, None, tile, begin, first + c, _SIDE, 1)
        if s < spans - 1:
            wait(acc, carried, part)
        elif body.groups == 1:
            finish(at, tokens, weight, tile, m0 + begin, acc, sums, begin)
        else:
            body.end_group(held, acc, sums, scales, None, tile, begin, g, _SIDE, 1)

    @T.inline
    def products(at, tokens, weight, tile, j, turned, which):
        picked = T.alloc_buffer((_PARTS, span * each, _SIDE), "int32")
        sums = T.alloc_buffer((_PARTS, _SIDE), "int32")
        carried = T.meta_var(T.alloc_buffer((BLOCK, TILE_ROWS), "int32") if carries else None)
        held = T.meta_var(T.alloc_buffer((BLOCK, 1, TILE_ROWS), "float32") if body.groups > 1 else None)
        m0, parts = T.meta_var((j * BLOCK, T.min(_PARTS, (tokens - j * BLOCK + (_SIDE - 1)) // _SIDE)))
        if body.groups > 1:
            for t in range(BLOCK):
                held[t, 0, lanes] = T.broadcast(T.float32(0), TILE_ROWS)
        for g in range(body.groups):
            for s in range(spans):
                first = T.meta_var(g * body.group_chunks + s * span)
                gather(picked, sums, turned, which, j, first * each, count_of(g, s) * each)
                for part in range(parts):
                    part_of_tile(at, tokens, weight, tile, m0, part, g, s, picked, sums, carried, held)
        if body.groups > 1:
            for t in range(T.min(BLOCK, tokens - m0)):
                out = T.alloc_buffer((1, 1, TILE_ROWS), "float32")  # in a register, as others: bits are the same
                out[0, 0, lanes] = held[t, 0, lanes]
                store(at, weight, out, tile, m0 + t, 0, 0)

    return products


def turn(turned: Any, a: Any, block: Any, step: Any) -> None:
    """Emit the turning of 64 columns of a block of tokens.

    Four rounds that mix bytes of register i with those of register i + 8 turn 16x16 bytes in each quarter of them.
    Tokens are taken in the order in which :func:`_gathering` leaves them one after another.
    """
    with T.serial(0, 4) as piece:  # not unrolled: the time to compile grows fast with statements
        tokens = [block * BLOCK + (16 * v + 4 * piece + i) for v in range(4) for i in range(4)]
        rows = [T.bind(a[token, T.ramp(step * BLOCK, 1, BLOCK)]) for token in tokens]
        for _ in range(4):
            rows = [T.bind(mixed(rows[k // 2], rows[k // 2 + 8], 1, k % 2)) for k in range(_SIDE)]
        for k, register in enumerate(rows):
            for lane in range(4):
                quarter = T.Shuffle([register], list(range(16 * lane, 16 * lane + 16)))
                place = [block, step * BLOCK + (16 * lane + k), T.ramp(16 * piece, 1, 16)]
                T.buffer_store(turned, quarter, place)


def mixed(one: Any, other: Any, size_bytes: int, half: int) -> Any:
    """Return the lower or upper halves of the quarters of two int8x64, elements by turns: ``vpunpcklbw`` and so on."""
    places = []
    for first in (16 * lane + 8 * half for lane in range(4)):
        for begin in range(first, first + 8, size_bytes):
            places += [*range(begin, begin + size_bytes), *range(64 + begin, 64 + begin + size_bytes)]
    return T.Shuffle([one, other], places)


def _gathering(body: Products, kept: int, width: int) -> Any:
    """Make a macro that gathers some of a tile's columns of a block of tokens, and their sums.

    ``which`` lists blocks of ``width`` columns.

    ``gather(picked, sums, turned, which, block, first, count)`` takes ``count`` times four columns, the first of them
    ``4 * first``.
    """
    isa, fmt, quads = body.isa, body.fmt, body.chunks * body.fmt.chunk_columns // 4
    ones, every = splat(0x01010101, _SIDE), T.ramp(0, 1, _SIDE)
    factor = splat(-int(fmt.zero_point) if fmt.symmetric else 1, _SIDE)

    def column_of(which: Any, place: Any) -> Any:
        return which[place] if width == 1 else which[place // width] * width + T.Cast("int32", place % width)

    def pick(picked: Any, totals: Any, turned: Any, which: Any, block: Any, first: Any, q: Any, there: int) -> None:
        """Emit four columns, ``there`` of which are kept and the others zeros."""
        zeros = T.broadcast(T.int8(0), BLOCK)
        a, b, c, d = (
            T.bind(turned[block, column_of(which, 4 * (first + q) + i), T.ramp(0, 1, BLOCK)] if i < there else zeros)
            for i in range(4)
        )
        for half in range(2):
            ab, cd = T.bind(mixed(a, b, 1, half)), T.bind(mixed(c, d, 1, half))
            for quarter in range(2):
                part = 2 * half + quarter
                four = T.bind(T.reinterpret(mixed(ab, cd, 2, quarter), dtype=f"int32x{_SIDE}"))
                T.buffer_store(picked, four, [part, q, every])
                T.buffer_store(totals[part], dot4(totals[part][every], ones, four, fmt, isa), [every])

    def fill_up(picked: Any, totals: Any, turned: Any, which: Any, block: Any, first: Any) -> None:
        """Emit what is left of the last chunk, where all columns are kept and do not fill it."""
        for q in range(kept // 4, quads):
            pick(picked, totals, turned, which, block, first, q - first, kept % 4 if q == kept // 4 else 0)

    def clear(totals: Any) -> None:
        for total in totals:
            T.buffer_store(total, splat(0, _SIDE), [every])

    def keep(sums: Any, totals: Any) -> None:
        for part, total in enumerate(totals):
            T.buffer_store(sums, total[every] * factor, [part, every])

    @T.inline
    def gather(picked, sums, turned, which, block, first, count):
        totals = T.meta_var(registers(_PARTS, (_SIDE,), "int32"))
        clear(totals)
        for q in range(T.max(T.min(count, kept // 4 - first), 0)):
            pick(picked, totals, turned, which, block, first, q, 4)
        if first + count == quads:
            fill_up(picked, totals, turned, which, block, first)
        keep(sums, totals)

    return gather
