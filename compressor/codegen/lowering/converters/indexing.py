"""Convert PyTorch's indexing by tensors, which counts negative indices from the end."""

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch import fx
from tvm import te, tirx


def index(node: fx.Node, importer: Any) -> Any:
    """Emit the elements that one or more index tensors pick together.

    TVM's own converter takes a negative index for one in front of the memory, several index tensors behind a whole
    dimension for a grid, and reads foreign memory where an index is out of range, which is held to the range here.
    """
    given: Any = node.args[1]
    picked = [axis for axis, which in enumerate(given) if which is not None]
    indices = [importer.env[given[axis]] for axis in picked]
    x = importer.env[node.args[0]]
    if len(picked) == 1:
        return _rows(x, indices[0], picked[0], importer)
    ranks = [len(which.ty.shape) for which in indices]
    sizes = [given[axis].meta["val"].shape for axis in picked]
    joint = [_joint(place, indices, sizes) for place in range(-max(ranks), 0)]
    # Dimensions that lie apart are put in front.
    begin = picked[0] if picked == list(range(picked[0], picked[-1] + 1)) else 0
    rest = [axis for axis in range(len(x.ty.shape)) if axis not in picked]
    shape = [x.ty.shape[axis] for axis in rest]
    shape[begin:begin] = joint

    def pick(values: Any, *which: Any) -> Any:
        def element(*at: Any) -> Any:
            own, shared = [*at[:begin], *at[begin + len(joint) :]], at[begin : begin + len(joint)]
            place: dict[int, Any] = dict(zip(rest, own, strict=True))
            for axis, table, size in zip(picked, which, sizes, strict=True):
                its = shared[len(shared) - len(size) :]
                found = table[tuple(0 if _is_one(n) else i for i, n in zip(its, size, strict=True))]
                place[axis] = _in_range(found.astype("int64"), values.shape[axis])
            return values[tuple(place[axis] for axis in range(len(place)))]

        return te.compute(shape, element, "picked")

    return importer.block_builder.emit_te(pick, x, *indices)


def picks_by_mask(node: fx.Node) -> bool:
    """Return whether a node picks elements by bools, so that their number depends on values."""
    indices: Any = node.args[1] if node.target is torch.ops.aten.index.Tensor else []
    return any(which is not None and which.meta["val"].dtype == torch.bool for which in indices)


def _rows(x: Any, which: Any, axis: int, importer: Any) -> Any:
    """Emit what one index tensor picks, in place of one dimension."""
    rank = len(which.ty.shape)

    def pick(values: Any, table: Any) -> Any:
        def element(*at: Any) -> Any:
            found = _in_range(table[at[axis : axis + rank]].astype("int64"), values.shape[axis])
            return values[(*at[:axis], found, *at[axis + rank :])]

        shape = [*values.shape[:axis], *table.shape, *values.shape[axis + 1 :]]
        return te.compute(shape, element, "rows")

    return importer.block_builder.emit_te(pick, x, which)


def _in_range(found: Any, size: Any) -> Any:
    """Return an index counted from the front, within the dimension."""
    size = size.astype("int64") if isinstance(size, tirx.Expr) else tirx.const(size, "int64")
    front = tirx.Select(found < 0, found + size, found)
    return tirx.max(tirx.min(front, size - 1), tirx.const(0, "int64"))


def _joint(place: int, indices: list[Any], sizes: list[Any]) -> Any:
    """Return a size of all index tensors together, counted from the last."""
    own = [
        which.ty.shape[len(size) + place]
        for which, size in zip(indices, sizes, strict=True)
        if len(size) >= -place and not _is_one(size[place])
    ]
    return own[0] if own else tvm.tirx.IntImm("int64", 1)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
