"""The weight of a convolution as its products read it: signed bytes, a run after the other."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import centred, code_quad, dot4
from compressor.codegen.kernels.convolution.direct import Feed
from compressor.codegen.kernels.convolution.feeds import RUN_BYTES, PatchFeed
from compressor.codegen.kernels.vector import splat
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS


def is_aligned(fmt: Format, feed: Feed) -> bool:
    """Whether runs of the weight are whole chunks of it, or what fills up the only run's last chunk meets zeros."""
    if isinstance(feed, PatchFeed):
        return True
    return feed.pixel == feed.geometry.channels and feed.run_bytes % fmt.chunk_columns == 0


def run_quads(feed: Feed) -> int:
    """Return the words of a run, filled up to whole registers of AMX."""
    return -(-feed.run_bytes // RUN_BYTES) * RUN_BYTES // 4


def load_weights(
    weights: Any, start: Any, to: Any, codes: Any, first: Any, n_tiles: int, feed: Feed, fmt: Format, isa: Isa
) -> None:
    """Emit signed bytes of some tiles, a run after the other, and minus what the 128 of each activation adds.

    Args:
        weights: int32 [tiles, runs * run_quads, 16], four bytes each.
        start: int32 [tiles, 16].
        to: the first tile of both that is written.
        codes: the stored weight's; its tiles from ``first`` on.
    """
    loader = _Loader(weights, start, to, codes, first, feed, fmt, isa)
    parts = [T.ramp(part, 1, isa.lanes) for part in range(0, TILE_ROWS, isa.lanes)]
    places = [(n, at) for n in range(n_tiles) for at in parts]
    for n, at in places:
        T.buffer_store(start, splat(0, isa.lanes), [to + n, at])
    if is_aligned(fmt, feed):
        loader.copy(places)
    else:
        for run in range(feed.runs):
            for slot in range(run_quads(feed)):
                for n, at in places:
                    loader.put(n, run * run_quads(feed) + slot, at, loader.gathered(n, run, slot, at))
    for n, at in places:
        T.buffer_store(start, splat(0, isa.lanes) - start[to + n, at], [to + n, at])


def load_kept(
    weights: Any, start: Any, codes: Any, first: Any, n_tiles: int, feed: Feed, fmt: Format, chunks: int, isa: Isa
) -> None:
    """Emit signed bytes of the columns that some tiles keep, one after the other, and minus what the 128 adds.

    Args:
        weights: int32 [n_tiles, words of all chunks, 16].
        start: int32 [n_tiles, 16].
        first: of the tiles.
        chunks: that are stored of a tile.
    """
    loader, quads = _Loader(weights, start, 0, codes, first, feed, fmt, isa), fmt.chunk_columns // 4
    places = [(n, T.ramp(part, 1, isa.lanes)) for n in range(n_tiles) for part in range(0, TILE_ROWS, isa.lanes)]
    for n, at in places:
        T.buffer_store(start, splat(0, isa.lanes), [n, at])
    with T.serial(0, chunks) as c:
        for quad in range(quads):
            for n, at in places:
                loader.put(n, c * quads + quad, at, loader.stored(n, c, quad, at))
    for n, at in places:
        T.buffer_store(start, splat(0, isa.lanes) - start[n, at], [n, at])


class _Loader:
    """Tiles of a weight, and where they go; arguments are those of :func:`load_weights`."""

    def __init__(
        self, weights: Any, start: Any, to: Any, codes: Any, first: Any, feed: Feed, fmt: Format, isa: Isa
    ) -> None:
        self.weights, self.start, self.to, self.codes, self.first = weights, start, to, codes, first
        self.feed, self.fmt, self.isa = feed, fmt, isa

    def copy(self, places: list[tuple[int, Any]]) -> None:
        """Emit whole chunks, and zeros behind those of a run."""
        lanes, quads, words = self.isa.lanes, self.fmt.chunk_columns // 4, run_quads(self.feed)
        run_chunks = -(-self.feed.run_bytes // self.fmt.chunk_columns)
        with T.serial(0, self.feed.runs) as run:
            with T.serial(0, run_chunks) as c:
                for quad in range(quads):
                    for n, at in places:
                        place = run * words + c * quads + quad
                        self.put(n, place, at, self.stored(n, run * run_chunks + c, quad, at))
            if run_chunks * quads < words:
                with T.serial(run_chunks * quads, words) as slot:
                    for n, at in places:
                        T.buffer_store(self.weights, splat(0, lanes), [self.to + n, run * words + slot, at])

    def put(self, n: int, place: Any, at: Any, four: Any) -> None:
        """Emit a word of each row, and add its bytes to the sums."""
        tile = self.to + n
        T.buffer_store(self.weights, four, [tile, place, at])
        added = splat(0x80808080, self.isa.lanes)
        total = dot4(self.start[tile, at], added, self.weights[tile, place, at], self.fmt, self.isa)
        T.buffer_store(self.start, total, [tile, at])

    def stored(self, n: int, chunk: Any, quad: int, at: Any) -> Any:
        """Return four columns of a chunk."""
        lanes = self.isa.lanes
        codes = code_quad(lambda word: self.codes[self.first + n, chunk, word, at], self.fmt, quad, lanes)
        return centred(codes, int(self.fmt.zero_point), lanes)

    def gathered(self, n: int, run: int, slot: int, at: Any) -> Any:
        """Return a word of a run, put together byte by byte."""
        lanes, quads = self.isa.lanes, self.fmt.chunk_columns // 4
        four = splat(0, lanes)
        for byte in range(4):
            column = self.feed.column(run, 4 * slot + byte)
            if column is not None:
                chunk, quad = divmod(column // 4, quads)
                lone = T.shift_right(self.stored(n, chunk, quad, at), splat(8 * (column % 4), lanes))
                lone = T.bitwise_and(lone, splat(0xFF, lanes))
                four = T.bitwise_or(four, T.shift_left(lone, splat(8 * byte, lanes)))
        return four
