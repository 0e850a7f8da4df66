"""The packed linear: dequantisation and matrix product in one kernel that reads the stored codes.

Integer path: activations become int8 codes (of 8 bits or fewer), dot products run in int32 within a group of columns,
by bytes, by AMX's tiles or by bit planes, and one float multiply-add a group applies the scales.  Float path:
activations stay as they are, or become the floats that they round to
(:mod:`compressor.codegen.kernels.linear.activations`), and codes become floats in registers, integers by conversion,
small floats by way of float16, tables by a permutation, codebooks by a tree of choices.  What a weight stores as floats
meets the activations as they came, after that.  A single token takes a loop over ``gemv_tiles`` tiles of 16 rows;
several tokens take a loop over blocks of ``gemm_tokens`` tokens that unpacks each code once a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import cast

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import amx
from compressor.codegen.kernels.amx import SIDE
from compressor.codegen.kernels.linear.bit_planes import PlaneProducts, counts_bits
from compressor.codegen.kernels.linear.preparation import Prepared, preparation
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.linear.tiles import TOKENS, Buffers, TileProducts, takes_tiles
from compressor.codegen.kernels.linear.weights import Weights, by_token, parameter
from compressor.codegen.kernels.vector import registers
from compressor.formats.activations import Activations
from compressor.formats.format import TILE_ROWS, Format


@dataclass(frozen=True)
class Schedule:
    """What the tuner chooses: tiles of 16 rows a step for one token, and tiles by tokens for many."""

    gemv_tiles: int
    gemm_tiles: int
    gemm_tokens: int


_GEMM_DEFAULT = (1, 8)


def gemv_space(tiles: int) -> list[Schedule]:
    """Schedules that differ in what one token takes, for a weight of ``tiles`` tiles; the default first."""
    return [Schedule(n, *_GEMM_DEFAULT) for n in (4, 2, 8, 1) if tiles % n == 0]


def gemm_space(tiles: int, gemv_tiles: int, fmt: Format, isa: Isa) -> list[Schedule]:
    """Schedules that differ in what several tokens take; the default first.

    AMX has one: two tiles by blocks of tokens that fit the cache.  Otherwise a chunk is unrolled over its columns,
    tiles and tokens: formats with long chunks take smaller blocks, since the time to compile grows with the square of
    the statements.
    """
    if takes_tiles(fmt, isa):
        return [Schedule(gemv_tiles, 2 - tiles % 2, TOKENS)]
    quads = fmt.chunk_columns // 4
    space = [(n, m) for n, m in ((4, 4), (2, 8), (1, 16), (2, 4)) if n * m * quads <= 64 and tiles % n == 0]
    space.insert(0 if fmt.integer_products else 1, _GEMM_DEFAULT)  # floats gain more from sharing what is unpacked
    return [Schedule(gemv_tiles, n, m) for n, m in space]


def common_schedule(schedule: Schedule, rows: Sequence[int], fmt: Format, isa: Isa) -> Schedule:
    """The schedule of several weights in one kernel, from that of the first: as it is where its tiles divide them all.

    Otherwise the largest of the space that do.
    """
    tiles = gcd(*(-(-n // TILE_ROWS) for n in rows))
    gemv, gemm = schedule.gemv_tiles, (schedule.gemm_tiles, schedule.gemm_tokens)
    if tiles % gemv:
        gemv = max(one.gemv_tiles for one in gemv_space(tiles))
    if tiles % schedule.gemm_tiles:
        gemm = max((one.gemm_tiles, one.gemm_tokens) for one in gemm_space(tiles, gemv, fmt, isa))
    return Schedule(gemv, *gemm)


def packed_linear(
    out_features: int, in_features: int, fmt: Format, has_bias: bool, isa: Isa, schedule: Schedule
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.linear.packed_linear`.

    Parameters of the result: x float32 [d0, d1, in], the parts that the format has (:mod:`compressor.formats.format`),
        bias
    (where there is one), y float32 [d0, d1, out].
    """
    return fused_linear([out_features], in_features, fmt, has_bias, isa, schedule)


def fused_linear(
    rows: Sequence[int],
    columns: int,
    fmt: Format,
    has_bias: bool,
    isa: Isa,
    schedule: Schedule,
    *,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """TIR for packed linears of the same activations, which are prepared once.

    Parameters of the result: x float32 [d0, d1, columns], or what the prologue reads in its place, and the vectors
    float32 [columns] that it reads; for each of ``rows`` the parts that the format has
    (:mod:`compressor.formats.format`) and bias (where there is one); the residual, float32 [d0, d1, rows], which is
    added to the outputs (of one weight only); for each of ``rows`` y float32 [d0, d1, rows].
    """
    is_sliced = counts_bits(fmt, isa)
    body = (PlaneProducts if is_sliced else Products)(rows[0], columns, fmt, isa)
    integer, fed = body.integer, cast(Activations, fmt.activations)
    weights = Weights(rows, columns, fmt, has_bias, has_residual)
    has_outliers, has_columns = "outlier_starts" in weights.stored[0], fmt.float_columns > 0
    chunks, groups = body.chunks, body.groups
    is_tiled = takes_tiles(fmt, isa)
    is_final = groups == 1 and not (weights.is_ragged or has_outliers or has_columns)
    by_tiles = TileProducts(body, columns, schedule.gemm_tiles, is_final=is_final)
    # Bytes from one token's activations to the next, those that fill up chunks or registers included.
    width = by_tiles.stride if is_tiled else chunks * fmt.chunk_columns
    fed_groups, by_group = body.fed_groups, body.fed_groups > 1
    assert prologue is None or not (has_outliers or has_columns)  # which read the activations again
    inputs, vectors = (1, 0) if prologue is None else (prologue.inputs, prologue.vectors)
    split = by_tiles.split if is_tiled and not integer else None
    prepare = preparation(body, columns, width, is_sliced, split, prologue)
    round_to = by_tiles.sides * SIDE if is_tiled else schedule.gemm_tokens
    step, every = max(schedule.gemm_tokens, round_to), T.ramp(0, 1, 16)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given = T.meta_var([parameter((d0, d1, columns), "float32") for _ in range(inputs)])
        of_norm = T.meta_var([parameter((columns,), "float32") for _ in range(vectors)])
        weights.declare(d0, d1)
        tokens = T.meta_var(d0 * d1)
        slots = T.meta_var(T.if_then_else(tokens == 1, T.int64(1), (tokens + (round_to - 1)) // round_to * round_to))
        read = T.meta_var([by_token(buffer) for buffer in given])
        a = T.alloc_buffer((slots, width), "int8" if integer else "float32")  # activations, columns filled up
        # What products read: bit planes where they count ones.
        operands = T.meta_var(T.alloc_buffer((slots, chunks * fed.bits), "int32") if is_sliced else a)
        # Of floats, AMX takes two in bfloat16.
        halves = T.meta_var(T.alloc_buffer((2, slots, width), "uint16") if is_tiled and not integer else a)
        sums = T.alloc_buffer((slots, groups), "int32" if integer else "float32")  # of each group's activations
        # What an output, or a group's part of it, is multiplied by: the activations' scale...
        factor = T.alloc_buffer((slots, fed_groups), "float32")
        prepared = T.meta_var(Prepared(read, of_norm, a, operands, halves, sums, factor, weights.shared))

        @T.inline
        def add_floats(weight, out, tile, token, t, n):
            if not by_group:
                out[t, n, every] = out[t, n, every] * T.broadcast(factor[token, 0], TILE_ROWS)
            if has_columns:
                for k in range(fmt.float_columns):
                    single = T.meta_var(T.broadcast(read[0][token, weight.parts["float_columns"][k]], TILE_ROWS))
                    value = T.meta_var(T.Cast("float32x16", weight.parts["float_values"][tile, k, every]))
                    out[t, n, every] = out[t, n, every] + value * single
            if has_outliers:
                starts = T.meta_var(weight.parts["outlier_starts"])
                for r in range(TILE_ROWS):
                    begin = T.meta_var(starts[tile * TILE_ROWS + r])
                    for k in range(starts[tile * TILE_ROWS + r + 1] - begin):
                        single = T.meta_var(read[0][token, T.Cast("int32", weight.parts["outlier_columns"][begin + k])])
                        value = T.meta_var(T.Cast("float32", weight.parts["outlier_values"][begin + k]))
                        out[t, n, r] = out[t, n, r] + value * single

        @T.inline
        def write(weight, out, tile, token, t, n):
            # What a token's outputs of a tile still lack, and then where they belong.
            add_floats(weight, out, tile, token, t, n)
            if weights.is_ragged:
                for r in range(TILE_ROWS):
                    row = T.meta_var(tile * TILE_ROWS + r)
                    if row < weight.rows:
                        weight.y[token, row] = weight.finish(out[t, n, r], token, row)
            else:
                at = T.meta_var(T.ramp(tile * TILE_ROWS, 1, TILE_ROWS))
                weight.y[token, at] = weight.finish(out[t, n, every], token, at)

        @T.inline
        def block(weight, first, n_tiles, m0, n_tokens):
            codes, scales, zeros, codebook = T.meta_var(
                [weight.parts.get(name) for name in ("codes", "scales", "zeros", "codebook")]
            )
            shape = T.meta_var((n_tokens, n_tiles, TILE_ROWS))
            partial = T.meta_var((body.accumulators * n_tiles, TILE_ROWS))
            acc = T.meta_var(registers(n_tokens, partial, "int32" if integer else "float32"))
            out = T.alloc_buffer(shape, "float32")
            values = T.alloc_buffer((4, TILE_ROWS), "float32")  # of four columns
            table = T.alloc_buffer((n_tiles, body.table_size, TILE_ROWS), "float32")  # of a group
            body.clear(out, n_tokens, n_tiles)
            for g in range(groups):
                body.start_group(acc, sums, zeros, first, m0, g, n_tokens, n_tiles)
                body.load_table(table, codebook, first, g, n_tiles)
                for c in range(T.min(body.group_chunks, chunks - g * body.group_chunks)):
                    chunk = T.meta_var(g * body.group_chunks + c)
                    body.add_chunk(acc, operands, codes, values, table, first, m0, chunk, n_tokens, n_tiles)
                body.end_group(out, acc, sums, scales, factor if by_group else None, first, m0, g, n_tokens, n_tiles)
            for t in T.unroll(n_tokens):
                if m0 + t < tokens:
                    for n in T.unroll(n_tiles):
                        write(weight, out, first + n, m0 + t, t, n)

        @T.inline
        def tile_block(weight, first, m0):
            n_tiles = T.meta_var(by_tiles.n_tiles)
            out = T.alloc_buffer((1 if is_final else step, n_tiles, TILE_ROWS), "float32")
            b = T.alloc_buffer((1 if by_tiles.is_direct else by_tiles.steps, n_tiles, SIDE, SIDE), "int32")
            found = T.alloc_buffer((2, by_tiles.sides, n_tiles, SIDE, SIDE), "int32" if integer else "float32")
            scale = T.alloc_buffer((n_tiles, TILE_ROWS), "float32")
            count = T.meta_var(T.min(tokens - m0, T.int64(step)))
            at = T.meta_var(Buffers(halves, weight, sums, factor, b, scale, found, out))
            amx.configure()
            for t in range(0 if is_final else (count + (round_to - 1)) // round_to * round_to):
                for n in T.unroll(n_tiles):
                    out[t, n, every] = T.broadcast(T.float32(0), TILE_ROWS)
            by_tiles.add_groups(at, first, m0, count)
            amx.release()
            for t in range(0 if is_final else count):
                for n in T.unroll(n_tiles):
                    write(weight, out, first + n, m0 + t, t, n)

        if tokens == 1:
            prepare(prepared, T.int64(0))
            for i in T.parallel(weights.steps(schedule.gemv_tiles)):
                weight, first = T.meta_var(weights.of_task(i, schedule.gemv_tiles))
                block(weight, first, schedule.gemv_tiles, T.int64(0), 1)
        else:
            for m in T.parallel(tokens):
                prepare(prepared, m)
            blocks, steps = T.meta_var(((tokens + (step - 1)) // step, weights.steps(schedule.gemm_tiles)))
            if is_tiled:
                # A thread goes through the weights with one block of tokens, which stays in its second-level cache.
                for task in T.parallel(blocks * steps):
                    weight, first = T.meta_var(weights.of_task(task % steps, schedule.gemm_tiles))
                    tile_block(weight, first, task // steps * step)
            else:
                for i in T.parallel(steps):
                    weight, first = T.meta_var(weights.of_task(i, schedule.gemm_tiles))
                    for j in range(blocks):
                        block(weight, first, schedule.gemm_tiles, j * step, step)

    return kernel
