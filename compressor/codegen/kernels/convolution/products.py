"""Products of a convolution: sums over what outputs read, of 16 rows of the weight a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import amx
from compressor.codegen.kernels.amx import REGISTERS, ROW_BYTES, SIDE
from compressor.codegen.kernels.codes import centred, code_quad, dot4
from compressor.codegen.kernels.convolution.feeds import RUN_BYTES, Feed, PatchFeed
from compressor.codegen.kernels.vector import registers, splat
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_QUADS = RUN_BYTES // 4
_TOKENS = 4  # outputs that share a loaded weight, without AMX
_MOST_TILES = 4


class End(Protocol):
    """What becomes of sums."""

    def start_tiles(self, first: Any, n_tiles: int) -> None:
        """Prepare for the outputs of ``n_tiles`` tiles of rows from ``first`` on."""

    def write(self, q: Any, first: Any, total: Callable[[int, Any], Any]) -> None:
        """Finish output ``q`` of the band; ``total`` (tile, rows) has its sums, int32."""


def is_aligned(fmt: Format, feed: Feed) -> bool:
    """Whether runs of the weight are whole chunks of it, or what fills up the only run's last chunk meets zeros."""
    if isinstance(feed, PatchFeed):
        return True
    return feed.pixel == feed.geometry.channels and feed.run_bytes % fmt.chunk_columns == 0


class BandProducts:
    """Sums over what outputs read, of 16 rows a vector."""

    def __init__(self, feed: Feed, fmt: Format, tiles: int, isa: Isa) -> None:
        self.feed, self.fmt, self.tiles, self.isa = feed, fmt, tiles, isa
        self.run_quads = -(-feed.run_bytes // RUN_BYTES) * _QUADS
        most = 2 if isa.matrix_unit == "amx" else _MOST_TILES * isa.lanes // TILE_ROWS
        self.n_tiles = next(n for n in range(min(most, tiles), 0, -1) if tiles % n == 0)
        self.sides = min(2, feed.blocks(feed.band))
        self.steps = feed.runs * self.run_quads // _QUADS
        self.is_resident = tiles == 1 and self.steps <= REGISTERS // 2  # all weights stay in registers
        # Of AMX, after those that hold sums: the first registers of activations, and of weights.
        self._act, self._held = 2 * self.n_tiles, 2 * self.n_tiles + 2
        self._parts = [T.ramp(part, 1, isa.lanes) for part in range(0, TILE_ROWS, isa.lanes)]

    def load_weights(self, weights: Any, start: Any, codes: Any) -> None:
        """Signed bytes of all weights, a run after the other, and minus what the 128 of each activation adds.

        Args:
            weights: int32 [tiles, runs * run_quads, 16], four bytes each.
            start: int32 [tiles, 16].
        """
        fmt, lanes, quads = self.fmt, self.isa.lanes, self.fmt.chunk_columns // 4
        run_chunks = -(-self.feed.run_bytes // fmt.chunk_columns)

        def stored(tile: Any, chunk: Any, quad: int, at: Any) -> Any:
            return centred(code_quad(lambda w: codes[tile, chunk, w, at], fmt, quad, lanes), int(fmt.zero_point), lanes)

        def put(tile: Any, place: Any, at: Any, four: Any) -> None:
            T.buffer_store(weights, four, [tile, place, at])
            sum_ = dot4(start[tile, at], splat(0x80808080, lanes), weights[tile, place, at], fmt, self.isa)
            T.buffer_store(start, sum_, [tile, at])

        def gathered(tile: Any, run: int, slot: int, at: Any) -> Any:
            four = splat(0, lanes)
            for byte in range(4):
                column = self.feed.column(run, 4 * slot + byte)
                if column is not None:
                    chunk, quad = divmod(column // 4, quads)
                    lone = T.shift_right(stored(tile, chunk, quad, at), splat(8 * (column % 4), lanes))
                    lone = T.bitwise_and(lone, splat(0xFF, lanes))
                    four = T.bitwise_or(four, T.shift_left(lone, splat(8 * byte, lanes)))
            return four

        with T.serial(0, self.tiles) as tile:
            for at in self._parts:
                T.buffer_store(start, splat(0, lanes), [tile, at])
                if is_aligned(fmt, self.feed):
                    with T.serial(0, self.feed.runs) as run:
                        with T.serial(0, run_chunks) as c:
                            for quad in range(quads):
                                place = run * self.run_quads + c * quads + quad
                                put(tile, place, at, stored(tile, run * run_chunks + c, quad, at))
                        with T.serial(run_chunks * quads, self.run_quads) as slot:
                            T.buffer_store(weights, splat(0, lanes), [tile, run * self.run_quads + slot, at])
                else:
                    for run in range(self.feed.runs):
                        for slot in range(self.run_quads):
                            put(tile, run * self.run_quads + slot, at, gathered(tile, run, slot, at))
                T.buffer_store(start, splat(0, lanes) - start[tile, at], [tile, at])

    def multiply(self, band: Any, weights: Any, start: Any, end: End) -> None:
        """Compute the outputs of a band from its bytes."""
        blocks = -(-self.feed.blocks(self.feed.band) // self.sides)
        if self.isa.matrix_unit != "amx":
            with T.serial(0, blocks) as i, T.serial(0, self.tiles // self.n_tiles) as g:
                end.start_tiles(g * self.n_tiles, self.n_tiles)
                self._by_dots(band, weights, start, i * self.sides, g * self.n_tiles, end)
            return
        sums = T.alloc_buffer((self.sides, self.n_tiles, SIDE, TILE_ROWS), "int32")
        amx.configure()
        for step in range(self.steps if self.is_resident else 0):
            amx.load(self._held + step, weights[0, step * _QUADS, 0], ROW_BYTES)
        with T.serial(0, blocks) as i, T.serial(0, self.tiles // self.n_tiles) as g:
            end.start_tiles(g * self.n_tiles, self.n_tiles)
            self._by_registers(band, weights, start, sums, i * self.sides, g * self.n_tiles, end)
        amx.release()

    def _by_registers(self, band: Any, weights: Any, start: Any, sums: Any, block: Any, first: Any, end: End) -> None:
        pairs = [(s, n) for s in range(self.sides) for n in range(self.n_tiles)]
        each = self.run_quads // _QUADS

        def step(run: Any, k: Any, held: Sequence[int]) -> None:
            for s in range(self.sides):
                place = self.feed.first(block + s) * self.feed.step + self.feed.offset(run) + k * RUN_BYTES
                amx.load(self._act + s, band[place], self.feed.step)
                for n in range(self.n_tiles):
                    amx.tile("tdpbusd", T.uint8(s * self.n_tiles + n), T.uint8(self._act + s), T.uint8(held[n]))

        for i in range(len(pairs)):
            amx.tile("tilezero", T.uint8(i))
        if self.is_resident:
            for i in range(self.steps):
                step(i // each, i % each, [self._held + i])
        else:
            with T.serial(0, self.feed.runs) as run, T.serial(0, each) as k:
                for n in range(self.n_tiles):
                    amx.load(self._held + n, weights[first + n, run * self.run_quads + k * _QUADS, 0], ROW_BYTES)
                step(run, k, range(self._held, self._held + self.n_tiles))
        for i, (s, n) in enumerate(pairs):
            amx.tile("tilestored64", T.uint8(i), T.address_of(sums[s, n, 0, 0]), T.int64(4 * TILE_ROWS))
        (beginning,) = registers(1, (self.n_tiles, TILE_ROWS), "int32")
        for n in range(self.n_tiles):
            for at in self._parts:
                T.buffer_store(beginning, start[first + n, at], [n, at])
        for s in range(self.sides):
            with T.serial(0, SIDE) as r:
                end.write(self.feed.first(block + s) + r, first, partial(_of_block, sums, beginning, s, r))

    def _by_dots(self, band: Any, weights: Any, start: Any, block: Any, first: Any, end: End) -> None:
        lanes = self.isa.lanes
        with T.serial(0, self.sides * SIDE // _TOKENS) as group:
            q = self.feed.first(block + group // (SIDE // _TOKENS)) + group % (SIDE // _TOKENS) * _TOKENS
            acc = registers(_TOKENS, (self.n_tiles, TILE_ROWS), "int32")
            for t in range(_TOKENS):
                for n in range(self.n_tiles):
                    for at in self._parts:
                        T.buffer_store(acc[t], start[first + n, at], [n, at])
            with T.serial(0, self.feed.runs) as run, T.serial(0, -(-self.feed.run_bytes // 4)) as quad:
                for t in range(_TOKENS):
                    place = T.ramp((q + t) * self.feed.step + self.feed.offset(run) + 4 * quad, 1, 4)
                    four = T.broadcast(T.reinterpret(band[place], dtype="int32"), lanes)
                    for n in range(self.n_tiles):
                        for at in self._parts:
                            weight = weights[first + n, run * self.run_quads + quad, at]
                            T.buffer_store(acc[t], dot4(acc[t][n, at], four, weight, self.fmt, self.isa), [n, at])
            for t in range(_TOKENS):
                end.write(q + t, first, partial(_of_output, acc[t]))


def _of_block(sums: Any, beginning: Any, side: int, output: Any, n: int, at: Any) -> Any:
    return sums[side, n, output, at] + beginning[n, at]


def _of_output(acc: Any, n: int, at: Any) -> Any:
    return acc[n, at]
