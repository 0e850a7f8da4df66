"""Put our choice of the largest in the place of PyTorch's.

topk(x, k)      becomes    top_k(x, k), gather(x, top_k)
max(x, dim)     becomes    top_k(x, 1), gather(x, top_k)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compressor.graph.rules import why_not

_aten, _ours = torch.ops.aten, torch.ops.compressor


class TopK:
    """The largest elements of rows, or the largest one, become an operator that has a kernel, and a lookup."""

    name = "top-k"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match PyTorch's topk, and its maximum with its place."""
        return node if node.target in (_aten.topk.default, _aten.max.dim) else None

    def check(self, match: fx.Node) -> str:
        """Ask for a fixed number of the largest, along the last dimension of floats."""
        x, k, dim, largest, _ = _topk_arguments(match)
        val = x.meta["val"]
        return why_not(
            (not isinstance(k, int), "how many it takes is not fixed"),
            (val.dtype != torch.float32, "its rows are not float32"),
            (dim % val.dim() != val.dim() - 1, "it looks along another dimension than the last"),
            (not largest, "it takes the smallest"),
            (any(user.target.__name__ != "getitem" for user in match.users), "its results are used as one"),  # type: ignore[union-attr]
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``top_k``, and ``gather`` where values are read."""
        x, k, *_ = _topk_arguments(match)
        values, places = match.meta["val"]
        is_flat = places.dim() < x.meta["val"].dim()
        with graph.inserting_before(match):
            index = graph.call_function(_ours.top_k.default, (x, k))
            index.meta = {**match.meta, "val": places.unsqueeze(-1) if is_flat else places}
            gathered = graph.call_function(_aten.gather.default, (x, -1, index))
            gathered.meta = {**match.meta, "val": values.unsqueeze(-1) if is_flat else values}
            if is_flat:
                gathered, index = (graph.call_function(_aten.squeeze.dim, (y, -1)) for y in (gathered, index))
                gathered.meta, index.meta = ({**match.meta, "val": y} for y in (values, places))
        for user in list(match.users):
            user.replace_all_uses_with((gathered, index)[int(user.args[1])])  # type: ignore[arg-type]
            graph.erase_node(user)
        graph.erase_node(match)
        return index


def _topk_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return (x, k, dim, largest, sorted)."""
    if node.target is _aten.max.dim:
        return node.args[0], 1, node.args[1], True, True
    names = ("self", "k", "dim", "largest", "sorted")
    given: dict[str, Any] = {"dim": -1, "largest": True, "sorted": True, **dict(zip(names, node.args, strict=False))}
    given |= node.kwargs
    return tuple(given[name] for name in names)
