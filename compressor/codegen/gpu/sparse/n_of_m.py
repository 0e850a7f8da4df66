"""Linears of which each row stores N of every M weights: codes are expanded to all columns in registers.

A lane multiplies whole chunks of stored codes here, too; its columns are those that the chunk's groups cover, and
activations are laid out to meet them.  A group's number selects, for each of its columns, a byte of the stored codes,
or the code of zero: one byte permutation expands four columns.  What follows are the products of dense weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import call
from compressor.codegen.gpu.linear.fragments import LANES, Fragments
from compressor.codegen.gpu.linear.kernel import Schedule, linear_kernel
from compressor.codegen.gpu.linear.operands import Operands, PackedLoads
from compressor.codegen.gpu.linear.products import Products
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.linear.weights import Weight
from compressor.formats.extras import KeptOfGroup
from compressor.formats.format import Format
from compressor.formats.layouts.patterns import combinations

_IN_REGISTERS = 8  # choices whose selectors two permutations look up
_ZERO = 4  # selects the code of zero

_EXPAND = """
__device__ inline unsigned compressor_permute(unsigned a, unsigned b, unsigned selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
#endif
}
// The number that begins at a bit of two words.
__device__ inline unsigned compressor_number(int low, int high, int bit, int mask) {
  return (unsigned)(((unsigned long long)(unsigned)high << 32 | (unsigned)low) >> bit) & mask;
}
// The selector of one of eight numbers, from tables of their low bytes and of their high bytes.
__device__ inline unsigned compressor_selector(
    unsigned number, unsigned low0, unsigned low1, unsigned high0, unsigned high1) {
  return compressor_permute(
      compressor_permute(low0, low1, number), compressor_permute(high0, high1, number), 0x40);
}
"""

_LOAD = """
// Two words that a neighbouring chunk reads as well.
__device__ inline void compressor_load2(int* to, const int* from) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
#else
  to[0] = from[0], to[1] = from[1];
#endif
}
"""


def supports(fmt: Format) -> str:
    """Say what these kernels cannot read of a format; an empty text if they read all."""
    pattern = _pattern(fmt)
    if pattern.kept not in (1, 2, 4) or pattern.size % 4:
        return (
            f"packed linears on a GPU keep 1, 2 or 4 of groups of a multiple of 4 weights, not {pattern.kept}:"
            f"{pattern.size}; take 2:4"
        )
    found = _fragments(fmt, pattern.size << 16)
    return found if isinstance(found, str) else ""


def n_of_m_linear(
    rows: Sequence[int],
    columns: int,
    fmt: Format,
    has_bias: bool,
    *,
    schedule: Schedule | None = None,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.linear.packed_linear` of a format that keeps N of every M weights.

    Parameters of the result: as of :func:`compressor.codegen.kernels.linear.packed.fused_linear`.
    """
    assert not supports(fmt)
    return linear_kernel(*kept_parts(rows, columns, fmt, has_bias, has_residual), schedule or Schedule(), prologue)


def kept_parts(
    rows: Sequence[int], columns: int, fmt: Format, has_bias: bool, has_residual: bool
) -> tuple[Products, Operands]:
    """Return what the kernel for weights [rows, columns] is made of."""
    fragments = _fragments(fmt, columns)
    assert isinstance(fragments, Fragments)
    operands = Operands(rows, [fmt.parts(n, columns) for n in rows], has_bias, has_residual)
    return _KeptProducts(fragments, fmt), operands


def _fragments(fmt: Format, columns: int) -> Fragments | str:
    """Lay out all columns, those that are not stored included; or say why that cannot be."""
    pattern = _pattern(fmt)
    scale, chunk = (n // pattern.kept * pattern.size for n in (fmt.columns(columns), fmt.chunk_columns))
    return Fragments.cut(fmt, columns, scale, chunk)


class _KeptLoads(PackedLoads):
    """Loads beside a chunk's codes the words that its groups' numbers begin in, and the words after those."""

    def __init__(self, fragments: Fragments, fmt: Format) -> None:
        super().__init__(fragments, fmt)
        self.pattern = _pattern(fmt)
        self.first = self.words  # of the patterns: of a chunk the bit where they begin, two words of each row
        self.words += 5 * fragments.lane_chunks
        self.chunk_bits = fmt.chunk_columns // self.pattern.kept * self.pattern.index_bits

    def codes(self, to: Any, slot: int, weight: Weight, tile: Any, step: Any, lane: Any) -> None:
        """Load a step's codes to ``to[slot]`` and on, and then the words that numbers begin in."""
        super().codes(to, slot, weight, tile, step, lane)
        part = weight.parts["patterns"]
        for i in range(self.fragments.lane_chunks):
            chunk = T.min(step * self.fragments.step_chunks + LANES * i + lane % LANES, self.chunks - 1)
            bit, place = chunk * self.chunk_bits, slot + self.first + 5 * i
            T.buffer_store(to, bit % 32, [place])
            for j in range(2):
                word = T.min(bit // 32 + j, int(part.shape[1]) - 1)  # what is beyond a row's last is masked
                at = T.address_of(part[tile, word, lane // LANES * 2])
                T.evaluate(call("compressor_load2", T.address_of(to[place + 1 + 2 * j]), at, source=_LOAD))


class _KeptProducts(Products):
    """The statements for one format that keeps N of every M weights."""

    def __init__(self, fragments: Fragments, fmt: Format) -> None:
        super().__init__(fragments, fmt)
        self.pattern = _pattern(fmt)
        self.loads = self.kept = _KeptLoads(fragments, fmt)
        self.is_nibbles = False  # codes are bytes where they are expanded

    def number(self, words: Any, slot: int, chunk: int, group: int, row: int) -> Any:
        """Return the number of a group of a lane's chunk, uint32."""
        place, bits = slot + self.kept.first + 5 * chunk, self.pattern.index_bits
        low, high = words[place + 1 + row], words[place + 3 + row]
        bit, mask = words[place] + group * bits, T.int32((1 << bits) - 1)
        return call("compressor_number", low, high, bit, mask, source=_EXPAND, kind="uint32")

    def _quad(self, words: Any, slot: int, quad: int, row: int, high: bool) -> Any:
        """Return four columns' codes of a row, one a byte: those that are stored, and of the others that of zero."""
        kept, size = self.pattern.kept, self.pattern.size
        chunk, inner = divmod(quad, self.fragments.quads)
        group, part = divmod(4 * inner, size)
        stored, first = divmod(group * kept, 4)
        codes = self.stored_quad(words, slot, chunk, stored, row, high)
        number = self.number(words, slot, chunk, group, row)
        zeros = T.uint32(int(self.fmt.zero_point) * 0x01010101)
        return call(
            "compressor_permute", codes, zeros, self._selector(number, part, first), source=_EXPAND, kind="uint32"
        )

    def _selector(self, number: Any, part: int, first: int) -> Any:
        """Return the selector of a group's columns from ``part`` on, whose codes are bytes from ``first`` on."""
        selectors = [
            sum((first + kept.index(part + i) if part + i in kept else _ZERO) << 4 * i for i in range(4))
            for kept in combinations(self.pattern)
        ]
        if len(selectors) <= _IN_REGISTERS:
            tables = []
            for down in (0, 8):
                table = [selector >> down & 255 for selector in selectors] + [0] * (_IN_REGISTERS - len(selectors))
                tables += [T.uint32(int.from_bytes(bytes(table[i : i + 4]), "little")) for i in (0, 4)]
            return call("compressor_selector", number, *tables, source=_EXPAND, kind="uint32")
        name = f"compressor_selector_{self.pattern.kept}_{self.pattern.size}_{part}_{first}"
        listed = ", ".join(map(str, selectors))
        source = (
            f"static __device__ const unsigned short {name}_table[] = {{{listed}}};\n"
            f"__device__ inline unsigned {name}(unsigned number) {{ return {name}_table[number]; }}\n"
        )
        number = T.min(number, T.uint32(len(selectors) - 1))  # damaged ones read no other memory
        return call(name, number, source=source, kind="uint32")


def _pattern(fmt: Format) -> KeptOfGroup:
    found = fmt.extra(KeptOfGroup)
    assert found is not None
    return found
