"""Products of a convolution by AMX: 16 outputs by 16 rows of the weight a register."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import amx
from compressor.codegen.kernels.amx import REGISTERS, ROW_BYTES, SIDE
from compressor.codegen.kernels.convolution.feeds import RUN_BYTES, BandFeed
from compressor.codegen.kernels.convolution.weights import load_weights, run_quads
from compressor.codegen.kernels.vector import registers
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_QUADS = RUN_BYTES // 4


class End(Protocol):
    """What becomes of sums."""

    def start_tiles(self, first: Any, n_tiles: int) -> None:
        """Prepare for the outputs of ``n_tiles`` tiles of rows from ``first`` on."""

    def write(self, q: Any, first: Any, total: Callable[[int, Any], Any]) -> None:
        """Finish output ``q`` of the band; ``total`` (tile, rows) has its sums, int32."""


class TileProducts:
    """Sums over what outputs read, of 16 rows a register.

    Attributes:
        band: rows of outputs of a task.
        chunks: parts of the weight's rows; here each task has all of them.
    """

    chunks = 1

    def __init__(self, feed: BandFeed, fmt: Format, tiles: int, isa: Isa) -> None:
        self.feed, self.fmt, self.tiles, self.isa, self.band = feed, fmt, tiles, isa, feed.band
        self.run_quads = run_quads(feed)
        self.n_tiles = 2 if tiles % 2 == 0 else 1
        self.sides = min(2, feed.blocks(feed.band))
        self.steps = feed.runs * self.run_quads // _QUADS
        self.is_resident = tiles == 1 and self.steps <= REGISTERS // 2  # all weights stay in registers
        # After those that hold sums: the first registers of activations, and of weights.
        self._act, self._held = 2 * self.n_tiles, 2 * self.n_tiles + 2
        self._parts = [T.ramp(part, 1, isa.lanes) for part in range(0, TILE_ROWS, isa.lanes)]

    def prepare(self, codes: Any, _kept: None) -> None:
        """Emit what turns all weights into signed bytes, before the tasks."""
        self._weights = T.alloc_buffer((self.tiles, self.feed.runs * self.run_quads, TILE_ROWS), "int32")
        self._start = T.alloc_buffer((self.tiles, TILE_ROWS), "int32")
        with T.serial(0, self.tiles // self.n_tiles) as g:
            first = g * self.n_tiles
            load_weights(self._weights, self._start, first, codes, first, self.n_tiles, self.feed, self.fmt, self.isa)

    def multiply(self, band: Any, _base: Any, _rows: Any, _chunk: Any, end: End) -> None:
        """Compute the outputs of a band from its bytes."""
        sums = T.alloc_buffer((self.sides, self.n_tiles, SIDE, TILE_ROWS), "int32")
        amx.configure()
        for step in range(self.steps if self.is_resident else 0):
            amx.load(self._held + step, self._weights[0, step * _QUADS, 0], ROW_BYTES)
        blocks = -(-self.feed.blocks(self.feed.band) // self.sides)
        with T.serial(0, blocks) as i, T.serial(0, self.tiles // self.n_tiles) as g:
            end.start_tiles(g * self.n_tiles, self.n_tiles)
            self._by_registers(band, self._weights, self._start, sums, i * self.sides, g * self.n_tiles, end)
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


def _of_block(sums: Any, beginning: Any, side: int, output: Any, n: int, at: Any) -> Any:
    return sums[side, n, output, at] + beginning[n, at]
