"""Say sequences that are shifted by some tokens, and slices that begin late, by the places that they are read at.

pad(x[:, k:], behind=k)         becomes      where(i + k < n, x[:, i + k], 0)       i = arange(n), n = x.shape[1]
pad(x[:, :-k], in front=k)      becomes      where(i - k >= 0, x[:, i - k], 0)

x[begin:end] of a fixed length   becomes      x[begin + arange(end - begin)]

The first two have x's own length in all steps, where a slice has another, which may be none.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compressor.graph.matching import calls, replace_by, shape_of
from compressor.graph.rewrite import call_before
from compressor.graph.rules import why_not

_aten = torch.ops.aten


class Shifted:
    """A slice that is filled up with zeros to the length that it was cut from is a lookup of rows."""

    name = "shifted sequence"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match zeros beside a slice, along a dimension that varies, up to the length of what was cut."""
        if node.target not in (_aten.pad.default, _aten.constant_pad_nd.default):
            return None
        source: Any = node.args[0]
        if not calls(source, _aten.slice.Tensor):
            return None
        whole: Any = source.args[0]
        if shape_of(node.meta["val"]) != shape_of(whole.meta["val"]):
            return None
        return node if not isinstance(node.meta["val"].shape[_dimension(source)], int) else None

    def check(self, match: fx.Node) -> str:
        """Ask for zeros on one side, and for the slice to leave out as much on the other."""
        source: Any = match.args[0]
        sides = _sides(match)
        named = {"start": 0, "end": None, "step": 1}
        named |= {**dict(zip(("self", "dim", "start", "end", "step"), source.args, strict=False)), **source.kwargs}
        start, whole = named["start"] or 0, named["end"] is None or named["end"] == 2**63 - 1
        front = sides == (-(named["end"] or 0) if isinstance(named["end"], int) else None, 0) and start == 0
        behind = sides == (0, start) and whole
        return why_not(
            (match.target is _aten.pad.default and match.args[2:3] not in ((), ("constant",)), "it repeats tokens"),
            (_filler(match) != 0, "it is not filled with zeros"),
            (named["step"] != 1 or not (front or behind), "it is not a shift"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``index`` and ``where``."""
        source: Any = match.args[0]
        sides: Any = _sides(match)
        x, dim, (front, behind) = source.args[0], _dimension(source), sides

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return call_before(graph, match, target, *args, **kwargs)

        size = call(_aten.sym_size.int, x, dim)
        places = call(_aten.add.Tensor, call(_aten.arange.default, size), behind - front)
        count = call(_aten.full.default, [], size, dtype=torch.int64)
        kept = call(_aten.lt.Tensor, places, count) if behind else call(_aten.ge.Scalar, places, 0)
        inside = call(_aten.where.self, kept, places, call(_aten.full.default, [], 0, dtype=torch.int64))
        rows = call(_aten.index.Tensor, x, [*[None] * dim, inside])
        for _ in range(x.meta["val"].dim() - dim - 1):
            kept = call(_aten.unsqueeze.default, kept, -1)
        dtype = match.meta["val"].dtype
        made = call(_aten.where.self, kept, rows, call(_aten.full.default, [], 0, dtype=dtype))
        match.replace_all_uses_with(made)
        graph.erase_node(match)
        return made


class LateSlice:
    """A slice that begins at a place that varies is a lookup of rows: kernels know where a tensor begins."""

    name = "late slice"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
        """Return a slice of a fixed length with the places where it begins and ends, of which the first varies."""
        given: Any = (*node.args, None, None, None, None)
        if not calls(node, _aten.slice.Tensor) or node.kwargs or not isinstance(given[2], fx.Node):
            return None
        size = given[0].meta["val"].shape[_dimension(node)]
        end = given[3] if isinstance(given[3], fx.Node) or (given[3] or 0) < 0 else min(given[3] or size, size)
        return (node, given[2], end) if isinstance(size, int) and given[4] in (None, 1) else None

    def check(self, match: tuple[fx.Node, Any, Any]) -> str:
        """Ask for places inside of the tensor."""
        node, *places = match
        size = node.args[0].meta["val"].shape[_dimension(node)]  # type: ignore[union-attr]
        known = [place.meta["val"].node for place in places if isinstance(place, fx.Node)]
        spans = [number.shape_env.bound_sympy(number.expr) for number in known]
        return why_not(
            (any(isinstance(place, int) and place < 0 for place in places), "it ends before the end"),
            (any(span.lower < 0 or span.upper > size for span in spans), "it may begin or end outside of the tensor"),
        )

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, Any, Any]) -> fx.Node:
        """Call ``index``."""
        node, begin, end = match
        count = call_before(graph, node, operator.sub, end, begin)
        first = call_before(graph, node, _aten.full.default, [], begin, dtype=torch.int64)
        places = call_before(
            graph, node, _aten.add.Tensor, call_before(graph, node, _aten.arange.default, count), first
        )
        return replace_by(graph, node, _aten.index.Tensor, (node.args[0], [*[None] * _dimension(node), places]))


def _dimension(node: Any) -> int:
    """Return the dimension of a slice."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(given % node.meta["val"].dim())


def _sides(node: fx.Node) -> tuple[int, int] | None:
    """Return how much is filled in front and behind along the slice's dimension; None if others are filled too."""
    sizes: Any = node.args[1]
    at = 2 * (node.meta["val"].dim() - 1 - _dimension(node.args[0]))
    others = [size for i, size in enumerate(sizes) if i not in (at, at + 1)]
    return None if any(others) or len(sizes) <= at else (sizes[at], sizes[at + 1])


def _filler(node: fx.Node) -> Any:
    """Return the number that a tensor is filled up with."""
    place = 3 if node.target is _aten.pad.default else 2
    return node.args[place] if len(node.args) > place and node.args[place] is not None else 0
