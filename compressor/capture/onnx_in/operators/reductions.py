"""Reductions, sums along a dimension, softmax, and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.values import Call, refuse


def _axes(call: Call, x: Tensor) -> list[int] | None:
    """Return the axes to reduce; None where nothing is to be done."""
    axes = call.axes(1)
    if axes:
        return [axis % x.dim() for axis in axes]
    return None if call.get("noop_with_empty_axes", 0) else list(range(x.dim()))


@operator("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
          "ReduceLogSumExp", "ReduceSumSquare")  # fmt: skip
def reduce(call: Call) -> Tensor:
    """Reduce dimensions."""
    x, keep, op = call.tensor(0), bool(call.get("keepdims", 1)), call.op
    axes = _axes(call, x)
    if axes is None:
        return _of_each(op, x)
    if op == "ReduceMean":
        return torch.mean(x, axes, keep) if x.is_floating_point() else torch.mean(x.double(), axes, keep).to(x.dtype)
    if op in ("ReduceMax", "ReduceMin"):
        return _extreme(x, axes, keep, op == "ReduceMax")
    if op == "ReduceProd":
        for axis in sorted(axes, reverse=True):
            x = torch.prod(x, axis, keep, dtype=x.dtype)
        return x
    if op == "ReduceLogSumExp":
        return torch.logsumexp(x.double(), axes, keep).to(x.dtype) if not x.is_floating_point() else torch.logsumexp(
            x, axes, keep)  # fmt: skip
    x = {"ReduceL1": torch.abs, "ReduceL2": torch.square, "ReduceSumSquare": torch.square}.get(op, lambda y: y)(x)
    total = torch.sum(x, axes, keep, dtype=x.dtype) if axes else x
    return {"ReduceL2": torch.sqrt, "ReduceLogSum": torch.log}.get(op, lambda y: y)(total)


def _of_each(op: str, x: Tensor) -> Tensor:
    """Return what a reduction of one element is."""
    if op in ("ReduceL1", "ReduceL2"):
        return torch.abs(x)
    if op == "ReduceSumSquare":
        return torch.square(x)
    return torch.log(x) if op == "ReduceLogSum" else x


def _extreme(x: Tensor, axes: list[int], keep: bool, largest: bool) -> Tensor:
    if x.dtype is torch.bool:
        return _extreme(x.to(torch.uint8), axes, keep, largest).to(torch.bool)
    empty = [axis for axis in axes if isinstance(x.shape[axis], int) and x.shape[axis] == 0]
    if empty:
        ends: Any = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        end = ends.min if largest else ends.max
        if x.dtype.is_floating_point:
            end = float("-inf") if largest else float("inf")
        kept = [1 if i in axes else size for i, size in enumerate(x.shape)]
        shape = kept if keep else [size for i, size in enumerate(x.shape) if i not in axes]
        return torch.full(shape, end, dtype=x.dtype)
    return torch.amax(x, axes, keep) if largest else torch.amin(x, axes, keep)


@operator("ArgMax", "ArgMin")
def arg_extreme(call: Call) -> Tensor:
    """Return where the largest or smallest element is, the first or the last of equal ones."""
    x, axis, keep = call.tensor(0), call.get("axis", 0), bool(call.get("keepdims", 1))
    find = torch.argmax if call.op == "ArgMax" else torch.argmin
    if not call.get("select_last_index", 0):
        return find(x, axis, keep)
    last: Tensor = x.shape[axis] - 1 - find(torch.flip(x, [axis]), axis, keep)
    return last


@operator("CumSum")
def cumsum(call: Call) -> Tensor:
    """Add up along a dimension."""
    x, axis = call.tensor(0), int(call.number(1, "its axis"))
    x = torch.flip(x, [axis]) if call.get("reverse", 0) else x
    total = torch.cumsum(x, axis, dtype=x.dtype)
    total = total - x if call.get("exclusive", 0) else total
    return torch.flip(total, [axis]) if call.get("reverse", 0) else total


@operator("Softmax", "LogSoftmax", "Hardmax")
def softmax(call: Call) -> Tensor:
    """Normalise along a dimension."""
    x, axis = call.tensor(0), call.get("axis", -1)
    if call.op == "Softmax":
        return torch.softmax(x, axis)
    if call.op == "LogSoftmax":
        return torch.log_softmax(x, axis)
    if not isinstance(x.shape[axis], int):
        raise refuse("it marks the largest along a size that varies")
    places = [1] * x.dim()
    places[axis] = x.shape[axis]
    return (torch.arange(x.shape[axis]).reshape(places) == torch.argmax(x, axis, keepdim=True)).to(x.dtype)


@operator("NegativeLogLikelihoodLoss")
def nll_loss(call: Call) -> Tensor:
    """Return the weighted negative log likelihood of classes [N, d...] under [N, C, d...]."""
    return _likelihood(call, call.tensor(0), call.tensor(1), call.maybe(2))


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Return the loss of scores, and their log likelihoods."""
    logs = torch.log_softmax(call.tensor(0), 1)
    loss = _likelihood(call, logs, call.tensor(1), call.maybe(2))
    return (loss, logs) if call.outputs > 1 else loss


def _likelihood(call: Call, logs: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    ignored = call.get("ignore_index")
    classes = labels.to(torch.int64)
    kept = torch.ones_like(classes, dtype=torch.bool) if ignored is None else classes != ignored
    safe = torch.where(kept, classes, torch.zeros_like(classes))
    loss = -torch.gather(logs, 1, safe.unsqueeze(1)).squeeze(1)
    weights = torch.ones_like(loss) if weight is None else weight[safe]
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    loss = torch.where(kept, loss * weights, torch.zeros_like(loss))
    how = call.get("reduction", "mean")
    if how == "none":
        return loss
    return torch.sum(loss) if how == "sum" else torch.sum(loss) / torch.sum(weights)
