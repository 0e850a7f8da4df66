"""Products of a convolution that skip groups of four inputs: time falls with what is left out.

The 32 rows of a pair of tiles keep the same groups, so a pair has a list of them, which a task makes of the stored bits
once for all of its outputs: where the four bytes of each lie behind those that an output reads first.  The weights of a
group, two registers, then meet the four bytes of each output of a block, as in
:mod:`compressor.codegen.kernels.convolution.dots`: 24 products take 12 broadcasts and three loads.  Were each tile to
keep groups of its own, they would take 24 broadcasts, and loads would be what limits the products: a sixth of the time
of 512 channels of 14 x 14.  A number of tiles that is odd is taken one by one, by blocks of twice as many outputs.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.convolution.direct import Feed
from compressor.codegen.kernels.convolution.dots import DotProducts
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.weights import load_kept, words_shape
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
        return f"blocks of {blocks.width} column are not the four bytes of a product; group_sparse leaves out 32x4"
    return f"{geometry.channels} channels are not a multiple of {_WORD}" if geometry.channels % _WORD else ""


class GroupProducts(DotProducts):
    """Sums over the groups that each pair of tiles of 16 rows keeps."""

    group_tiles: ClassVar[tuple[int, ...]] = (2, 1)
    most_outputs: ClassVar[int] = 24

    def __init__(self, feed: Feed, fmt: Format, tiles: int, isa: Isa) -> None:
        super().__init__(feed, fmt, tiles, isa)
        self.words = feed.geometry.columns // _WORD
        self.kept_words = fmt.stored_columns(feed.geometry.columns) // _WORD

    def start(self) -> None:
        """Emit the memory of a task: what tiles keep, and where their outputs find what that meets."""
        words = self.fmt.chunks(self.feed.geometry.columns) * self.fmt.chunk_columns // _WORD
        self._weights = T.alloc_buffer(words_shape(self.n_tiles, words, self.isa), "int32")
        self._places = T.alloc_buffer((list_room(self.kept_words),), "int32")
        (self._start,) = registers(1, (self.n_tiles, TILE_ROWS), "int32")

    def load(self, first: Any) -> None:
        """Emit what turns the weights of tiles into bytes, and the bits of their pair into places."""
        fmt, isa, codes, chunks = self.fmt, self.isa, self._codes, self.fmt.chunks(self.feed.geometry.columns)
        load_kept(self._weights, self._start, codes, first, self.n_tiles, self.feed, fmt, chunks, isa)
        list_kept(self._places, self._kept, first // 2, self.words, self.kept_words, isa)
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
            self.add_four(acc, places, source, begin, k)
