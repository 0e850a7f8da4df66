"""Tell which module of the original model a node of the graph comes from."""

from __future__ import annotations

from torch.fx import Node


def describe(node: Node) -> str:
    """A node's name, and the module that it belongs to."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return f"{node.name} ({stack[-1][0]})" if stack and stack[-1][0] else node.name
