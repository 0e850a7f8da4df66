"""Linears of which each tile of 16 rows keeps columns of its own: what is left out is neither read nor multiplied.

The codes of the columns that a tile keeps are those of a dense weight with fewer columns, and go to the kernel of few
tokens as such.  What is new is in front of a tile: its columns are listed from their bits, and their activations are
gathered from the token's row into the order of that weight's operands::

    prepare   x            -> a row of codes, or of halves, in the order of columns; of one token in shared memory
    list      bits         -> columns of the tile
    gather    row, columns -> operand B
    products  codes, B     -> y, as for few tokens

Many tokens are few tokens again and again: the weight is read once for every eight of them, or four of floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import WARP, barrier, call
from compressor.codegen.gpu.linear import products as of_products
from compressor.codegen.gpu.linear.activations import Preparation, Prepared
from compressor.codegen.gpu.linear.few_tokens import FewTokens, Registers
from compressor.codegen.gpu.linear.fragments import Fragments
from compressor.codegen.gpu.linear.kernel import Schedule, preparing
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Products
from compressor.codegen.gpu.linear.shares import Streaming
from compressor.codegen.gpu.memory import held, shared, stream_word
from compressor.codegen.kernels.linear.prologue import Prologue, declare_inputs
from compressor.codegen.kernels.linear.weights import Weight, by_token
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_SCAN = """
__device__ inline int compressor_bits(int word) { return __popc((unsigned)word); }
// How many bits are set in the words of a warp's lanes up to this one's.
__device__ inline int compressor_bits_up_to(int word, int lane) {
  int count = __popc((unsigned)word);
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(0xffffffffu, count, step);
    if (lane >= step) count += other;
  }
  return count;
}
"""


def supports(fmt: Format) -> str:
    """Say what this kernel cannot read of a format; an empty text if it reads all."""
    blocks = fmt.extra(ColumnBlocks)
    assert blocks is not None
    if blocks.is_of_images:
        return f"blocks of {blocks.shape} are of convolutions, for which there are no kernels on a GPU; take 16x1"
    if wrong := of_products.supports(fmt.of_kept):
        return wrong
    found = Fragments.of(fmt.of_kept, 1 << 20)
    return found if isinstance(found, str) else ""


class _Row(Fragments):
    """Activations in the order of columns, four of them in a word or two."""

    def place(self, quad: Any) -> tuple[Any, Any, Any, Any]:
        """Return (step, vector, lane, word) of a quad of columns, of which the word alone counts."""
        return 0, 0, 0, quad * self.quad_words

    @property
    def words(self) -> int:
        """Words of a row, of each half."""
        return self.steps * self.step_columns // 4 * self.quad_words

    def index(self, token: Any, half: Any, _step: Any, _vector: Any, _lane: Any, word: Any) -> Any:
        """Return where a word of a token's row is."""
        return (token * self.halves + half) * self.words + word

    def element(self, words: Any, token: Any, half: int, column: Any) -> Any:
        """Return an activation as it is stored, in the low bits of a uint32; zero beyond the last column."""
        if self.integer:
            word, down = column // 4, column % 4 * 8
        else:  # columns 0 and 2, 1 and 3
            word, down = column // 4 * 2 + column % 2, column % 4 // 2 * 16
        at = self.index(token, half, 0, 0, 0, word)
        bits = T.bitwise_and(T.shift_right(words[at], T.Cast("uint32", down)), T.uint32(255 if self.integer else 65535))
        return T.if_then_else(column < self.columns, bits, T.uint32(0))


class KeptColumns(FewTokens):
    """The kernel for one token, or for the eight or four tokens of a block."""

    def __init__(self, fmt: Format, columns: int, operands: Operands, streaming: Streaming, is_one: bool) -> None:
        blocks, stored = fmt.extra(ColumnBlocks), fmt.of_kept
        assert blocks is not None
        self.pattern, self.kept = blocks, fmt.stored_columns(columns)
        fragments = Fragments.of(stored, self.kept)
        assert isinstance(fragments, Fragments)
        tokens = 1 if is_one else 8 // fragments.halves
        super().__init__(Products(fragments, stored), operands, replace(streaming, tiles=1), tokens)
        f = fragments
        self.row = _Row(columns, f.kind, f.order, 4, 1, columns, columns, f.act)
        self.all_blocks = blocks.blocks(columns)
        self.bit_words = -(-self.all_blocks // 64) * 2
        self.first: Any = 0  # token of the block

    def begin_at(self, token: Any, factor: Any) -> Any:
        """Let the statements that follow compute tokens from this one on, and return a view of their factors."""
        self.first = token
        data = T.bind(T.address_of(factor[token, 0]))
        return T.decl_buffer((self.tokens, 1), "float32", data=data)

    def store(self, weight: Weight, value: Any, token: Any, row: Any) -> None:
        """Store one output of the block's tokens."""
        super().store(weight, value, self.first + token, row)

    def list_blocks(self, weight: Weight, tile: Any, places: Any, counts: Any, thread: Any) -> None:
        """List the blocks of columns that a tile keeps; as many as there should be, whatever its bits are."""
        kept, lane, warp = self.kept // self.pattern.width, thread % WARP, thread // WARP
        at = T.alloc_buffer((2,), "int32", scope="local")  # place of the next, blocks of the rounds before
        bits = T.alloc_buffer((2,), "int32", scope="local")  # a word, bits up to it in its warp
        T.buffer_store(at, T.int32(0), [1])
        for i in range(-(-kept // self.threads)):
            with T.If(i * self.threads + thread < kept), T.Then():  # what the bits do not name is beyond the last
                T.buffer_store(places, T.int32(self.all_blocks), [i * self.threads + thread])
        for i in range(-(-self.bit_words // self.threads)):
            word = i * self.threads + thread
            T.buffer_store(bits, T.int32(0), [0])
            with T.If(word < self.bit_words), T.Then():
                address = T.address_of(weight.parts["kept"][tile // self.pattern.tiles, 4 * word])
                T.buffer_store(bits, stream_word(address), [0])
            T.buffer_store(bits, call("compressor_bits_up_to", bits[0], lane, source=_SCAN, kind="int32"), [1])
            with T.If(lane == WARP - 1), T.Then():
                T.buffer_store(counts, bits[1], [warp])
            barrier()
            T.buffer_store(at, at[1] + bits[1] - call("compressor_bits", bits[0], source=_SCAN, kind="int32"), [0])
            for other in range(self.warps):
                T.buffer_store(at, at[0] + T.if_then_else(other < warp, counts[other], 0), [0])
                T.buffer_store(at, at[1] + counts[other], [1])
            with T.serial(32) as bit:
                is_set = T.bitwise_and(T.shift_right(bits[0], T.Cast("int32", bit)), 1) == 1
                with T.If(T.And(is_set, at[0] < kept)), T.Then():
                    T.buffer_store(places, word * 32 + bit, [at[0]])
                    T.buffer_store(at, at[0] + 1, [0])
            barrier()

    def gather(self, to: Any, words: Any, places: Any, thread: Any, tokens: Any) -> None:
        """Gather the activations of the listed columns."""
        f, row, width = self.fragments, self.row, self.pattern.width
        quads = self.all_steps * f.step_columns // 4
        four = T.alloc_buffer((4,), "int32", scope="local")
        for i in range(-(-quads // self.threads)):
            quad = i * self.threads + thread
            with T.If(quad < quads), T.Then():
                for j in range(4):
                    k = 4 * quad + j
                    column = places[T.min(k, self.kept - 1) // width] * width + k % width
                    T.buffer_store(four, T.if_then_else(k < self.kept, column, T.int32(row.columns)), [j])
                step, vector, lane, word = f.place(quad)
                for token in range(self.tokens):
                    m = held(T.min(self.first + token, self.first + tokens - 1)) if self.tokens > 1 else 0
                    for half in range(f.halves):
                        for r in range(f.quad_words):
                            value = self._joined(words, m, half, four, r)
                            T.buffer_store(to, value, [self.index(token, half, step, vector, lane, word + r)])

    def _joined(self, words: Any, token: Any, half: int, four: Any, r: int) -> Any:
        """Return a word of operand B: four int8, or two halves."""
        integer = self.fragments.integer
        chosen, bits = (range(4), 8) if integer else (self.fragments.order[2 * r : 2 * r + 2], 16)
        result = None
        for place, j in enumerate(chosen):
            value = T.shift_left(self.row.element(words, token, half, four[j]), T.uint32(bits * place))
            result = value if result is None else T.bitwise_or(result, value)
        return result

    def memory_of_tile(self, preparing: Preparation, words: Any, factor: Any) -> list[Any]:
        """Return the buffers: parts of sums, operand B, listed columns, counts; row, factors and room to prepare."""
        own = [
            ((2, self.warps, self.tokens, TILE_ROWS), "float32"), ((self.room,), "uint32"), ((self.kept,), "int32"),
            ((self.warps,), "int32"),
        ]  # fmt: skip
        if not self.is_one:
            return [*shared(*own), words, factor, None]
        row = ((self.row.halves * self.row.words,), "uint32")
        return shared(*own, row, ((1, 1), "float32"), ((max(4, preparing.scratch),), "float32"))

    def macro(self, prologue: Prologue | None) -> Any:
        """Make a macro ``run(given, norm, words, factor, tokens)`` that launches the kernel.

        ``words`` and ``factor`` are those of all tokens, of which ``tokens`` from ``self.first`` on are computed; one
        token has none.
        """
        operands, share, is_one = self.operands, self.share, self.is_one
        preparing = Preparation(self.row, prologue, self.threads, self.row.steps)
        prepare, multiply = preparing.macro(), self.multiply_task()

        @T.inline
        def run(given, norm, words_, factor_, tokens):
            with (
                T.launch_thread("blockIdx.x", self.grid) as block,
                T.launch_thread("threadIdx.x", self.threads) as thread,
            ):
                lane, warp = T.meta_var((thread % WARP, thread // WARP))
                local = T.meta_var(Registers.of(self))
                parts, operand, places, counts, row, factor, scratch = T.meta_var(
                    self.memory_of_tile(preparing, words_, factor_)
                )
                at = T.meta_var(Prepared(given, norm, operands.shared, operand, factor, self.index))
                first = T.meta_var(operands.select(block, 1))
                self.load(local, first, warp * share.steps, lane, 0, share.loads)
                if is_one:
                    there = T.meta_var(Prepared(given, norm, operands.shared, row, factor, self.row.index))
                    prepare(there, T.int32(0), thread, scratch)
                self.start(local)
                for turn in range(self.turns):
                    task = T.meta_var(T.min(block + turn * self.grid, self.tasks - 1))
                    own = T.meta_var(operands.select(task, 1))
                    self.list_blocks(own[0], own[1], places, counts, thread)
                    self.gather(operand, row, places, thread, tokens)
                    barrier()
                    multiply(at, local, parts, block, turn, warp, lane)
                    if block + turn * self.grid < self.tasks:
                        self.add_up(at, parts, own, thread, tokens, turn % 2)

        return run


def column_blocks_linear(
    rows: Sequence[int],
    columns: int,
    fmt: Format,
    has_bias: bool,
    *,
    schedule: Schedule | None = None,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.linear.packed_linear` of a format that leaves out blocks of columns.

    Parameters of the result: as of :func:`compressor.codegen.kernels.linear.packed.fused_linear`.
    """
    assert not supports(fmt)
    schedule = schedule or Schedule()
    operands = Operands(rows, [fmt.parts(n, columns) for n in rows], has_bias, has_residual)
    fragments = Fragments.of(fmt.of_kept, fmt.stored_columns(columns))
    assert isinstance(fragments, Fragments)
    streaming, short, *_ = schedule.of_shape(sum(operands.tiles), fragments)
    one = KeptColumns(fmt, columns, operands, streaming, True)
    few = KeptColumns(fmt, columns, operands, short, False)
    run_one, run_few, layout = one.macro(prologue), few.macro(None), few.row
    prepare = preparing(layout, prologue, layout.steps, layout.index, operands)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given3, norm = T.meta_var(declare_inputs(prologue, columns, d0, d1))
        operands.declare(d0, d1)
        tokens = T.meta_var(T.Cast("int32", d0 * d1))
        given = T.meta_var([by_token(buffer) for buffer in given3])
        if d0 * d1 == 1:
            run_one(given, norm, None, None, tokens)
        else:
            words = T.alloc_buffer((d0 * d1 * (layout.halves * layout.words),), "uint32")
            factor = T.alloc_buffer((d0 * d1, 1), "float32")
            prepare(given, norm, words, factor, tokens)
            with T.launch_thread("blockIdx.y", (tokens + (few.tokens - 1)) // few.tokens) as some:
                own = T.meta_var(few.begin_at(some * few.tokens, factor))
                run_few(given, norm, words, own, tokens - some * few.tokens)

    return kernel
