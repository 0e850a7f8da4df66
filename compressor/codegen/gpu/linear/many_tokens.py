"""Linears of many tokens: blocks of tokens by tiles of rows, on tensor cores.

Activations come through shared memory, where copies of the next stages are under way; codes go from global memory to
registers, a stage ahead, and become operands there::

    prepare     x                -> words, in the order of :mod:`compressor.codegen.gpu.linear.fragments`, and factors
    stage       words            -> shared memory, `stages` of them in turn
    step        codes, words     -> sums of a group, by tensor cores
    group       sums, scales     -> outputs
    finish      outputs of the warps that share out the columns -> y
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import WARP
from compressor.codegen.gpu.linear.fragments import LANES
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.shares import Tiling
from compressor.codegen.gpu.memory import copy16, end_copies, held, shared, wait_copies
from compressor.formats.parts import TILE_ROWS


class ManyTokens:
    """The kernel for blocks of ``tiling.tokens`` tokens.

    Attributes:
        steps: of a warp; those beyond the last column are multiplied by zeros.
        stage: steps of a stage and column warp.
        block_words: words of activations of eight tokens and one step.
        stage_words: of a stage.
    """

    def __init__(self, products: Statements, operands: Operands, tiling: Tiling) -> None:
        self.products, self.operands, self.tiling = products, operands, tiling
        self.fragments = fragments = products.fragments
        self.threads = WARP * tiling.warps
        self.is_channel = fragments.groups == 1
        group = fragments.group_steps
        fitting = [n for n in range(1, tiling.steps + 1) if self.is_channel or group % n == 0 or n % group == 0]
        self.stage = max(fitting)
        unit = self.stage if self.is_channel else max(group, self.stage)
        units = -(-fragments.steps // unit)
        self.steps = -(-units // tiling.column_warps) * unit
        self.turns = self.steps // self.stage
        self.all_steps = self.steps * tiling.column_warps
        self.piece = self.stage if self.is_channel else min(group, self.stage)
        self.group_turns = self.turns if self.is_channel else max(1, group // self.stage)
        self.block_words = fragments.halves * fragments.vectors * WARP * fragments.vector
        self.token_blocks = tiling.token_warps * tiling.token_blocks
        self.stage_words = tiling.column_warps * self.token_blocks * self.stage * self.block_words
        self.pieces = self.stage // self.piece

    def index(self, token: Any, half: int, step: Any, vector: Any, lane: Any, word: Any) -> Any:
        """Return where a word of the activations is in global memory."""
        f = self.fragments
        place = ((token // 8 * self.all_steps + step) * f.halves + half) * f.vectors + vector
        return (place * WARP + token % 8 * LANES + lane) * f.vector + word

    def slots(self, tokens: Any) -> Any:
        """Round a number of tokens up to whole blocks."""
        return (tokens + (self.tiling.tokens - 1)) // self.tiling.tokens * self.tiling.tokens

    def room(self, tokens: Any) -> Any:
        """Words of all activations, with blocks filled up."""
        return self.slots(tokens) // 8 * (self.all_steps * self.block_words)

    def copy_stage(self, to: Any, words: Any, first: Any, turn: Any, thread: Any) -> None:
        """Begin to copy a stage: of each column warp and block of tokens, a run of steps."""
        run = self.stage * self.block_words // 4  # of 16 bytes
        total = self.stage_words // 4
        base = turn % self.tiling.stages * self.stage_words
        for i in range(-(-total // self.threads)):
            place = i * self.threads + thread
            column, rest = place // (run * self.token_blocks), place % (run * self.token_blocks)
            block, inner = rest // run, rest % run
            step = column * self.steps + turn * self.stage
            source = ((first + block) * self.all_steps + step) * self.block_words + 4 * inner
            with T.If(T.And(place < total, turn < self.turns)), T.Then():
                copy16(T.address_of(to[base + 4 * place]), T.address_of(words[source]))
        end_copies()

    def load_codes(self, local: Any, where: Any, tiles: list[Any], step: Any, lane: Any, s: int) -> None:
        """Load the codes of one step of a stage, for all tiles of the warp."""
        loads = self.products.loads
        for n, tile in enumerate(tiles):
            slot = (s * self.tiling.row_tiles + n) * loads.words
            loads.codes(local.words, slot, where, tile, step + s, lane)

    def load_scales(self, local: Any, where: Any, tiles: list[Any], step: Any, lane: Any) -> None:
        """Load the scales and zero points of a stage's groups."""
        loads, f = self.products.loads, self.fragments
        for piece in range(self.pieces):
            at = step + piece * self.piece
            for inner in range(f.step_groups):
                for n, tile in enumerate(tiles):
                    slot = self.raws + self.slot(piece, inner, n)
                    loads.scales(local.raw, slot, where, tile, f.group(at, inner), lane)
                    group = f.group(at, f.inner_group(lane))  # zero points are of the lane's own columns
                    loads.zeros(local.raw, slot + self.raws // 2, where, tile, group, lane)

    def slot(self, piece: int, inner: int, tile: int) -> int:
        """Return which register has the scales of a piece's group."""
        return (piece * self.fragments.step_groups + inner) * self.tiling.row_tiles + tile

    def multiply(self, local: Any, stage: Any, base: Any, lane: Any, s: int, inner: int) -> None:
        """Multiply one step of a stage: the codes of all tiles by all blocks of tokens of the warp."""
        products, f, tiling = self.products, self.fragments, self.tiling
        loads = products.loads
        per_vector = f.vector // 2  # products whose operand B one vector holds
        for vector in range(f.vectors):
            for i in range(per_vector):
                for n in range(tiling.row_tiles):
                    slot = (s * tiling.row_tiles + n) * loads.words
                    at = products.operand * (i * tiling.row_tiles + n)
                    constants = n * products.constants
                    products.expand(local.a, at, local.words, slot, vector * per_vector + i, local.constants, constants)
                    products.leave_out(local.a, at, lane, inner)
            for block in range(tiling.token_blocks):
                for half in range(f.halves):
                    place = ((block * self.stage + s) * f.halves + half) * f.vectors + vector
                    source = T.ramp(base + (place * WARP + lane) * f.vector, 1, f.vector)
                    T.buffer_store(local.b, stage[source], [T.ramp(0, 1, f.vector)])
                    for i in range(per_vector):
                        for n in range(tiling.row_tiles):
                            sums = (block * tiling.row_tiles + n) * products.sums
                            at, constants = products.operand * (i * tiling.row_tiles + n), n * products.constants
                            products.multiply(local.sums, sums, local.a, at, local.b, 2 * i, local.constants, constants)

    def start_piece(self, local: Any, piece: int) -> None:
        """Take the zero points of a piece's group."""
        count = self.tiling.row_tiles
        for n in range(count if self.products.constants else 0):
            raw = local.raw[self.raws // 2 + self.slot(piece, 0, n)]
            self.products.store_constants(local.constants, n * self.products.constants, raw)

    def finish_group(self, local: Any, factor: Any, token: Any, step: Any, lane: Any, piece: int, inner: int) -> None:
        """Add a group's sums, scaled, to the outputs, and begin anew."""
        products, f, tiling = self.products, self.fragments, self.tiling
        for n in range(tiling.row_tiles):
            scales = [held(products.scale(local.raw[self.slot(piece, inner, n)], row)) for row in range(2)]
            for block in range(tiling.token_blocks):
                sums = (block * tiling.row_tiles + n) * products.sums
                for i in range(4):
                    value = products.total(local.sums, sums, i) * scales[i // 2]
                    if f.act_span:
                        group = T.min(f.group(step + piece * self.piece, inner), f.groups - 1) // f.act_span
                        value = value * factor[token + 8 * block + lane % LANES * 2 + i % 2, group]
                    place = 4 * (block * tiling.row_tiles + n) + i
                    T.buffer_store(local.out, local.out[place] + value, [place])
                products.clear(local.sums, sums)

    def macro(self) -> Any:
        """Make a macro ``run(words, factor, tokens)`` that launches the kernel."""
        tiling, operands = self.tiling, self.operands
        stages, across, columns = tiling.stages, tiling.token_warps, tiling.column_warps
        warp_words = self.stage_words // (columns * across)
        width, height, per_warp = tiling.tokens, operands.tasks(tiling.tiles), 8 * tiling.token_blocks
        is_grouped = not self.is_channel and self.group_turns > 1

        @T.inline
        def run(words, factor, tokens):
            blocks = T.meta_var((tokens + (width - 1)) // width)
            with (
                T.launch_thread("blockIdx.x", blocks) as token_block,
                T.launch_thread("blockIdx.y", height) as row_block,
                T.launch_thread("threadIdx.x", self.threads) as thread,
            ):
                lane, warp = T.meta_var((thread % WARP, thread // WARP))
                beside, column = T.meta_var((warp % across, warp // across % columns))
                down = T.meta_var(warp // (across * columns))
                local = T.meta_var(Registers.of(self))
                memory = T.meta_var(self.memory())
                where = T.meta_var(operands.select(row_block, tiling.tiles))
                tiles = T.meta_var(self.own_tiles(where, down))
                first, token = T.meta_var((column * self.steps, token_block * width + beside * per_warp))
                self.begin(local, where[0], tiles, first, lane)
                for turn in T.unroll(stages - 1):
                    self.copy_stage(memory, words, token_block * self.token_blocks, turn, thread)
                for turn in range(self.turns):
                    wait_copies(stages - 2)
                    T.tvm_storage_sync("shared.dyn")
                    self.copy_stage(memory, words, token_block * self.token_blocks, turn + (stages - 1), thread)
                    base = T.meta_var(((turn % stages * columns + column) * across + beside) * warp_words)
                    step = T.meta_var(first + turn * self.stage)
                    self.turn(local, where[0], tiles, memory, base, turn, step, lane, factor, token)
                    if is_grouped:
                        if turn % self.group_turns == self.group_turns - 1:
                            self.finish_group(local, factor, token, step, lane, 0, 0)
                    self.take_next(local)
                if self.is_channel:
                    self.finish_group(local, factor, token, first, lane, 0, 0)
                wait_copies(0)
                if columns > 1:
                    T.tvm_storage_sync("shared.dyn")
                    self.leave(local, memory, column, down * across + beside, lane)
                    T.tvm_storage_sync("shared.dyn")
                if column == 0:
                    self.add_up(local, memory, down * across + beside, lane)
                    self.store(local, where, down, factor, token, lane, tokens)

        return run

    def memory(self) -> Any:
        """Allocate the stages; the parts of outputs come where they have been."""
        size = max(self.tiling.stages * self.stage_words, self.parts_words)
        return shared(((size,), "uint32"))[0]

    def own_tiles(self, where: Any, down: Any) -> list[Any]:
        """Return the warp's tiles of rows; beyond the last, the last again."""
        _weight, first, count = where
        first = first + down * self.tiling.row_tiles
        return [T.min(first + n, count - 1) for n in range(self.tiling.row_tiles)]

    def begin(self, local: Any, weight: Any, tiles: list[Any], first: Any, lane: Any) -> None:
        """Load what the first stage needs, and set all sums and outputs to zero."""
        for s in range(self.stage):
            self.load_codes(local, weight, tiles, first, lane, s)
        self.load_scales(local, weight, tiles, first, lane)
        self.take_next(local)
        for n in range(self.tiling.row_tiles * self.tiling.token_blocks):
            self.products.clear(local.sums, n * self.products.sums)
            for i in range(4):
                T.buffer_store(local.out, T.float32(0), [4 * n + i])

    def take_next(self, local: Any) -> None:
        """Take the next stage's scales and zero points."""
        for i in range(self.raws):
            T.buffer_store(local.raw, local.raw[self.raws + i], [i])

    def turn(
        self, local: Any, weight: Any, tiles: list[Any], memory: Any, base: Any, turn: Any, step: Any, lane: Any,
        factor: Any, token: Any,
    ) -> None:  # fmt: skip
        """Multiply a stage, and load the codes of the next."""
        if not self.is_channel:
            self.load_scales(local, weight, tiles, step + self.stage, lane)
        for s in range(self.stage):
            if s % self.piece == 0:
                self.start_piece(local, s // self.piece)
            is_end = s % self.piece == self.piece - 1 and self.group_turns == 1 and not self.is_channel
            for inner in range(self.fragments.step_groups):
                self.multiply(local, memory, base, lane, s, inner)
                if is_end:
                    self.finish_group(local, factor, token, step, lane, s // self.piece, inner)
            with T.If(turn + 1 < self.turns), T.Then():
                self.load_codes(local, weight, tiles, step + self.stage, lane, s)

    @property
    def raws(self) -> int:
        """Registers of a stage's scales and zero points."""
        return 2 * self.pieces * self.fragments.step_groups * self.tiling.row_tiles

    @property
    def parts_words(self) -> int:
        """Words of shared memory for the outputs of all column warps but the first."""
        tiling = self.tiling
        warps = (tiling.column_warps - 1) * tiling.row_warps * tiling.token_warps
        return warps * tiling.row_tiles * tiling.token_blocks * 4 * WARP

    def _part(self, column: Any, place: Any, i: int, lane: Any) -> Any:
        tiling = self.tiling
        size = 4 * tiling.row_tiles * tiling.token_blocks
        return (((column - 1) * (tiling.row_warps * tiling.token_warps) + place) * size + i) * WARP + lane

    def leave(self, local: Any, memory: Any, column: Any, place: Any, lane: Any) -> None:
        """Leave a warp's outputs for the first column warp."""
        with T.If(column > 0), T.Then():
            for i in range(4 * self.tiling.row_tiles * self.tiling.token_blocks):
                value = T.reinterpret(local.out[i], dtype="uint32")
                T.buffer_store(memory, value, [self._part(column, place, i, lane)])

    def add_up(self, local: Any, memory: Any, place: Any, lane: Any) -> None:
        """Add what the other column warps have left."""
        for column in range(1, self.tiling.column_warps):
            for i in range(4 * self.tiling.row_tiles * self.tiling.token_blocks):
                value = T.reinterpret(memory[self._part(column, place, i, lane)], dtype="float32")
                T.buffer_store(local.out, local.out[i] + value, [i])

    def store(self, local: Any, where: Any, down: Any, factor: Any, token: Any, lane: Any, tokens: Any) -> None:
        """Store the outputs of two neighbouring rows at once."""
        weight, first, count = where
        g, t, tiling = lane // LANES, lane % LANES, self.tiling
        is_even = all(n % 2 == 0 for n in self.operands.rows)
        for block in range(tiling.token_blocks):
            for i in range(2):
                at = token + (8 * block + 2 * t + i)
                with T.If(at < tokens), T.Then():
                    times = T.float32(1) if self.fragments.act_span else held(factor[at, 0])
                    for n in range(tiling.row_tiles):
                        tile = first + down * tiling.row_tiles + n
                        row = tile * TILE_ROWS + 2 * g
                        place = 4 * (block * tiling.row_tiles + n) + i
                        values = [local.out[place] * times, local.out[place + 2] * times]
                        self._store_pair(local, weight, at, row, values, tile < count, is_even)

    def _store_pair(
        self, local: Any, weight: Any, token: Any, row: Any, values: list[Any], is_tile: Any, is_even: bool
    ) -> None:
        if is_even:
            with T.If(T.And(is_tile, row < weight.rows)), T.Then():
                T.buffer_store(local.pair, values[0], [0])
                T.buffer_store(local.pair, values[1], [1])
                both = T.ramp(row, 1, 2)
                T.buffer_store(weight.y, weight.finish(local.pair[T.ramp(0, 1, 2)], token, both), [token, both])
            return
        for j, value in enumerate(values):
            with T.If(T.And(is_tile, row + j < weight.rows)), T.Then():
                T.buffer_store(weight.y, weight.finish(value, token, row + j), [token, row + j])


@dataclass(frozen=True)
class Registers:
    """Hold a lane's codes, scales and zero points, operands A and B, constants, sums, outputs and two values."""

    words: Any
    raw: Any
    a: Any
    b: Any
    constants: Any
    sums: Any
    out: Any
    pair: Any

    @classmethod
    def of(cls, kernel: ManyTokens) -> Registers:
        """Allocate the registers of a kernel."""
        products, tiling, f = kernel.products, kernel.tiling, kernel.fragments
        count = tiling.row_tiles * tiling.token_blocks

        def registers(size: int, kind: str) -> Any:
            return T.alloc_buffer((max(1, size),), kind, scope="local")

        return cls(
            registers(kernel.stage * tiling.row_tiles * products.loads.words, "int32"),
            registers(2 * kernel.raws, "int32"),
            registers(products.operand * f.vector // 2 * tiling.row_tiles, "uint32"),
            registers(f.vector, "uint32"),
            registers(tiling.row_tiles * products.constants, "uint32"),
            registers(count * products.sums, products.kind),
            registers(count * 4, "float32"),
            registers(2, "float32"),
        )
