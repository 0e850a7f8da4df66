"""The rule of each operator: which entries of its output are which of its inputs.

A tensor without a rule keeps all channels that it is made of, and is named.  Weights are inputs like others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from compressor.graph.dependencies.attention import ATTENTION
from compressor.graph.dependencies.axes import Axes, Reading, Rule
from compressor.graph.dependencies.computing import COMPUTING, broadcast
from compressor.graph.dependencies.moving import MOVING, getitem
from compressor.graph.provenance import describe, source_line


def unknown(node: Node, reading: Reading) -> Axes | tuple[Axes, ...]:
    """Keep all that an operator reads: nothing is known of it."""
    line = source_line(node)
    reason = f"no rule says what {node.target} does to it: {describe(node)}{f', {line}' if line else ''}"
    for source in node.all_input_nodes:
        found = reading.axes.get(source, [])
        for axes in found if isinstance(found, tuple) else (found,):
            reading.keep(axes, reason)
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return tuple([None] * one.dim() if isinstance(one, Tensor) else [] for one in value)
    return [None] * value.dim() if isinstance(value, Tensor) else []


def rule_of(node: Node) -> Rule:
    """Return the rule of a node; :func:`unknown` where there is none."""
    if getattr(node.target, "__name__", "") == "getitem":
        return getitem
    rule = COMPUTING.get(node.target) or MOVING.get(node.target) or ATTENTION.get(node.target)
    if rule is not None:
        return rule
    return broadcast if torch.Tag.pointwise in getattr(node.target, "tags", ()) else unknown
