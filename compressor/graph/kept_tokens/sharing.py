"""Let neighbouring layers share keys and values: which may, and the means of the weights that make these.

AcrossKV (Qiao et al. 2024, arXiv 2410.03960, section 3.2): each group computes keys and values once, with the mean of
the group's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from compressor.graph.kept_tokens.layers import CannotKeep, LaterLayer
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import is_parameter


def groups(layers: Sequence[LaterLayer], share: int) -> list[list[LaterLayer]]:
    """Return neighbouring layers in groups of so many; the last group may be smaller."""
    return [list(layers[begin : begin + share]) for begin in range(0, len(layers), share)]


def average(graph: GraphModule, group: Sequence[LaterLayer]) -> None:
    """Give the first layer of a group the means of all parameters between the residual stream and keys and values.

    Raises:
        CannotKeep: two layers make them in different ways.
    """
    first, *others = group
    ends, means = {first.keys.node, first.values.node}, dict[str, list[str]]()
    for other in others:
        pairs = _Pairs(graph, ends)
        made = ((first.attention.keys, other.attention.keys), (first.attention.values, other.attention.values))
        if not all(pairs.match(*pair) for pair in made):
            raise CannotKeep(
                f"{first.name} and {other.name} make keys and values in different ways (as of {pairs.odd}), and cannot "
                "share them; set `share: 1`"
            )
        for name, twin in pairs.found.items():
            means.setdefault(name, [name]).append(twin)
    for name, twins in means.items():
        given = [graph.get_parameter(twin).detach() for twin in twins]
        mean = torch.stack([value.float() for value in given]).mean(0)
        set_parameter(graph, name, mean.to(given[0].dtype))


class _Pairs:
    """Two dataflows that are compared, node by node, from their ends back to linears.

    Attributes:
        found: names of parameters of the one, and of the other in the same place.
        odd: the first node that differs.
    """

    def __init__(self, graph: GraphModule, ends: set[Node]) -> None:
        self._graph, self._ends, self._seen = graph, ends, set[tuple[Any, Any]]()
        self.found, self.odd = dict[str, str](), ""

    def match(self, one: Any, other: Any) -> bool:
        """Return whether two values are made alike, of the same inputs but for parameters."""
        if one is other or (one, other) in self._seen:
            return True
        if not isinstance(one, Node) or not isinstance(other, Node):
            return self._say(one, type(one) is type(other) and one == other)
        self._seen.add((one, other))
        if is_parameter(self._graph, one) and is_parameter(self._graph, other):
            shapes = [self._graph.get_parameter(str(node.target)).shape for node in (one, other)]
            self.found[str(one.target)] = str(other.target)
            return self._say(one, shapes[0] == shapes[1])
        if one.op != "call_function" or one.target is not other.target:
            return self._say(one, False)
        given, theirs = tree_leaves((one.args, one.kwargs)), tree_leaves((other.args, other.kwargs))
        if one in self._ends:  # what a linear reads is replaced
            given, theirs = given[1:], theirs[1:]
        return self._say(one, len(given) == len(theirs)) and all(map(self.match, given, theirs))

    def _say(self, node: Any, same: bool) -> bool:
        self.odd = self.odd or ("" if same else str(node))
        return same
