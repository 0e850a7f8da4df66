"""Convert PyTorch's own operators where TVM's converters or schedules fail on sizes that vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax, te

from compressor.codegen.lowering.converters import picking
from compressor.graph.matching import shape_of

_UNROLLED = 16  # places of a scatter that are written out


def slice_rows(node: fx.Node, importer: Any) -> Any:
    """Emit a slice up to a symbolic end, such as the first S rows of a table of positions, with that length.

    TVM's own converter infers min(S, rows), with which nothing broadcasts; and of the first token, min(1, S); and
    no length where the end counts from behind.
    """
    given: Any = node.args
    table, axis, begin, end, step = given + (None, 0, None, None, 1)[len(given) :]
    length = node.meta["val"].shape[axis]
    known = end.meta["val"] if isinstance(end, fx.Node) else None
    whole = table.meta["val"].shape[axis]
    if isinstance(length, int) and not isinstance(whole, int) and isinstance(begin or 0, int) and step == 1:
        return picking.rows_in_a_row(importer, importer.env[table], axis, begin or 0, length)
    if not begin and step == 1 and isinstance(end, int) and end < 0 and not isinstance(whole, int):
        x = importer.env[table]
        return picking.rows_in_a_row(importer, x, axis, 0, x.ty.shape[axis] + end)
    if begin or step != 1 or not _same_symbol(length, known):
        return importer._slice(node)
    return picking.rows_in_a_row(importer, importer.env[table], axis, 0, importer.env[end])


def reshape(node: fx.Node, importer: Any) -> Any:
    """Emit a reshape; TVM's own converter compares symbolic sizes as if they were numbers, and fails."""
    before: Any = node.args[0]
    x, sizes = importer.retrieve_args(node)
    if shape_of(before.meta["val"]) == shape_of(node.meta["val"]):
        return x
    return importer.block_builder.emit(relax.op.reshape(x, sizes))


def masked_fill(node: fx.Node, importer: Any) -> Any:
    """Emit a choice between a number and floats; TVM's own converter fails on infinity."""
    x, mask, value = importer.retrieve_args(node)[:3]
    if not str(x.ty.dtype).startswith("float"):
        return importer._masked_fill(node)
    return importer.block_builder.emit(relax.op.where(mask, relax.const(float(value), str(x.ty.dtype)), x))


def scatter_value(node: fx.Node, importer: Any) -> Any:
    """Emit rows in which one number takes the chosen places; TVM's own scatter cannot be scheduled."""
    x, axis, index, value = importer.retrieve_args(node)
    rank, each = len(x.ty.shape), index.ty.shape[-1]
    is_last = axis % rank == rank - 1 and _same_symbols(node.args[0], node.args[2])
    if not is_last or not isinstance(each, tvm.tirx.IntImm) or int(each) > _UNROLLED:
        return importer._scatter_value(node)

    def scattered(rows: Any, chosen: Any) -> Any:
        def element(*place: Any) -> Any:
            found = rows[place]
            for i in range(int(each)):
                there = chosen[(*place[:-1], i)] == place[-1].astype(chosen.dtype)
                found = tvm.tirx.Select(there, tvm.tirx.const(value, rows.dtype), found)
            return found

        return te.compute(rows.shape, element, "scattered")

    return importer.block_builder.emit_te(scattered, x, index)


def _same_symbols(one: Any, other: Any) -> bool:
    """Return whether two nodes' values have the same sizes but for the last."""
    return shape_of(one.meta["val"])[:-1] == shape_of(other.meta["val"])[:-1]


def flatten(node: fx.Node, importer: Any) -> Any:
    """Emit dimensions as one; see :func:`_last_as_one`."""
    x, *dims = importer.retrieve_args(node)
    merged = _last_as_one(x) if dims in ([-2], [-2, -1]) else None
    return importer._flatten(node) if merged is None else importer.block_builder.emit_te(merged, x)


def _last_as_one(x: Any) -> Any:
    """Return what puts the last two dimensions together, where an earlier one is computed from another size, as behind
    convolutions: TVM takes seconds to simplify the indices of its own reshape there.  None elsewhere.
    """
    sizes, plain = list(x.ty.shape), (tvm.tirx.IntImm, tvm.tirx.Var)
    if all(isinstance(size, plain) for size in sizes) or not all(isinstance(n, tvm.tirx.IntImm) for n in sizes[-2:]):
        return None
    width = int(sizes[-1])

    def merged(given: Any) -> Any:
        shape = [*sizes[:-2], int(sizes[-2]) * width]
        return te.compute(shape, lambda *at: given[(*at[:-1], at[-1] // width, at[-1] % width)], "last_as_one")

    return merged


def running_sum(node: fx.Node, importer: Any) -> Any:
    """Emit sums of all places up to each, such as those that count the tokens in front of one; TVM lowers none of its
    own for lengths that vary.  They take time with the square of the length.
    """
    x, axis = importer.retrieve_args(node)[:2]
    axis = axis % len(x.ty.shape)
    is_whole = str(x.ty.dtype).startswith(("int", "bool"))  # whose sums PyTorch makes as wide as it can
    dtype = importer.integers if is_whole else str(x.ty.dtype)

    def sums(given: Any) -> Any:
        place = te.reduce_axis((0, given.shape[axis]), "place")

        def upto(*index: Any) -> Any:
            earlier = given[(*index[:axis], place, *index[axis + 1 :])].astype(dtype)
            zero = tvm.tirx.const(0, dtype)
            return te.sum(tvm.tirx.Select(place <= index[axis], earlier, zero), axis=place)

        return te.compute(given.shape, upto, "running_sum")

    return importer.block_builder.emit_te(sums, x)


def subtract_from(node: fx.Node, importer: Any) -> Any:
    """Emit a number less a tensor; TVM's own converter takes a whole number for an int32."""
    x, number, *scale = importer.retrieve_args(node)
    if scale and scale[0] != 1:
        return importer._rsub(node)
    if not isinstance(number, int | float):  # a size that varies

        def difference(given: Any, size: Any) -> Any:
            return te.compute(given.shape, lambda *at: tvm.tirx.Cast(given.dtype, size) - given[at], "difference")

        return importer.block_builder.emit_te(difference, x, number)
    return importer.block_builder.emit(relax.op.subtract(relax.const(number, str(x.ty.dtype)), x))


def full(node: fx.Node, importer: Any) -> Any:
    """Emit one number everywhere; TVM's own converter fails on infinity."""
    sizes, value = node.args
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    if sizes or not isinstance(value, int | float):
        return importer._full(node)
    return importer.block_builder.emit(relax.const(value, dtype))


def put_in_place(node: fx.Node, importer: Any) -> Any:
    """Emit a tensor with another in one place of a dimension of fixed size, which TVM's own converters lack."""
    x, part, axis, place = importer.retrieve_args(node)
    emit, count = importer.block_builder.emit, int(x.ty.shape[axis])
    pieces = [emit(relax.op.expand_dims(part, axis))]
    for before, begin, end in ((True, 0, place % count), (False, place % count + 1, count)):
        if begin < end:
            piece = emit(relax.op.strided_slice(x, [axis], [begin], [end]))
            pieces = [piece, *pieces] if before else [*pieces, piece]
    return emit(relax.op.concat(pieces, axis))


def group_norm(node: fx.Node, importer: Any) -> Any:
    """Emit a norm over a length that varies, and over all channels or each: TVM's own kernel has no schedule here.

    Of each channel, with a length that is a quotient, LLVM does not come to an end with it.
    """
    x, groups, weight, bias, eps = (*importer.retrieve_args(node), None, None, 1e-5)[:5]
    _, channels, *rest = x.ty.shape
    if groups not in (1, int(channels)) or all(isinstance(size, tvm.tirx.IntImm) for size in rest):
        return importer._group_norm(node)
    emit, op, axes = importer.block_builder.emit, relax.op, list(range(1 if groups == 1 else 2, 2 + len(rest)))
    centred = emit(op.subtract(x, emit(op.mean(x, axes, keepdims=True))))
    spread = emit(op.mean(emit(op.multiply(centred, centred)), axes, keepdims=True))
    result = emit(op.multiply(centred, emit(op.rsqrt(emit(op.add(spread, relax.const(float(eps), "float32")))))))
    for parameter, combine in ((weight, op.multiply), (bias, op.add)):
        if parameter is not None:
            by_channel = emit(op.reshape(parameter, [1, int(channels), *[1] * len(rest)]))
            result = emit(combine(result, by_channel))
    return result


def _same_symbol(one: object, other: object) -> bool:
    """Return whether both are the same symbolic number."""
    return isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt) and one.node.expr == other.node.expr


CONVERTERS: Mapping[str, Callable[[fx.Node, Any], Any]] = MappingProxyType(
    {
        "slice.Tensor": slice_rows,
        "reshape.default": reshape,
        "view.default": reshape,
        "cumsum.default": running_sum,
        "index.Tensor": picking.index,
        "select.int": picking.select,
        "narrow.default": picking.narrow,
        "rsub.Scalar": subtract_from,
        "full.default": full,
        "select_scatter.default": put_in_place,
        "masked_fill.Scalar": masked_fill,
        "scatter.value": scatter_value,
        "group_norm.default": group_norm,
        "flatten.using_ints": flatten,
    }
)
"""The converter of each operator, by its name, on all targets."""
