"""Products of a convolution by dot products of four bytes a lane: blocks of outputs that registers hold.

A task has some rows of outputs, its band, and some groups of tiles of 16 rows of the weight.  A group's weights become
signed bytes in the first-level cache; then a block of neighbouring outputs by the group's tiles is summed in registers,
where each loaded weight serves all outputs and each broadcast of four bytes serves all tiles.  The last block of a band
ends where the band ends: it may compute outputs again, and writes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.convolution.direct import DirectFeed, Feed
from compressor.codegen.kernels.convolution.weights import (
    activation_words,
    add_products,
    load_weights,
    run_quads,
    words_of,
    words_shape,
)
from compressor.codegen.kernels.vector import registers
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_GROUP_TILES = (2, 3, 1)
_MOST_OUTPUTS = 16
_CHUNKS = 4
"""Parts of the tiles at least, where an image is one band: threads share them."""
_SMALL = 1 << 20
"""Products below which threads take longer to wake."""


def takes_lanes(isa: Isa) -> bool:
    """Tell whether kernels load sixteen columns of activations at once, and multiply by one lane of the register."""
    return isa.lanes == 4 and isa.registers == 32


class End(Protocol):
    """Ends of outputs: how sums become what is stored."""

    def start_tiles(self, first: Any, n_tiles: int) -> None:
        """Prepare for the outputs of ``n_tiles`` tiles of rows from ``first`` on."""

    def put(self, output: Any, q: Any, first: Any, total: Callable[[int, Any], Any]) -> None:
        """Finish an output; as of the end of a convolution."""


class DotProducts:
    """Sums over what outputs read, of 16 rows of the weight a tile.

    Attributes:
        band: rows of outputs of a task.
        chunks: parts of the weight's rows; each is a task of its own.
    """

    group_tiles: ClassVar[tuple[int, ...]] = _GROUP_TILES
    most_outputs: ClassVar[int] = _MOST_OUTPUTS

    def __init__(self, feed: Feed, fmt: Format, tiles: int, isa: Isa) -> None:
        self.feed, self.fmt, self.isa = feed, fmt, isa
        # Words of int16 would fill the first-level cache with a pair of tiles, and lone ones give each load of weights
        # to three outputs: 1.1 to 1.8 times the products a second of a pair and one output.
        # Lanes of activations are free, and lone tiles load the fewest weights.
        is_alone = isa.dot2 is not None or (takes_lanes(isa) and self.group_tiles is _GROUP_TILES)
        self.n_tiles = next(n for n in ((1,) if is_alone else self.group_tiles) if tiles % n == 0)
        self.groups = tiles // self.n_tiles
        self._parts = [T.ramp(part, 1, isa.lanes) for part in range(0, TILE_ROWS, isa.lanes)]
        self.band, (high, wide) = feed.band, feed.geometry.outputs
        self.chunks = 1
        if self.band == high and high * wide * feed.geometry.columns * tiles * TILE_ROWS >= _SMALL:
            # Each chunk rounds its band again, if not all is rounded before.
            least = _CHUNKS if isinstance(feed, DirectFeed) else 2
            divisors = [n for n in range(1, self.groups + 1) if self.groups % n == 0]
            self.chunks = min(divisors, key=lambda n: (n < least, n % 2, abs(n - least)))
        self.is_flat = feed.pitch == wide
        last = high - (-(-high // self.band) - 1) * self.band
        length, shortest = (self.band * wide, last * wide) if self.is_flat else (wide, wide)
        sums = isa.registers * 3 // 4 // len(self._parts)
        self.outputs = _block(length, max(1, min(self.most_outputs, sums // self.n_tiles, shortest)))

    def prepare(self, codes: Any, kept: Any) -> None:
        """Keep the stored weight: each task has its own part of it to turn into bytes.

        Args:
            kept: which blocks it stores; None where it stores all.
        """
        self._codes, self._kept = codes, kept

    def start(self) -> None:
        """Emit the memory of a task."""
        quads = self.feed.runs * run_quads(self.feed)
        self._weights = T.alloc_buffer(words_shape(self.n_tiles, quads, self.isa), "int32")
        (self._start,) = registers(1, (self.n_tiles, TILE_ROWS), "int32")

    def load(self, first: Any) -> None:
        """Emit what turns a group's weights into bytes."""
        load_weights(self._weights, self._start, 0, self._codes, first, self.n_tiles, self.feed, self.fmt, self.isa)

    def add(self, acc: list[Any], places: list[tuple[int, Any]], source: Any, base: Any, q: Any) -> None:
        """Emit all products of a block of outputs, the first of which is ``q``."""
        whole = self.feed.run_bytes // 16 if takes_lanes(self.isa) else 0
        with T.serial(0, self.feed.runs) as run:
            begin = T.bind(base + q * self.feed.step + self.feed.offset(run))
            first = run * run_quads(self.feed)
            if whole:
                with T.serial(0, whole) as k:
                    self._add_sixteen(acc, places, source, begin + 16 * k, first + 4 * k)
            if 4 * whole < -(-self.feed.run_bytes // 4):
                with T.serial(4 * whole, -(-self.feed.run_bytes // 4)) as quad:
                    self.add_four(acc, places, source, begin + 4 * quad, first + quad)

    def _add_sixteen(self, acc: list[Any], places: list[tuple[int, Any]], source: Any, begin: Any, quad: Any) -> None:
        """As :meth:`add_four`, of four times four columns."""
        acts = []
        for t in range(len(acc)):
            place = T.ramp(begin + t * self.feed.step, 1, 16)
            acts += [T.bind(act) for act in activation_words(T.reinterpret(source[place], dtype="int32x4"), self.isa)]
        for k in range(4):
            for n, at in places:
                weight = T.bind(self._weights[n, quad + k, at])
                for total, act in zip(acc, acts, strict=True):
                    add_products(total, [n, at], [T.Shuffle([act], [k] * 4)], [weight], self.fmt, self.isa)

    def add_four(self, acc: list[Any], places: list[tuple[int, Any]], source: Any, begin: Any, quad: Any) -> None:
        """Emit the products of four columns with a block of outputs, the first of which reads from ``begin`` on.

        Args:
            quad: the columns' place among the weights.
        """
        words = words_of(self.isa)
        for t, total in enumerate(acc):
            place = T.ramp(begin + t * self.feed.step, 1, 4)
            four = T.broadcast(T.reinterpret(source[place], dtype="int32"), self.isa.lanes)
            acts = activation_words(four, self.isa)
            for n, at in places:
                weights = [self._weights[n, quad * words + word, at] for word in range(words)]
                add_products(total, [n, at], acts, weights, self.fmt, self.isa)

    def multiply(self, source: Any, base: Any, rows: Any, chunk: Any, end: End) -> None:
        """Compute the outputs of a band and a chunk of the weight's rows.

        Args:
            source: int8; what the band reads begins at ``base``.
            rows: of outputs that the band has.
        """
        wide, count = self.feed.geometry.outputs[1], self.outputs
        self.start()
        each = self.groups // self.chunks
        with T.serial(0, each) as g:
            first = (chunk * each + g) * self.n_tiles
            self.load(first)
            end.start_tiles(first, self.n_tiles)
            if self.is_flat:
                length = rows * wide
                with T.serial(0, (length + (count - 1)) // count) as k:
                    q = T.min(k * count, length - count)
                    self._block(source, base, q, q, first, end)
            else:
                with T.serial(0, rows) as r, T.serial(0, -(-wide // count)) as k:
                    column = T.min(k * count, T.int64(wide - count))
                    self._block(source, base, r * self.feed.pitch + column, r * wide + column, first, end)

    def _block(self, source: Any, base: Any, q: Any, output: Any, first: Any, end: End) -> None:
        """Emit a block of outputs, of which the first is ``q`` of the feed and ``output`` of the band."""
        count = self.outputs
        acc = registers(count, (self.n_tiles, TILE_ROWS), "int32")
        places = [(n, at) for n in range(self.n_tiles) for at in self._parts]
        for t in range(count):
            for n, at in places:
                T.buffer_store(acc[t], self._start[n, at], [n, at])
        self.add(acc, places, source, base, q)
        for t in range(count):
            end.put(output + t, q + t, first, partial(_sums, acc[t]))


def _block(length: int, most: int) -> int:
    """Return how many neighbours make a block: few in vain at the end, and few loads of weights."""
    return min(range(-(-most // 2), most + 1), key=lambda count: -(-length // count) * (2 * count + 1))


def _sums(acc: Any, n: int, at: Any) -> Any:
    return acc[n, at]
