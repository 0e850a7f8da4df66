"""Products of bit planes with bit planes: AND or XOR, and counts of ones.

With codes ``w = sum 2^p w_p`` and activations ``a = sum 2^q a_q``, the last of whose planes is negative (two's
complement), the sum of ``w * a`` over columns is ``sum 2^(p+q) popcount(w_p & a_q)`` (Zeng et al. 2024, ABQ-LLM, arXiv
2408.08554).  Counts with the same ``p + q`` share an accumulator; powers of two come in once a group.  Activations of
1 bit are signs: with ``a`` set where one is minus, which ``m`` of them are, and ``b`` planes of a bipolar weight, the
sum of ``w * a`` is ``sum 2^p popcount(w_p ^ a) - (2^b - 1) * m`` (Ma et al. 2024, arXiv 2409.17870).

:func:`supports` says when that is quicker than four products of bytes an instruction.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.codes import dot4
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.vector import emit_tree, splat
from compressor.formats.activations import Activations
from compressor.formats.format import Format

CHUNK = 32
"""Columns of a word of a plane."""
_QUADS = CHUNK // 4


def supports(fmt: Format, isa: Isa) -> str:
    """Say why products are not counts of ones, for any number of tokens; an empty text where they are.

    The choice is by time: each pair of planes costs so much, against bytes that are put together from the planes and
    multiplied.  Measured on linears of 2048 x 2048, one token: docs/decisions/0024-bit-planes.md.
    """
    act = fmt.activations
    if not fmt.bit_planes:
        return "codes do not lie in planes of one bit"
    if act is None or not fmt.integer_products:
        return "activations are not integers"
    if act.is_sign and fmt.bit_planes != "bipolar":
        return "signs meet a grid that has a zero"
    pairs, bytes_cost = fmt.bits * act.bits, 22 + 9 * fmt.bits
    if pairs * (4 if isa.count_ones is not None else 8) >= bytes_cost:
        return f"{pairs} pairs of planes take longer than products of bytes on {isa.name}"
    return ""


def slice_chunk(planes: Any, quads: Any, a: Any, m: Any, c: Any, act: Activations) -> None:
    """Put a chunk of int8 activations into planes, in the order of the weight's: column 4 * j + i is bit 8 * i + j.

    Args:
        planes: int32 [slots, chunks * bits].
        quads: int32 [8], scratch.
    """
    four = T.reinterpret(a[m, T.ramp(c * CHUNK, 1, CHUNK)], dtype=f"int32x{_QUADS}")
    places = T.Shuffle([T.int32(j) for j in range(_QUADS)], list(range(_QUADS)))
    for q in range(act.bits):
        bits = T.shift_right(four, splat(7 if act.is_sign else q, _QUADS))
        bits = T.shift_left(T.bitwise_and(bits, splat(0x01010101, _QUADS)), places)
        T.buffer_store(quads, bits, [T.ramp(0, 1, _QUADS)])
        emit_tree(T.bitwise_or, quads, _QUADS)
        T.buffer_store(planes, quads[0], [m, c * act.bits + q])


class PlaneProducts(Products):
    """As :class:`Products`, of activations that lie in planes, int32 [slots, chunks * their bits]."""

    def __init__(self, rows: int, columns: int, fmt: Format, isa: Isa) -> None:
        super().__init__(rows, columns, fmt, isa)
        assert isinstance(fmt.activations, Activations)
        self.columns, self.act_bits, self.is_sign = columns, fmt.activations.bits, fmt.activations.is_sign
        self.accumulators = fmt.bits + self.act_bits - 1

    def start_group(
        self, acc: Any, sums: Any, zeros: Any, first: Any, m0: Any, g: Any, n_tokens: int, n_tiles: int
    ) -> None:
        """As without planes; the signs that are minus are counted from their sum."""
        super().start_group(acc, sums, zeros, first, m0, g, n_tokens, n_tiles)
        lanes = self.isa.lanes
        for t, n, at in self.lanes(n_tokens, n_tiles):
            for k in range(1, self.accumulators):
                T.buffer_store(acc[t], splat(0, lanes), [k * n_tiles + n, at])
            if self.is_sign:
                length = T.min(self.group_columns, self.columns - g * self.group_columns)
                minus = T.shift_right(T.Cast("int32", length) - sums[m0 + t, g], T.int32(1))
                rest = T.broadcast(minus * T.int32(self.fmt.levels - 1), lanes)
                T.buffer_store(acc[t], acc[t][n, at] - rest, [n, at])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Count the ones of every pair of planes; ``a`` are the activations' planes."""
        lanes = self.isa.lanes
        for t, n, at in self.lanes(n_tokens, n_tiles):
            for p in range(self.fmt.bits):
                for q in range(self.act_bits):
                    word = T.broadcast(a[m0 + t, c * self.act_bits + q], lanes)
                    meet = T.bitwise_xor if self.is_sign else T.bitwise_and
                    both = meet(codes[first + n, c, p, at], word)
                    place = [(p + q) * n_tiles + n, at]
                    negative = q == self.act_bits - 1 and not self.is_sign
                    T.buffer_store(acc[t], add_ones(acc[t][tuple(place)], both, negative, self.fmt, self.isa), place)

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Bring the accumulators together, and go on as without planes."""
        for t, n, at in self.lanes(n_tokens, n_tiles):
            value = splat(0, self.isa.lanes)
            for k in reversed(range(self.accumulators)):
                value = T.shift_left(value, splat(1, self.isa.lanes)) + acc[t][k * n_tiles + n, at]
            T.buffer_store(acc[t], value, [n, at])
        super().end_group(out, acc, sums, scales, factor, first, m0, g, n_tokens, n_tiles)


def add_ones(acc: Any, word: Any, negative: bool, fmt: Format, isa: Isa) -> Any:
    """``acc`` plus (or minus) the ones in each 32-bit lane of ``word``."""
    if isa.count_ones is not None:
        ones = isa.count_ones(word)
        return acc - ones if negative else acc + ones
    return dot4(acc, _ones_of_bytes(word, isa), splat(0xFFFFFFFF if negative else 0x01010101, isa.lanes), fmt, isa)


def _ones_of_bytes(word: Any, isa: Isa) -> Any:
    """Emit the ones in each byte: the machine's own way, or as LLVM counts them."""
    if isa.ones_of_bytes is not None:
        return isa.ones_of_bytes(word)
    return T.reinterpret(T.popcount(T.reinterpret(word, dtype=f"int8x{4 * isa.lanes}")), dtype=f"int32x{isa.lanes}")
