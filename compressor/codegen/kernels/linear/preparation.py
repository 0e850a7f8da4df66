"""Prepare a token's activations for the products of the packed linear.

They are rounded (:mod:`compressor.codegen.kernels.activations`) or copied, filled up with zeros, summed by
groups for the zero points, and laid out as the products take them: in digits, in bit planes, or in bfloat16 for AMX.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tvm.script import tirx as T

from compressor.codegen.kernels.activations import inverse_scale, on_grid, span_scale
from compressor.codegen.kernels.linear.bit_planes import slice_chunk
from compressor.codegen.kernels.linear.digits import DigitProducts, splitting
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.vector import emit_tree, emit_tree_sum, finite_size, size_bits
from compressor.formats.activations import Activations

_LINE_BYTES = 64


@dataclass(frozen=True)
class Prepared:
    """What is read and written; ``slots`` are tokens, filled up to whole blocks."""

    inputs: Sequence[Any]  # float32 [tokens, columns]: the activations, or what they are computed from
    vectors: Sequence[Any]  # float32 [columns], of a norm
    a: Any  # activations, columns filled up: int8 or float32 [slots, width]
    planes: Any  # their bit planes, int32 [slots, chunks * bits], or ``a``
    halves: Any  # them as two numbers in bfloat16: uint16 [2, slots, width], or ``a``
    sums: Any  # of each group's activations, int32 or float32 [slots, groups]
    factor: Any  # what an output, or a group's part of it, is multiplied by, float32 [slots, groups of activations]
    parts: Mapping[str, Any]  # of the weight: its ``tensor_scale``, ``input_scale``, ``float_columns``


def preparation(
    body: Products,
    columns: int,
    width: int,
    has_planes: bool,
    split: Callable[..., None] | None,
    prologue: Prologue | None = None,
) -> Any:
    """Make a macro ``prepare(at, m)`` that prepares token ``m``; ``at`` is a :class:`Prepared`.

    Args:
        width: elements from one token's activations to the next.
        split: writes ``at.halves``, where products take those.
        prologue: what activations are of the inputs, where they are not the input.
    """
    fmt, integer = body.fmt, body.integer
    if isinstance(body, DigitProducts):
        return splitting(body, columns, _filling(columns, None if prologue is None else prologue.row(columns)))
    fill, add_up = _fill(body, columns, prologue), adding_up(body)

    @T.inline
    def prepare(at, m):
        fill(at, m)
        for k in range(width - columns):
            at.a[m, columns + k] = T.int8(0) if integer else T.float32(0)
        if not integer:
            at.factor[m, 0] = at.parts["tensor_scale"][0] if "tensor_scale" in at.parts else T.float32(1)
        add_up(at.a, at.sums, m, 0)
        if split is not None:
            split(at.halves, at.a, m)
        if has_planes:
            for c in range(body.chunks):
                quads = T.alloc_buffer((8,), "int32")
                slice_chunk(at.planes, quads, at.a, m, c, cast(Activations, fmt.activations))

    return prepare


def _fill(body: Products, columns: int, prologue: Prologue | None) -> Any:
    """Choose the macro ``fill(at, m)`` that writes a token's activations: copied, computed, or rounded of either."""
    compute = None if prologue is None else prologue.row(columns)
    if body.fmt.activations is not None:
        return _rounding(body, columns, compute)
    write = _filling(columns, compute)

    @T.inline
    def fill(at, m):
        write(at, m, at.a, m)

    return fill


def _filling(columns: int, compute: Callable[..., None] | None) -> Any:
    """Make a macro ``fill(at, m, to, r)`` that writes token ``m``'s activations, copied or computed, to row ``r``."""

    @T.inline
    def computed(at, m, to, r):
        compute(at.inputs, at.vectors, m, to, r)  # type: ignore[misc]

    return _copying(columns) if compute is None else computed


def _copying(columns: int) -> Any:
    """Make a macro that copies row ``m`` of the inputs to row ``r``."""

    @T.inline
    def copy(at, m, to, r):
        for k in range(columns // 16):
            to[r, T.ramp(k * 16, 1, 16)] = at.inputs[0][m, T.ramp(k * 16, 1, 16)]
        for k in range(columns % 16):
            to[r, columns // 16 * 16 + k] = at.inputs[0][m, columns // 16 * 16 + k]

    return copy


def _rounding(body: Products, columns: int, compute: Callable[..., None] | None) -> Any:
    """Make a macro that rounds a token's activations, each span of columns with a scale of its own.

    What is rounded lies in the input; in a row of its own where it is computed first, or where float columns are taken
    out of it.
    """
    fmt, act = body.fmt, cast(Activations, body.fmt.activations)
    span = act.group_size or columns  # columns that share a scale
    in_row = fmt.outlier_features > 0 or compute is not None
    write, round_span = _filling(columns, compute), _span_rounding(body.integer, act)

    @T.inline
    def rounded(at, m):
        rest = T.meta_var(T.alloc_buffer((1, columns), "float32") if in_row else at.inputs[0])
        r = T.meta_var(0 if in_row else m)
        if in_row:
            write(at, m, rest, r)
        if fmt.outlier_features > 0:
            for k in range(fmt.outlier_features):
                rest[r, at.parts["float_columns"][k]] = T.float32(0)
        for g in range(columns // span):
            round_span(at, rest, r, m, g, g * span, span // 16, span % 16)
        if columns % span > 0:
            begin = T.meta_var(columns // span * span)
            round_span(at, rest, r, m, columns // span, begin, (columns - begin) // 16, (columns - begin) % 16)

    return rounded


def _span_rounding(integer: bool, act: Activations) -> Any:
    """Make a macro that rounds columns that share a scale: to int8 codes and their factor, or to floats on a grid."""
    every = T.ramp(0, 1, 16)
    combine, kind = (operator.add, "float32") if act.is_sign else (T.max, "int32")
    is_static = act.granularity == "tensor"

    def size(x: Any, lanes: int) -> Any:
        return T.abs(x) if act.is_sign else size_bits(x, lanes)

    @T.inline
    def peak(rest, m, out, begin, n_vectors, n_tail):
        # The largest size; of signs, the mean.
        lane = T.alloc_buffer((16,), kind)
        lane[every] = T.broadcast(T.Cast(kind, 0), 16)
        for k in range(n_vectors):
            lane[every] = combine(lane[every], size(rest[m, T.ramp(begin + k * 16, 1, 16)], 16))
        for k in range(n_tail):
            lane[0] = combine(lane[0], size(rest[m, begin + n_vectors * 16 + k], 1))
        emit_tree(combine, lane, 16)
        if act.is_sign:
            out[0] = finite_size(size_bits(lane[0] / T.Cast("float32", n_vectors * 16 + n_tail), 1))
        elif is_static:
            # A stored scale saturates what is too large, so that infinity has a place; NaN has none.
            nan = T.meta_var(T.reinterpret(lane[0], dtype="float32"))
            out[0] = T.if_then_else(lane[0] > T.int32(0x7F800000), nan, T.float32(0))
        else:
            out[0] = finite_size(lane[0])

    @T.inline
    def round_span(at, rest, r, m, g, begin, n_vectors, n_tail):
        scale = T.alloc_buffer((1,), "float32")
        peak(rest, r, scale, begin, n_vectors, n_tail)
        scale[0] = span_scale(scale[0], act, at.parts["input_scale"][0] if act.calibrated else None)
        inverse = T.alloc_buffer((1,), "float32")
        inverse[0] = inverse_scale(scale[0])
        for k in range(n_vectors):
            there = T.meta_var(T.ramp(begin + k * 16, 1, 16))
            near = T.meta_var(on_grid(rest[r, there], inverse[0], act, 16))
            at.a[m, there] = T.Cast("int8x16", near) if integer else near * T.broadcast(scale[0], 16)
        for k in range(n_tail):
            one = T.meta_var(begin + n_vectors * 16 + k)
            near = T.meta_var(on_grid(rest[r, one], inverse[0], act, 1))
            at.a[m, one] = T.Cast("int8", near) if integer else near * scale[0]
        if integer:
            at.factor[m, g] = scale[0]

    return round_span


def adding_up(body: Products) -> Any:
    """Make a macro that adds up a token's activations by groups, where zero points need the sums.

    ``add_up(values, sums, m, n)`` reads and writes where :meth:`Products.at` says for token ``m`` and tile ``n``.
    """
    every, integer, size = T.ramp(0, 1, 16), body.integer, body.group_columns

    @T.inline
    def add_up(values, sums, m, n):
        for g in range(body.groups if body.has_zeros else 0):
            lane = T.alloc_buffer((16,), "int32" if integer else "float32")
            lane[every] = T.broadcast(T.int32(0) if integer else T.float32(0), 16)
            length = T.meta_var(T.min(size, body.padded - g * size))
            for k in range(length // 16):
                some = T.meta_var(values[body.at(m, n, T.ramp(g * size + k * 16, 1, 16))])
                lane[every] = lane[every] + (T.Cast("int32x16", some) if integer else some)
            for k in range(length % 16):
                single = T.meta_var(values[body.at(m, n, g * size + length // 16 * 16 + k)])
                lane[0] = lane[0] + (T.Cast("int32", single) if integer else single)
            emit_tree_sum(lane, 16)
            T.buffer_store(sums, lane[0], list(body.at(m, n, g)))

    return add_up


def apart(columns: int, size_bytes: int) -> int:
    """Return the elements of a row, filled up to an odd number of cache lines.

    Of rows that are a power of two apart, the same columns of all tokens would meet in the same few sets of the cache.
    """
    line = _LINE_BYTES // size_bytes
    return (-(-columns // line) | 1) * line
