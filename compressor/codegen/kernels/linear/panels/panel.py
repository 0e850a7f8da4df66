"""Prompts by registers of four lanes: a task turns its tile's codes into bytes once, in the first-level cache.

Where registers are short, what unpacks codes and spreads activations takes as many instructions as the products.  So a
panel of bytes is made first, and four bytes of activations are a lane of a register that products read by its number::

    codes    int32 [chunks, words, 16]       as stored, a row a lane
    by dot4  int32 [columns / 4, 16]         four columns a word, a row a lane
    by mmla  int32 [columns / 8, 8, 4]       eight columns of a row, then of the next: 2 x 8 by 8 x 2 an instruction

The sums of an ``mmla`` are those of two rows by two tokens; they are parted at the end of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import centred, code_quad
from compressor.codegen.kernels.linear.blocks import vector_block
from compressor.codegen.kernels.linear.digits import DigitProducts, by_eight
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.weights import Weight
from compressor.codegen.kernels.vector import splat
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.formats.planes import UpperPlane

_LANES = 4
_STEP = 16
"""Columns of a chunk here: those of a register of activations."""


def supports(body: Products) -> str:
    """Say why prompts do not take panels; an empty text where they do."""
    fmt, isa = body.fmt, body.isa
    if isa.lanes != _LANES or (isa.signed4 is None and isa.mmla is None):
        return f"{isa.name} has no products of a register's lane"
    if type(body) not in (Products, DigitProducts) or not body.integer or not body.has_zeros:
        return f"{fmt.name} does not multiply bytes of all columns"
    if fmt.extra(UpperPlane) is not None:
        return "codes are the upper halves of others"
    return f"groups of {body.group_columns} columns" if body.groups > 1 and body.group_columns % _STEP else ""


def tokens_of(body: Products, wanted: int) -> int:
    """Return the tokens of a block: pairs where products take two."""
    return wanted + wanted % 2 if body.isa.mmla is not None and body.digits == 1 else wanted


@dataclass(frozen=True)
class _Panel:
    """A task's codes, read by the tile's number and chunk as stored codes are."""

    words: Any

    def __getitem__(self, place: tuple[Any, ...]) -> Any:
        return self.words[place[-2:]]


class PanelProducts(Products):
    """Products of a panel by ``signed4``: a register of activations has four times four columns."""

    def __init__(self, rows: int, columns: int, fmt: Format, isa: Isa) -> None:
        super().__init__(rows, columns, fmt, isa)
        self.columns, self.chunks, self.group_chunks = columns, -(-columns // _STEP), -(-self.group_columns // _STEP)
        if fmt.symmetric:  # the zero point is subtracted once, so that sums begin with zero
            self.less = int(fmt.zero_point - self.half)
        elif fmt.bits == 8:
            self.less = 128

    def words(self) -> tuple[int, int]:
        """Return the panel's shape, filled up to whole chunks of both kinds."""
        return lcm(_STEP, self.fmt.chunk_columns) * self._parts // 4, TILE_ROWS

    @property
    def _parts(self) -> int:
        return -(-self.columns // lcm(_STEP, self.fmt.chunk_columns))

    def unpack(self, panel: Any, codes: Any, tile: Any) -> None:
        """Emit what writes a tile's panel; behind the last chunk it repeats that, which meets zeros."""
        each, chunk = lcm(_STEP, self.fmt.chunk_columns), self.fmt.chunk_columns
        last = self.fmt.chunks(self.columns) - 1
        with T.serial(0, self._parts) as s:
            for two in range(each // 8):
                for part in range(0, TILE_ROWS, _LANES):
                    pair = []
                    for quad in (2 * two, 2 * two + 1):
                        which = T.min(s * (each // chunk) + 4 * quad // chunk, last)
                        at = T.ramp(part, 1, _LANES)
                        pair.append(self._stored(codes, tile, which, 4 * quad % chunk // 4, at))
                    self._store(panel, s * (each // 8) + two, part, pair)

    def _stored(self, codes: Any, tile: Any, chunk: Any, quad: int, at: Any) -> Any:
        value = code_quad(lambda word: codes[tile, chunk, word, at], self.fmt, quad, _LANES)
        return T.bind(centred(value, self.less, _LANES) if self.less else value)

    def _store(self, panel: Any, two: Any, part: int, pair: list[Any]) -> None:
        for i, value in enumerate(pair):
            T.buffer_store(panel, value, [2 * two + i, T.ramp(part, 1, _LANES)])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add sixteen columns of a tile and every token."""
        times = self.isa.signed4
        assert n_tiles == 1 and times is not None
        given = self._operands(a, m0, c, n_tokens)
        for quad in range(_STEP // 4):
            for part in range(0, TILE_ROWS, _LANES):
                at = T.ramp(part, 1, _LANES)
                word = T.bind(codes[first, 4 * c + quad, at])
                for t, row, four in given:
                    value = times(acc[t][row, at], word, T.Shuffle([four], [quad] * _LANES))
                    T.buffer_store(acc[t], value, [row, at])

    def _operands(self, a: Any, m0: Any, c: Any, n_tokens: int) -> list[tuple[int, int, Any]]:
        """Return registers of activations, each with its token and the row of that token's sums."""
        return [(t, 0, self._activations(a, m0 + t, c, "int32x4")) for t in range(n_tokens)]

    @staticmethod
    def _activations(a: Any, token: Any, c: Any, kind: str) -> Any:
        return T.bind(T.reinterpret(a[token, T.ramp(c * _STEP, 1, _STEP)], dtype=kind))


class MatrixProducts(PanelProducts):
    """Products of a panel by ``mmla``: eight columns of two rows and two tokens, whose activations are mixed."""

    def _store(self, panel: Any, two: Any, part: int, pair: list[Any]) -> None:
        for half in range(2):
            rows = T.Shuffle(pair, [2 * half, _LANES + 2 * half, 2 * half + 1, _LANES + 2 * half + 1])
            k = part // 2 + half  # the pair's number
            T.buffer_store(panel, rows, [2 * two + k // 4, T.ramp(k % 4 * _LANES, 1, _LANES)])

    def start_group(
        self, acc: Any, sums: Any, zeros: Any, first: Any, m0: Any, g: Any, n_tokens: int, n_tiles: int
    ) -> None:
        """Set the sums to zero, and keep what the end of the group adds."""
        self._zeros = [self.minus_zeros(sums[m0 + t, g], zeros, first, g, at) for t, _, at in self.lanes(n_tokens, 1)]
        for t, _, at in self.lanes(n_tokens, 1):
            for row in range(self.accumulators):
                T.buffer_store(acc[t], splat(0, _LANES), [row, at])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add sixteen columns: of tokens t and t + 1, ``acc[t]`` has the rows 4 i and 4 i + 1, the next the others."""
        assert n_tiles == 1 and self.isa.mmla is not None
        for half in range(2):
            acts = [self._activations(a, row, 2 * c + half, "int8x16") for row in self._rows(m0, n_tokens)]
            for k in range(TILE_ROWS // 2):
                word = T.bind(codes[first, 4 * c + 2 * half + k // 4, T.ramp(k % 4 * _LANES, 1, _LANES)])
                at = T.ramp(k // 2 * _LANES, 1, _LANES)
                for p, two in enumerate(acts):
                    t, row = self._sums(p, k)
                    T.buffer_store(acc[t], self.isa.mmla(acc[t][row, at], word, two), [row, at])

    def _rows(self, m0: Any, n_tokens: int) -> list[Any]:
        """Return the rows of activations that a block reads: one for two tokens."""
        return [(m0 + t) // 2 for t in range(0, n_tokens, 2)]

    def _sums(self, p: int, k: int) -> tuple[int, int]:
        """Return the token and the row of its sums that take the products of row ``p`` and the pair ``k`` of rows."""
        return 2 * p + k % 2, 0

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Part the sums of two tokens, and go on as without matrices."""
        zeros = iter(self._zeros)
        minus = {(t, int(at.base)): next(zeros) for t, _, at in self.lanes(n_tokens, n_tiles)}
        for t in range(0, n_tokens, 2):
            for part in range(0, TILE_ROWS, _LANES):
                at = T.ramp(part, 1, _LANES)
                both = [T.bind(acc[t + i][0, at]) for i in range(2)]
                for i in range(2):
                    value = T.Shuffle(both, [i, 2 + i, _LANES + i, _LANES + 2 + i])
                    T.buffer_store(acc[t + i], value + minus[t + i, part], [0, at])
        super().end_group(out, acc, sums, scales, factor, first, m0, g, n_tokens, n_tiles)


def by_panels(shape: Any, store: Any, kind: type[PanelProducts]) -> Any:
    """Make a macro that computes all outputs of many tokens, a tile of rows a task.

    Args:
        shape: the kernel's :class:`compressor.codegen.kernels.linear.packed.Shape`.
        kind: of products, those of the kernel's own.
    """
    weights, step = shape.weights, shape.step
    body = kind(weights.rows[0], shape.columns, shape.body.fmt, shape.body.isa)
    block, mix = vector_block(replace(shape, body=body, given=body), store), _mixing(body.chunks)

    @T.inline
    def multiply(at, tokens, _turned):
        for i in T.parallel(weights.steps(1)):
            weight, first = T.meta_var(weights.of_task(i, 1))
            panel = T.alloc_buffer(body.words(), "int32")
            body.unpack(panel, weight.codes, first)
            for j in range((tokens + (step - 1)) // step):
                block(at, tokens, _of_panel(weight, panel), first, 1, j * step, step)

    @T.inline
    def by_pairs(at, tokens, turned):
        pairs = T.alloc_buffer(((tokens + step) // 2, 2 * _STEP * body.chunks), "int8")
        for p in T.parallel((tokens + 1) // 2):
            mix(pairs, at.planes, p)
        mixed = T.meta_var(replace(at, planes=pairs))
        multiply(mixed, tokens, turned)

    return by_pairs if kind is MatrixProducts else multiply


def _mixing(chunks: int) -> Any:
    """Make a macro that mixes the activations of two tokens: eight columns of one, then of the other."""

    @T.inline
    def mix(pairs, a, p):
        for c in range(chunks):
            both = T.meta_var([T.bind(a[2 * p + t, T.ramp(c * _STEP, 1, _STEP)]) for t in range(2)])
            for half in T.unroll(2):
                pairs[p, T.ramp((2 * c + half) * _STEP, 1, _STEP)] = T.Shuffle(both, by_eight(half))

    return mix


def _of_panel(weight: Weight, panel: Any) -> Weight:
    others = {name: part for name, part in weight.parts.items() if name != "lower"}  # of two planes: both are in it
    return replace(weight, parts={**others, "codes": _Panel(panel)})
