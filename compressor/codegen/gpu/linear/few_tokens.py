"""Linears of few tokens: the weight streams from memory once, and nothing else takes long.

A block of threads takes tiles of 16 rows, one or a few at a time; each of its warps takes some of the columns, and
keeps the codes of several steps on their way.  For one token, the first codes are asked for before the activations are
prepared in shared memory; of several tokens, another kernel has prepared them in global memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import WARP, barrier
from compressor.codegen.gpu.linear.activations import Preparation, Prepared
from compressor.codegen.gpu.linear.fragments import LANES
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.shares import Share, Streaming
from compressor.codegen.gpu.memory import held, shared
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.parts import TILE_ROWS


class FewTokens:
    """The kernel for up to ``tokens`` tokens.

    Attributes:
        all_steps: of all warps.
        is_one: for one token, which the kernel prepares itself.
        columns: of operand B, of a token: its halves are neighbours where eight columns hold them all.
        sets: operands B of the same columns: halves that are not neighbours.
        blocks: of eight columns of operand B.
        chains: sums that take turns, so that a product need not wait for the one before.
        tiles: of a task.
        turns: tasks of a block of threads, at most.
    """

    def __init__(self, products: Statements, operands: Operands, streaming: Streaming, tokens: int) -> None:
        self.products, self.operands, self.tokens, self.is_one = products, operands, tokens, tokens == 1
        self.fragments = f = products.fragments
        self.columns = f.halves if tokens * f.halves <= 8 else 1
        self.sets = f.halves // self.columns
        self.blocks = -(-tokens * self.columns // 8)
        self.chains = 2 if self.blocks == 1 and products.per_step % 2 == 0 and not f.integer else 1
        self.tiles = streaming.tiles
        self.warps, self.threads = streaming.warps, WARP * streaming.warps
        self.share = Share.of(f, self.warps, streaming.loads)
        self.all_steps = self.share.steps * self.warps
        self.tasks = operands.tasks(self.tiles)
        self.turns = -(-self.tasks // streaming.blocks)
        self.grid = -(-self.tasks // self.turns)
        self.pieces = self.share.loads // self.share.piece
        self.is_channel = f.groups == 1
        self.slots = self.pieces * f.step_groups * self.tiles
        self.raws = 2 * self.slots  # registers of scales and zero points of a batch
        self.width = f.lane_words

    def index(self, token: Any, half: int, step: Any, vector: Any, lane: Any, word: Any) -> Any:
        """Return where a word of the activations is."""
        f = self.fragments
        if self.is_one:
            return (((step * f.vectors + vector) * f.halves + half) * LANES + lane) * f.vector + word
        column = token * self.columns + (half if self.sets == 1 else 0)
        block = column // 8 * self.sets + (half if self.sets > 1 else 0)
        place = (block * self.all_steps + step) * f.vectors + vector
        return (place * WARP + column % 8 * LANES + lane) * f.vector + word

    @property
    def room(self) -> int:
        """Words of the activations."""
        f = self.fragments
        lanes = LANES * f.halves if self.is_one else WARP * self.blocks * self.sets
        return self.all_steps * f.vectors * f.vector * lanes

    def own_tiles(self, where: Any) -> list[Any]:
        """Return a task's tiles; beyond the last, the last again."""
        _weight, first, count = where
        return [first] if self.tiles == 1 else [T.min(first + n, count - 1) for n in range(self.tiles)]

    def load(self, local: Registers, where: Any, step: Any, lane: Any, first: int, end: int) -> None:
        """Ask for the codes of some steps of a batch, and for scales where a piece begins."""
        loads, piece, f = self.products.loads, self.share.piece, self.fragments
        following = self.raws if self.is_channel else 0
        for u in range(first, end):
            for n, tile in enumerate(self.own_tiles(where)):
                loads.codes(local.words, (u * self.tiles + n) * loads.words, where[0], tile, step + u, lane)
                for inner in range(f.step_groups if u % piece == 0 else 0):
                    slot = following + self.slot(u, inner, n)
                    loads.scales(local.raw, slot, where[0], tile, f.group(step + u, inner), lane)
                    group = f.group(step + u, f.inner_group(lane))  # zero points are of the lane's own columns
                    loads.zeros(local.raw, slot + self.slots, where[0], tile, group, lane)

    def slot(self, u: int, inner: int, tile: int) -> int:
        """Return which register has the scales of a step's group, or of the piece that the step is in."""
        return (u // self.share.piece * self.fragments.step_groups + inner) * self.tiles + tile

    def load_activations(self, at: Any, local: Registers, step: Any, lane: Any) -> None:
        """Load operand B of a step."""
        f = self.fragments
        for block in range(self.blocks * self.sets):
            for vector in range(f.vectors):
                to = [T.ramp(block * self.width + vector * f.vector, 1, f.vector)]
                if self.is_one:
                    place = self.index(0, 0, step, vector, lane % LANES, 0) + lane // LANES * LANES * f.vector
                    with T.If(lane // LANES < f.halves), T.Then():
                        T.buffer_store(local.b, at.words[T.ramp(place, 1, f.vector)], to)
                else:
                    place = ((block * self.all_steps + step) * f.vectors + vector) * WARP + lane
                    T.buffer_store(local.b, at.words[T.ramp(place * f.vector, 1, f.vector)], to)

    def _sums(self, chain: int, block: int, tile: int) -> int:
        return ((chain * self.blocks + block) * self.tiles + tile) * self.products.sums

    def consume(self, at: Any, local: Registers, step: Any, lane: Any, u: int) -> None:
        """Multiply one step of a batch by the activations."""
        products, count = self.products, self.products.constants
        if u % self.share.piece == 0 and count:
            for n in range(self.tiles):
                products.store_constants(local.constants, n * count, local.raw[self.slots + self.slot(u, 0, n)])
        self.load_activations(at, local, step + u, lane)
        for inner in range(self.fragments.step_groups):
            self._multiply(local, lane, u, inner)
            if not self.is_channel and u % self.share.piece == self.share.piece - 1:
                self.finish_piece(at, local, step, lane, u, inner)

    def _multiply(self, local: Registers, lane: Any, u: int, inner: int) -> None:
        products, count = self.products, self.products.constants
        for product in range(products.per_step):
            for n in range(self.tiles):
                slot = (u * self.tiles + n) * products.loads.words
                products.expand(local.a, 0, local.words, slot, product, local.constants, n * count)
                products.leave_out(local.a, 0, lane, inner)
                for block in range(self.blocks):
                    sums = self._sums(product % self.chains, block, n)
                    for which in range(self.sets):
                        b = (block * self.sets + which) * self.width + 2 * product
                        products.multiply(local.sums, sums, local.a, 0, local.b, b, local.constants, n * count)

    def finish_piece(self, at: Any, local: Registers, step: Any, lane: Any, u: int, inner: int) -> None:
        """Add a piece's sums, scaled, to the outputs."""
        products, f = self.products, self.fragments
        for n in range(self.tiles):
            for row in range(2):
                scale = held(products.scale(local.raw[self.slot(u, inner, n)], row))
                for block in range(self.blocks):
                    for column in range(2):
                        i = 2 * row + column
                        chains = [products.total(local.sums, self._sums(c, block, n), i) for c in range(self.chains)]
                        value = (chains[0] if self.chains == 1 else chains[0] + chains[1]) * scale
                        if f.act_span:
                            token = T.Cast("int32", 0) if self.is_one else block * 8 + lane % LANES * 2 + column
                            group = T.min(f.group(step + u, inner), f.groups - 1) // f.act_span
                            value = value * at.factor[token, group]
                        place = 4 * (block * self.tiles + n) + i
                        T.buffer_store(local.out, local.out[place] + value, [place])
        self.clear(local)

    def clear(self, local: Registers) -> None:
        """Set the sums of products to zero."""
        for i in range(self.chains * self.blocks * self.tiles):
            self.products.clear(local.sums, i * self.products.sums)

    def leave(self, parts: Any, local: Registers, lane: Any, warp: Any, parity: Any) -> None:
        """Leave a warp's share of the outputs for the other warps."""
        g, t = lane // LANES, lane % LANES
        for block in range(self.blocks):
            for n in range(self.tiles):
                for row in range(2):
                    first = 4 * (block * self.tiles + n) + 2 * row
                    values, at = [local.out[first], local.out[first + 1]], n * TILE_ROWS + 2 * g + row
                    if self.is_one:
                        with T.If(t == 0), T.Then():
                            one = values[0] + values[1] if self.columns == 2 else values[0]
                            T.buffer_store(parts, one, [parity, warp, 0, at])
                    elif self.columns == 2:
                        T.buffer_store(parts, values[0] + values[1], [parity, warp, block * 4 + t, at])
                    else:
                        for column, value in enumerate(values):
                            T.buffer_store(parts, value, [parity, warp, block * 8 + 2 * t + column, at])
        for i in range(4 * self.blocks * self.tiles):
            T.buffer_store(local.out, T.float32(0), [i])

    def add_up(self, at: Any, parts: Any, where: Any, thread: Any, tokens: Any, parity: Any) -> None:
        """Add up the warps' shares, and store the outputs."""
        weight, first_tile, _count = where
        total = T.alloc_buffer((1,), "float32", scope="local")
        rows = self.tiles * TILE_ROWS
        for first in range(0, self.tokens * rows, self.threads):
            token, row = (first + thread) // rows, (first + thread) % rows
            to = first_tile * TILE_ROWS + row
            with T.If(T.And(token < T.min(tokens, self.tokens), to < weight.rows)), T.Then():
                T.buffer_store(total, T.float32(0), [0])
                for warp in range(self.warps):
                    T.buffer_store(total, total[0] + parts[parity, warp, token, row], [0])
                value = total[0] if self.fragments.act_span else total[0] * at.factor[token, 0]
                self.store(weight, value, token, to)

    def store(self, weight: Any, value: Any, token: Any, row: Any) -> None:
        """Store one output."""
        T.buffer_store(weight.y, weight.finish(value, token, row), [token, row])

    def memory(self, preparing: Preparation, words: Any, factor: Any) -> list[Any]:
        """Return the buffers for parts of sums, activations, factors, and the preparation."""
        parts = ((2, self.warps, self.tokens, self.tiles * TILE_ROWS), "float32")
        if not self.is_one:
            return [*shared(parts), words, factor, None]
        activations, factors = ((self.room,), "uint32"), ((1, self.fragments.act_groups), "float32")
        return shared(parts, activations, factors, ((max(4, preparing.scratch),), "float32"))

    def macro(self, prologue: Prologue | None) -> Any:
        """Make a macro ``run(given, norm, words, factor, tokens)`` that launches the kernel.

        ``words`` and ``factor`` are what another kernel has prepared; one token has none.
        """
        operands, share, is_one = self.operands, self.share, self.is_one
        preparing = Preparation(self.fragments, prologue, self.threads, self.all_steps)
        prepare, multiply = preparing.macro(), self.multiply_task()

        @T.inline
        def run(given, norm, words_, factor_, tokens):
            with (
                T.launch_thread("blockIdx.x", self.grid) as block,
                T.launch_thread("threadIdx.x", self.threads) as thread,
            ):
                lane, warp = T.meta_var((thread % WARP, thread // WARP))
                local = T.meta_var(Registers.of(self))
                parts, held_words, factor, scratch = T.meta_var(self.memory(preparing, words_, factor_))
                at = T.meta_var(Prepared(given, norm, operands.shared, held_words, factor, self.index))
                first = T.meta_var(operands.select(block, self.tiles))
                self.load(local, first, warp * share.steps, lane, 0, share.loads)
                if is_one:
                    prepare(at, T.int32(0), thread, scratch)
                    barrier()
                self.start(local)
                for turn in range(self.turns):
                    multiply(at, local, parts, block, turn, warp, lane)
                    task = T.meta_var(block + turn * self.grid)
                    if task < self.tasks:
                        own = T.meta_var(operands.select(task, self.tiles))
                        self.add_up(at, parts, own, thread, tokens, turn % 2)

        return run

    def multiply_task(self) -> Any:
        """Make a macro that multiplies the warps' shares of a block's task, and leaves them for all warps to add up."""
        share, batches = self.share, self.share.batches

        @T.inline
        def multiply(at, local, parts, block, turn, warp, lane):
            for part in range(batches):
                step = T.meta_var(warp * share.steps + part * share.loads)
                self.batch(at, local, block, turn * batches + part, step, warp, lane)
                if self.is_channel and part == batches - 1:
                    self.finish_piece(at, local, step, lane, 0, 0)
                self.take_next(local)
            self.leave(parts, local, lane, warp, turn % 2)
            barrier()  # the other half of the parts is read before the next

        return multiply

    def start(self, local: Registers) -> None:
        """Set all sums to zero, and take the first scales."""
        self.clear(local)
        for i in range(4 * self.blocks * self.tiles):
            T.buffer_store(local.out, T.float32(0), [i])
        for i in range(self.width if self.is_one else 0):  # of lanes without a token
            T.buffer_store(local.b, T.uint32(0), [i])
        self.take_next(local)

    def batch(self, at: Any, local: Registers, block: Any, turn: Any, step: Any, warp: Any, lane: Any) -> None:
        """Multiply one batch, and ask for the codes of the next where its place becomes free."""
        share, batches = self.share, self.share.batches
        task = T.bind(block + (turn + 1) // batches * self.grid)
        is_single = self.turns * batches == 1
        following = None if is_single else self.operands.select(task, self.tiles)
        there = warp * share.steps + (turn + 1) % batches * share.loads
        asked = 0
        for u in range(share.loads):
            self.consume(at, local, step, lane, u)
            if not self.is_channel and u % share.piece < share.piece - 1:
                continue
            if following is not None:
                with T.If(task < self.tasks), T.Then():
                    self.load(local, following, there, lane, asked, u + 1)
            asked = u + 1

    def take_next(self, local: Registers) -> None:
        """Take the next tile's scales, where they are loaded while those of a tile are still needed."""
        for i in range(self.raws if self.is_channel else 0):
            T.buffer_store(local.raw, local.raw[self.raws + i], [i])


@dataclass(frozen=True)
class Registers:
    """Hold a lane's codes, scales and zero points, operands A and B, constants, sums and outputs."""

    words: Any
    raw: Any
    a: Any
    b: Any
    constants: Any
    sums: Any
    out: Any

    @classmethod
    def of(cls, kernel: FewTokens) -> Registers:
        """Allocate the registers of a kernel."""
        products, count = kernel.products, kernel.blocks * kernel.tiles

        def registers(size: int, kind: str) -> Any:
            return T.alloc_buffer((max(1, size),), kind, scope="local")

        return cls(
            registers(kernel.share.loads * kernel.tiles * products.loads.words, "int32"),
            registers(2 * kernel.raws, "int32"),
            registers(products.operand, "uint32"),
            registers(kernel.blocks * kernel.sets * kernel.width, "uint32"),
            registers(kernel.tiles * products.constants, "uint32"),
            registers(kernel.chains * count * products.sums, products.kind),
            registers(4 * count, "float32"),
        )
