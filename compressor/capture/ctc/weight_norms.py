"""Compute the weights of weight norms (Salimans and Kingma 2016) once.

weight_norm(v, g)      becomes   a weight of its own, g v / |v|, with |v| for each slice along a dimension
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

_NORM = torch.ops.aten._weight_norm.default
_STORED = ".parametrizations."


@dataclass(frozen=True)
class WeightNorm:
    """A weight that follows from two stored tensors.

    Attributes:
        direction, length: names of v and g.
        dim: along which each slice has a length.
    """

    direction: str
    length: str
    dim: int

    def weight(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight, float32 of the shape of v."""
        v, g = read(self.direction), read(self.length)
        if v.is_meta:
            return torch.empty(v.shape, dtype=torch.float32, device="meta")
        return torch._weight_norm(v.float(), g.float(), self.dim)


def fold_weight_norms(graph: fx.Graph) -> dict[str, WeightNorm]:
    """Let the users of weight norms read a parameter in their place.

    Returns:
        Parameters by name, ``conv.weight`` where the module is ``conv``.
    """
    found: dict[str, WeightNorm] = {}
    for node in list(graph.find_nodes(op="call_function", target=_NORM)):
        v, g, dim = (*node.args, 0)[:3]
        if not all(isinstance(source, fx.Node) and source.op == "get_attr" for source in (v, g)):
            continue
        name = str(v.target).split(_STORED)[0] + ".weight" if _STORED in str(v.target) else f"{v.target}.normed"
        found[name] = WeightNorm(str(v.target), str(g.target), int(dim))
        with graph.inserting_before(node):
            weight = graph.get_attr(name)
        weight.meta = {**v.meta}
        node.replace_all_uses_with(weight)
        graph.erase_node(node)
        for source in (v, g):
            if not source.users:
                graph.erase_node(source)
    return found
