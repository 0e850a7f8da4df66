"""Gather the activations that a tile of 16 rows keeps, so that its products read them one after another.

Where blocks of 16 rows by one column are left out, a bit a column says which are there.  The activations of 64 columns
(or 16, by what the machine has) are squeezed by their bits in a register and stored where the last ones end; the fill
level moves by the number of ones.  It is never above the columns kept, whatever the bits are.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.preparation import adding_up
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.vector import splat

LINE_BYTES = 64
AHEAD_BYTES = 4096
"""How far ahead of a tile's codes lines are prefetched while it is squeezed: a page."""
ROOM = 64
"""Elements behind those that are kept, which a whole register may be stored to."""
_LANES = 16


class KeptProducts(Products):
    """Products of columns that are kept: every tile of a block of tiles has activations and sums of its own."""

    def at(self, token: Any, tile: Any, place: Any) -> tuple[Any, ...]:
        """Return the index of what a token's tile has at a place, of [tokens, tiles, n]."""
        return token, tile, place


def squeezing(body: Products, columns: int, kept: int, isa: Isa) -> Any:
    """Make a macro that gathers activations, and their sums by groups.

    ``squeeze(picked, totals, a, parts, first, m0, n_tokens, n_tiles)`` writes picked[t, n, :kept], int8 or float32, of
    the tokens from ``m0`` on and the tiles from ``first`` on, and zeros up to a whole chunk; totals[t, n, groups].
    """
    width = 64 if body.integer and isa.squeeze_bytes is not None else 16
    one, add_up = _step(body.integer, width, isa), adding_up(body)
    tail = body.chunks * body.fmt.chunk_columns - kept
    steps, lines = -(-columns // width), body.chunks * body.fmt.chunk_words
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
                            prefetch(parts["codes"][first + n, 0, 0, 0], there)
                    word = T.meta_var(parts["kept"][first + n, T.ramp(step * (width // 8), 1, width // 8)])
                    one(picked, a, word, t, n, m0 + t, step, fill)
                    fill[0] = T.min(fill[0], T.int64(kept))
                for k in range(tail):
                    picked[t, n, kept + k] = T.int8(0) if body.integer else T.float32(0)
                add_up(picked, totals, t, n)

    return squeeze


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
        which: int32 [list_room(kept)]; zeros where fewer bits are set.
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
    with T.serial(0, -(-count // ROOM)) as step:
        for k in range(ROOM // _LANES):
            place = step * (ROOM // _LANES) + k
            mask = T.bind(T.reinterpret(bits[tile, T.ramp(place * 2, 1, 2)], dtype="uint16"))
            here = T.ramp(T.Cast("int32", place * _LANES), 1, _LANES)
            T.buffer_store(which, isa.squeeze(here, mask), [T.ramp(fill[0], 1, _LANES)])
            T.buffer_store(fill, fill[0] + T.Cast("int64", T.popcount(mask)), [0])
        T.buffer_store(fill, T.min(fill[0], T.int64(kept)), [0])
