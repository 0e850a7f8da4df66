"""Compute complex numbers by their real and imaginary parts, as rotary embeddings do that turn pairs of channels.

polar(r, a)                 becomes      r * cos(a), r * sin(a)
view_as_complex(x)          becomes      x[..., 0], x[..., 1]
(a + bi) * (c + di)         becomes      a * c - b * d, a * d + b * c
view_as_real(a + bi)        becomes      stack([a, b], -1)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from compressor.graph.rewrite import call_before
from compressor.graph.rules import why_not

_aten = torch.ops.aten
_Call = Callable[..., fx.Node]
_Parts = tuple[fx.Node, fx.Node]

_OF_EACH_PART = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.index.Tensor,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.flatten.using_ints,
        _aten.repeat.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.neg.default,
    }
)
"""Operators on one complex tensor that do the same to both parts."""
_CASTS = frozenset({_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default})
_SUMS = frozenset({_aten.add.Tensor, _aten.sub.Tensor})


class RealParts:
    """An operator on complex numbers becomes operators on their parts; what it was goes as dead code."""

    name = "real parts"

    def __init__(self) -> None:
        self._parts: dict[fx.Node, _Parts] = {}

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match whatever gives or takes complex numbers."""
        if node.op != "call_function":
            return None
        return node if _is_complex(node) or any(map(_is_complex, node.all_input_nodes)) else None

    def check(self, match: fx.Node) -> str:
        """Ask for known parts, and an operator that is known here."""
        unknown = [x.name for x in match.all_input_nodes if _is_complex(x) and x not in self._parts]
        odd = match.target in _SUMS and bool(match.kwargs.get("alpha", 1) != 1)
        known = match.target in {*_OPERATORS, *_OF_EACH_PART, *_CASTS}
        by_complex: bool = match.target is _aten.div.Tensor and _is_complex(match.args[1])
        return why_not(
            (bool(unknown), f"the parts of {', '.join(unknown)} are not known"),
            (not known or odd or by_complex, f"{match.target} on complex numbers is not known"),
            (any(isinstance(arg, complex) for arg in match.args), "it has a complex number in it"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Compute both parts; a real result takes the operator's place."""
        call = partial(call_before, graph, match)
        args: list[Any] = [self._parts.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in match.args]
        found: Any
        if match.target in _CASTS:
            found = args[0]
        elif match.target in _OF_EACH_PART:
            found = tuple(call(match.target, part, *args[1:], **match.kwargs) for part in args[0])
        else:
            found = _OPERATORS[match.target](call, *args)
        if isinstance(found, tuple):
            self._parts[match] = found
            return match
        match.replace_all_uses_with(found)
        return found  # type: ignore[no-any-return]


def _is_complex(x: Any) -> bool:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return isinstance(value, Tensor) and bool(value.is_complex())


def _polar(call: _Call, size: fx.Node, angle: fx.Node) -> _Parts:
    sides = (call(_aten.cos.default, angle), call(_aten.sin.default, angle))
    return call(_aten.mul.Tensor, size, sides[0]), call(_aten.mul.Tensor, size, sides[1])


def _from_pairs(call: _Call, x: fx.Node) -> _Parts:
    return call(_aten.select.int, x, -1, 0), call(_aten.select.int, x, -1, 1)


def _to_pairs(call: _Call, parts: _Parts) -> fx.Node:
    return call(_aten.stack.default, list(parts), -1)


def _product(call: _Call, x: Any, y: Any) -> _Parts:
    if not isinstance(x, tuple):
        x, y = y, x
    (a, b), times = x, _aten.mul.Tensor
    if not isinstance(y, tuple):
        return call(times, a, y), call(times, b, y)
    c, d = y
    return (
        call(_aten.sub.Tensor, call(times, a, c), call(times, b, d)),
        call(_aten.add.Tensor, call(times, a, d), call(times, b, c)),
    )


def _sum(target: Any) -> Callable[..., _Parts]:
    def parts(call: _Call, x: Any, y: Any) -> _Parts:
        if isinstance(x, tuple) and isinstance(y, tuple):
            return call(target, x[0], y[0]), call(target, x[1], y[1])
        if isinstance(x, tuple):
            return call(target, x[0], y), x[1]
        return call(target, x, y[0]), y[1] if target is _aten.add.Tensor else call(_aten.neg.default, y[1])

    return parts


def _size(call: _Call, parts: _Parts) -> fx.Node:
    squares = [call(_aten.mul.Tensor, part, part) for part in parts]
    return call(_aten.sqrt.default, call(_aten.add.Tensor, *squares))


def _conjugate(call: _Call, parts: _Parts) -> _Parts:
    return parts[0], call(_aten.neg.default, parts[1])


_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.polar.default: _polar,
    _aten.complex.default: lambda call, real, imaginary: (real, imaginary),
    _aten.view_as_complex.default: _from_pairs,
    _aten.view_as_real.default: _to_pairs,
    _aten.real.default: lambda call, parts: parts[0],
    _aten.imag.default: lambda call, parts: parts[1],
    _aten.abs.default: _size,
    _aten._conj.default: _conjugate,
    _aten._conj_physical.default: _conjugate,
    _aten.conj_physical.default: _conjugate,
    _aten.mul.Tensor: _product,
    _aten.div.Tensor: lambda call, x, y: (call(_aten.div.Tensor, x[0], y), call(_aten.div.Tensor, x[1], y)),
    _aten.add.Tensor: _sum(_aten.add.Tensor),
    _aten.sub.Tensor: _sum(_aten.sub.Tensor),
}
"""From the parts of operands, or real operands, to the parts of the result, or a real result."""
