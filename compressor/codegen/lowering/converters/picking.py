"""Convert what picks places of a tensor: TVM's own converters read foreign memory at places that count from the end."""

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax, te


def select(node: fx.Node, importer: Any) -> Any:
    """Emit one place of a dimension, such as the last token of each text."""
    x, axis, place = importer.retrieve_args(node)
    axis %= len(x.ty.shape)

    def selected(source: Any, given: Any) -> Any:
        begin = _from_start(given, source.shape[axis])
        shape = [*source.shape[:axis], *source.shape[axis + 1 :]]
        return te.compute(shape, lambda *at: source[(*at[:axis], begin, *at[axis:])], "selected")

    return importer.block_builder.emit_te(selected, x, place)


def narrow(node: fx.Node, importer: Any) -> Any:
    """Emit some places of a dimension in a row."""
    return rows_in_a_row(importer, *importer.retrieve_args(node))


def rows_in_a_row(importer: Any, x: Any, axis: int, first: Any, length: Any) -> Any:
    """Emit ``length`` places of a dimension, from ``first`` on."""
    axis %= len(x.ty.shape)

    def rows(source: Any, given: Any, count: Any) -> Any:
        begin = _from_start(given, source.shape[axis])
        shape = [*source.shape[:axis], count, *source.shape[axis + 1 :]]
        return te.compute(shape, lambda *at: source[(*at[:axis], begin + at[axis], *at[axis + 1 :])], "rows")

    return importer.block_builder.emit_te(rows, x, first, length)


def _from_start(place: Any, size: Any) -> Any:
    """Return a place that counts from the end, if it is a negative number, as one from the start."""
    return place + size if isinstance(place, int) and place < 0 else place


def index(node: fx.Node, importer: Any) -> Any:
    """Emit what index tensors pick, as PyTorch does: negative places count from the end, several tensors broadcast.

    Where a place is out of range, the nearest one is read.  TVM's own converter picks each row with each column where
    PyTorch picks pairs.
    """
    indices: Any = node.args[1]
    x, given = importer.env[node.args[0]], {a: importer.env[i] for a, i in enumerate(indices) if i is not None}
    emit_te, sizes = importer.block_builder.emit_te, x.ty.shape
    found = [emit_te(_counted, places, sizes[axis], primfunc_name_hint="places") for axis, places in given.items()]
    axes = list(given)
    if len(axes) == 1:
        return importer.block_builder.emit(relax.op.take(x, found[0], axes[0], mode="clip"))
    dims = max(len(places.ty.shape) for places in found)
    # Where the indexed dimensions stand together, their places go there; else to the front.
    begin = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0

    def picked(source: Any, *places: Any) -> Any:
        kept = [size for axis, size in enumerate(source.shape) if axis not in given]
        shape = [*kept[:begin], *_broadcast([index.shape for index in places], dims), *kept[begin:]]

        def element(*at: Any) -> Any:
            inside, outside = at[begin : begin + dims], iter([*at[:begin], *at[begin + dims :]])
            chosen = {axis: _read(index, inside) for axis, index in zip(axes, places, strict=True)}
            return source[tuple(chosen[a] if a in chosen else next(outside) for a in range(len(source.shape)))]

        return te.compute(shape, element, "picked")

    return emit_te(picked, x, *found)


def picks_by_mask(node: fx.Node) -> bool:
    """Return whether a node picks elements by bools, or assigns to such, so that their number depends on values."""
    aten = torch.ops.aten
    indices: Any = node.args[1] if node.target in (aten.index.Tensor, aten.index_put.default) else []
    return any(which is not None and which.meta["val"].dtype == torch.bool for which in indices)


def _counted(places: Any, size: Any) -> Any:
    """Count places from the start, and keep them inside."""

    def place(*at: Any) -> Any:
        given, end = places[at], tvm.tirx.Cast(places.dtype, size)
        from_start = tvm.tirx.Select(given < 0, given + end, given)
        return tvm.tirx.Max(tvm.tirx.Min(from_start, end - 1), tvm.tirx.const(0, places.dtype))

    return te.compute(places.shape, place, "places")


def _broadcast(shapes: list[Any], dims: int) -> list[Any]:
    """Return the shape that all of these have after broadcasting."""
    result: list[Any] = [1] * dims
    for shape in shapes:
        for axis, size in enumerate(shape, dims - len(shape)):
            result[axis] = result[axis] if _is_one(size) else size
    return result


def _read(index: Any, at: Any) -> Any:
    """Read an index tensor at a place of the shape that it is broadcast to."""
    own = at[len(at) - len(index.shape) :]
    return index[tuple(0 if _is_one(size) else i for size, i in zip(index.shape, own, strict=True))]


def _is_one(size: Any) -> bool:
    return isinstance(size, tvm.tirx.IntImm) and int(size) == 1
