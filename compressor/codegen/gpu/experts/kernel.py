"""Routed linears on a GPU: the kernels of linears, for one expert after another.

Of one token, each of its experts is a linear of one token, beside the others.  Several tokens are sorted by expert
first, so that a weight is read once for a block of an expert's tokens::

    sort      index           -> blocks of slots                 (:mod:`compressor.codegen.gpu.experts.order`)
    prepare   x, slots        -> words and factors, block after block
    products  words, weights  -> y, at each slot's pair of token and expert
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.experts.order import Order, block_count, sort_pairs
from compressor.codegen.gpu.linear import dense, packed
from compressor.codegen.gpu.linear.activations import Preparation, Prepared
from compressor.codegen.gpu.linear.few_tokens import FewTokens
from compressor.codegen.gpu.linear.kernel import PREPARING, Schedule
from compressor.codegen.gpu.linear.many_tokens import ManyTokens
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.shares import Streaming
from compressor.codegen.gpu.memory import held
from compressor.codegen.gpu.sparse import n_of_m
from compressor.codegen.kernels.experts import Routing, is_expert, slice_of
from compressor.codegen.kernels.linear.weights import Weight
from compressor.formats.extras import ColumnBlocks, KeptOfGroup
from compressor.formats.format import Format

FEW = 8
"""Tokens of a block where experts have few."""
_TURN = 16  # tokens of an expert, on average, up to which blocks are of few


class ExpertOperands(Operands):
    """One expert's weight in the place of all weights of a kernel, and the pairs that its outputs belong to."""

    pairs: Any = None  # function: token of a block -> pair, or -1

    def take(self, weight: Weight, pairs: Any = None) -> None:
        """Let the statements that follow read this weight."""
        self._all, self.pairs = [weight], pairs


class _Few(FewTokens):
    """Stores a token's outputs where its pair is."""

    operands: ExpertOperands

    def store(self, weight: Weight, value: Any, token: Any, row: Any) -> None:
        if self.is_one:
            super().store(weight, value, token, row)
            return
        pair = held(self.operands.pairs(token))
        with T.If(pair >= 0), T.Then():
            super().store(weight, value, pair, row)


class _Many(ManyTokens):
    """Stores a token's outputs where its pair is."""

    operands: ExpertOperands

    def _store_pair(
        self, local: Any, weight: Any, token: Any, row: Any, values: list[Any], is_tile: Any, is_even: bool
    ) -> None:
        pair = held(self.operands.pairs(token))
        with T.If(pair >= 0), T.Then():
            super()._store_pair(local, weight, pair, row, values, is_tile, is_even)


def supports(fmt: Format) -> str:
    """Say what these kernels cannot read of a format; an empty text if they read all."""
    if fmt.extra(ColumnBlocks) is not None:
        return "experts on a GPU do not leave columns out"
    return packed.supports(fmt) if fmt.extra(KeptOfGroup) is None else n_of_m.supports(fmt)


def packed_routed_linear(
    routing: Routing, rows: int, columns: int, fmt: Format, has_bias: bool, schedule: Schedule | None
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.packed_routed_linear`.

    Parameters of the result: as those of :func:`compressor.codegen.kernels.experts.packed_routed_linear`.
    """
    make = packed.packed_parts if fmt.extra(KeptOfGroup) is None else n_of_m.kept_parts
    return _routed_kernel(*make([rows], columns, fmt, has_bias, False), routing, schedule or Schedule())


def dense_routed_linear(routing: Routing, rows: int, columns: int, storage: str, has_bias: bool) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.experts.routed_linear`.

    Parameters of the result: as those of :func:`compressor.codegen.kernels.experts.dense_routed_linear`.
    """
    return _routed_kernel(*dense.dense_parts(rows, columns, storage, has_bias), routing, Schedule())


def _routed_kernel(
    products: Statements, one_expert: Operands, routing: Routing, schedule: Schedule
) -> tvm.tirx.PrimFunc:
    """Write TIR with the parameters x, index, all experts' parts and biases, and y, for any number of tokens."""
    experts, each, fragments = routing.experts, routing.each, products.fragments
    operands = ExpertOperands(one_expert.rows, one_expert.stored, one_expert.has_bias, False)
    rows, columns, has_bias = operands.rows[0], fragments.columns, operands.has_bias
    streaming, short, _some, tiling, _most = schedule.of_shape(operands.tiles[0], fragments)
    one = _Few(products, operands, _shared_out(streaming, each), 1)
    few = _Few(products, operands, _shared_out(short, each), FEW)
    many = _Many(products, operands, tiling)
    run_one = one.macro(None)
    run_few = _sorted(routing, few, few.macro(None), few.tokens, few.room)
    run_many = _sorted(routing, many, many.macro(), many.tiling.tokens, many.room(many.tiling.tokens))

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        t = T.int64()
        pairs = T.meta_var(t * each)
        x, chosen, stored, bias, y = T.meta_var(routing.declare(t, rows, columns, operands.stored[0], has_bias))
        if t == 1:
            with T.launch_thread("blockIdx.y", each) as k:
                if is_expert(chosen[k], experts):
                    row = T.meta_var(slice_of(x, routing.source(k), (1, columns)))
                    own = T.meta_var(slice_of(y, k, (1, rows)))
                    operands.take(of_expert(stored, bias, rows, chosen[k], own))
                    run_one([row], [], None, None, T.int32(1))
                else:
                    with (
                        T.launch_thread("blockIdx.x", one.grid) as part,
                        T.launch_thread("threadIdx.x", one.threads) as i,
                    ):
                        if part == 0:
                            clear_row(y, k, i, rows, one.threads)
        elif pairs <= _TURN * experts:
            run_few(x, chosen, stored, bias, y, pairs)
        else:
            run_many(x, chosen, stored, bias, y, pairs)

    return kernel


def _shared_out(streaming: Streaming, each: int) -> Streaming:
    """Give each of a token's experts its part of the blocks."""
    return replace(streaming, blocks=max(1, streaming.blocks // each))


def _sorted(routing: Routing, kernel: Any, run: Any, width: int, room: int) -> Any:
    """Make a macro that sorts pairs into blocks of ``width``, prepares them, and runs ``run`` for each block.

    Args:
        kernel: of :class:`_Few` or :class:`_Many`; ``run`` is its macro.
        room: words of a block's activations.
    """
    experts, operands, fragments = routing.experts, kernel.operands, kernel.fragments
    rows, columns = operands.rows[0], fragments.columns
    sort = sort_pairs(experts, width)
    statements = Preparation(fragments, None, PREPARING, kernel.all_steps)
    prepare, is_few = statements.macro(), isinstance(kernel, _Few)

    @T.inline
    def several(x, chosen, stored, bias, y, pairs):
        blocks = T.meta_var(block_count(experts, pairs, width))
        into = T.meta_var(Order.allocate(experts, pairs, width))
        words = T.alloc_buffer((blocks * room,), "uint32")
        factor = T.alloc_buffer((blocks * width, fragments.act_groups), "float32")
        sort(chosen, pairs, into)
        with T.launch_thread("blockIdx.x", pairs) as pair, T.launch_thread("threadIdx.x", PREPARING) as thread:
            scratch = T.meta_var(statements.memory())
            if into.slot_of[pair] >= 0:
                slot = T.meta_var(held(into.slot_of[pair]))
                row = T.meta_var(slice_of(x, routing.source(pair), (1, columns)))
                weight = T.meta_var(of_expert(stored, bias, rows, chosen[pair], y))
                there = T.meta_var(_block(words, slot // width, room))
                scales = T.meta_var(slice_of(factor, slot, (1, fragments.act_groups)))
                place = T.meta_var(lambda _token, *rest: kernel.index(slot % width, *rest))
                prepare(Prepared([row], [], weight.parts, there, scales, place), T.int32(0), thread, scratch)
            else:
                clear_row(y, pair, thread, rows, PREPARING)
        with T.launch_thread("blockIdx.z", blocks) as block:
            if into.owner[block] >= 0:
                weight = T.meta_var(of_expert(stored, bias, rows, into.owner[block], y))
                operands.take(weight, lambda token: into.order[block * width + token])
                there = T.meta_var(_block(words, block, room))
                scales = T.meta_var(slice_of(factor, block * width, (width, fragments.act_groups)))
                if is_few:
                    run([], [], there, scales, T.int32(width))
                else:
                    run(there, scales, T.int32(width))

    return several


def _block(words: Any, block: Any, room: int) -> Any:
    """View one block's activations."""
    return slice_of(words, T.Cast("int64", block) * room, (room,))


def of_expert(stored: Mapping[str, Any], bias: Any, rows: int, expert: Any, y: Any) -> Weight:
    """View one expert's weight, whose outputs go to y."""
    number = held(T.Cast("int32", expert))
    parts = {name: slice_of(buffer, number, buffer.shape[1:]) for name, buffer in stored.items()}
    return Weight(rows, parts, None if bias is None else slice_of(bias, number, (rows,)), None, y)


@T.inline
def clear_row(y, pair, thread, rows, threads):
    """Set the outputs of a pair without an expert of this kernel to zero: another kernel has it."""
    for i in range(-(-rows // threads)):
        if i * threads + thread < rows:
            y[pair, i * threads + thread] = T.float32(0)
