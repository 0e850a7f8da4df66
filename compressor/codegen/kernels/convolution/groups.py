"""Products of a convolution that skip groups of four inputs: time falls with what is left out.

The 16 rows of a tile keep the same groups, so a tile has a list of them, which a task makes of the stored bits once for
all of its outputs: where the four bytes of each lie behind those that an output reads first.  A group's weights, one
register, then meet the four bytes of each output of a block, as in :mod:`compressor.codegen.kernels.convolution.dots`.
There a broadcast of four bytes serves two or three tiles; here each tile reads other bytes, so that a block has one tile
and as many more outputs: 24 products take 24 broadcasts and a load of weights, which two loads a cycle just keep up
with.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import dot4
from compressor.codegen.kernels.convolution.direct import Feed
from compressor.codegen.kernels.convolution.dots import DotProducts
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.weights import load_kept
from compressor.codegen.kernels.linear.squeeze import list_kept, list_room
from compressor.codegen.kernels.vector import registers, splat
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_LANES = 16
_WORD = 4  # bytes


def supports(blocks: ColumnBlocks, geometry: Geometry) -> str:
    """Say why groups of a convolution cannot be skipped; an empty text if they can."""
    if blocks.width != _WORD:
        return f"blocks of {blocks.width} column are not the four bytes of a product; group_sparse leaves out 16x4"
    return f"{geometry.channels} channels are not a multiple of {_WORD}" if geometry.channels % _WORD else ""


class GroupProducts(DotProducts):
    """Sums over the groups that each tile of 16 rows keeps."""

    group_tiles: ClassVar[tuple[int, ...]] = (1,)
    most_outputs: ClassVar[int] = 24

    def __init__(self, feed: Feed, fmt: Format, tiles: int, isa: Isa) -> None:
        super().__init__(feed, fmt, tiles, isa)
        self.words = feed.geometry.columns // _WORD
        self.kept_words = fmt.stored_columns(feed.geometry.columns) // _WORD

    def start(self) -> None:
        """Emit the memory of a task: what a tile keeps, and where its outputs find what that meets."""
        words = self.fmt.chunks(self.feed.geometry.columns) * self.fmt.chunk_columns // _WORD
        self._weights = T.alloc_buffer((1, words, TILE_ROWS), "int32")
        self._places = T.alloc_buffer((list_room(self.kept_words),), "int32")
        (self._start,) = registers(1, (1, TILE_ROWS), "int32")

    def load(self, first: Any) -> None:
        """Emit what turns a tile's weights into bytes, and its bits into places."""
        fmt, isa = self.fmt, self.isa
        load_kept(
            self._weights, self._start, self._codes, first, self.feed, fmt, fmt.chunks(self.feed.geometry.columns), isa
        )
        list_kept(self._places, self._kept, first, self.words, self.kept_words, isa)
        run_words = self.feed.run_bytes // _WORD
        with T.serial(0, -(-self.kept_words // _LANES)) as k:
            here = T.ramp(k * _LANES, 1, _LANES)
            word = T.bind(T.min(self._places[here], splat(self.words - 1, _LANES)))  # whatever the bits are
            place = word * splat(_WORD, _LANES)
            for run in range(1, self.feed.runs):
                gap = self.feed.offset(run) - self.feed.offset(run - 1) - self.feed.run_bytes
                is_behind = word >= splat(run * run_words, _LANES)
                place = place + T.Select(is_behind, splat(gap, _LANES), splat(0, _LANES))
            T.buffer_store(self._places, place, [here])

    def add(self, acc: list[Any], places: list[tuple[int, Any]], source: Any, base: Any, q: Any) -> None:
        """Emit the products of the groups that are kept with a block of outputs, the first of which is ``q``."""
        with T.serial(0, self.kept_words) as k:
            begin = T.bind(base + q * self.feed.step + T.Cast("int64", self._places[k]))
            for t, total in enumerate(acc):
                place = T.ramp(begin + t * self.feed.step, 1, _WORD)
                four = T.broadcast(T.reinterpret(source[place], dtype="int32"), self.isa.lanes)
                for n, at in places:
                    weight = self._weights[n, k, at]
                    T.buffer_store(total, dot4(total[n, at], four, weight, self.fmt, self.isa), [n, at])
