"""Copy one half of a graph, with the inputs that it reads.

pictures -> picture embeddings
ids, mask -> text embeddings
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from compressor.errors import VerificationError

_SIZE = torch.ops.aten.sym_size.int


def pair_halves(graph: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Return what embeds pictures and what embeds texts as graphs of their own, which share the parameters."""
    leaves: Any = graph.graph.output_node().args[0]
    inputs = graph.graph.find_nodes(op="placeholder")
    return _half(graph, inputs[:1], leaves[0]), _half(graph, inputs[1:], leaves[1])


def _half(graph: GraphModule, inputs: list[Node], leaf: Node) -> GraphModule:
    nodes, env = fx.Graph(), dict[Node, Node]()
    for node in inputs:
        env[node] = nodes.placeholder(str(node.target))
        env[node].meta = dict(node.meta)
    copy_calls(graph, nodes, env, needed_nodes([leaf], set(env)))
    nodes.output(env[leaf])
    half = GraphModule(graph, nodes, class_name=type(graph).__name__)
    half.meta.update(graph.meta)
    return half


def copy_calls(graph: GraphModule, nodes: fx.Graph, env: dict[Node, Node], needed: set[Node]) -> None:
    """Copy the calls that are needed.

    Args:
        env: node of the whole -> of the half; has the half's inputs, and gets what is copied.
    """
    for node in graph.graph.nodes:
        if node not in needed or node in env or node.op in ("placeholder", "output"):
            continue
        if node.target is _SIZE and node.args[0].op == "placeholder" and node.args[0] not in env:
            env[node] = nodes.call_function(_SIZE, _same_size(node, env))
        else:
            env[node] = nodes.node_copy(node, env.__getitem__)


def needed_nodes(targets: list[Node], given: set[Node]) -> set[Node]:
    """Return what the targets are computed from."""
    found, ahead = set[Node](), list(targets)
    while ahead:
        node = ahead.pop()
        if node in found:
            continue
        found.add(node)
        if node not in given:
            ahead.extend(node.all_input_nodes)
    return found


def _same_size(node: Node, env: dict[Node, Node]) -> tuple[Node, int]:
    """Return where a half finds the size that the whole asks an input for which it lacks."""
    size = str(node.meta["val"])
    for source, own in env.items():
        value = source.meta.get("val")
        if own.op == "placeholder" and isinstance(value, Tensor):
            for axis, other in enumerate(value.shape):
                if str(other) == size:
                    return own, axis
    raise VerificationError(f"{node.name}: no input of this half has the size {size}; report it")
