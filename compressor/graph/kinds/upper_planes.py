"""Make the graph that drafts from upper planes: linears whose codes lie in two planes read the upper one alone.

    packed_linear(x, [codes, lower, scales], bias, "W8A8_P4")      becomes
    packed_linear(x, [codes, scales], bias, "W4A8_C_OF8")

Parameters are shared, and half of the codes' bytes are not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.formats.format import Format
from compressor.formats.planes import TwoPlanes
from compressor.graph.model import clone_graph

PLANES = "planes"
"""Name of the entry that drafts from upper planes, and of the kind of drafts."""
_LINEAR = torch.ops.compressor.packed_linear.default


def has_planes(graph: GraphModule) -> bool:
    """Tell whether some linears' codes lie in two planes."""
    return any(_in_planes(node) is not None for node in graph.graph.nodes)


def upper_graph(graph: GraphModule) -> GraphModule:
    """Return the graph that reads upper planes only, which shares the parameters; linears of other formats stay."""
    upper = clone_graph(graph)
    for node in upper.graph.nodes:
        if (fmt := _in_planes(node)) is None:
            continue
        x, parts, bias, _, columns, rows = node.args
        stored = dict(zip(fmt.parts(rows, columns), parts, strict=True))
        node.args = (x, [stored[name] for name in fmt.upper.parts(rows, columns)], bias, fmt.upper.name, columns, rows)
    upper.graph.eliminate_dead_code()
    return clone_graph(upper)  # without the parameters that are not read


def _in_planes(node: Node) -> Format | None:
    """Return the format of a linear whose codes lie in two planes; None for other nodes."""
    args: Any = node.args
    fmt = Format.parse(args[3]) if node.target is _LINEAR else None
    return fmt if fmt is not None and fmt.extra(TwoPlanes) is not None else None
