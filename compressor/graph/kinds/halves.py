"""Copy one half of a graph, with the inputs that it reads.

pictures -> picture embeddings
ids, mask -> text embeddings
"""

from __future__ import annotations

from collections.abc import Mapping
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
    pictures, texts = ({node: str(node.target) for node in part} for part in (inputs[:1], inputs[1:]))
    return half_of(graph, pictures, leaves[0]), half_of(graph, texts, leaves[1])


def half_of(graph: GraphModule, inputs: Mapping[Node, str], output: Any) -> GraphModule:
    """Return what computes some values as a graph of its own, which shares the parameters.

    Args:
        inputs: nodes that become its inputs, in their order, each with its name there.
        output: a node, or a tuple of them, and of what else a graph returns.
    """
    nodes, env = fx.Graph(), dict[Node, Node]()
    for node, name in inputs.items():
        env[node] = nodes.placeholder(name)
        env[node].meta = dict(node.meta)
    targets = list[Node]()
    fx.node.map_arg(output, targets.append)
    copy_calls(graph, nodes, env, needed_nodes(targets, set(env)))
    nodes.output(fx.node.map_arg(output, env.__getitem__))
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
