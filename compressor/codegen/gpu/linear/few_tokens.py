"""Linears of few tokens: the weight streams from memory once, and nothing else takes long.

One block of threads takes tiles of 16 rows one after another; each of its warps takes some of the columns, and keeps
the codes of several steps on their way.  For one token, the first codes are asked for before the activations are
prepared in shared memory; of several tokens, another kernel has prepared them in global memory.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import WARP
from compressor.codegen.gpu.linear.activations import Preparation, Prepared
from compressor.codegen.gpu.linear.fragments import LANES
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.shares import Share, Streaming
from compressor.codegen.gpu.memory import held, shared
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.parts import TILE_ROWS


class FewTokens:
    """The kernel for one token, or for up to ``blocks`` blocks of columns of operand B.

    Attributes:
        blocks: of eight columns: eight tokens of int8, four of floats, which have two columns each.
        tokens: at most.
    """

    def __init__(
        self, products: Statements, operands: Operands, streaming: Streaming, blocks: int, is_one: bool
    ) -> None:
        self.products, self.operands, self.blocks, self.is_one = products, operands, blocks, is_one
        self.fragments = fragments = products.fragments
        self.halves, self.warps = fragments.halves, streaming.warps
        self.threads = WARP * self.warps
        self.share = Share.of(fragments, self.warps, streaming.loads)
        self.steps = self.share.steps * self.warps
        self.tokens = 1 if is_one else blocks * 8 // self.halves
        total = operands.tasks(1)
        self.turns = -(-total // streaming.blocks)  # tiles of a block
        self.grid, self.total = -(-total // self.turns), total
        self.pieces = self.share.loads // self.share.piece
        self.is_channel = fragments.groups == 1
        self.next = 2 if self.is_channel else 0  # where the next scales are loaded to

    def index(self, token: Any, half: int, step: Any, vector: Any, lane: Any, word: Any) -> Any:
        """Return where a word of the activations is."""
        f = self.fragments
        if self.is_one:
            return (((step * f.vectors + vector) * self.halves + half) * LANES + lane) * f.vector + word
        column = token * self.halves + half
        place = (column // 8 * self.steps + step) * f.vectors + vector
        return (place * WARP + column % 8 * LANES + lane) * f.vector + word

    @property
    def room(self) -> int:
        """Words of the activations."""
        lanes = LANES * self.halves if self.is_one else WARP * self.blocks
        return self.steps * self.fragments.vectors * self.fragments.vector * lanes

    def load(self, words: Any, raw: Any, weight: Any, tile: Any, step: Any, lane: Any, u: int) -> None:
        """Ask for the codes of one step of a batch, and for scales where a piece begins."""
        loads, share = self.products.loads, self.share
        loads.codes(words, u * loads.words, weight, tile, step + u, lane)
        if u % share.piece == 0:
            group, slot = (step + u) // self.fragments.group_steps, u // share.piece
            loads.scales(raw, self.next + slot, weight, tile, group, lane)
            loads.zeros(raw, self.next + self.pieces + slot, weight, tile, group, lane)

    def load_batch(self, words: Any, raw: Any, where: Any, step: Any, lane: Any, first: int, end: int) -> None:
        """Ask for the codes of some steps of a batch."""
        for u in range(first, end):
            self.load(words, raw, where[0], where[1], step, lane, u)

    def consume(self, at: Any, local: Any, step: Any, lane: Any, u: int) -> None:
        """Multiply one step of a batch by the activations."""
        products, f = self.products, self.fragments
        words, raw, sums, b, a, constants = local
        if u % self.share.piece == 0 and products.constants:
            products.store_constants(constants, 0, raw[self.pieces + u // self.share.piece])
        width = f.vectors * f.vector
        for block in range(self.blocks):
            for vector in range(f.vectors):
                to = [T.ramp(block * width + vector * f.vector, 1, f.vector)]
                if self.is_one:
                    place = self.index(0, 0, step + u, vector, lane % LANES, 0) + lane // LANES * LANES * f.vector
                    with T.If(lane // LANES < self.halves), T.Then():
                        T.buffer_store(b, at.words[T.ramp(place, 1, f.vector)], to)
                else:
                    place = ((block * self.steps + step + u) * f.vectors + vector) * WARP + lane
                    T.buffer_store(b, at.words[T.ramp(place * f.vector, 1, f.vector)], to)
        for product in range(products.per_step):
            products.expand(a, 0, words, u * products.loads.words, product, constants, 0)
            for block in range(self.blocks):
                products.multiply(sums, block * products.sums, a, 0, b, block * width + 2 * product, constants, 0)

    def finish_piece(self, at: Any, local: Any, out: Any, step: Any, lane: Any, u: int) -> None:
        """Add a piece's sums, scaled, to the outputs."""
        products, f = self.products, self.fragments
        _words, raw, sums, *_ = local
        for row in range(2):
            scale = held(products.scale(raw[u // self.share.piece], row))
            for block in range(self.blocks):
                for column in range(2):
                    value = products.total(sums, block * products.sums, 2 * row + column) * scale
                    if f.act_span:
                        token = T.Cast("int32", 0) if self.is_one else block * 8 + lane % LANES * 2 + column
                        group = T.min((step + u) // f.group_steps, f.groups - 1) // f.act_span
                        value = value * at.factor[token, group]
                    place = 4 * block + 2 * row + column
                    T.buffer_store(out, out[place] + value, [place])
        for block in range(self.blocks):
            products.clear(sums, block * products.sums)

    def leave(self, parts: Any, out: Any, lane: Any, warp: Any) -> None:
        """Leave a warp's share of the outputs for the other warps."""
        g, t = lane // LANES, lane % LANES
        for row in range(2):
            for block in range(self.blocks):
                values = [out[4 * block + 2 * row + column] for column in range(2)]
                if self.halves == 2:
                    places = [(block * 4 + t, values[0] + values[1])]
                else:
                    places = [(block * 8 + 2 * t + column, value) for column, value in enumerate(values)]
                if self.is_one:
                    with T.If(t == 0), T.Then():
                        T.buffer_store(parts, places[0][1], [warp, 0, 2 * g + row])
                    continue
                for token, value in places:
                    T.buffer_store(parts, value, [warp, token, 2 * g + row])
        for i in range(4 * self.blocks):
            T.buffer_store(out, T.float32(0), [i])

    def add_up(self, at: Any, parts: Any, weight: Any, tile: Any, thread: Any, tokens: Any) -> None:
        """Add up the warps' shares, and store the outputs."""
        total = T.alloc_buffer((1,), "float32", scope="local")
        for first in range(0, self.tokens * TILE_ROWS, self.threads):
            place = first + thread
            token, row = place // TILE_ROWS, place % TILE_ROWS
            with T.If(T.And(token < T.min(tokens, self.tokens), tile * TILE_ROWS + row < weight.rows)), T.Then():
                T.buffer_store(total, T.float32(0), [0])
                for warp in range(self.warps):
                    T.buffer_store(total, total[0] + parts[warp, token, row], [0])
                value = total[0] if self.fragments.act_span else total[0] * at.factor[token, 0]
                self.store(weight, value, token, tile * TILE_ROWS + row)

    def store(self, weight: Any, value: Any, token: Any, row: Any) -> None:
        """Store one output."""
        T.buffer_store(weight.y, weight.finish(value, token, row), [token, row])

    def memory(self, preparing: Preparation, words: Any, factor: Any) -> list[Any]:
        """Return the buffers for parts of sums, activations, factors, and the preparation."""
        parts = ((self.warps, self.tokens, TILE_ROWS), "float32")
        if not self.is_one:
            return [*shared(parts), words, factor, None]
        activations, factors = ((self.room,), "uint32"), ((1, self.fragments.act_groups), "float32")
        return shared(parts, activations, factors, ((max(4, preparing.scratch),), "float32"))

    def macro(self, prologue: Prologue | None) -> Any:
        """Make a macro ``run(given, norm, words, factor, tokens)`` that launches the kernel.

        ``words`` and ``factor`` are what :func:`prepare_few` has left; one token has none.
        """
        f, products, operands, share = self.fragments, self.products, self.operands, self.share
        loads, is_one, batches = share.loads, self.is_one, share.batches
        preparing = Preparation(f, prologue, self.threads, self.steps)
        prepare = preparing.macro()

        @T.inline
        def run(given, norm, words_, factor_, tokens):
            with (
                T.launch_thread("blockIdx.x", self.grid) as block,
                T.launch_thread("threadIdx.x", self.threads) as thread,
            ):
                lane, warp = T.meta_var((thread % WARP, thread // WARP))
                words = T.alloc_buffer((loads * products.loads.words,), "int32", scope="local")
                raw = T.alloc_buffer((self.next + 2 * self.pieces,), "int32", scope="local")
                sums = T.alloc_buffer((self.blocks * products.sums,), products.kind, scope="local")
                b = T.alloc_buffer((self.blocks * f.lane_words,), "uint32", scope="local")
                a = T.alloc_buffer((products.operand,), "uint32", scope="local")
                constants = T.alloc_buffer((2,), "uint32", scope="local")
                out = T.alloc_buffer((4 * self.blocks,), "float32", scope="local")
                parts, held, factor, scratch = T.meta_var(self.memory(preparing, words_, factor_))
                at = T.meta_var(Prepared(given, norm, operands.shared, held, factor, self.index))
                local = T.meta_var((words, raw, sums, b, a, constants))
                first = T.meta_var(operands.select(block, 1))
                self.load_batch(words, raw, first, warp * share.steps, lane, 0, loads)
                if is_one:
                    prepare(at, T.int32(0), thread, scratch)
                    T.tvm_storage_sync("shared.dyn")
                self.start(local, out)
                self.take_next(raw)
                for turn in range(self.turns):
                    for part in range(batches):
                        step = T.meta_var(warp * share.steps + part * loads)
                        self.batch(at, local, out, block, turn * batches + part, step, warp, lane)
                        if self.is_channel and part == batches - 1:
                            self.finish_piece(at, local, out, step, lane, 0)
                        self.take_next(raw)
                    self.leave(parts, out, lane, warp)
                    T.tvm_storage_sync("shared.dyn")
                    task = T.meta_var(block + turn * self.grid)
                    if task < self.total:
                        own = T.meta_var(operands.select(task, 1))
                        self.add_up(at, parts, own[0], own[1], thread, tokens)
                    T.tvm_storage_sync("shared.dyn")

        return run

    def start(self, local: Any, out: Any) -> None:
        """Set all sums to zero."""
        _words, _raw, sums, b, *_ = local
        for block in range(self.blocks):
            self.products.clear(sums, block * self.products.sums)
        for i in range(4 * self.blocks):
            T.buffer_store(out, T.float32(0), [i])
        for i in range(self.fragments.lane_words if self.is_one else 0):  # of lanes without a token
            T.buffer_store(b, T.uint32(0), [i])

    def batch(self, at: Any, local: Any, out: Any, block: Any, turn: Any, step: Any, warp: Any, lane: Any) -> None:
        """Multiply one batch, and ask for the codes of the next where its place becomes free."""
        share, batches = self.share, self.share.batches
        after = turn + 1
        task = T.bind(block + after // batches * self.grid)
        is_single = self.turns * batches == 1
        following = None if is_single else self.operands.select(task, 1)
        there = warp * share.steps + after % batches * share.loads
        asked = 0
        for u in range(share.loads):
            self.consume(at, local, step, lane, u)
            if not self.is_channel:
                if u % share.piece < share.piece - 1:
                    continue
                self.finish_piece(at, local, out, step, lane, u)
            if following is not None:
                self._ask(local, following, there, lane, task, range(asked, u + 1))
            asked = u + 1

    def _ask(self, local: Any, following: Any, step: Any, lane: Any, task: Any, steps: range) -> None:
        """Load steps of the next batch, unless there is none."""
        words, raw, *_ = local
        with T.If(task < self.total), T.Then():
            self.load_batch(words, raw, following, step, lane, steps.start, steps.stop)

    def take_next(self, raw: Any) -> None:
        """Take the next tile's scales, where they are loaded while those of a tile are still needed."""
        for i in range(2 if self.is_channel else 0):
            T.buffer_store(raw, raw[self.next + i], [i])
