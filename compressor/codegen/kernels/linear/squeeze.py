"""Gather the activations that a tile of 16 rows keeps, so that its products read them one after another.

Where blocks of 16 rows by one column are left out, a bit a column says which are there.  The activations of 64 columns
(or 16, by what the machine has) are squeezed by their bits in a register and stored where the last ones end; the fill
level moves by the number of ones.  It is never above the columns kept, whatever the bits are.

For one token, memory bounds the time, and squeezing reads none.  :func:`streaming` therefore squeezes a tile between
the products of the tile before it, so that lines of codes are asked for at an even rate.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.codes import dot4
from compressor.codegen.kernels.linear.preparation import adding_up
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.vector import emit_tree_sum, registers, splat
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format

LINE_BYTES = 64
AHEAD_BYTES = 2048
"""How far ahead codes are prefetched, half a page: of the tile that is squeezed, or of the line that is multiplied.

Into the second cache: the first one has too few lines on their way for memory to be busy (on an AMD EPYC one token took
1.15 to 1.7 times as long; ahead by 512 to 3,072 bytes are alike).
"""
_AHEAD_LEVEL = 2
ROOM = 64
"""Elements behind those that are kept, which a whole register may be stored to."""
_LANES = 16
_CHAINS = 4  # sums that products are added to by turns: one product waits five cycles for the last on the same sum


class KeptProducts(Products):
    """Products of columns that are kept: every tile of a block of tiles has activations and sums of its own."""

    def __init__(self, rows: int, columns: int, fmt: Format, isa: Isa, blocks: ColumnBlocks) -> None:
        super().__init__(rows, columns, fmt, isa)
        self.blocks = blocks

    def steps(self, columns: int, width: int) -> int:
        """Count the steps of ``width`` columns through a row, those that fill up its last block included."""
        return -(-self.blocks.blocks(columns) * self.blocks.width // width)

    def flags(self, bits: Any, tile: Any, step: Any, width: int) -> Any:
        """Return a bit for each of ``width`` columns of a tile, uint8 [width / 8]; ``bits``: the part ``kept``."""
        if self.blocks.width == 1:
            return bits[tile, T.ramp(step * (width // 8), 1, width // 8)]
        block = step * width // self.blocks.width
        byte = T.shift_right(bits[tile // self.blocks.tiles, block // 8], T.Cast("uint8", block % 8))
        return T.broadcast(T.bitwise_and(byte, T.uint8(1)) * T.uint8(255), width // 8)

    def at(self, token: Any, tile: Any, place: Any) -> tuple[Any, ...]:
        """Return the index of what a token's tile has at a place, of [tokens, tiles, n]."""
        return token, tile, place


def squeezing(body: KeptProducts, columns: int, kept: int, isa: Isa) -> Any:
    """Make a macro that gathers activations, and their sums by groups.

    ``squeeze(picked, totals, a, parts, first, m0, n_tokens, n_tiles)`` writes picked[t, n, :kept], int8 or float32, of
    the tokens from ``m0`` on and the tiles from ``first`` on, and zeros up to a whole chunk; totals[t, n, groups].
    """
    width = 64 if body.integer and isa.squeeze_bytes is not None else 16
    one = _step(body.integer, width, isa)
    add_up = _adding_up_bytes(body) if body.integer else adding_up(body)
    tail = body.chunks * body.fmt.chunk_columns - kept
    steps, lines = body.steps(columns, width), body.chunks * body.fmt.chunk_words
    share = -(-lines // steps)

    @T.inline
    def squeeze(picked, totals, a, parts, first, m0, n_tokens, n_tiles):
        for t in range(n_tokens):
            for n in range(n_tiles):
                fill = T.alloc_buffer((1,), "int64")
                fill[0] = T.int64(0)
                for step in range(steps):
                    if n_tokens == 1:  # memory is waited for otherwise; several tokens wait for arithmetic
                        for line in range(share):
                            there = T.meta_var((step * share + line) * LINE_BYTES + AHEAD_BYTES)
                            prefetch(parts["codes"][first + n, 0, 0, 0], there, level=_AHEAD_LEVEL)
                    word = T.meta_var(body.flags(parts["kept"], first + n, step, width))
                    one(picked, a, word, t, n, m0 + t, step, fill)
                    fill[0] = T.min(fill[0], T.int64(kept))
                for k in range(tail):
                    picked[t, n, kept + k] = T.int8(0) if body.integer else T.float32(0)
                add_up(picked, totals, t, n)

    return squeeze


def _adding_up_bytes(body: Products) -> Any:
    """As :func:`adding_up`, of integers that are kept: whole registers by a dot product with ones."""
    isa, size, padded = body.isa, body.group_columns, body.chunks * body.fmt.chunk_columns
    lanes, every = isa.lanes, T.ramp(0, 1, isa.lanes)
    ones, quads = splat(0x01010101, lanes), f"int32x{lanes}"

    @T.inline
    def add_up(values, sums, m, n):
        for g in range(body.groups if body.has_zeros else 0):
            length = T.meta_var(T.min(size, padded - g * size))
            lane = T.alloc_buffer((lanes,), "int32")
            lane[every] = splat(0, lanes)
            for k in range(length // (4 * lanes)):
                some = T.meta_var(values[m, n, T.ramp(g * size + 4 * lanes * k, 1, 4 * lanes)])
                lane[every] = dot4(lane[every], ones, T.reinterpret(some, dtype=quads), body.fmt, isa)
            for k in range(length % (4 * lanes) // lanes):
                begin = T.meta_var(g * size + length // (4 * lanes) * (4 * lanes) + k * lanes)
                lane[every] = lane[every] + T.Cast(quads, values[m, n, T.ramp(begin, 1, lanes)])
            for k in range(length % lanes):
                single = T.meta_var(values[m, n, g * size + length // lanes * lanes + k])
                lane[0] = lane[0] + T.Cast("int32", single)
            emit_tree_sum(lane, lanes)
            sums[m, n, g] = lane[0]

    return add_up


def one_token(shape: Any, store: Any, block: Any) -> Any:
    """Make a macro ``single(at, tokens, weight, first)`` that computes some tiles of a weight for the only token.

    Args:
        shape: the kernel's :class:`compressor.codegen.kernels.linear.packed.Shape`.
        store: adds what the outputs of a tile still lack, and stores them.
        block: computes some tiles for some tokens, each after what it needs is gathered.
    """
    body, n_tiles = shape.body, shape.schedule.gemv_tiles

    @T.inline
    def by_block(at, tokens, weight, first):
        block(at, tokens, weight, first, n_tiles, T.int64(0), 1)

    gathers = body is not shape.given and body.isa.squeeze is not None and body.isa.lanes == _LANES
    if not (gathers and body.integer and body.groups == 1):
        return by_block
    stream = streaming(body, shape.columns, shape.kept, store)

    @T.inline
    def by_stream(at, _tokens, weight, first):
        stream(at, weight, first, n_tiles)

    return by_stream


def streaming(body: KeptProducts, columns: int, kept: int, store: Any) -> Any:
    """Make a macro ``stream(at, weight, first, n_tiles)`` that computes tiles one after another, for one token.

    Each is squeezed beside the products of the tile before it.
    """
    width = 64 if body.isa.squeeze_bytes is not None else 16
    one, add_up, chunks = _step(True, width, body.isa), _adding_up_bytes(body), body.chunks
    tail, steps = chunks * body.fmt.chunk_columns - kept, body.steps(columns, width)
    share, extra = divmod(chunks, steps)  # chunks beside a step; the first steps have one more
    begin_tile, add_chunks, add_chains = _chains(body)

    @T.inline
    def step_of(picked, at, weight, tile, slot, step, fill):
        word = T.meta_var(body.flags(weight.parts["kept"], tile, step, width))
        one(picked, at.a, word, slot, 0, 0, step, fill)
        fill[0] = T.min(fill[0], T.int64(kept))

    @T.inline
    def end_squeeze(picked, sums, slot):
        for k in range(tail):
            picked[slot, 0, kept + k] = T.int8(0)
        add_up(picked, sums, slot, 0)

    @T.inline
    def end_tile(at, weight, tile, acc):
        out = T.alloc_buffer((1, 1, _LANES), "float32")
        add_chains(acc)
        body.clear(out, 1, 1)
        body.end_group(out, acc, at.sums, weight.parts["scales"], None, tile, 0, 0, 1, 1)
        store(at, weight, out, tile, T.int64(0), 0, 0)

    @T.inline
    def stream(at, weight, first, n_tiles):
        acc = T.meta_var(registers(_CHAINS, (1, _LANES), "int32"))
        picked = T.alloc_buffer((2, 1, kept + tail + ROOM), "int8")  # of a tile and of the next
        sums = T.alloc_buffer((2, 1, 1), "int32")
        fill = T.alloc_buffer((1,), "int64")
        fill[0] = T.int64(0)
        for step in range(steps):
            step_of(picked, at, weight, first, 0, step, fill)
        end_squeeze(picked, sums, 0)
        for n in range(n_tiles - 1):
            slot, tile = T.meta_var((n % 2, first + n))
            begin_tile(acc, sums, weight, tile, slot)
            fill[0] = T.int64(0)
            for step in range(extra):
                step_of(picked, at, weight, tile + 1, 1 - slot, step, fill)
                add_chunks(acc, picked, weight, tile, slot, step * (share + 1), share + 1)
            for step in range(steps - extra):
                step_of(picked, at, weight, tile + 1, 1 - slot, extra + step, fill)
                add_chunks(acc, picked, weight, tile, slot, extra + (extra + step) * share, share)
            end_squeeze(picked, sums, 1 - slot)
            end_tile(at, weight, tile, acc)
        slot, tile = T.meta_var(((n_tiles - 1) % 2, first + (n_tiles - 1)))
        begin_tile(acc, sums, weight, tile, slot)
        for c in range(chunks // _CHAINS):
            add_chunks(acc, picked, weight, tile, slot, c * _CHAINS, _CHAINS)
        add_chunks(acc, picked, weight, tile, slot, chunks // _CHAINS * _CHAINS, chunks % _CHAINS)
        end_tile(at, weight, tile, acc)

    return stream


def _chains(body: Products) -> tuple[Any, Any, Any]:
    """Return what emits the start of a tile's sums, some of its chunks, and the sum of the sums."""
    every = T.ramp(0, 1, _LANES)

    def begin(acc: Any, sums: Any, weight: Any, tile: Any, slot: Any) -> None:
        body.start_group(acc, sums, weight.parts.get("zeros"), tile, slot, 0, 1, 1)
        for other in acc[1:]:
            T.buffer_store(other, splat(0, _LANES), [0, every])

    def add(acc: Any, picked: Any, weight: Any, tile: Any, slot: Any, first: Any, count: int) -> None:
        codes = weight.parts["codes"]
        for i in range(count):
            for word in range(body.fmt.chunk_words):  # of 16 rows, a line
                prefetch(codes[tile, first + i, word, 0], AHEAD_BYTES, level=_AHEAD_LEVEL)
            body.add_chunk([acc[i % _CHAINS]], picked, codes, None, None, tile, slot, first + i, 1, 1)

    def add_all(acc: Any) -> None:
        for other in acc[1:]:
            T.buffer_store(acc[0], acc[0][0, every] + other[0, every], [0, every])

    return begin, add, add_all


def _step(integer: bool, width: int, isa: Isa) -> Any:
    """Make a macro that squeezes ``width`` columns."""
    word_type, squeeze, squeeze_bytes = f"uint{width}", isa.squeeze, isa.squeeze_bytes

    @T.inline
    def by_bytes(picked, a, word, t, n, m, step, fill):
        mask = T.meta_var(T.reinterpret(word, dtype=word_type))
        values = T.meta_var(a[m, T.ramp(step * width, 1, width)])
        picked[t, n, T.ramp(fill[0], 1, width)] = squeeze_bytes(values, mask)  # type: ignore[misc]
        fill[0] = fill[0] + T.Cast("int64", T.popcount(mask))

    @T.inline
    def by_lanes(picked, a, word, t, n, m, step, fill):
        mask = T.meta_var(T.reinterpret(word, dtype=word_type))
        values = T.meta_var(a[m, T.ramp(step * width, 1, width)])
        wide = T.meta_var(T.reinterpret(T.Cast("int32x16", values) if integer else values, dtype="int32x16"))
        squeezed = T.meta_var(squeeze(wide, mask))  # type: ignore[misc]
        there = T.meta_var(T.ramp(fill[0], 1, width))
        picked[t, n, there] = T.Cast("int8x16", squeezed) if integer else T.reinterpret(squeezed, dtype="float32x16")
        fill[0] = fill[0] + T.Cast("int64", T.popcount(mask))

    @T.inline
    def one_by_one(picked, a, word, t, n, m, step, fill):
        flags = T.alloc_buffer((2,), "uint8")
        flags[T.ramp(0, 1, 2)] = word
        for k in range(width):
            picked[t, n, fill[0]] = a[m, step * width + k]
            bit = T.meta_var(T.shift_right(flags[k // 8], T.Cast("uint8", k % 8)))
            fill[0] = fill[0] + T.Cast("int64", T.bitwise_and(bit, T.uint8(1)))

    if integer and isa.squeeze_bytes is not None:
        return by_bytes
    return one_by_one if isa.squeeze is None else by_lanes


def list_room(kept: int) -> int:
    """Return the elements of a list of :func:`list_kept`: whole registers may be stored behind the last."""
    return -(-kept // _LANES) * _LANES + ROOM


def list_kept(which: Any, bits: Any, tile: Any, count: int, kept: int, isa: Isa) -> None:
    """Emit a list of the blocks that a tile keeps, rising; never more than there is room for, whatever the bits.

    Args:
        which: int32 [list_room(kept)]; some blocks of the tile where fewer bits are set.
        bits: the part ``kept``.
        count: blocks of a tile.
    """
    with T.serial(0, -(-kept // _LANES)) as k:
        T.buffer_store(which, splat(0, _LANES), [T.ramp(k * _LANES, 1, _LANES)])
    fill = T.alloc_buffer((1,), "int64")
    T.buffer_store(fill, T.int64(0), [0])
    if isa.squeeze is None:
        with T.serial(0, count) as c:
            T.buffer_store(which, T.Cast("int32", c), [fill[0]])
            bit = T.bitwise_and(T.shift_right(bits[tile, c // 8], T.Cast("uint8", c % 8)), T.uint8(1))
            T.buffer_store(fill, T.min(fill[0] + T.Cast("int64", bit), T.int64(kept)), [0])
        return
    list_step = _list_by_lanes if isa.squeeze_bytes is None else _list_by_bytes(kept / count)
    with T.serial(0, -(-count // ROOM)) as step:
        list_step(which, bits, tile, step, fill, isa)
        T.buffer_store(fill, T.min(fill[0], T.int64(kept)), [0])


def _list_by_lanes(which: Any, bits: Any, tile: Any, step: Any, fill: Any, isa: Isa) -> None:
    """Emit the list of 64 blocks, 16 of them at a time."""
    for k in range(ROOM // _LANES):
        place = step * (ROOM // _LANES) + k
        mask = T.bind(T.reinterpret(bits[tile, T.ramp(place * 2, 1, 2)], dtype="uint16"))
        here = T.ramp(T.Cast("int32", place * _LANES), 1, _LANES)
        T.buffer_store(which, isa.squeeze(here, mask), [T.ramp(fill[0], 1, _LANES)])  # type: ignore[misc]
        T.buffer_store(fill, fill[0] + T.Cast("int64", T.popcount(mask)), [0])


def _list_by_bytes(share: float) -> Any:
    """Return what emits the list of 64 blocks, whose numbers are squeezed as bytes.

    A register of 64 numbers becomes four of 16.  As many of these as a share of kept blocks fills nearly always, by two
    standard deviations, are stored without asking how many there are.
    """
    usual = min(ROOM // _LANES, -int(-(ROOM * share + 2 * math.sqrt(ROOM * share * (1 - share))) // _LANES))

    def list_step(which: Any, bits: Any, tile: Any, step: Any, fill: Any, isa: Isa) -> None:
        mask = T.bind(T.reinterpret(bits[tile, T.ramp(step * (ROOM // 8), 1, ROOM // 8)], dtype="uint64"))
        ones = T.bind(T.Cast("int64", T.popcount(mask)))
        here = T.bind(isa.squeeze_bytes(T.ramp(T.int8(0), T.int8(1), ROOM), mask))  # type: ignore[misc]
        first = T.broadcast(T.Cast("int32", step * ROOM), _LANES)

        def put(k: int) -> None:
            numbers = T.Cast(f"int32x{_LANES}", T.Shuffle([here], list(range(k * _LANES, (k + 1) * _LANES))))
            T.buffer_store(which, numbers + first, [T.ramp(fill[0] + k * _LANES, 1, _LANES)])

        for k in range(usual):
            put(k)
        if usual * _LANES < ROOM:
            with T.If(ones > usual * _LANES), T.Then():
                for k in range(usual, ROOM // _LANES):
                    put(k)
        T.buffer_store(fill, fill[0] + ones, [0])

    return list_step
