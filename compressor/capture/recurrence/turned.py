"""Rules for layers that keep channels in front of tokens, [B, C, S], between linears over [B, S, C].

matmul(weight, x)                            becomes   transpose(dense_linear(transpose(x), weight))
transpose(transpose(x, a, b), b, a)          becomes   x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compressor.graph.matching import calls, is_float, is_parameter, replace_by
from compressor.graph.rules import why_not

_ATEN = torch.ops.aten
_TRANSPOSE = _ATEN.transpose.int


class WeightTimesTokens:
    """A stored weight times tokens with the channels in front is a linear."""

    name = "weight times tokens"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match a product whose first factor is a stored matrix."""
        return node if calls(node, _ATEN.matmul.default) and is_parameter(node.args[0], 2) else None

    def check(self, match: fx.Node) -> str:
        """Ask for float32 tokens in more than one dimension."""
        x: Any = match.args[1]
        return why_not(
            (not is_float(x), "its second factor is not float32"),
            (x.meta["val"].dim() < 3, "its second factor is one matrix"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``dense_linear`` between transpositions."""
        weight, x = match.args
        assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
        with graph.inserting_before(match):
            turned = _call(graph, _TRANSPOSE, (x, -1, -2), match)
            product = _call(graph, torch.ops.compressor.dense_linear.default, (turned, weight, None), match)
        made = replace_by(graph, match, _TRANSPOSE, (product, -1, -2))
        if DropTranspositions.undoes(turned):
            turned.replace_all_uses_with(x.args[0])  # type: ignore[arg-type]
            graph.erase_node(turned)
        return made


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """Call an operator on nodes, with the provenance of another node."""
    node = graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta = {**like.meta, "val": target(*values)}
    return node


class DropTranspositions:
    """A transposition that undoes the one before it is dropped."""

    name = "transpositions"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match a transposition of a transposition."""
        return node if calls(node, _TRANSPOSE) and calls(node.args[0], _TRANSPOSE) else None

    def check(self, match: fx.Node) -> str:
        """Ask for the same two dimensions."""
        return why_not((not self.undoes(match), "they swap other dimensions"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> None:
        """Let the readers read what was transposed."""
        before: Any = match.args[0]
        match.replace_all_uses_with(before.args[0])
        graph.erase_node(match)

    @staticmethod
    def undoes(node: fx.Node) -> bool:
        """Return whether a transposition is one of the same dimensions of a transposition."""
        before: Any = node.args[0]
        rank = node.meta["val"].dim()
        return calls(before, _TRANSPOSE) and _swapped(before, rank) == _swapped(node, rank)


def _swapped(node: fx.Node, rank: int) -> set[int]:
    dims: Any = node.args[1:3]
    return {dim % rank for dim in dims}
