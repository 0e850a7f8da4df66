"""Products of many tokens with AMX's registers of 16 rows of 64 bytes (:mod:`compressor.codegen.kernels.amx`).

Of int8, a register takes 16 tokens by 64 columns of activations, another 64 columns by 16 rows of the weight, four
columns a word: as the packed layout has them, but for their bits.  Codes are unpacked once for a block of tokens.  Sums
of a group are int32 in a register; they leave it to get their scales.

Of floats, it takes 32 columns in bfloat16.  What codes stand for without their scale has few bits and is exact in it;
activations become two numbers each, the higher bits and what they leave, so that 16 of float32's 24 bits take part (as
in Henry et al. 2019, arXiv 1904.06376).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.amx import REGISTERS, ROW_BYTES, SIDE, load, prefetch, tile
from compressor.codegen.kernels.codes import centred, code_values, scale_values
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.weights import Weight
from compressor.codegen.kernels.vector import splat
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

TOKENS = 128
"""Tokens for which codes are unpacked once: so many outputs of two tiles stay in the first-level cache."""
_LANES = SIDE
_MOST_PIECES = 8
_MOST_UNROLLED = 4  # registers of a group whose products are written out; the sums of more are rarely scaled

Pieces = Callable[[int, int], None]
"""``pieces(i, n)`` emits part i of n of some statements."""


def supports(fmt: Format, isa: Isa) -> str:
    """Say why several tokens are not multiplied by AMX's tiles; an empty text where they are."""
    if isa.matrix_unit != "amx":
        return f"{isa.name} has no AMX"
    blocks = fmt.extra(ColumnBlocks)
    if blocks is not None and blocks.width != ROW_BYTES:
        return "tiles of rows keep columns of their own"
    if blocks is not None and not (fmt.integer_products and fmt.symmetric and fmt.zero_point % 1 == 0):
        return "sums of the activations that a tile keeps would be needed for zero points"
    if fmt.codebook or (fmt.element is not None and not fmt.element.is_float):
        return "the values of a table need more bits than bfloat16 has"
    return "codes lie in planes of one bit" if fmt.bit_planes else ""


@dataclass(frozen=True)
class Buffers:
    """What a thread's products read and write; shapes in rows and columns of registers where they say nothing else."""

    a: Any  # activations: int8 [slots, stride], or what :meth:`TileProducts.split` made
    weight: Weight
    act_sums: Any  # of a group's activations
    factor: Any  # of activations, float32 [slots, their groups]
    b: Any  # a group's weights as registers take them, int32 [steps, n_tiles, 16, 16]: four bytes or two bfloat16
    scale: Any  # a group's, float32 [n_tiles, 16]
    sums: Any  # of a group, for the tokens of this visit and of the one before: [2, sides, n_tiles, 16, 16]
    out: Any  # float32 [tokens, n_tiles, 16], of several groups
    which: Any  # blocks of columns that these tiles keep, int32; None where all are kept

    @property
    def codes(self) -> Any:
        """The weight's."""
        return self.weight.codes

    @property
    def zeros(self) -> Any:
        """Zero points, or None where all codes share one."""
        return self.weight.parts.get("zeros")


class TileProducts:
    """Statements that multiply ``16 * sides`` tokens a visit by ``n_tiles`` tiles of the weight's rows.

    A group's weights stay in registers for all tokens where half of the registers suffice: then 16 tokens are enough,
    two registers hold activations, and one a tile the sums.  Otherwise each visit loads them again, for 32 tokens.

    Where blocks of 32 rows by 64 columns are left out, a register of weights is half of one, and the activations that
    it meets are loaded from where its columns are: time falls with what is left out.
    """

    def __init__(
        self, body: Products, columns: int, n_tiles: int, *, is_final: bool, blocks: ColumnBlocks | None = None
    ) -> None:
        """``is_final``: what products and scales make of the only group are the outputs, but for the bias."""
        self.body, self.fmt, self.n_tiles, self.is_final = body, body.fmt, n_tiles, is_final
        self.depth = ROW_BYTES if body.integer else ROW_BYTES // 2  # columns of a register
        self.step_chunks = self.depth // self.fmt.chunk_columns  # of a register
        self.steps = -(-body.group_chunks // self.step_chunks)  # registers of a group
        # From one token's activations to the next: all that the last group reads, which may be shorter (zeros times
        # memory that nobody wrote may be NaN), and a cache line more, so that the rows of a register do not meet in the
        # same few sets of the cache.
        reach = max(columns, (body.groups - 1) * body.group_columns + self.steps * self.depth)
        self.stride = -(-reach // self.depth) * self.depth + self.depth
        self.is_resident = body.integer and self.steps * n_tiles <= REGISTERS // 2
        self.sides = 1 if self.is_resident else 2
        self.blocks = 0 if blocks is None else blocks.blocks(columns)
        whole = not self.blocks and columns % self.depth == 0 and body.group_columns % self.depth == 0
        self.is_direct = whole and body.integer and self.fmt.planes == (8,)  # what is stored is what the register takes
        # Otherwise the zero point is subtracted while unpacking; of bytes, where it is a number that all codes share.
        is_centred = body.integer and not self.is_direct and self.fmt.symmetric and not body.half
        self.centre = int(self.fmt.zero_point) if is_centred else 0

    @property
    def kept_blocks(self) -> int:
        """Blocks of columns that are read where others are left out, those that fill up groups included."""
        return self.body.groups * self.steps

    def split(self, halves: Any, a: Any, m: Any) -> None:
        """Split a token's float32 activations into two bfloat16 numbers each, uint16 [2, slots, stride]."""
        with T.serial(0, self.stride // _LANES) as k:
            at = T.ramp(k * _LANES, 1, _LANES)
            value = a[m, at]
            high = T.bitwise_and(T.reinterpret(value, dtype=f"int32x{_LANES}"), splat(0xFFFF0000, _LANES))
            low = T.reinterpret(value - T.reinterpret(high, dtype=f"float32x{_LANES}"), dtype=f"int32x{_LANES}")
            near = low + splat(0x8000, _LANES)  # to the nearest, as the bits below are cut off
            for part, bits in enumerate((high, near)):
                half = T.shift_right(T.reinterpret(bits, dtype=f"uint32x{_LANES}"), T.broadcast(T.uint32(16), _LANES))
                T.buffer_store(halves, T.Cast(f"uint16x{_LANES}", half), [part, m, at])

    def _unpack(self, at: Buffers, first: Any, g: Any) -> None:
        """Codes of a group as the registers take them, and zeros where it ends within one."""
        body, quads = self.body, self.fmt.chunk_columns // 4
        ends = body.group_chunks % self.step_chunks != 0 or body.chunks % body.group_chunks != 0

        def chunk(k: Any, n: int, c: int, is_there: bool) -> None:
            every, place = T.ramp(0, 1, _LANES), g * body.group_chunks + k * self.step_chunks + c
            for quad in range(quads):
                row = c * quads + quad
                value = splat(0, _LANES)
                if is_there:
                    value = body.quad(at.codes, first + n, place, quad, every)
                if self.body.integer:
                    T.buffer_store(at.b, self._centred(value) if is_there else value, [k, n, row, every])
                    continue
                for pair in range(2):
                    two = self._two(value, 2 * pair, self._zero(at.zeros, first + n, g)) if is_there else value
                    T.buffer_store(at.b, two, [k, n, 2 * row + pair, every])

        with T.serial(0, 0 if self.is_direct else self.steps) as k:
            for n in range(self.n_tiles):
                for c in range(self.step_chunks):
                    if not ends:
                        chunk(k, n, c, True)
                        continue
                    left = T.min(body.group_chunks, body.chunks - g * body.group_chunks)
                    with T.If(k * self.step_chunks + c < left):
                        with T.Then():
                            chunk(k, n, c, True)
                        with T.Else():
                            chunk(k, n, c, False)

    def _centred(self, codes: Any) -> Any:
        return centred(codes, self.centre, _LANES) if self.centre else codes

    def _zero(self, zeros: Any, tile: Any, g: Any) -> Any:
        """Zero points of a group in float32; None where there are none."""
        if not self.body.has_zeros:
            return None
        if zeros is None:
            return T.broadcast(T.float32(self.fmt.zero_point), _LANES)
        return T.Cast(f"float32x{_LANES}", self.body.of_rows(zeros, tile, g, T.ramp(0, 1, _LANES)))

    def _two(self, codes: Any, byte: int, zero: Any) -> Any:
        """Values of two neighbouring columns in bfloat16, one above the other."""
        values = [code_values(codes, i, self.fmt, self.body.isa, _no_table) for i in (byte, byte + 1)]
        values = values if zero is None else [value - zero for value in values]
        low, high = (T.reinterpret(value, dtype=f"uint32x{_LANES}") for value in values)
        both = T.bitwise_or(T.shift_right(low, T.broadcast(T.uint32(16), _LANES)), high)  # the lower bits are zeros
        return T.reinterpret(both, dtype=f"int32x{_LANES}")

    def add_groups(self, at: Buffers, first: Any, m0: Any, count: Any) -> None:
        """Add the products of all groups to the outputs of ``count`` tokens from ``m0``: ``at.out`` has them from 0 on.

        A visit takes ``SIDE * sides`` tokens.  Its sums go from registers to memory, and the visit after it scales them
        while its own products run.  With three visits, in this order::

            unpack the codes of group g
            visit 0: products of (g, 0), beside them the scales of (g - 1, 2); nothing to scale in the first group
            load the scales of group g
            visit 1: products of (g, 1), beside them the scales of (g, 0)
            visit 2: products of (g, 2), beside them the scales of (g, 1)

        and after the last group the scales of its last visit.  ``at.sums`` has two places, which visits take in turn.
        """

        def visits(sides: int) -> Any:
            return (count + (SIDE * sides - 1)) // (SIDE * sides)

        def turn(sides: int, g: Any, i: Any) -> Any:
            return (g * visits(sides) + i) % 2

        def scaling(sides: int, g: Any, i: Any) -> Pieces:
            t = i * (SIDE * sides)
            return lambda part, parts: self._scale(at, sides, first, m0, t, count, g, turn(sides, g, i), part, parts)

        def visit(sides: int, g: Any, i: Any, beside: Pieces) -> None:
            m = m0 + i * (SIDE * sides)
            self._prefetch_next(at, sides, first, m, g, i, visits(sides))
            self._multiply(at, sides, first, m, g, turn(sides, g, i), beside)

        def all_visits(sides: int, g: Any) -> None:
            with T.If(g > 0):
                with T.Then():
                    visit(sides, g, T.int64(0), scaling(sides, g - 1, visits(sides) - 1))
                with T.Else():
                    visit(sides, g, T.int64(0), lambda _part, _parts: None)
            self._load_scales(at, first, g)
            with T.serial(T.int64(1), visits(sides)) as i:
                visit(sides, g, i, scaling(sides, g, i - 1))

        def either(statements: Callable[[int], None]) -> None:
            if self.sides == 1:
                return statements(1)
            with T.If(count <= SIDE):
                with T.Then():
                    statements(1)
                with T.Else():
                    statements(self.sides)

        last = T.int64(self.body.groups - 1)
        with T.serial(T.int64(0), T.int64(self.body.groups)) as g:
            self._unpack(at, first, g)
            for k in range(self.steps if self.is_resident else 0):
                for n in range(self.n_tiles):
                    self._load_weight(at, first, g, k, n)
            either(lambda sides: all_visits(sides, g))
        either(lambda sides: scaling(sides, last, visits(sides) - 1)(0, 1))

    def _load_scales(self, at: Buffers, first: Any, g: Any) -> None:
        every = T.ramp(0, 1, _LANES)
        for n in range(self.n_tiles):
            stored = self.body.of_rows(at.weight.parts["scales"], first + n, g, every)
            T.buffer_store(at.scale, scale_values(stored, self.fmt, _LANES), [n, every])

    def _prefetch_next(self, at: Buffers, sides: int, first: Any, m: Any, g: Any, i: Any, visits: Any) -> None:
        """Prefetch what comes next, a share at each visit: the next group's codes, and in the last group the outputs.

        The processor sees a short run of lines now and then and does not fetch them by itself, and all at once would
        keep it waiting.
        """
        body = self.body
        lines = self.fmt.chunk_words * body.group_chunks
        with T.If(g < body.groups - 1):
            with T.Then():
                share = (lines + (visits - 1)) // visits
                with T.serial(T.int64(0), share) as line:
                    for n in range(self.n_tiles):
                        place = at.codes[first + n, (g + 1) * body.group_chunks, 0, 0]
                        prefetch(place, (i * share + line) * ROW_BYTES)
            with T.Else(), T.serial(0, SIDE * sides) as r:
                for n in range(self.n_tiles):
                    place = (m + r, (first + n) * SIDE)
                    prefetch(at.weight.y[place], 0, writes=True)
                    if at.weight.residual is not None:
                        prefetch(at.weight.residual[place], 0)

    def _weight(self, k: Any, n: int) -> int:
        """Return the register of a weight."""
        return REGISTERS // 2 + k * self.n_tiles + n if self.is_resident else REGISTERS - 2 + n

    def _load_weight(self, at: Buffers, first: Any, g: Any, k: Any, n: int) -> None:
        chunk = (g * self.steps + k) * self.step_chunks
        load(self._weight(k, n), at.codes[first + n, chunk, 0, 0] if self.is_direct else at.b[k, n, 0, 0], ROW_BYTES)

    def _multiply(self, at: Buffers, sides: int, first: Any, m: Any, g: Any, turn: Any, beside: Pieces) -> None:
        """Add up a group's products for a visit's tokens from ``m``; other units execute ``beside`` meanwhile."""
        integer, parts = self.body.integer, 1 if self.body.integer else 2
        pairs = [(s, n) for s in range(sides) for n in range(self.n_tiles)]
        product = "tdpbf16ps" if not integer else "tdpbssd" if self.centre else "tdpbsud"
        stride_bytes = self.stride * ROW_BYTES // self.depth

        def products(k: Any, after: Callable[[], None]) -> None:
            column = g * self.body.group_columns + k * self.depth
            if at.which is not None:
                column = T.Cast("int64", at.which[g * self.steps + k]) * self.depth
            for n in range(0 if self.is_resident else self.n_tiles):
                self._load_weight(at, first, g, k, n)
            for part in range(parts):
                held = [len(pairs) + (k % 2 if self.is_resident else s) for s in range(sides)]
                for s, register in enumerate(held):
                    place = [m + SIDE * s, column] if integer else [part, m + SIDE * s, column]
                    load(register, at.a[tuple(place)], stride_bytes)
                for i, (s, n) in enumerate(pairs):
                    tile(product, T.uint8(i), T.uint8(held[s]), T.uint8(self._weight(k, n)))
                    after()

        for i in range(len(pairs)):
            tile("tilezero", T.uint8(i))
        if self.steps <= _MOST_UNROLLED:
            total = self.steps * parts * len(pairs)
            pieces = math.gcd(total, _MOST_PIECES)
            done = iter(range(1, total + 1))

            def after() -> None:
                piece, rest = divmod(next(done) * pieces, total)
                if rest < pieces:
                    beside(piece - 1, pieces)

            for k in range(self.steps):
                products(k, after)
        else:
            with T.serial(0, self.steps) as k:
                products(k, lambda: None)
            beside(0, 1)
        for i, (s, n) in enumerate(pairs):
            tile("tilestored64", T.uint8(i), T.address_of(at.sums[turn, s, n, 0, 0]), T.int64(4 * SIDE))

    def _scale(
        self, at: Buffers, sides: int, first: Any, m0: Any, t: Any, count: Any, g: Any, turn: Any, part: int, parts: int
    ) -> None:
        """Part of ``parts`` of what adds a visit's sums with their scales to the outputs."""
        every, rows = T.ramp(0, 1, _LANES), SIDE * sides * self.n_tiles // parts
        size = min(rows, SIDE)
        for begin in range(part * rows, (part + 1) * rows, size):
            s, n = divmod(begin // SIDE, self.n_tiles)
            place = t + (SIDE * s + begin % SIDE)
            # Not unrolled: the time to compile grows fast with statements.
            with T.serial(0, T.min(T.int64(size), count - place) if self.is_final else size) as r:
                m, total = m0 + place + r, at.sums[turn, s, n, begin % SIDE + r, every]
                if self.body.integer and not self.centre:
                    total = total + self.body.minus_zeros(at.act_sums[m, g], at.zeros, first + n, g, every)
                factor = at.factor if self.body.act_groups > 1 else None  # one a token comes last
                value = self.body.scaled(total, at.scale[n, every], at.act_sums, factor, m, g)
                if not self.is_final:
                    before = [place + r, n, every]
                    T.buffer_store(at.out, value if self.body.groups == 1 else at.out[tuple(before)] + value, before)
                    continue
                across = T.ramp((first + n) * SIDE, 1, _LANES)
                whole = at.weight.finish(value, m, across, T.broadcast(at.factor[m, 0], _LANES))
                T.buffer_store(at.weight.y, whole, [m, across])


def _no_table(_level: int) -> Any:
    raise AssertionError("codebooks are not for tiles")


assert TILE_ROWS == SIDE  # a register takes the rows of a tile
