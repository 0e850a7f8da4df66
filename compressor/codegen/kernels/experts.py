"""Routed linears: of the weights of all experts, those of a token's experts are read.

One token runs the products of the packed linear (:mod:`compressor.codegen.kernels.linear.packed`) for each of its
experts, in the tiles that it takes for one token.  Several tokens are sorted by expert first (a stable counting sort of
the pairs of token and expert), so that each code is unpacked once for a block of an expert's rows.  Every thread takes
some tiles of all experts: however unevenly tokens are spread, threads have the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import to_float
from compressor.codegen.kernels.dense import add_vector
from compressor.codegen.kernels.linear import bit_planes
from compressor.codegen.kernels.linear.blocks import FewRows, vector_block
from compressor.codegen.kernels.linear.packed import Schedule, Shape, store_outputs, tile_block
from compressor.codegen.kernels.linear.preparation import Prepared, preparation
from compressor.codegen.kernels.linear.weights import Apart, Weight, Weights, parameter
from compressor.codegen.kernels.vector import VECTOR, emit_tree_sum
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.formats.parts import Stored


@dataclass(frozen=True)
class Routing:
    """Sizes of a routed linear.

    Attributes:
        experts: E.
        each: K, experts of a token.
        own_rows: each of a token's experts reads a row of its own: x is [T, K, in], not [T, in].
    """

    experts: int
    each: int
    own_rows: bool

    @property
    def name(self) -> str:
        """As part of a kernel's name."""
        return f"{self.each}of{self.experts}{'_own' if self.own_rows else ''}"

    def inputs(self, tokens: Any, columns: int) -> tuple[Any, ...]:
        """Return the shape of x."""
        return (tokens, self.each, columns) if self.own_rows else (tokens, columns)

    def source(self, pair: Any) -> Any:
        """Return the row of x [T or T * K, in] that a pair of token and expert reads."""
        return pair if self.own_rows else pair // self.each

    def declare(
        self, tokens: Any, rows: int, columns: int, stored: Mapping[str, Stored], has_bias: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Declare the parameters of a routed linear [rows, columns] for ``tokens``; return them by pairs.

        Args:
            stored: type and shape of each part of one expert's weight.
        Returns:
            x float32 [T or T * K, in], chosen int64 [T * K], parts [E, ...] by name, bias float32 [E, rows] or None, y
            float32 [T * K, rows].
        """
        given = parameter(self.inputs(tokens, columns), "float32")
        index = parameter((tokens, self.each), "int64")
        parts = {name: parameter((self.experts, *size), kind) for name, (kind, size) in stored.items()}
        bias = parameter((self.experts, rows), "float32") if has_bias else None
        outputs = parameter((tokens, self.each, rows), "float32")
        pairs = tokens * self.each
        x = T.decl_buffer((pairs if self.own_rows else tokens, columns), "float32", data=given.data)
        y = T.decl_buffer((pairs, rows), "float32", data=outputs.data)
        return x, T.decl_buffer((pairs,), "int64", data=index.data), parts, bias, y


@dataclass(frozen=True)
class _Gathered:
    """Rows of the inputs in another order, read as the products and preparations of the packed linear read them."""

    x: Any
    row: Any  # function: slot -> row of x

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        return self.x[self.row(at[0]), at[1]]


def packed_routed_linear(
    routing: Routing, rows: int, columns: int, fmt: Format, has_bias: bool, isa: Isa, schedule: Schedule
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.packed_routed_linear`.

    Parameters of the result: x float32 [t, columns] or [t, K, columns], index int64 [t, K], the parts that the format
    has, each [E, ...], bias float32 [E, rows] (where there is one), y float32 [t, K, rows].
    """
    experts, each, own = routing.experts, routing.each, routing.own_rows
    weights = Weights([rows], columns, fmt, has_bias, False)
    shape = Shape.of(columns, fmt, weights, isa, schedule)
    body, act, has_planes = shape.body, cast(Activations, fmt.activations), not bit_planes.supports(fmt, isa)
    integer, width, step = body.integer, shape.width, shape.step
    # One token's activations are prepared once, unless something about that belongs to an expert.
    once = not (own or {"input_scale", "tensor_scale", "float_columns"} & set(weights.stored[0]))
    split = shape.tiles.split if shape.is_tiled and not integer else None
    prepare = preparation(shape.given, columns, width, has_planes, split)
    store = store_outputs(shape)
    block, by_tiles = vector_block(shape, store), tile_block(shape, store)
    gemv_steps, gemm_steps = weights.steps(schedule.gemv_tiles), weights.steps(schedule.gemm_tiles)
    of_few = FewRows(shape, block)
    few_steps, spare = weights.steps(of_few.tiles), max(step, shape.round_to, of_few.spare)

    @T.inline
    def many(at, end, weight, first, begin):
        for j in range((end - begin + (step - 1)) // step):
            if shape.is_tiled:
                by_tiles(at, end, weight, first, begin + j * step)
            else:
                block(at, end, weight, first, schedule.gemm_tiles, begin + j * step, step)

    @T.inline
    def each_task(steps, tiles_of, begin, of_expert, place, multiply):
        for i in T.parallel(experts * steps):
            e = T.meta_var(T.bind(T.Cast("int64", i % experts)))
            end = T.meta_var(T.bind(begin[e + 1]))
            weight = T.meta_var(of_expert(e))
            multiply(place(weight), end, weight, tiles_of(i // experts), begin[e])

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        t = T.int64()
        pairs = T.meta_var(t * each)
        x, chosen, stored, bias, y = T.meta_var(routing.declare(t, rows, columns, weights.stored[0], has_bias))
        slots = T.meta_var(T.if_then_else(t == 1, T.int64(each), pairs + spare))
        a = T.alloc_buffer((slots, width), "int8" if integer else "float32")
        operands = T.meta_var(T.alloc_buffer((slots, body.chunks * act.bits), "int32") if has_planes else a)
        halves = T.meta_var(T.alloc_buffer((2, slots, width), "uint16") if shape.is_tiled and not integer else a)
        sums = T.alloc_buffer((slots, shape.given.groups), "int32" if integer else "float32")
        factor = T.alloc_buffer((slots, body.act_groups), "float32")
        if t == 1:
            single = T.meta_var(_Gathered(x, lambda slot: slot if own else T.int64(0)))
            for k in range(1 if once else each):
                if True if once else is_expert(chosen[k], experts):
                    of_this = T.meta_var(_of_expert(stored, bias, rows, 0 if once else chosen[k], y, 0))
                    at = T.meta_var(Prepared([single], [], a, operands, halves, sums, factor, of_this.parts))
                    prepare(at, T.int64(k))
            for i in T.parallel(T.int64(each * gemv_steps)):
                k = T.meta_var(i // gemv_steps)
                if is_expert(chosen[k], experts):
                    of_task = T.meta_var(_of_expert(stored, bias, rows, chosen[k], y, k if once else 0))
                    there = T.meta_var(Prepared([single], [], a, operands, halves, sums, factor, of_task.parts))
                    slot = T.meta_var(T.int64(0) if once else k)
                    first = T.meta_var(Apart(i % gemv_steps, gemv_steps))
                    block(there, T.int64(each), of_task, first, schedule.gemv_tiles, slot, 1)
            _clear_others(chosen, y, T.int64(each), rows, experts)
        else:
            begin = T.alloc_buffer((experts + 1,), "int64")
            order = T.alloc_buffer((slots,), "int64")  # slot -> pair
            held = T.alloc_buffer((slots, rows), "float32")  # outputs by slot
            _sort_pairs(chosen, pairs, begin, order, experts)
            gathered = T.meta_var(_Gathered(x, lambda slot: routing.source(order[slot])))
            for s in T.parallel(begin[experts]):
                source = T.meta_var(T.bind(routing.source(order[s])))
                of_slot = T.meta_var(_of_expert(stored, bias, rows, chosen[order[s]], held, 0))
                row = T.meta_var(_Gathered(x, partial(_always, source)))
                at = T.meta_var(Prepared([row], [], a, operands, halves, sums, factor, of_slot.parts))
                prepare(at, s)
            of_expert = T.meta_var(lambda e: _of_expert(stored, bias, rows, e, held, 0))
            side_by_side = T.meta_var(lambda number: number * schedule.gemm_tiles)
            apart = T.meta_var(lambda number: Apart(number, few_steps))
            place = T.meta_var(lambda w: Prepared([gathered], [], a, operands, halves, sums, factor, w.parts))
            if shape.few == 0:
                each_task(gemm_steps, side_by_side, begin, of_expert, place, many)
            elif t <= shape.few:
                each_task(few_steps, apart, begin, of_expert, place, of_few.multiply)
            else:
                each_task(gemm_steps, side_by_side, begin, of_expert, place, many)
            for s in T.parallel(begin[experts]):
                _copy_row(held, s, y, order[s], rows)
            _clear_others(chosen, y, pairs, rows, experts)

    return kernel


def dense_routed_linear(
    routing: Routing, rows: int, columns: int, storage: str, has_bias: bool, gemv_rows: int
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.routed_linear`: pair after pair, so many rows of a weight at once.

    Parameters of the result: x float32 [t, columns] or [t, K, columns], index int64 [t, K], weight [E, rows, columns]
    of dtype ``storage`` ("float32", "float16", or "uint16" for the bits of bfloat16), bias float32 [E, rows] (where
    there is one), y float32 [t, K, rows].
    """
    experts, each, every = routing.experts, routing.each, T.ramp(0, 1, VECTOR)
    vectors, tail = columns // VECTOR, columns % VECTOR

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        t = T.int64()
        pairs = T.meta_var(t * each)
        x, chosen, stored, bias, y = T.meta_var(
            routing.declare(t, rows, columns, {"weight": (storage, (rows, columns))}, has_bias)
        )
        for i in T.parallel((rows + gemv_rows - 1) // gemv_rows):
            for p in range(pairs):
                if is_expert(chosen[p], experts):
                    row0 = T.meta_var(i * gemv_rows)
                    weight = T.meta_var(slice_of(stored["weight"], chosen[p], (rows, columns)))
                    acc = T.alloc_buffer((1, gemv_rows, VECTOR), "float32")
                    for r in T.unroll(gemv_rows):
                        acc[0, r, every] = T.broadcast(T.float32(0), VECTOR)
                    for k in range(vectors):
                        add_vector(acc, x, weight, row0, rows, routing.source(p), pairs, gemv_rows, 1, k, storage)
                    for r in T.unroll(gemv_rows):
                        emit_tree_sum(acc, VECTOR, 0, r)
                        if row0 + r < rows:
                            for k in range(tail):
                                at = T.meta_var(vectors * VECTOR + k)
                                single = T.meta_var(to_float(weight[row0 + r, at], storage, 1))
                                acc[0, r, 0] = acc[0, r, 0] + single * x[routing.source(p), at]
                            y[p, row0 + r] = acc[0, r, 0] + bias[chosen[p], row0 + r] if has_bias else acc[0, r, 0]
        _clear_others(chosen, y, pairs, rows, experts)

    return kernel


def _always(row: Any, _slot: Any) -> Any:
    return row


def is_expert(index: Any, experts: int) -> Any:
    """Return whether an index names an expert; others never lead to memory outside the weights."""
    return T.And(index >= 0, index < experts)


def slice_of(buffer: Any, place: Any, shape: Sequence[Any]) -> Any:
    """View a part of a buffer, from a place along its first dimension on."""
    data = T.bind(T.address_of(buffer[(place, *[0] * (len(buffer.shape) - 1))]))
    return T.decl_buffer(tuple(shape), buffer.dtype, data=data)


def _of_expert(stored: Mapping[str, Any], bias: Any, rows: int, expert: Any, y: Any, first: Any) -> Weight:
    """Return one expert's weight, whose outputs begin at row ``first`` of y [n, rows]."""
    number = T.bind(expert)
    parts = {name: slice_of(buffer, number, buffer.shape[1:]) for name, buffer in stored.items()}
    own = None if bias is None else slice_of(bias, number, (rows,))
    outputs = y if isinstance(first, int) else slice_of(y, first, (1, rows))
    if not isinstance(first, int):
        outputs = T.decl_buffer((1, rows), "float32", data=outputs.data)
    return Weight(rows, parts, own, None, outputs)


@T.inline
def _copy_row(source, s, target, p, rows):
    for k in range(rows // 16):
        target[p, T.ramp(k * 16, 1, 16)] = source[s, T.ramp(k * 16, 1, 16)]
    for k in range(rows % 16):
        target[p, rows // 16 * 16 + k] = source[s, rows // 16 * 16 + k]


@T.inline
def _clear_others(chosen, y, pairs, rows, experts):
    # Pairs without an expert of this kernel: those of another format.
    for p in range(pairs):
        if chosen[p] < 0 or chosen[p] >= experts:
            for k in range(rows):
                y[p, k] = T.float32(0)


@T.inline
def _sort_pairs(chosen, pairs, begin, order, experts):
    """Sort pairs by expert, those of one expert by token: ``begin[e]`` is the first slot of expert e."""
    place = T.alloc_buffer((experts,), "int64")
    for e in range(experts + 1):
        begin[e] = T.int64(0)
    for p in range(pairs):
        if chosen[p] >= 0 and chosen[p] < experts:
            begin[chosen[p] + 1] = begin[chosen[p] + 1] + T.int64(1)
    for e in range(experts):
        place[e] = begin[e]
        begin[e + 1] = begin[e + 1] + begin[e]
    for p in range(pairs):
        if chosen[p] >= 0 and chosen[p] < experts:
            order[place[chosen[p]]] = p
            place[chosen[p]] = place[chosen[p]] + T.int64(1)
