"""Say operators that kernels lack with those that they have.

add(x, y, alpha=a)                  becomes      x + y * a              and sub likewise
mul(float32, size)                  becomes      mul(float32, full((), size))      and add, sub, div likewise
div(x, y, rounding_mode="floor")    becomes      floor_divide(x, y)
div(x, y, rounding_mode="trunc")    becomes      trunc(x / y); of integers (x - fmod(x, y)) / y
where(c, x, 0.5)                    becomes      where(c, x, full((), 0.5))
addcmul(x, y, z, value=a)           becomes      x + y * z * a          and addcdiv likewise
new_full(x, shape, 0.5)             becomes      full(shape, 0.5)
take(x, i)                          becomes      index(reshape(x, -1), i)
narrow(x, d, begin, length)         becomes      slice(x, d, begin, begin + length)
glu(x, d)                           becomes      the first half of x along d, times the sigmoid of the second
std(x, d), var(x, d)                become      the mean of (x - mean(x, d))^2, its root for std
multiply, subtract, divide, ...     become       mul, sub, div, ...
clamp(int64, min=0)                 becomes      clamp(int64, 0, the largest int64)
clamp(x, 0, size)                   becomes      minimum(maximum(x, 0), full((), size))
pad(x, (0, size), value=a)          becomes      cat((x, full(shape, a)))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from compressor.graph.rewrite import call_before

_aten = torch.ops.aten
_Call = Callable[..., fx.Node]

_SAME: dict[Any, Any] = {
    _aten.multiply.Tensor: _aten.mul.Tensor,
    _aten.multiply.Scalar: _aten.mul.Scalar,
    _aten.subtract.Tensor: _aten.sub.Tensor,
    _aten.subtract.Scalar: _aten.sub.Scalar,
    _aten.divide.Tensor: _aten.div.Tensor,
    _aten.divide.Scalar: _aten.div.Scalar,
    _aten.true_divide.Tensor: _aten.div.Tensor,
    _aten.true_divide.Scalar: _aten.div.Scalar,
}


def _plain_terms(node: fx.Node, call: _Call) -> fx.Node:
    x, y = (
        call(_aten.full.default, [], arg, dtype=node.meta["val"].dtype) if _is_size(arg) else arg for arg in node.args
    )
    factor = node.kwargs.get("alpha", 1)
    return call(node.target, x, y if factor == 1 else call(_aten.mul.Tensor, y, factor))


def _is_size(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.SymInt)


def _needs_plain_terms(node: fx.Node) -> bool:
    """Return whether a sum or product has a factor, or a size among floats, which kernels leave an integer."""
    is_float: bool = node.meta["val"].is_floating_point()
    return bool(node.kwargs.get("alpha", 1) != 1) or (is_float and any(map(_is_size, node.args)))


def _added(node: fx.Node, call: _Call) -> fx.Node:
    x, y, z = node.args
    both = call(_aten.mul.Tensor if node.target is _aten.addcmul.default else _aten.div.Tensor, y, z)
    factor = node.kwargs.get("value", 1)
    return call(_aten.add.Tensor, x, both if factor == 1 else call(_aten.mul.Tensor, both, factor))


def _filled(node: fx.Node, call: _Call) -> fx.Node:
    return call(_aten.full.default, *node.args[1:], dtype=node.meta["val"].dtype)


def _rounded(node: fx.Node, call: _Call) -> fx.Node:
    x, y = node.args[:2]
    mode = node.kwargs["rounding_mode"]
    if mode is None:
        return call(_aten.div.Tensor, x, y)
    if mode == "floor":
        return call(_aten.floor_divide.default, x, y)
    if node.meta["val"].is_floating_point():
        return call(_aten.trunc.default, call(_aten.div.Tensor, x, y))
    rest = call(_aten.fmod.Tensor if isinstance(y, fx.Node) else _aten.fmod.Scalar, x, y)
    return call(_aten.floor_divide.default, call(_aten.sub.Tensor, x, rest), y)


def _chosen(node: fx.Node, call: _Call) -> fx.Node:
    dtype = node.meta["val"].dtype
    both = [x if isinstance(x, fx.Node) else call(_aten.full.default, [], x, dtype=dtype) for x in node.args[1:3]]
    return call(_aten.where.self, node.args[0], *both)


def _repeated(node: fx.Node, call: _Call) -> fx.Node:
    x, counts = _repetition(node)
    sizes = list(x.meta["val"].shape)
    if sizes[0] == 1:
        return call(_aten.expand.default, x, [counts[0], *[-1] * (len(sizes) - 1)])
    each = call(_aten.expand.default, call(_aten.unsqueeze.default, x, 0), [counts[0], *[-1] * len(sizes)])
    return call(_aten.reshape.default, each, [-1, *sizes[1:]])


def _repetition(node: fx.Node) -> tuple[Any, Any]:
    return node.args[0], node.args[1]


def _varies_in_front(node: fx.Node) -> bool:
    """Return whether a repetition is of the first dimension, by a number that varies, and of no other."""
    x, counts = _repetition(node)
    first, *rest = x.meta["val"].shape
    known = first == 1 or all(isinstance(size, int) for size in rest)
    in_front = len(counts) == len(rest) + 1 and isinstance(counts[0], fx.Node) and all(n == 1 for n in counts[1:])
    return known and in_front


def _joined(node: fx.Node, call: _Call) -> fx.Node:
    parts, *axis = node.args
    return call(node.target, [part for part in parts if not _is_nothing(part)], *axis)  # type: ignore[union-attr]


def _is_nothing(x: Any) -> bool:
    """Return whether a tensor is the empty vector, which joins tensors of any rank and adds nothing."""
    shape = x.meta["val"].shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0  # one that data decide is not asked


def _windows(node: fx.Node, call: _Call) -> fx.Node:
    given: Any = node.args
    x, kernel, dilation, padding, stride = given
    rows = call(_aten.permute.default, x, [0, 2, 3, 1])
    found = call(torch.ops.compressor.patches.default, rows, kernel, stride, padding, dilation)
    channels, places = int(x.meta["val"].shape[1]), call(_aten.flatten.using_ints, found, 1, 2)
    apart = call(_aten.unflatten.int, places, 2, [int(places.meta["val"].shape[2]) // channels, channels])
    return call(_aten.flatten.using_ints, call(_aten.permute.default, apart, [0, 3, 2, 1]), 1, 2)


def _taken(node: fx.Node, call: _Call) -> fx.Node:
    return call(_aten.index.Tensor, call(_aten.reshape.default, node.args[0], [-1]), [node.args[1]])


def _clamped(node: fx.Node, call: _Call) -> fx.Node:
    x, (low, high), dtype = node.args[0], _bounds(node), node.meta["val"].dtype
    if _is_size(low) or _is_size(high):
        for bound, nearest in ((low, _aten.maximum.default), (high, _aten.minimum.default)):
            x = x if bound is None else call(nearest, x, call(_aten.full.default, [], bound, dtype=dtype))
        return x  # type: ignore[return-value]
    limits = torch.iinfo(dtype)
    return call(_aten.clamp.default, x, limits.min if low is None else low, limits.max if high is None else high)


def _axis(node: fx.Node) -> int:
    axis: Any = node.args[1] if len(node.args) > 1 else -1
    return int(axis % node.meta["val"].dim())


def _padded(node: fx.Node, call: _Call) -> fx.Node:
    x, sides, dtype = node.args[0], _sides(node), node.meta["val"].dtype
    for pair in range(len(sides) // 2):
        dim, parts = node.meta["val"].dim() - 1 - pair, [x]
        for side, at in zip(sides[2 * pair : 2 * pair + 2], (0, 2), strict=True):
            if side != 0:
                sizes: Any = [
                    side if axis == dim else size if isinstance(size, int) else call(_aten.sym_size.int, x, axis)
                    for axis, size in enumerate(x.meta["val"].shape)  # type: ignore[union-attr]
                ]
                parts.insert(at, call(_aten.full.default, sizes, _filler(node), dtype=dtype))
        x = parts[0] if len(parts) == 1 else call(_aten.cat.default, parts, dim)
    return x  # type: ignore[return-value]


def _sides(node: fx.Node) -> Any:
    """Return how much is filled in front and behind, the last dimension first."""
    return node.args[1]


def _filler(node: fx.Node) -> Any:
    """Return the number that a tensor is filled up with."""
    return node.args[3] if len(node.args) > 3 and node.args[3] is not None else 0


def _gated(node: fx.Node, call: _Call) -> fx.Node:
    dim = _axis(node)
    half = node.meta["val"].shape[dim]
    values, gates = (call(_aten.slice.Tensor, node.args[0], dim, i * half, (i + 1) * half) for i in range(2))
    return call(_aten.mul.Tensor, values, call(_aten.sigmoid.default, gates))


def _spread(node: fx.Node, call: _Call) -> fx.Node:
    x, axes, over, keep = _spread_arguments(node)
    count = math.prod(x.meta["val"].shape[axis] for axis in axes)
    away = call(_aten.sub.Tensor, x, call(_aten.mean.dim, x, axes, True))
    mean = call(_aten.mean.dim, call(_aten.mul.Tensor, away, away), axes, keep)
    variance = mean if not over else call(_aten.mul.Tensor, mean, count / (count - over))
    return call(_aten.sqrt.default, variance) if node.target.__name__.startswith("std") else variance  # type: ignore[union-attr]


def _spread_arguments(node: fx.Node) -> tuple[Any, list[int], float, bool]:
    """Return what a variance or deviation is of, over which dimensions, what its divisor is less by, and keepdim."""
    names = ("self", "dim", "unbiased", "keepdim")
    given: dict[str, Any] = {"dim": None, "unbiased": True, "keepdim": False, "correction": None}
    given |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    over = given["correction"] if given["correction"] is not None else int(given["unbiased"])
    axes = given["dim"] or list(range(given["self"].meta["val"].dim()))
    return given["self"], axes, over, given["keepdim"]


def _bounds(node: fx.Node) -> tuple[Any, Any]:
    """Return the bounds of a clamp by numbers."""
    if node.target is _aten.clamp_min.default:
        return node.args[1], None
    if node.target is _aten.clamp_max.default:
        return None, node.args[1]
    given = (*node.args[1:], None, None)[:2]
    return given[0], given[1]


_FORMS: dict[Any, Callable[[fx.Node, _Call], fx.Node]] = {
    _aten.add.Tensor: _plain_terms,
    _aten.sub.Tensor: _plain_terms,
    _aten.mul.Tensor: _plain_terms,
    _aten.div.Tensor: _plain_terms,
    _aten.div.Tensor_mode: _rounded,
    _aten.div.Scalar_mode: _rounded,
    _aten.addcmul.default: _added,
    _aten.addcdiv.default: _added,
    _aten.new_full.default: _filled,
    _aten.where.Scalar: _chosen,
    _aten.where.ScalarSelf: _chosen,
    _aten.where.ScalarOther: _chosen,
    _aten.repeat.default: _repeated,
    _aten.cat.default: _joined,
    _aten.im2col.default: _windows,
    _aten.take.default: _taken,
    _aten.glu.default: _gated,
    _aten.pad.default: _padded,
    _aten.std.dim: _spread,
    _aten.std.correction: _spread,
    _aten.var.dim: _spread,
    _aten.var.correction: _spread,
    _aten.clamp.default: _clamped,
    _aten.clamp_min.default: _clamped,
    _aten.clamp_max.default: _clamped,
}


class OperatorForm:
    """An operator that kernels lack becomes those that compute the same."""

    name = "operator form"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match one of the operators."""
        if _FORMS.get(node.target) is _plain_terms:
            return node if _needs_plain_terms(node) else None
        if node.target is _aten.cat.default:
            parts: Any = node.args[0]
            return node if any(map(_is_nothing, parts)) and node.meta["val"].dim() > 1 else None
        if node.target is _aten.pad.default:
            constant = node.args[2:3] in ((), ("constant",))
            filled = all(_is_size(side) or side >= 0 for side in _sides(node))
            return node if constant and filled and any(map(_is_size, _sides(node))) else None
        if node.target is _aten.repeat.default:
            return node if _varies_in_front(node) else None
        if _FORMS.get(node.target) is _clamped:
            whole = not node.meta["val"].is_floating_point() and not node.meta["val"].is_complex()
            return node if (whole and None in _bounds(node)) or any(map(_is_size, _bounds(node))) else None
        if _FORMS.get(node.target) is _spread:
            x, axes, *_ = _spread_arguments(node)
            return node if all(isinstance(x.meta["val"].shape[axis], int) for axis in axes) else None
        if _FORMS.get(node.target) is _gated and not isinstance(node.meta["val"].shape[_axis(node)], int):
            return None
        return node if node.op == "call_function" and (node.target in _SAME or node.target in _FORMS) else None

    def check(self, match: fx.Node) -> str:
        """Ask for nothing."""
        return ""

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call the plain operators."""
        if match.target in _SAME:
            match.target = _SAME[match.target]
            return match

        made = _FORMS[match.target](match, partial(call_before, graph, match))
        match.replace_all_uses_with(made)
        graph.erase_node(match)
        return made
