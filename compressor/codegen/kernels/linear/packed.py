"""The packed linear: dequantisation and matrix product in one kernel that reads the stored codes.

Integer path: activations become int8 codes, dot products run in int32 within a group of columns, by bytes, by AMX's
tiles or by bit planes, and one float multiply-add a group applies the scales.  Float path: activations stay as they
are, or become the floats that they round to, and codes become floats in registers; or activations become integers as
:mod:`~compressor.codegen.kernels.linear.digits`.  One token takes a loop over ``gemv_tiles`` tiles of 16 rows; several
take one over blocks of ``gemm_tokens`` that unpacks each code once a block.  Weights that lack columns or single
numbers: :mod:`~compressor.codegen.kernels.linear.prompts`, :mod:`~compressor.codegen.kernels.linear.expand`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, cast

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import INDEPENDENT_ROWS, Isa
from compressor.codegen.kernels import amx
from compressor.codegen.kernels.amx import SIDE
from compressor.codegen.kernels.linear import bit_planes, blocks, digits, expand, prompts
from compressor.codegen.kernels.linear import tiles as amx_tiles
from compressor.codegen.kernels.linear.bit_planes import PlaneProducts
from compressor.codegen.kernels.linear.blocks import FewRows, by_vectors, vector_block
from compressor.codegen.kernels.linear.panels import panel
from compressor.codegen.kernels.linear.panels.digit_panel import kind_of
from compressor.codegen.kernels.linear.preparation import Prepared, apart, preparation
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.prologue import Prologue, declare_inputs
from compressor.codegen.kernels.linear.squeeze import ROOM, KeptProducts, list_kept, list_room, one_token
from compressor.codegen.kernels.linear.tiles import TOKENS, Buffers, TileProducts
from compressor.codegen.kernels.linear.weights import Weights, added_floats, by_token
from compressor.formats.activations import Activations
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, OutlierFeatures, Outliers, SingleZeros, SkippedInputs
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.formats.planes import TwoPlanes, UpperPlane


@dataclass(frozen=True)
class Schedule:
    """What the tuner chooses: tiles of 16 rows a step for one token, and tiles by tokens for many."""

    gemv_tiles: int
    gemm_tiles: int
    gemm_tokens: int


_GEMM_DEFAULT = (1, 8)
_FEW_BESIDE_TILES = 8  # rows up to which unpacking codes for AMX or a panel takes longer than the vectors' work
_EXTRAS = (Outliers, OutlierFeatures, ColumnBlocks, SingleZeros, KeptOfGroup, SkippedInputs, TwoPlanes, UpperPlane)
"""That are read, two of them by kernels of their own."""


def supports(fmt: Format, isa: Isa) -> str:
    """Say what this kernel does not read of a format; an empty text if it reads all."""
    unread = [e.suffix for e in fmt.extras if not isinstance(e, _EXTRAS) or getattr(e, "is_of_images", False)]
    text = f"the packed linear for {isa.name} does not read what {', '.join(unread)} stores"
    return text if unread else expand.supports(fmt, isa)


def gemv_space(tiles: int, fmt: Format, isa: Isa) -> list[Schedule]:
    """Schedules that differ in what one token takes, for a weight of ``tiles`` tiles; the default first.

    Four places in memory at once are read quickest; a tile of two planes has two, and digits take twice the registers.
    """
    order = (2, 4, 1, 8) if fmt.extra(TwoPlanes) is not None or digits.reads(fmt, isa) else (4, 2, 8, 1)
    return [Schedule(n, *_GEMM_DEFAULT) for n in order if tiles % n == 0]


def gemm_space(tiles: int, gemv_tiles: int, fmt: Format, isa: Isa) -> list[Schedule]:
    """Schedules that differ in what several tokens take; the default first.

    AMX has one: two tiles by blocks of tokens that fit the cache.  Otherwise a chunk is unrolled over columns, tiles
    and tokens, and long ones take smaller blocks: the time to compile grows with the square of the statements.
    """
    if not amx_tiles.supports(fmt, isa):
        return [Schedule(gemv_tiles, 2 - tiles % 2, TOKENS)]
    if isa.lanes < 8 and not blocks.supports(isa):
        return [Schedule(gemv_tiles, 1, m) for m in digits.tokens(fmt, isa)]
    quads = fmt.chunk_columns // 4
    space = [(n, m) for n, m in ((4, 4), (2, 8), (1, 16), (2, 4)) if n * m * quads <= 64 and tiles % n == 0]
    space.insert(0 if fmt.integer_products else 1, _GEMM_DEFAULT)  # floats gain more from sharing what is unpacked
    return [Schedule(gemv_tiles, n, m) for n, m in space]


def common_schedule(schedule: Schedule, rows: Sequence[int], fmt: Format, isa: Isa) -> Schedule:
    """Return the schedule of several weights in one kernel: that of the first where its tiles divide them all.

    Otherwise the largest of the space that do.
    """
    tiles = gcd(*(-(-n // TILE_ROWS) for n in rows))
    gemv, gemm = schedule.gemv_tiles, (schedule.gemm_tiles, schedule.gemm_tokens)
    if tiles % gemv:
        gemv = max(one.gemv_tiles for one in gemv_space(tiles, fmt, isa))
    if tiles % schedule.gemm_tiles:
        gemm = max((one.gemm_tiles, one.gemm_tokens) for one in gemm_space(tiles, gemv, fmt, isa))
    return Schedule(gemv, *gemm)


def packed_linear(
    out_features: int, in_features: int, fmt: Format, has_bias: bool, isa: Isa, schedule: Schedule
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.linear.packed_linear`, with the parameters of :func:`fused_linear`."""
    return fused_linear([out_features], in_features, fmt, has_bias, isa, schedule)


@dataclass(frozen=True)
class Shape:
    """What the loops of one kernel have in common, decided before any of it is written.

    Attributes:
        body: the products of a chunk of columns.
        given: the products that activations are prepared for: the same, unless tiles gather blocks of columns.
        weights: one or several, and their outputs.
        tiles: the products by AMX.
        schedule: as the tuner chose it.
        columns: of the weight.
        kept: those that its tiles keep.
        is_tiled: several tokens go through AMX.
        is_final: AMX's tiles hold the outputs, which need nothing more.
        width: elements from one token's activations to the next.
        step: tokens of a block; ``round_to`` of them are computed together.
    """

    body: Products
    given: Products
    weights: Weights
    tiles: TileProducts
    schedule: Schedule
    columns: int
    kept: int
    is_tiled: bool
    is_final: bool
    width: int
    round_to: int
    step: int

    @classmethod
    def of(cls, columns: int, fmt: Format, weights: Weights, isa: Isa, schedule: Schedule) -> Shape:
        """Decide how a format is multiplied on an instruction set."""
        kind = expand.ExpandedProducts if fmt.extra(SingleZeros) is not None else Products
        kind = kind if bit_planes.supports(fmt, isa) else PlaneProducts
        given = body = kind(weights.rows[0], columns, fmt.of_kept, isa)
        kept = fmt.stored_columns(columns)
        if (left_out := fmt.extra(ColumnBlocks)) is not None:
            body, given.has_zeros = KeptProducts(weights.rows[0], kept, fmt.of_kept, isa, left_out), False
        else:
            given = body = digits.products(given, columns)
        is_tiled = not amx_tiles.supports(fmt, isa)
        has_floats = body.fmt.without_outliers != body.fmt
        is_final = body.groups == 1 and not (weights.is_ragged or has_floats)
        tiles = TileProducts(body, columns, schedule.gemm_tiles, is_final=is_final, blocks=left_out)
        width = tiles.stride if is_tiled else apart(given.padded * given.digits, 1 if body.integer else 4)
        if body is not given:
            width = -(-width // ROOM) * ROOM  # whole registers are squeezed
        round_to = tiles.sides * SIDE if is_tiled else panel.tokens_of(body, schedule.gemm_tokens)
        step = max(schedule.gemm_tokens, round_to)
        return cls(body, given, weights, tiles, schedule, columns, kept, is_tiled, is_final, width, round_to, step)

    @property
    def few(self) -> int:
        """Rows up to which they take blocks of their own: fewer of integers by AMX or panels, which sum up the same."""
        if blocks.supports(self.body.isa):
            return 0
        if not (self.is_tiled and self.body.integer):
            return INDEPENDENT_ROWS if panel.supports(self.body) else _FEW_BESIDE_TILES
        return 0 if self.tiles.is_direct or self.tiles.blocks else _FEW_BESIDE_TILES

    @property
    def kind(self) -> str:
        """Type of sums."""
        return "int32" if self.body.integer else "float32"


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
    only: int = 0,
) -> tvm.tirx.PrimFunc:
    """Write TIR for packed linears of the same activations, which are prepared once.

    With ``only`` it serves that many tokens, one or more than :data:`~compressor.codegen.isa.INDEPENDENT_ROWS`, and no
    other number: a tenth of the statements, for the tuner.

    Parameters of the result: x float32 [d0, d1, columns], or what the prologue reads in its place, and the vectors
    float32 [columns] that it reads; for each of ``rows`` the parts that the format has
    (:mod:`compressor.formats.format`) and bias (where there is one); the residual, float32 [d0, d1, rows], which is
    added to the outputs (of one weight only); for each of ``rows`` y float32 [d0, d1, rows].
    """
    weights = expand.weights_of(rows, columns, fmt, has_bias, has_residual, isa)
    shape = Shape.of(columns, fmt, weights, isa, schedule)
    body, act, has_planes = shape.body, cast(Activations, fmt.activations), not bit_planes.supports(fmt, isa)
    integer, width, round_to = body.integer, shape.width, shape.round_to
    assert prologue is None or not (weights.has_outliers or fmt.outlier_features)  # float columns read x as it came
    split = shape.tiles.split if shape.is_tiled and not integer else None
    prepare = preparation(shape.given, columns, width, has_planes, split, prologue)
    store = store_outputs(shape)
    block = vector_block(shape, store)
    turns, single = not (shape.is_tiled or prompts.supports(fmt, isa)), one_token(shape, store, block)
    of_few = FewRows(shape, block)
    few = of_few.loop()

    # Inputs that are gathered tile by tile go on to the next one.
    of_one = weights.apart if body is shape.given else weights.of_task
    many: Any
    if turns:
        many = prompts.prompt_products(weights, shape, store, None if only > 1 else few)
    elif shape.is_tiled:
        many = _by_amx(shape, tile_block(shape, store))
    elif not panel.supports(body):
        many = panel.by_panels(shape, store, kind_of(body))
    else:
        many = by_vectors(shape, block)

    @T.inline
    def one(at, tokens):
        prepare(at, T.int64(0))
        for i in T.parallel(weights.steps(schedule.gemv_tiles)):
            weight, first = T.meta_var(of_one(i, schedule.gemv_tiles))
            single(at, tokens, weight, first)

    @T.inline
    def several(at, tokens, turned):
        for m in T.parallel(tokens):
            prepare(at, m)
        if shape.few == 0 or turns or only > 1:
            many(at, tokens, turned)
        elif tokens <= shape.few:
            few(at, tokens, turned)
        else:
            many(at, tokens, turned)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given, of_norm = T.meta_var(declare_inputs(prologue, columns, d0, d1))
        weights.declare(d0, d1)
        tokens = T.meta_var(d0 * d1)
        spare = T.meta_var(prompts.BLOCK if turns else of_few.spare)  # that are read behind the last, and not stored
        filled = T.meta_var((tokens + (round_to - 1)) // round_to * round_to + spare)
        slots = T.meta_var(T.if_then_else(tokens == 1, T.int64(1), filled))
        read = T.meta_var([by_token(buffer) for buffer in given])
        a = T.alloc_buffer((slots, width), "int8" if integer else "float32")  # activations, columns filled up
        # What products read: bit planes where they count ones.
        operands = T.meta_var(T.alloc_buffer((slots, body.chunks * act.bits), "int32") if has_planes else a)
        # Of floats, AMX takes two in bfloat16.
        halves = T.meta_var(T.alloc_buffer((2, slots, width), "uint16") if shape.is_tiled and not integer else a)
        sums = T.alloc_buffer((slots, shape.given.groups), shape.kind)  # of each group's activations
        # What an output, or a group's part of it, is multiplied by.
        factor = T.alloc_buffer((slots, body.act_groups), "float32")
        sizes = T.meta_var((prompts.blocks_of(tokens, isa), width, prompts.BLOCK))
        turned = T.meta_var(T.alloc_buffer(sizes, "int8") if turns else None)
        at = T.meta_var(Prepared(read, of_norm, a, operands, halves, sums, factor, weights.shared))
        if only == 1:
            one(at, tokens)
        elif only > 1:
            several(at, tokens, turned)
        elif tokens == 1:
            one(at, tokens)
        else:
            several(at, tokens, turned)

    return kernel


def store_outputs(shape: Shape) -> Any:
    """Make a macro that adds what a token's outputs of a tile still lack, and stores them where they belong."""
    body, weights = shape.body, shape.weights
    fmt, by_group = body.fmt, body.act_groups > 1
    every, has_floats = T.ramp(0, 1, 16), fmt.outlier_features > 0 or weights.has_outliers
    add_floats = added_floats(fmt, weights.has_outliers)

    @T.inline
    def store(at, weight, out, tile, token, t, n):
        floats = T.meta_var(T.alloc_buffer((TILE_ROWS,), "float32") if has_floats else None)
        factor = T.meta_var(None if by_group else at.factor[token, 0])
        if has_floats:
            add_floats(at, weight, floats, tile, token)
        whole = T.meta_var(floats[every] if has_floats else None)
        broad = T.meta_var(None if by_group else T.broadcast(factor, TILE_ROWS))
        place = T.meta_var(T.ramp(tile * TILE_ROWS, 1, TILE_ROWS))
        if T.bool(not weights.is_ragged) or tile * TILE_ROWS + TILE_ROWS <= weight.rows:
            weight.y[token, place] = weight.finish(out[t, n, every], token, place, broad, whole)
        else:
            for r in range(TILE_ROWS):
                row = T.meta_var(tile * TILE_ROWS + r)
                if row < weight.rows:
                    single = T.meta_var(floats[r] if has_floats else None)
                    weight.y[token, row] = weight.finish(out[t, n, r], token, row, factor, single)

    return store


def _by_amx(shape: Shape, by_tiles: Any) -> Any:
    """Make a macro that computes all outputs of many tokens, by AMX."""
    weights, step, steps = shape.weights, shape.step, shape.weights.steps(shape.schedule.gemm_tiles)

    @T.inline
    def by_amx(at, tokens, _turned):
        # A thread goes through the weights with one block of tokens, which stays in its second-level cache.
        for task in T.parallel((tokens + (step - 1)) // step * steps):
            weight, first = T.meta_var(weights.of_task(task % steps, shape.schedule.gemm_tiles))
            by_tiles(at, tokens, weight, first, task // steps * step)

    return by_amx


def tile_block(shape: Shape, store: Any) -> Any:
    """Make a macro that computes some tiles of a weight for a block of tokens, by AMX."""
    by_tiles, is_final, step, round_to = shape.tiles, shape.is_final, shape.step, shape.round_to
    leaves_out, kept_blocks, every = by_tiles.blocks > 0, by_tiles.kept_blocks, T.ramp(0, 1, 16)

    @T.inline
    def tile_block(at, tokens, weight, first, m0):
        n_tiles = T.meta_var(by_tiles.n_tiles)
        out = T.alloc_buffer((1 if is_final else step, n_tiles, TILE_ROWS), "float32")
        b = T.alloc_buffer((1 if by_tiles.is_direct else by_tiles.steps, n_tiles, SIDE, SIDE), "int32")
        found = T.alloc_buffer((2, by_tiles.sides, n_tiles, SIDE, SIDE), shape.kind)
        scale = T.alloc_buffer((n_tiles, TILE_ROWS), "float32")
        count = T.meta_var(T.min(tokens - m0, T.int64(step)))
        which = T.meta_var(T.alloc_buffer((list_room(kept_blocks),), "int32") if leaves_out else None)
        buffers = T.meta_var(Buffers(at.halves, weight, at.sums, at.factor, b, scale, found, out, which))
        if leaves_out:
            list_kept(which, weight.parts["kept"], first // 2, by_tiles.blocks, kept_blocks, shape.body.isa)
        amx.configure()
        for t in range(0 if is_final else (count + (round_to - 1)) // round_to * round_to):
            for n in T.unroll(n_tiles):
                out[t, n, every] = T.broadcast(T.float32(0), TILE_ROWS)
        by_tiles.add_groups(buffers, first, m0, count)
        amx.release()
        for t in range(0 if is_final else count):
            for n in T.unroll(n_tiles):
                store(at, weight, out, first + n, m0 + t, t, n)

    return tile_block
