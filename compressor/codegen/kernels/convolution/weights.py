"""The weight of a convolution as its products read it: signed bytes, a run after the other."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import centred, code_quad, dot4, less_128
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


def words_of(isa: Isa) -> int:
    """Return the words that four bytes of a row of the weight become: two where products are those of int16."""
    return 1 if isa.dot2 is None else 2


def words_shape(n_tiles: int, quads: int, isa: Isa) -> tuple[int, ...]:
    """Return the shape of the weights of some tiles, ``quads`` times four columns, int32."""
    return n_tiles, quads * words_of(isa), TILE_ROWS


def activation_words(four: Any, isa: Isa) -> list[Any]:
    """Return what the words of four bytes of the weight meet: as many, of four bytes in every lane."""
    if isa.signed4 is not None:
        return [less_128(four, isa.lanes)]
    if isa.dot2 is None:
        return [four]
    return [
        T.bitwise_and(part, splat(0x00FF00FF, isa.lanes)) for part in (four, T.shift_right(four, splat(8, isa.lanes)))
    ]


def add_products(total: Any, at: list[Any], acts: list[Any], weights: list[Any], fmt: Format, isa: Isa) -> None:
    """Emit the addition of the products of :func:`activation_words` with the words of four columns to sums."""
    value = total[tuple(at)]
    for act, weight in zip(acts, weights, strict=True):
        if isa.signed4 is not None:  # which takes a lane of its second operand
            value = isa.signed4(value, weight, act)
        else:
            value = dot4(value, act, weight, fmt, isa) if isa.dot2 is None else isa.dot2(value, act, weight)
    T.buffer_store(total, value, at)


def load_weights(
    weights: Any, start: Any, to: Any, codes: Any, first: Any, n_tiles: int, feed: Feed, fmt: Format, isa: Isa
) -> None:
    """Emit signed bytes of some tiles, a run after the other, and minus what the 128 of each activation adds.

    Args:
        weights: int32 [tiles, runs * run_quads, 16], four bytes each; of :func:`words_shape`.
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
                    loader.gather(n, run, slot, at)
    for n, at in places:
        T.buffer_store(start, splat(0, isa.lanes) - start[to + n, at], [to + n, at])


def load_kept(
    weights: Any, start: Any, codes: Any, first: Any, n_tiles: int, feed: Feed, fmt: Format, chunks: int, isa: Isa
) -> None:
    """Emit signed bytes of the columns that some tiles keep, one after the other, and minus what the 128 adds.

    Args:
        weights: int32 [n_tiles, words of all chunks, 16]; of :func:`words_shape`.
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
                        self._store(n, run * words + slot, at, splat(0, lanes))

    def put(self, n: int, place: Any, at: Any, four: Any) -> None:
        """Emit a word of each row, and add its bytes to the sums."""
        words = self._store(n, place, at, four)
        acts = activation_words(splat(0x80808080, self.isa.lanes), self.isa)
        add_products(self.start, [self.to + n, at], acts, words, self.fmt, self.isa)

    def _store(self, n: int, place: Any, at: Any, four: Any) -> list[Any]:
        """Emit the words of four bytes of each row, and return them as they are stored.

        Of pairs of int16, the first has the bytes 0 and 2, the second 1 and 3: shifts part activations so.
        """
        isa, places = self.isa, [place]
        words = [four]
        if isa.dot2 is not None:
            kind, eight = f"int16x{2 * isa.lanes}", T.broadcast(T.int16(8), 2 * isa.lanes)
            odd = T.reinterpret(four, dtype=kind)
            halves = (T.shift_right(T.shift_left(odd, eight), eight), T.shift_right(odd, eight))
            words = [T.reinterpret(half, dtype=f"int32x{isa.lanes}") for half in halves]
            places = [2 * place, 2 * place + 1]
        for word, where in zip(words, places, strict=True):
            T.buffer_store(self.weights, word, [self.to + n, where, at])
        return [self.weights[self.to + n, where, at] for where in places]

    def stored(self, n: int, chunk: Any, quad: int, at: Any) -> Any:
        """Return four columns of a chunk."""
        lanes = self.isa.lanes
        codes = code_quad(lambda word: self.codes[self.first + n, chunk, word, at], self.fmt, quad, lanes)
        return centred(codes, int(self.fmt.zero_point), lanes)

    def gather(self, n: int, run: int, slot: int, at: Any) -> None:
        """Emit a word of a run, put together byte by byte.

        Words of zeros alone are not summed: LLVM 22 fails to fold WebAssembly's products of constants.
        """
        lanes, quads, place = self.isa.lanes, self.fmt.chunk_columns // 4, run * run_quads(self.feed) + slot
        four = splat(0, lanes)
        for byte in range(4):
            column = self.feed.column(run, 4 * slot + byte)
            if column is not None:
                chunk, quad = divmod(column // 4, quads)
                lone = T.shift_right(self.stored(n, chunk, quad, at), splat(8 * (column % 4), lanes))
                lone = T.bitwise_and(lone, splat(0xFF, lanes))
                four = T.bitwise_or(four, T.shift_left(lone, splat(8 * byte, lanes)))
        if all(self.feed.column(run, 4 * slot + byte) is None for byte in range(4)):
            self._store(n, place, at, four)
        else:
            self.put(n, place, at, four)
