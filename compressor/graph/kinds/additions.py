"""Add calls, linears of their own and results to a captured graph."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import map_arg

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.rewrite import held_tensor, set_parameter

_DENSE = torch.ops.compressor.dense_linear.default
_LINEAR = "torch.nn.modules.linear.Linear"


class CallBuilder:
    """Adds calls in front of a node, with fake values and with linears' names.

    Args:
        name: of the module that calls are said to be in.
        dtype: of new weights.
    """

    def __init__(self, graph: GraphModule, name: str, before: Node, dtype: torch.dtype) -> None:
        self._graph, self._name, self._before, self._dtype = graph, name, before, dtype
        self._mode = graph.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
        self.names: list[str] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call."""
        with self._graph.graph.inserting_before(self._before):
            node = self._graph.graph.call_function(target, args, kwargs)
        with self._mode, self._mode.shape_env.ignore_fresh_unbacked_symbols():  # experts' rows are counted at run time
            given = map_arg((args, kwargs), self._value)
            node.meta = {"val": target(*given[0], **given[1]), "nn_module_stack": {self._name: (self._name, "Added")}}
        return node

    def linear(self, name: str, x: Node, rows: int, columns: int, bias: Node | None = None) -> Node:
        """Add a linear with a weight of its own."""
        self.names.append(f"{name}.weight")
        set_parameter(self._graph, self.names[-1], torch.empty(rows, columns, dtype=self._dtype, device="meta"))
        node = self.call(_DENSE, x, self.parameter(self.names[-1]), bias)
        node.meta["nn_module_stack"] = {name: (name, _LINEAR)}
        return node

    def parameter(self, name: str) -> Node:
        """Read a parameter of the graph."""
        held = self._graph.get_parameter(name)
        with self._graph.graph.inserting_before(self._before):
            node = self._graph.graph.get_attr(name)
        with self._mode:
            node.meta = {"val": torch.empty(held.shape, dtype=held.dtype)}
        return node

    def again(self, last: Node, x: Node) -> Node:
        """Call the last linear, and all that follows it up to the logits, with another input."""
        logits: Node = self._graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
        node, chain = logits, [logits]
        while node is not last:
            node = cast(Node, node.args[0])
            chain.append(node)
        for old in reversed(chain):
            x = self.call(old.target, x, *old.args[1:], **old.kwargs)
            x.meta = {**old.meta, "val": x.meta["val"]}
        return x

    def _value(self, node: Node) -> Any:
        if (value := node.meta.get("val")) is not None:
            return value
        held = held_tensor(self._graph, str(node.target))
        return torch.empty(held.shape, dtype=held.dtype)


def change_results(graph: GraphModule, change: Any) -> None:
    """Change the structure of what a graph's forward returns, a tuple."""
    known = cast(_PyTreeCodeGen, graph.graph._codegen).pytree_info
    assert known.out_spec is not None
    found = pytree.tree_unflatten([0] * known.out_spec.num_leaves, known.out_spec)
    spec = pytree.tree_structure(change(found))
    graph.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(known.orig_args, known.in_spec, spec)))
    graph.recompile()
