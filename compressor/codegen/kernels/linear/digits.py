"""Products of integers by float activations on machines of four lanes: an activation is two digits of eight bits.

    x = scale * (255 * upper + lower),    both digits from -127 to 127

A span of columns has a scale, that of its largest activation, so 16 bits are left of the 24 that a float32 has.  There
an instruction multiplies four floats, sixteen bytes (``sdot``) or 32 (``smmla``), and codes are bytes sooner than
floats; so two products of bytes are quicker than one of floats.  Rows lie so that each kind reads whole registers::

    by dot4  int8 [tokens, 2, columns]        the upper digits, then the lower ones
    by mmla  int8 [tokens, columns / 8, 2, 8] eight upper digits, then the lower ones of the same columns

The sums of a span fit 32 bits, so that both are put together before they become floats, and rows have the same bits
whatever is computed with them.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.activations import inverse_scale
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.vector import emit_tree, emit_tree_sum, finite_size, size_bits, splat, splat_float
from compressor.formats.activations import Activations
from compressor.formats.extras import Outliers, SkippedInputs
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.formats.planes import TwoPlanes

_BASE = 255
_LARGEST = 127 * _BASE + 127
_SPAN = 128
"""Columns that share a scale, where a group of the weight has more."""
_MOST_COLUMNS = (2**31 - 1) // (_LARGEST * 255)  # of a span, times codes of eight bits
_LANES, _STEP, _HALF = 4, 16, 8
_BESIDE = (Outliers, SkippedInputs, TwoPlanes)
"""Extras that leave all columns to the codes; what float columns multiply would widen the scales of their spans."""


def reads(fmt: Format, isa: Isa) -> bool:
    """Tell whether a format has integers of all columns and activations as they come, on a machine of four lanes."""
    is_integer = fmt.activations is None and fmt.element is None and not fmt.codebook
    is_whole = all(isinstance(extra, _BESIDE) for extra in fmt.extras)
    return is_integer and is_whole and isa.lanes == _LANES and (isa.signed4 is not None or isa.mmla is not None)


def products(body: Products, columns: int) -> Products:
    """Return the products by digits of what others multiply by floats; the same where digits are not the way."""
    fmt = body.fmt
    if type(body) is not Products or not reads(fmt, body.isa):
        return body
    span = _SPAN if fmt.group_size % _SPAN == 0 else fmt.group_size
    if span > _MOST_COLUMNS or span % fmt.chunk_columns or span % _STEP:
        return body
    planes = tuple(extra for extra in fmt.extras if isinstance(extra, TwoPlanes))
    by_digit = replace(fmt, activations=Activations(granularity="group", group_size=span), extras=planes)
    return DigitProducts(TILE_ROWS * body.tiles, columns, by_digit, body.isa)


def tokens(fmt: Format, isa: Isa) -> tuple[int, ...]:
    """Return the tokens of a prompt's blocks by a tile, the best first, on a machine of four lanes and 32 registers.

    Sums take four registers a token, of digits eight; products by several instructions take some for themselves.
    """
    if not reads(fmt, isa):
        return (4, 6)
    return (3, 2) if "asimddp" in isa.cpu_flags else (2, 3)


class DigitProducts(Products):
    """Products with both digits of activations: sums of the upper ones, and of the lower."""

    def __init__(self, rows: int, columns: int, fmt: Format, isa: Isa) -> None:
        super().__init__(rows, columns, fmt, isa)
        self.accumulators = self.digits = 2
        step = lcm(_STEP, fmt.chunk_columns)
        self.padded = -(-columns // step) * step

    def place(self, column: Any, digit: int) -> Any:
        """Return where a digit of a column lies in a row; ``column`` is a multiple of four."""
        if self.isa.mmla is None:
            return column + digit * self.padded
        return column // _HALF * _STEP + (column % _HALF + _HALF * digit)

    def start_group(
        self, acc: Any, sums: Any, zeros: Any, first: Any, m0: Any, g: Any, n_tokens: int, n_tiles: int
    ) -> None:
        """Begin the upper digits' sums with zero, and the others with what zero points take off."""
        for t, n, at in self.lanes(n_tokens, n_tiles):
            T.buffer_store(acc[t], splat(0, _LANES), [2 * n, at])
            T.buffer_store(acc[t], self.minus_zeros(sums[m0 + t, g], zeros, first + n, g, at), [2 * n + 1, at])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add one chunk of columns of every tile and token."""
        for quad in range(self.fmt.chunk_columns // 4):
            column, last = c * self.fmt.chunk_columns + 4 * quad, None
            for t, n, at in self.lanes(n_tokens, n_tiles):
                if t == 0:  # a new register of codes, shared by all tokens
                    last = self.quad(codes, first + n, c, quad, at)
                for digit in range(2):
                    four = T.reinterpret(a[m0 + t, T.ramp(self.place(column, digit), 1, 4)], dtype="int32")
                    value = self.dot(acc[t][2 * n + digit, at], last, T.broadcast(four, _LANES))
                    T.buffer_store(acc[t], value, [2 * n + digit, at])

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Put the digits together, those of a tile where its sums are looked for, and go on as with bytes."""
        for t, n, at in self.lanes(n_tokens, n_tiles):
            total = acc[t][2 * n, at] * splat(_BASE, _LANES) + acc[t][2 * n + 1, at]
            T.buffer_store(acc[t], total, [n, at])
        Products.end_group(self, out, acc, sums, scales, factor, first, m0, g, n_tokens, n_tiles)


def splitting(body: DigitProducts, columns: int, fill: Any) -> Any:
    """Make a macro ``prepare(at, m)`` that splits a token's activations, and adds them up by spans.

    The scale of a span that is not finite is NaN.

    Args:
        fill: macro ``fill(at, m, to, r)`` that writes them into row ``r`` of ``to``.
    """
    every, steps = T.ramp(0, 1, _STEP), body.padded // _STEP
    each = body.group_columns // _STEP if body.groups > 1 else steps

    def halves(x: Any, inverse: Any) -> tuple[Any, Any, Any]:
        whole = T.bind(T.nearbyint(x * T.broadcast(inverse, _STEP)))
        upper = T.bind(T.nearbyint(whole * splat_float(1 / _BASE, _STEP)))  # no tie: the base is odd
        return T.Cast(f"int32x{_STEP}", whole), upper, whole + upper * splat_float(-_BASE, _STEP)

    def store(a: Any, m: Any, k: Any, upper: Any, lower: Any) -> None:
        both = [T.bind(T.Cast(f"int8x{_STEP}", digit)) for digit in (upper, lower)]
        for half, digit in enumerate(both if body.isa.mmla is None else ()):
            T.buffer_store(a, digit, [m, T.ramp(body.place(k, half), 1, _STEP)])
        for half in range(0 if body.isa.mmla is None else 2):
            T.buffer_store(a, T.Shuffle(both, by_eight(half)), [m, T.ramp(2 * k + _STEP * half, 1, _STEP)])

    @T.inline
    def prepare(at, m):
        rest = T.alloc_buffer((1, body.padded), "float32")
        fill(at, m, rest, 0)
        for k in range(body.padded - columns):
            rest[0, columns + k] = T.float32(0)
        for g in range(body.groups):
            size = T.alloc_buffer((_STEP,), "int32")
            total = T.alloc_buffer((_STEP,), "int32")
            scale = T.alloc_buffer((2,), "float32")
            size[every] = splat(0, _STEP)
            total[every] = splat(0, _STEP)
            count = T.meta_var(T.min(each, steps - g * each))
            for k in range(count):
                size[every] = T.max(size[every], size_bits(rest[0, T.ramp((g * each + k) * _STEP, 1, _STEP)], _STEP))
            emit_tree(T.max, size, _STEP)
            scale[0] = finite_size(size[0]) * T.float32(1 / _LARGEST)
            scale[1] = inverse_scale(scale[0])
            for k in range(count):
                first = T.meta_var((g * each + k) * _STEP)
                whole, upper, lower = T.meta_var(halves(rest[0, T.ramp(first, 1, _STEP)], scale[1]))
                total[every] = total[every] + whole
                store(at.a, m, first, upper, lower)
            emit_tree_sum(total, _STEP)
            at.sums[m, g] = total[0]
            at.factor[m, g] = scale[0]

    return prepare


def by_eight(half: int) -> list[int]:
    """Return where a half of two registers of sixteen bytes lies that are mixed: eight of one, then of the other."""
    return [_STEP * which + _HALF * half + i for which in range(2) for i in range(_HALF)]
