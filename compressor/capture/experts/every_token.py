"""Route experts that a model computes for every token, with zeros for those that the token did not choose.

    s = f(scatter(c, index, chosen)), f(c) = 0   [T, E]     becomes    s = f(chosen)                          [T, K]
    x = repeat(x, E) * s                     [E, T, in]                x = x * s                          [T, K, in]
    y = bmm(x, weight)                      [E, T, out]                y = routed_linear(x, index, weight)
    sum(y, over E)                             [T, out]                sum(y, over K)

What lies between is followed operator by operator.  Each value is known for the experts that a token chose; that the
others add nothing to the sum is proved on the way: zeros stay zeros in products, sums and functions with f(0) = 0.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from compressor.graph.matching import is_parameter

_aten, _ours = torch.ops.aten, torch.ops.compressor
_SAME = frozenset({_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.to.dtype})
_VIEWS = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default})
_FUNCTIONS = frozenset(
    {
        *(_aten.sigmoid.default, _aten.silu.default, _aten.gelu.default, _aten.relu.default, _aten.tanh.default),
        *(_aten.square.default, _aten.pow.Tensor_Scalar, _aten.exp.default),
    }
)
_BOTH = frozenset({_aten.mul.Tensor, _aten.add.Tensor})
_SOFTMAX = frozenset({_aten.softmax.int, _aten._softmax.default})
_PARTS = frozenset({_aten.split.Tensor, _aten.chunk.default, _aten.slice.Tensor})


@dataclass(frozen=True)
class _Chosen:
    """The values that a tensor over all experts and tokens has for the chosen experts.

    Attributes:
        node: [T, K, ...]; [T, 1, ...] where all experts of a token have the same.
        order: ``te`` for [T, E], ``et`` for [E, T, ...], ``flat`` for [E T, ...].
        other: the number that it holds for every expert that was not chosen; None where that varies.
    """

    node: fx.Node
    order: str
    other: float | None


def route_experts(graph: fx.Graph) -> None:
    """Rewrite in place, wherever all can be followed from the choice of experts to the sum over them."""
    for node in graph.find_nodes(op="call_function", target=_aten.scatter.src):
        base, dim, index, chosen = node.args
        filled = base.target in (_aten.full_like.default, _aten.full.default, _aten.zeros_like.default)
        if not filled or node.meta["val"].dim() != 2 or dim % 2 != 1 or index.target is not _ours.top_k.default:
            continue
        other = 0.0 if base.target is _aten.zeros_like.default else float(base.args[1])
        _Choice(graph, index, node).follow(_Chosen(chosen, "te", other))
    graph.eliminate_dead_code()


class _Choice:
    """Follows what is computed from one choice of experts, index [T, K] of E."""

    def __init__(self, graph: fx.Graph, index: fx.Node, scores: fx.Node) -> None:
        self.graph, self.index, self.scores = graph, index, scores
        tokens, self.experts = scores.meta["val"].shape
        self.sizes = {"et": [str(self.experts), str(tokens)], "flat": [str(self.experts * tokens)]}
        self.known: dict[fx.Node, Any] = {}

    def follow(self, chosen: _Chosen) -> None:
        """Follow to the sums over the experts, and put sums over the chosen ones in their places."""
        self.known[self.scores] = chosen
        nodes = list(self.graph.nodes)
        for node in nodes[: nodes.index(self.scores)]:
            self._repeated(node)
        for node in nodes[nodes.index(self.scores) + 1 :]:
            self._repeated(node)
            found = [arg for arg in node.all_input_nodes if arg in self.known]
            if node in self.known or not found or node.op != "call_function":
                continue
            if node.target is _aten.sum.dim_IntList:
                self._sum(node, self.known[found[0]])
                continue
            result = self._result(node)
            if result is not None:
                self.known[node] = result

    def _call(self, before: fx.Node, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        given = fx.node.map_arg(args, lambda source: source.meta["val"])
        with self.index.meta["val"].fake_mode:
            node.meta = {**before.meta, "val": target(*given)}
        return node

    def _repeated(self, node: fx.Node) -> None:
        """Note rows [T, H] that are repeated for all experts."""
        counts: Any = node.args[1] if node.target is _aten.repeat.default else ()
        if list(counts) == [self.experts, 1] and self._order(node.meta["val"]) == "flat":
            source: Any = node.args[0]
            self.known[node] = _Chosen(self._call(node, _aten.unsqueeze.default, source, 1), "flat", None)

    def _order(self, value: Tensor) -> str | None:
        shape = [str(size) for size in value.shape]
        return next((order for order, sizes in self.sizes.items() if shape[: len(sizes)] == sizes), None)

    def _result(self, node: fx.Node) -> Any:
        """Return what a node holds for the chosen experts; None where it cannot be told."""
        args: Any = node.args
        target: Any = node.target
        x = self.known.get(args[0]) if isinstance(args[0], fx.Node) else None
        if isinstance(x, list):
            return x[args[1]] if target is operator.getitem else None
        if target in _BOTH:
            return self._pair(node)
        if x is None:
            return None
        if target in _SOFTMAX and x.order == "te" and args[1] in (-1, 1) and x.other == -math.inf:
            return replace(x, node=self._call(node, target, x.node, -1, *args[2:]), other=0.0)
        if target in _SAME:
            return x
        if target in _FUNCTIONS:
            held = torch.tensor(x.other, dtype=torch.float32) if x.other is not None else None
            other = None if held is None else float(target(held, *args[1:], **node.kwargs))
            made = self._call(node, target, x.node, *args[1:])
            made.kwargs = node.kwargs
            return replace(x, node=made, other=other)
        if target in (_aten.transpose.int, _aten.t.default) and x.order == "te":
            return replace(x, order="et")
        if target in _VIEWS:
            return self._viewed(node, x)
        if target in _PARTS:
            return self._parts(node, x)
        return self._product(node, x) if target in (_aten.bmm.default, _aten.matmul.default) else None

    def _pair(self, node: fx.Node) -> _Chosen | None:
        """Follow a product, or a sum, of two such tensors that lie alike."""
        args: Any = node.args
        x, y = (self.known.get(arg) if isinstance(arg, fx.Node) else None for arg in args[:2])
        if not isinstance(x, _Chosen) or not isinstance(y, _Chosen) or x.order != y.order:
            return None
        if x.node.meta["val"].dim() != y.node.meta["val"].dim():
            return None
        zeros = [held.other == 0.0 for held in (x, y)]
        zero = any(zeros) if node.target is _aten.mul.Tensor else all(zeros)
        return _Chosen(self._call(node, node.target, x.node, y.node), x.order, 0.0 if zero else None)

    def _viewed(self, node: fx.Node, x: _Chosen) -> _Chosen | None:
        """Follow a change between [E, T, ...] and [E T, ...], which may add a last dimension of 1."""
        order, shape = self._order(node.meta["val"]), list(node.meta["val"].shape)
        if order is None or x.order == "te":
            return None
        held, rest = x.node.meta["val"], shape[len(self.sizes[order]) :]
        own = list(held.shape[2:])
        if rest == own:
            return replace(x, order=order)
        if rest == [*own, 1]:
            return replace(x, node=self._call(node, _aten.unsqueeze.default, x.node, -1), order=order)
        return None

    def _parts(self, node: fx.Node, x: _Chosen) -> Any:
        """Follow what takes parts of the last dimension."""
        is_slice = node.target is _aten.slice.Tensor
        given: Any = [*node.args[1:], *(() if is_slice or len(node.args) > 2 else (0,))]
        axis = 0 if is_slice else 1
        before: Any = node.args[0]
        if given[axis] % before.meta["val"].dim() != before.meta["val"].dim() - 1:
            return None
        given[axis] = x.node.meta["val"].dim() - 1
        made = self._call(node, node.target, x.node, *given)
        if is_slice:
            return replace(x, node=made)
        count = len(made.meta["val"])
        return [replace(x, node=self._call(node, operator.getitem, made, part)) for part in range(count)]

    def _product(self, node: fx.Node, x: _Chosen) -> _Chosen | None:
        """Follow a product [E, T, in] x [E, in, out] with a stored weight."""
        weight: Any = node.args[1]
        if x.order != "et" or not is_parameter(weight, 3) or node.args[0] is weight:
            return None
        rows = x.node
        if rows.meta["val"].shape[1] == 1 and self.index.meta["val"].shape[1] != 1:
            rows = self._call(node, _aten.squeeze.dim, rows, 1)
        turned = self._call(node, _aten.transpose.int, weight, 1, 2)
        made = self._call(node, _ours.routed_linear.default, rows, self.index, turned, None)
        return _Chosen(made, "et", 0.0 if x.other == 0.0 else None)

    def _sum(self, node: fx.Node, x: Any) -> None:
        args: Any = node.args
        over_experts = isinstance(x, _Chosen) and x.order == "et" and list(args[1]) == [0] and len(args) == 2
        if over_experts and x.other == 0.0:
            node.replace_all_uses_with(self._call(node, _aten.sum.dim_IntList, x.node, [1]))
