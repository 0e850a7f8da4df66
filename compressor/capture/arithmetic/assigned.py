"""Say assignments to a part of a tensor with slices and concatenations, or with a choice at each place.

slice_scatter(x, y, d, begin, end)          becomes      cat(x[:begin], y, x[end:])
slice_scatter(x, y, d, begin, end, step)    becomes      the same, where y's entries go in front of the entries of x
                                                         that are left between them
index_put(x, [mask], y)                     becomes      where(mask, y, x), and x + y in place of y where y is added
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compressor.graph.matching import replace_by
from compressor.graph.rewrite import call_before
from compressor.graph.rules import why_not

_aten = torch.ops.aten


class AssignedSlice:
    """A tensor some entries of which are replaced is put together from what stays and what comes."""

    name = "assigned slice"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match an assignment to a slice."""
        return node if node.target is _aten.slice_scatter.default else None

    def check(self, match: fx.Node) -> str:
        """Ask for a fixed length along the slice's dimension."""
        x, _, dim, *bounds = _arguments(match)
        sizes = (x.meta["val"].shape[dim], *bounds)
        return why_not((not all(isinstance(size, int) for size in sizes), "its place varies"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``cat`` on slices."""
        x, y, dim, begin, end, step = _arguments(match)
        size = x.meta["val"].shape[dim]
        begin, end = (min(size, bound + size if bound < 0 else bound) for bound in (begin, end))
        count = max(0, -(-(end - begin) // step))

        def call(target: Any, *args: Any) -> fx.Node:
            return call_before(graph, match, target, *args)

        def part(source: fx.Node, low: int, high: int) -> list[fx.Node]:
            return [call(_aten.slice.Tensor, source, dim, low, high)] if high > low else []

        parts = part(x, 0, begin)
        if step == 1:
            parts += [y] if count else []
        elif count > 1:
            rows = [count - 1, step]
            between = call(_aten.unflatten.int, *part(x, begin, begin + (count - 1) * step), dim, rows)
            kept = call(_aten.slice.Tensor, between, dim + 1, 1, step)
            put = call(_aten.unsqueeze.default, *part(y, 0, count - 1), dim + 1)
            parts.append(call(_aten.flatten.using_ints, call(_aten.cat.default, [put, kept], dim + 1), dim, dim + 1))
        if step > 1 and count:
            parts += part(y, count - 1, count)
        behind = begin + (count - 1) * step + 1 if count else begin
        parts += part(x, behind, size)
        made = parts[0] if len(parts) == 1 else call(_aten.cat.default, parts, dim)
        match.replace_all_uses_with(made)
        graph.erase_node(match)
        return made


class AssignedWhere:
    """A tensor that gets the same values wherever a mask holds is chosen place by place."""

    name = "assignment by a mask"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match an assignment to the places of one mask, whole dimensions in front of it left out."""
        if node.target is not _aten.index_put.default:
            return None
        indices: Any = node.args[1]
        which = indices[-1]
        alone = which is not None and all(each is None for each in indices[:-1])
        return node if alone and which.meta["val"].dtype == torch.bool else None

    def check(self, match: fx.Node) -> str:
        """Ask for values that do not depend on which of the mask's places they go to."""
        args: Any = match.args
        x, indices, values = args[:3]
        behind = x.meta["val"].dim() - (len(indices) - 1) - indices[-1].meta["val"].dim()
        sizes = values.meta["val"].shape
        own = any(not isinstance(size, int) or size != 1 for size in sizes[: len(sizes) - behind])
        return why_not((len(sizes) > behind and own, "each place that the mask picks has a value of its own"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``where``."""
        args: Any = match.args
        x, indices, values, adds = (*args, match.kwargs.get("accumulate", False))[:4]
        mask = indices[-1]
        for _ in range(x.meta["val"].dim() - (len(indices) - 1) - mask.meta["val"].dim()):
            mask = call_before(graph, match, _aten.unsqueeze.default, mask, -1)
        new = call_before(graph, match, _aten.add.Tensor, x, values) if adds else values
        return replace_by(graph, match, _aten.where.self, (mask, new, x))


def _arguments(node: fx.Node) -> tuple[Any, Any, int, Any, Any, Any]:
    """Return what is changed, what comes in, the dimension, begin, end and step."""
    names = ("self", "src", "dim", "start", "end", "step")
    given: dict[str, Any] = {"dim": 0, "start": None, "end": None, "step": 1}
    given |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x = given["self"]
    end = x.meta["val"].shape[given["dim"]] if given["end"] is None else given["end"]
    return x, given["src"], given["dim"] % x.meta["val"].dim(), given["start"] or 0, end, given["step"]
