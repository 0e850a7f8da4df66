"""Products of many tokens with AMX: eight registers of 16 rows of 64 bytes, and one instruction a product of two.

Of int8, a register takes 16 tokens by 64 columns of activations, another 64 columns by 16 rows of the weight, four
columns a word: as the packed layout has them, but for their bits.  Codes are unpacked once for a block of tokens.  Sums
of a group are int32 in a register; they leave it to get their scales.

Of floats, it takes 32 columns in bfloat16.  What codes stand for without their scale has few bits and is exact in it;
activations become two numbers each, the higher bits and what they leave, so that 16 of float32's 24 bits take part (as
in Henry et al. 2019, arXiv 1904.06376).  Registers and instructions: Intel, Architecture Instruction Set Extensions
Programming Reference, chapter 3.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.products import Products
from compressor.codegen.kernels.vector import Isa, code_quad, code_values, scale_values, splat
from compressor.formats import TILE_ROWS, Format

SIDE = 16
"""Rows of a register."""
_ROW_BYTES = 64
TOKENS = 128
"""Tokens for which codes are unpacked once: so many outputs of two tiles stay in the first-level cache."""
_LANES = SIDE
_A, _B = 4, 6  # registers 0 to 3 hold sums, two tiles of activations and two of the weight follow


def takes_tiles(fmt: Format, isa: Isa) -> bool:
    """Whether several tokens are multiplied by tiles; values of tables need more bits than bfloat16 has."""
    is_exact = fmt.element is None or fmt.element.is_float
    return isa.tiles and is_exact and not fmt.codebook and not fmt.sliced


class TileProducts:
    """Statements of one step over ``n_tiles`` tiles of the weight's rows."""

    def __init__(self, body: Products, columns: int, n_tiles: int) -> None:
        self.body, self.fmt, self.n_tiles = body, body.fmt, n_tiles
        self.depth = _ROW_BYTES if body.integer else _ROW_BYTES // 2  # columns of a register
        # From one token's activations to the next: whole registers, and a cache line more, so that the rows of a
        # register do not meet in the same few sets of the cache.
        self.stride = -(-columns // self.depth) * self.depth + self.depth
        self.step_chunks = self.depth // self.fmt.chunk_columns  # of a register
        self.steps = -(-body.group_chunks // self.step_chunks)  # registers of a group
        whole = columns % self.depth == 0 and body.group_columns % self.depth == 0
        self.is_direct = whole and body.integer and self.fmt.bits == 8  # what is stored is what the register takes
        # Otherwise the zero point is subtracted while unpacking; of bytes, where it is a number that all codes share.
        is_centred = body.integer and not self.is_direct and self.fmt.symmetric and not body.half
        self.centre = int(self.fmt.middle) if is_centred else 0

    def configure(self) -> None:
        """All eight registers are full: palette 1, 64 bytes in each of 16 rows."""
        words = [1, *[0] * 3, *[_ROW_BYTES << 16 | _ROW_BYTES] * 4, *[0] * 4, *[SIDE * 0x01010101] * 2, 0, 0]
        memory = T.alloc_buffer((16,), "int32", scope="local")
        T.buffer_store(memory, T.Shuffle([T.int32(word) for word in words], list(range(16))), [T.ramp(0, 1, 16)])
        _tile("ldtilecfg", T.address_of(memory[0]))

    def release(self) -> None:
        """Give the registers back, so that nobody saves them."""
        _tile("tilerelease")

    def split(self, halves: Any, a: Any, m: Any) -> None:
        """A token's activations, float32, as two numbers in bfloat16 each, uint16 [2, slots, stride]."""
        with T.serial(0, self.stride // _LANES) as k:
            at = T.ramp(k * _LANES, 1, _LANES)
            value = a[m, at]
            high = T.bitwise_and(T.reinterpret(value, dtype=f"int32x{_LANES}"), splat(0xFFFF0000, _LANES))
            low = T.reinterpret(value - T.reinterpret(high, dtype=f"float32x{_LANES}"), dtype=f"int32x{_LANES}")
            near = low + splat(0x8000, _LANES)  # to the nearest, as the bits below are cut off
            for part, bits in enumerate((high, near)):
                half = T.shift_right(T.reinterpret(bits, dtype=f"uint32x{_LANES}"), T.broadcast(T.uint32(16), _LANES))
                T.buffer_store(halves, T.Cast(f"uint16x{_LANES}", half), [part, m, at])

    def unpack(self, b: Any, codes: Any, zeros: Any, first: Any, g: Any) -> None:
        """Codes of a group as the registers take them, and zeros where it ends within one.

        Args:
            b: int32 [steps, n_tiles, 16, 16], of four bytes or two bfloat16.
        """
        fmt, body, quads = self.fmt, self.body, self.fmt.chunk_columns // 4
        ends = body.group_chunks % self.step_chunks != 0 or body.chunks % body.group_chunks != 0

        def chunk(k: Any, n: int, c: int, is_there: bool) -> None:
            every, place = T.ramp(0, 1, _LANES), g * body.group_chunks + k * self.step_chunks + c
            # The next group's codes are asked for now: until then nothing else reads memory, and the processor, which
            # sees a short run of lines now and then, does not fetch them by itself.
            for w in range(fmt.chunk_words if body.groups > 1 and is_there else 0):
                _prefetch(codes[first + n, place + body.group_chunks, w, 0])
            for quad in range(quads):
                row = c * quads + quad
                value = splat(0, _LANES)
                if is_there:
                    value = code_quad(lambda w: codes[first + n, place, w, every], fmt, quad, _LANES)
                if self.body.integer:
                    T.buffer_store(b, self._centred(value) if is_there else value, [k, n, row, every])
                    continue
                for pair in range(2):
                    two = self._two(value, 2 * pair, self._zero(zeros, first + n, g)) if is_there else value
                    T.buffer_store(b, two, [k, n, 2 * row + pair, every])

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
        if not self.centre:
            return codes
        octets = T.reinterpret(codes, dtype=f"int8x{4 * _LANES}")
        centre = T.int8(self.centre - 256 * (self.centre > 127))  # of 8 bits, 128 and -128 are the same
        return T.reinterpret(octets - T.broadcast(centre, 4 * _LANES), dtype=f"int32x{_LANES}")

    def _zero(self, zeros: Any, tile: Any, g: Any) -> Any:
        """Zero points of a group in float32; None where there are none."""
        if not self.body.has_zeros:
            return None
        if zeros is None:
            return T.broadcast(T.float32(self.fmt.middle), _LANES)
        return T.Cast(f"float32x{_LANES}", self.body.of_rows(zeros, tile, g, T.ramp(0, 1, _LANES)))

    def _two(self, codes: Any, byte: int, zero: Any) -> Any:
        """Values of two neighbouring columns in bfloat16, one above the other."""
        values = [code_values(codes, i, self.fmt, _LANES, _no_table) for i in (byte, byte + 1)]
        values = values if zero is None else [value - zero for value in values]
        low, high = (T.reinterpret(value, dtype=f"uint32x{_LANES}") for value in values)
        both = T.bitwise_or(T.shift_right(low, T.broadcast(T.uint32(16), _LANES)), high)  # the lower bits are zeros
        return T.reinterpret(both, dtype=f"int32x{_LANES}")

    def multiply(self, sums: Any, a: Any, b: Any, codes: Any, first: Any, m0: Any, g: Any, n_sides: int) -> None:
        """Sums [n_sides, n_tiles, 16, 16] of a group, for ``16 * n_sides`` tokens from ``m0``.

        Args:
            a: int8 [slots, stride], or what :meth:`split` made.
        """
        pairs = [(s, n) for s in range(n_sides) for n in range(self.n_tiles)]
        product = "tdpbf16ps" if not self.body.integer else "tdpbssd" if self.centre else "tdpbsud"
        for i in range(len(pairs)):
            _tile("tilezero", T.uint8(i))
        with T.serial(0, self.steps) as k:
            step = g * self.steps + k if self.is_direct else k
            column = g * self.body.group_columns + k * self.depth
            for n in range(self.n_tiles):
                word = codes[first + n, step * self.step_chunks, 0, 0] if self.is_direct else b[k, n, 0, 0]
                _load(_B + n, word, _ROW_BYTES)
            for part in range(1 if self.body.integer else 2):
                for s in range(n_sides):
                    place = [m0 + SIDE * s, column] if self.body.integer else [part, m0 + SIDE * s, column]
                    _load(_A + s, a[tuple(place)], self.stride * _ROW_BYTES // self.depth)
                for i, (s, n) in enumerate(pairs):
                    _tile(product, T.uint8(i), T.uint8(_A + s), T.uint8(_B + n))
        for i, (s, n) in enumerate(pairs):
            _tile("tilestored64", T.uint8(i), T.address_of(sums[s, n, 0, 0]), T.int64(4 * SIDE))

    def load_scales(self, scale: Any, scales: Any, first: Any, g: Any) -> None:
        """The group's scales in float32 [n_tiles, 16]."""
        every = T.ramp(0, 1, _LANES)
        for n in range(self.n_tiles):
            stored = self.body.of_rows(scales, first + n, g, every)
            T.buffer_store(scale, scale_values(stored, self.fmt, _LANES), [n, every])

    def add(
        self, out: Any, sums: Any, scale: Any, fed_sums: Any, zeros: Any, factor: Any, first: Any, m0: Any, t0: Any,
        g: Any, n_sides: int,
    ) -> None:  # fmt: skip
        """Add a group's sums, with its scales, to ``out`` float32 [tokens, n_tiles, 16] from token ``t0`` on."""
        every = T.ramp(0, 1, _LANES)
        with T.serial(0, SIDE) as r:
            for s in range(n_sides):
                for n in range(self.n_tiles):
                    m, total, at = m0 + SIDE * s + r, sums[s, n, r, every], [t0 + SIDE * s + r, n, every]
                    if self.body.integer and not self.centre:
                        total = total + self.body.minus_zeros(fed_sums, zeros, first + n, m, g, every)
                    value = self.body.scaled(total, scale[n, every], fed_sums, factor, m, g)
                    T.buffer_store(out, out[tuple(at)] + value, at)


def _no_table(_level: int) -> Any:
    raise AssertionError("codebooks are not for tiles")


def _tile(name: str, *arguments: Any) -> None:
    """Emit one of the instructions, which take register numbers as constants."""
    number = T.llvm_lookup_intrinsic_id(f"llvm.x86.{name}")
    T.evaluate(T.call_llvm_intrin(number, *arguments, dtype="void"))


def _prefetch(element: Any) -> None:
    """Ask for a cache line that will be read; an address behind the last line does no harm."""
    number = T.llvm_lookup_intrinsic_id("llvm.prefetch")
    read, soon, data = T.int32(0), T.int32(3), T.int32(1)
    T.evaluate(T.call_llvm_intrin(number, T.address_of(element), read, soon, data, dtype="void"))


def _load(register: int, first: Any, stride_bytes: int) -> None:
    _tile("tileloadd64", T.uint8(register), T.address_of(first), T.int64(stride_bytes))


assert TILE_ROWS == SIDE  # a register takes the rows of a tile
