"""Prompts of float activations by products of bytes: an activation is two digits of eight bits.

    x = scale * (255 * upper + lower),    both digits from -127 to 127

A span of columns has a scale, that of its largest activation, so 16 bits are left of the 24 that a float32 has.  On
machines whose registers have four lanes, a product of bytes does four times the work of one of floats (``sdot``), or
eight times (``smmla``), so two of them are the quicker way.  A panel has the codes
(:mod:`compressor.codegen.kernels.linear.panels.panel`), and activations lie as ``mmla`` reads them::

    int8 [tokens, columns / 8, 2, 8]         eight upper digits, then the lower ones of the same columns

The sums of a span fit 32 bits, so that both are put together before they become floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.activations import inverse_scale
from compressor.codegen.kernels.linear.panels import panel
from compressor.codegen.kernels.linear.preparation import apart
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.vector import emit_tree, emit_tree_sum, finite_size, size_bits, splat, splat_float
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.formats.planes import TwoPlanes, UpperPlane

_BASE = 255
_LARGEST = 127 * _BASE + 127
_SPAN = 128
"""Columns that share a scale, where a group of the weight has more."""
_MOST_COLUMNS = (2**31 - 1) // (_LARGEST * 255)  # of a span, times codes of eight bits
_LANES, _STEP = 4, 16
_P = TypeVar("_P", bound=Products)


def reads(fmt: Format) -> bool:
    """Tell whether a format has integers of all columns, and activations as they come.

    Those that float columns multiply would widen the scales of their spans.
    """
    is_integer = fmt.activations is None and fmt.element is None and not fmt.codebook
    return is_integer and not fmt.outlier_features and fmt.extra(UpperPlane) is None


def supports(body: Products, columns: int) -> str:
    """Say why prompts do not take digits; an empty text where they do."""
    fmt = body.fmt
    if not reads(fmt) or type(body) is not Products:
        return f"{fmt.name} does not multiply integers of all columns by floats"
    if _span(fmt) > _MOST_COLUMNS or _span(fmt) % fmt.chunk_columns:
        return f"groups of {fmt.group_size} columns"
    return panel.supports(_in_bytes(body, columns, Products))


def tokens(isa: Isa) -> tuple[int, ...]:
    """Return the tokens of blocks, the best first: products by several instructions take registers for themselves."""
    return (3, 2) if "asimddp" in isa.cpu_flags else (2, 3)


def _span(fmt: Format) -> int:
    return _SPAN if fmt.group_size % _SPAN == 0 else fmt.group_size


def _in_bytes(body: Products, columns: int, kind: type[_P]) -> _P:
    """Return the products of the same codes with activations of eight bits, a scale each span."""
    given = Activations(granularity="group", group_size=_span(body.fmt))
    planes = tuple(extra for extra in body.fmt.extras if isinstance(extra, TwoPlanes))
    fmt = replace(body.fmt, activations=given, extras=planes)
    return kind(TILE_ROWS * body.tiles, columns, fmt, body.isa)


class DigitProducts(panel.PanelProducts):
    """Products of a panel with both digits of activations, by ``signed4``: sums of the upper ones, and of the lower."""

    def __init__(self, rows: int, columns: int, fmt: Format, isa: Isa) -> None:
        super().__init__(rows, columns, fmt, isa)
        self.accumulators = 2

    def start_group(
        self, acc: Any, sums: Any, zeros: Any, first: Any, m0: Any, g: Any, n_tokens: int, n_tiles: int
    ) -> None:
        """Set the sums to zero, and keep what the end of the group adds."""
        self._zeros = [self.minus_zeros(sums[m0 + t, g], zeros, first, g, at) for t, _, at in self.lanes(n_tokens, 1)]
        for t, _, at in self.lanes(n_tokens, 1):
            for digit in range(2):
                T.buffer_store(acc[t], splat(0, _LANES), [digit, at])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add sixteen columns of a tile and every token."""
        assert n_tiles == 1 and self.isa.signed4 is not None
        for half in range(2):
            acts = [self._activations(a, m0 + t, 2 * c + half, "int32x4") for t in range(n_tokens)]
            for quad, part in ((quad, part) for quad in range(2) for part in range(0, TILE_ROWS, _LANES)):
                at = T.ramp(part, 1, _LANES)
                word = T.bind(codes[first, 4 * c + 2 * half + quad, at])
                for t, four in enumerate(acts):
                    for digit in range(2):
                        lane = T.Shuffle([four], [2 * digit + quad] * _LANES)
                        T.buffer_store(acc[t], self.isa.signed4(acc[t][digit, at], word, lane), [digit, at])

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Put the digits together, and go on as with bytes."""
        for (t, _, at), zero in zip(self.lanes(n_tokens, 1), self._zeros, strict=True):
            upper, lower = self._digits(acc[t], at)
            T.buffer_store(acc[t], upper * splat(_BASE, _LANES) + lower + zero, [0, at])
        Products.end_group(self, out, acc, sums, scales, factor, first, m0, g, n_tokens, n_tiles)

    def _digits(self, total: Any, at: Any) -> tuple[Any, Any]:
        """Return a register's rows of the sums of upper and of lower digits."""
        return total[0, at], total[1, at]


class MatrixDigits(DigitProducts, panel.MatrixProducts):
    """The same by ``mmla``: eight columns of two rows with both digits of a token."""

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add sixteen columns: of a token, ``acc[t][0]`` has the rows 4 i and 4 i + 1, ``acc[t][1]`` the others."""
        assert n_tiles == 1 and self.isa.mmla is not None
        for half in range(2):
            acts = [self._activations(a, m0 + t, 2 * c + half, "int8x16") for t in range(n_tokens)]
            for k in range(TILE_ROWS // 2):
                word = T.bind(codes[first, 4 * c + 2 * half + k // 4, T.ramp(k % 4 * _LANES, 1, _LANES)])
                place = [k % 2, T.ramp(k // 2 * _LANES, 1, _LANES)]
                for t, both in enumerate(acts):
                    T.buffer_store(acc[t], self.isa.mmla(acc[t][tuple(place)], word, both), place)

    def _digits(self, total: Any, at: Any) -> tuple[Any, Any]:
        both = [T.bind(total[i, at]) for i in range(2)]
        upper, lower = (T.Shuffle(both, [i, 2 + i, _LANES + i, _LANES + 2 + i]) for i in range(2))
        return upper, lower


def by_digits(shape: Any, storing: Callable[[Any], Any]) -> Any:
    """Make a macro that computes all outputs of many tokens, a tile of rows a task.

    Args:
        shape: the kernel's :class:`compressor.codegen.kernels.linear.packed.Shape`.
        storing: makes the macro that stores the outputs of such a shape.
    """
    given, columns = shape.body, shape.columns
    body = _in_bytes(given, columns, DigitProducts if given.isa.mmla is None else MatrixDigits)
    step = shape.schedule.gemm_tokens
    shape = replace(shape, body=body, given=body, step=step)
    split, multiply = _splitting(body), panel.panel_tasks(shape, storing(shape))
    width = apart(2 * _STEP * body.chunks, 1)

    @T.inline
    def many(at, tokens, turned):
        slots = T.meta_var(tokens + step)  # the last block may read as many more
        digits = T.alloc_buffer((slots, width), "int8")
        sums = T.alloc_buffer((slots, body.groups), "int32")
        factor = T.alloc_buffer((slots, body.groups), "float32")
        for m in T.parallel(tokens):
            split(at.a, digits, sums, factor, m)
        by_digit = T.meta_var(replace(at, planes=digits, sums=sums, factor=factor))
        multiply(by_digit, tokens, turned)

    return many


def _splitting(body: DigitProducts) -> Any:
    """Make a macro that splits a token's activations, of which a span that is not finite gets a scale of NaN."""
    every, each = T.ramp(0, 1, _STEP), body.group_chunks

    def digits_of(x: Any, inverse: Any) -> tuple[Any, Any, Any]:
        whole = T.bind(T.nearbyint(x * T.broadcast(inverse, _STEP)))
        upper = T.bind(T.nearbyint(whole * splat_float(1 / _BASE, _STEP)))  # no tie: the base is odd
        return whole, upper, whole + upper * splat_float(-_BASE, _STEP)

    def store(digits: Any, m: Any, k: Any, upper: Any, lower: Any) -> None:
        both = [T.bind(T.Cast(f"int8x{_STEP}", x)) for x in (upper, lower)]
        for half in range(2):
            places = [_STEP * digit + 8 * half + i for digit in range(2) for i in range(8)]
            T.buffer_store(digits, T.Shuffle(both, places), [m, T.ramp(2 * k + _STEP * half, 1, _STEP)])

    @T.inline
    def split(a, digits, sums, factor, m):
        for g in range(body.groups):
            size = T.alloc_buffer((_STEP,), "int32")
            total = T.alloc_buffer((_STEP,), "int32")
            scale = T.alloc_buffer((2,), "float32")
            size[every] = splat(0, _STEP)
            total[every] = splat(0, _STEP)
            vectors = T.meta_var(T.min(each, body.chunks - g * each))
            for k in range(vectors):
                size[every] = T.max(size[every], size_bits(a[m, T.ramp((g * each + k) * _STEP, 1, _STEP)], _STEP))
            emit_tree(T.max, size, _STEP)
            scale[0] = finite_size(size[0]) * T.float32(1 / _LARGEST)
            scale[1] = inverse_scale(scale[0])
            for k in range(vectors):
                first = T.meta_var((g * each + k) * _STEP)
                whole, upper, lower = T.meta_var(digits_of(a[m, T.ramp(first, 1, _STEP)], scale[1]))
                total[every] = total[every] + T.Cast(f"int32x{_STEP}", whole)
                store(digits, m, first, upper, lower)
            emit_tree_sum(total, _STEP)
            sums[m, g] = total[0]
            factor[m, g] = scale[0]

    return split
