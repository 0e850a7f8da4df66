"""Cut a stretch out of a network of images, between two tensors that alone are live, as a graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim
from torch.fx import GraphModule, Node

from compressor.graph.kinds.halves import half_of


def stretch_graph(graph: GraphModule, entry: Node | None, exit_node: Node | None) -> GraphModule:
    """Return what computes one tensor from another, which shares the parameters and can be lowered.

    Args:
        entry: its input; None takes the graph's.
        exit_node: its output; None takes the graph's.
    """
    inputs = {node: str(node.target) for node in graph.graph.find_nodes(op="placeholder")}
    output: Any = graph.graph.output_node().args[0] if exit_node is None else (exit_node,)
    part = half_of(graph, inputs if entry is None else {entry: "stream"}, output)
    if entry is not None:
        sizes: Any = entry.meta["val"].shape
        varies = not isinstance(sizes[0], int)
        example = torch.zeros(2 if varies else sizes[0], *sizes[1:], dtype=entry.meta["val"].dtype)
        part.meta["inputs"] = ((example,), ({0: Dim("batch", min=1)},) if varies else None)
    return part
