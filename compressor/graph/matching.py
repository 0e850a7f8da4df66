"""Ask about nodes where rules match patterns, and replace them."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, fx


def shape_of(value: Tensor) -> list[str]:
    """Return the sizes as text: symbols print alike when they are the same."""
    return [str(size) for size in value.shape]


def replace_by(graph: fx.Graph, node: fx.Node, target: object, args: tuple[object, ...]) -> fx.Node:
    """Put a call in the place of a node, whose provenance it gets."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args)  # type: ignore[arg-type]
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def is_parameter(node: Any, dims: int) -> TypeGuard[fx.Node]:
    """Return whether a node reads a parameter or buffer of so many dimensions."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and node.meta["val"].dim() == dims


def is_float(node: Any) -> TypeGuard[fx.Node]:
    """Return whether a node gives a float32 tensor."""
    return isinstance(node, fx.Node) and node.meta["val"].dtype == torch.float32


def calls(node: Any, target: object) -> TypeGuard[fx.Node]:
    """Return whether a node calls an operator."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target
