"""Compute what follows from numbers in a model's code alone, once, when it is captured.

erfinv(2 * constant - 1)        becomes      constant

Models write such numbers as tensors, with any of PyTorch's functions; no kernel needs to know these.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

_MOST = 4096  # numbers of a result


def fold_constants(graph: fx.Graph, constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put constants in the place of nodes that depend on constants and nothing else.

    Args:
        graph: of which the nodes carry fake values.
        constants: that the export found in the model's code, by name.
    Returns:
        New constants of the graph, by name.
    """
    known, made = dict[fx.Node, Any](), dict[str, Tensor]()
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.target in constants:
            known[node] = constants[node.target]
        sources = node.all_input_nodes
        if node.op != "call_function" or not sources or not all(source in known for source in sources):
            continue
        fakes = [fake for fake in pytree.tree_leaves(node.meta.get("val")) if isinstance(fake, Tensor)]
        sizes = [size for fake in fakes for size in fake.shape]
        fixed = fakes and all(isinstance(size, int) for size in sizes) and all(f.numel() <= _MOST for f in fakes)
        if not fixed or not _is_pure(node):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        with torch.no_grad():
            known[node] = node.target(*args, **kwargs)
    for node, value in known.items():
        outside = [user for user in node.users if user not in known]
        if node.op == "get_attr" or not outside or not isinstance(value, Tensor):
            continue
        name = f"folded_{len(made)}"
        made[name] = value.contiguous()
        with graph.inserting_before(node):
            held = graph.create_node("get_attr", name)
        held.meta = dict(node.meta)
        node.replace_all_uses_with(held)
    graph.eliminate_dead_code()
    return made


def _is_pure(node: fx.Node) -> bool:
    """Return whether a node's operator gives the same each time, and changes nothing."""
    target: Any = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
