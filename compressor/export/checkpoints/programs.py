"""Tell whether two captured graphs are one program: equal operators on equal shapes, with equal constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.provenance import describe
from compressor.graph.rewrite import held_tensor

_FACTS = ("kind", "vocab_size", "layers", "cache_heads", "head_dim", "states", "max_positions")


def why_different(wanted: GraphModule, found: GraphModule, renamed: Callable[[str], str | None] = str) -> str:
    """Say in what a graph differs from another; empty if they are one program on parameters of equal shapes.

    Args:
        renamed: the name that a parameter of the first has in the other.
    """
    sizes = _sizes(wanted) | _sizes(found)
    ours, theirs = ([node for node in graph.graph.nodes if node not in sizes] for graph in (wanted, found))
    held = {node: f"@{renamed(str(node.target))}" for node in ours if node.op == "get_attr"}
    held |= {node: f"@{node.target}" for node in theirs if node.op == "get_attr"}
    ours, theirs = ([node for node in nodes if node not in held] for nodes in (ours, theirs))
    places = sizes | held | {node: f"%{place}" for nodes in (ours, theirs) for place, node in enumerate(nodes)}
    for one, other in zip(ours, theirs, strict=False):
        if _described(one, places) != _described(other, places):
            return f"{describe(one)} would be {_words(other)}, and is {_words(one)}"
    if len(ours) != len(theirs):
        return f"it would have {len(theirs)} operators, and has {len(ours)}"
    if reason := _why_unequal(wanted, found, renamed):
        return reason
    for fact in _FACTS:
        first, second = (getattr(graph.meta["model"], fact) for graph in (wanted, found))
        if first != second:
            return f"its {fact} would be {second}, and is {first}"
    return ""


def _why_unequal(wanted: GraphModule, found: GraphModule, renamed: Callable[[str], str | None]) -> str:
    """Say which tensor that both graphs read has another shape or other values; empty if none has."""
    for node in wanted.graph.find_nodes(op="get_attr"):
        first, second = held_tensor(wanted, str(node.target)), held_tensor(found, str(renamed(str(node.target))))
        if first.shape != second.shape:
            return f"{node.target} would have shape {list(second.shape)}, and has {list(first.shape)}"
        if not first.is_meta and not second.is_meta and not torch.equal(first, second.to(first.dtype)):
            return f"{node.target} would have other values"
    return ""


def _sizes(graph: GraphModule) -> dict[Node, str]:
    """Name the sizes that are read from inputs by the first input with that size: which one is read says nothing."""
    inputs = graph.graph.find_nodes(op="placeholder")
    known: dict[str, str] = {}
    for place, node in enumerate(inputs):
        for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            known.setdefault(str(size), f"size {axis} of %{place}")
    reads = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    return {node: known[str(node.meta["val"])] for node in reads if node.args[0] in inputs}


def _described(node: Node, places: dict[Node, str]) -> Any:
    value = node.meta.get("val")
    shape = [size if type(size) is int else None for size in value.shape] if isinstance(value, Tensor) else None
    given = node.args
    if node.target is torch.ops.aten.embedding.default:
        given = given[:2]  # the rest is for gradients
    args = torch.fx.node.map_arg((given, node.kwargs), lambda source: places[source])
    return node.op, str(node.target), repr(args), shape


def _words(node: Node) -> str:
    value = node.meta.get("val")
    return f"{node.target}{f' of {list(value.shape)}' if isinstance(value, Tensor) else ''}"
