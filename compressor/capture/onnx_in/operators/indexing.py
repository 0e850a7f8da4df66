"""Operators that read and write by index."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.values import Call, Constant, Numbers, refuse


def _wrapped(index: Tensor, size: int | torch.SymInt) -> Tensor:
    """Count negative indices from the end."""
    moved: Any = index + size
    return torch.where(index < 0, moved, index)


def _index(call: Call, position: int, size: int | torch.SymInt) -> Tensor:
    """Return an index; constants are wrapped without an operator in the graph."""
    value, index = call.inputs[position], call.tensor(position).to(torch.int64)
    if isinstance(value, Constant) and value.listed is not None and bool((value.listed >= 0).all()):
        return index
    return _wrapped(index, size)


@operator("Gather")
def gather(call: Call) -> Tensor:
    """Take slices; rows of a stored float matrix as an embedding does."""
    x, axis = call.tensor(0), call.get("axis", 0)
    axis = axis % x.dim()
    known = call.known(1)
    if known is not None and known.ndim == 0 and isinstance(known.item(), int):
        return x.select(axis, known.item())
    if isinstance(call.inputs[1], Numbers):
        return x.index_select(axis, call.tensor(1).reshape(-1)).reshape(
            [*x.shape[:axis], *known.shape, *x.shape[axis + 1 :]]  # type: ignore[union-attr]
        )
    index = _index(call, 1, x.shape[axis])
    if isinstance(call.inputs[0], Constant) and axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(index, x)
    if index.dim() == 1:
        return x.index_select(axis, index)
    shape = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    return x.index_select(axis, index.reshape(-1)).reshape(shape)


@operator("GatherElements")
def gather_elements(call: Call) -> Tensor:
    """Take elements along one dimension."""
    x, axis = call.tensor(0), call.get("axis", 0)
    return torch.gather(x, axis, _index(call, 1, x.shape[axis]))


@operator("GatherND")
def gather_nd(call: Call) -> Tensor:
    """Take slices by tuples of indices."""
    x, index, batch = call.tensor(0), call.tensor(1).to(torch.int64), call.get("batch_dims", 0)
    parts = []
    for d in range(batch):
        shape = [1] * (index.dim() - 1)
        shape[d] = x.shape[d]
        parts.append(torch.arange(x.shape[d]).reshape(shape))
    for d in range(index.shape[-1]):
        parts.append(_wrapped(index[..., d], x.shape[batch + d]))
    return x[tuple(parts)]


@operator("ScatterElements", "Scatter")
def scatter_elements(call: Call) -> Tensor:
    """Write elements along one dimension, or reduce them into what is there."""
    x, axis, updates = call.tensor(0), call.get("axis", 0), call.tensor(2)
    index, how = _index(call, 1, x.shape[axis]), call.get("reduction", "none")
    if how == "none":
        return torch.scatter(x, axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    if how not in names:
        raise refuse(f"reduction {how!r} is not read")
    return torch.scatter_reduce(x, axis, index, updates, reduce=names[how], include_self=True)


@operator("ScatterND")
def scatter_nd(call: Call) -> Tensor:
    """Write slices by tuples of indices, or reduce them into what is there."""
    x, index, updates = call.tensor(0), call.tensor(1).to(torch.int64), call.tensor(2)
    how, depth = call.get("reduction", "none"), index.shape[-1]
    places = tuple(_wrapped(index[..., d], x.shape[d]) for d in range(depth))
    if how in ("none", "add"):
        return torch.index_put(x, places, updates, accumulate=how == "add")
    names = {"mul": "prod", "max": "amax", "min": "amin"}
    if how not in names:
        raise refuse(f"reduction {how!r} is not read")
    flat = torch.zeros_like(places[0])
    for d in range(depth):
        flat = flat * x.shape[d] + places[d]
    rest = list(x.shape[depth:])
    rows = x.reshape([-1, *rest]) if rest else x.reshape(-1)
    spread = flat.reshape([-1] + [1] * len(rest)).expand([flat.numel(), *rest])
    done = torch.scatter_reduce(rows, 0, spread, updates.reshape([-1, *rest]), reduce=names[how], include_self=True)
    return done.reshape(x.shape)


@operator("OneHot")
def one_hot(call: Call) -> Tensor:
    """Mark indices; those out of range mark nothing."""
    index, depth, values = call.tensor(0).to(torch.int64), call.number(1, "the depth"), call.tensor(2)
    depth = int(depth) if isinstance(depth, float) else depth
    axis = call.get("axis", -1)
    axis = axis + index.dim() + 1 if axis < 0 else axis
    places = torch.arange(depth).reshape([1] * axis + [-1] + [1] * (index.dim() - axis))
    return torch.where(_wrapped(index, depth).unsqueeze(axis) == places, values[1], values[0])


@operator("TopK")
def top_k(call: Call) -> tuple[Tensor, Tensor]:
    """Return the largest or smallest values and where they are; equal ones in their order."""
    x, k, axis = call.tensor(0), call.number(1, "k"), call.get("axis", -1)
    kept = torch.sort(x, dim=axis, descending=bool(call.get("largest", 1)), stable=True)
    return _first(kept.values, axis, k), _first(kept.indices, axis, k)


def _first(x: Tensor, axis: int, count: int) -> Tensor:
    return x.narrow(axis, 0, count)


@operator("ReverseSequence")
def reverse_sequence(call: Call) -> Tensor:
    """Reverse the first elements of each sequence of a batch."""
    x, lengths = call.tensor(0), call.tensor(1)
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    steps = torch.arange(x.shape[time])
    shape_steps, shape_lengths = [1] * x.dim(), [1] * x.dim()
    shape_steps[time], shape_lengths[batch] = x.shape[time], x.shape[batch]
    steps, lengths = steps.reshape(shape_steps), lengths.reshape(shape_lengths)
    places = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return torch.gather(x, time, places.expand(x.shape))
