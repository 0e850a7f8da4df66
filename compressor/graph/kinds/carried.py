"""Find the tensor that many layers of a decoder read beside the residual stream: what is carried past them.

Of an encoder-decoder it is the encoder's output; where later layers run kept tokens alone
(:mod:`compressor.graph.kept_tokens`), what all of them make keys and values of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.kinds.encoder_decoder import memory_node

_OPS = torch.ops.compressor
KEPT = (_OPS.kept_attention.default, _OPS.packed_kept_attention.default)
"""Attention of kept tokens, over float32 caches and over packed ones."""
_LINEARS = (_OPS.dense_linear.default, _OPS.packed_linear.default)


def carried_node(graph: GraphModule) -> Node | None:
    """Return the tensor that is carried past layers; None where there is none, or more than one."""
    sources: dict[Any, None] = {}
    for node in graph.graph.nodes:
        if node.target in KEPT:
            sources |= {linear.args[0]: None for rows in node.args[1:3] for linear in last_linears(rows)}
    if not sources:
        return memory_node(graph)
    found = list(sources)
    return found[0] if len(found) == 1 and isinstance(found[0].meta.get("val"), Tensor) else None


def last_linears(value: Node, entry: Node | None = None) -> list[Node]:
    """Return the last linears on all ways to a value, in the graph's order.

    Args:
        entry: a node where ways end too; it is among what is returned if one leads there without a linear.
    """
    found, seen, ahead = set[Node](), set[Node](), [value]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in _LINEARS or node is entry:
            found.add(node)
        else:
            ahead += node.all_input_nodes
    return sorted(found)
