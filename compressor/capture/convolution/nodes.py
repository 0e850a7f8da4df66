"""Read the arguments of convolutions, and add nodes in front of others."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.rewrite import call_before, set_parameter

ATEN = torch.ops.aten
CONVOLUTIONS = (
    ATEN.conv1d, ATEN.conv2d, ATEN.conv3d, ATEN.conv_transpose1d, ATEN.conv_transpose2d, ATEN.conv_transpose3d,
    ATEN.convolution,
)  # fmt: skip
CONV1D = (ATEN.conv1d.default, ATEN.conv1d.padding)
CONV2D = (ATEN.conv2d.default, ATEN.conv2d.padding)
CONV3D = (ATEN.conv3d.default, ATEN.conv3d.padding)
TRANSPOSED: dict[Any, int] = {
    ATEN.conv_transpose1d.default: 1, ATEN.conv_transpose2d.input: 2, ATEN.conv_transpose3d.input: 3,
}  # fmt: skip
"""Transposed convolution -> dimensions of its images."""
SHARED = "its weight is shared or computed"


def arguments(node: Node, dims: int = 2) -> Any:
    """Return input, weight, bias, strides, paddings (or a word), dilations, groups; each of all dimensions."""
    given: tuple[Any, ...] = node.args
    x, weight, bias, stride, padding, dilation, groups = given + (None, 1, 0, 1, 1)[len(given) - 2 :]
    return x, weight, bias, spread(stride, dims), spread(padding, dims), spread(dilation, dims), groups


def spread(value: Any, dims: int) -> Any:
    """Return a number for each dimension, of which one may stand for all; a word as it is."""
    values = [value] if isinstance(value, int) else value
    return [*values] * dims if len(values) == 1 else values


def is_parameter(node: Any) -> TypeGuard[Node]:
    """Return whether a node is a parameter or buffer of the graph."""
    return isinstance(node, Node) and node.op == "get_attr"


def is_own(node: Any) -> bool:
    """Return whether a node is a parameter that nothing else reads."""
    return is_parameter(node) and len(node.users) == 1


def to_last(rank: int) -> list[int]:
    """Return the permutation that puts the channels of images behind their pixels."""
    return [0, *range(2, rank), 1]


def to_first(rank: int) -> list[int]:
    """Return the permutation that puts the channels of images in front of their pixels."""
    return [0, rank - 1, *range(1, rank - 1)]


def call(graph: GraphModule, before: Node, target: Any, *args: Any) -> Node:
    """Add a call in front of a node, whose provenance it gets; its value is that of its inputs' values."""
    return call_before(graph.graph, before, target, *args)


def permuted(graph: GraphModule, before: Node, x: Node, order: list[int]) -> Node:
    """Add a permutation in front of a node."""
    return call(graph, before, ATEN.permute.default, x, order)


def parameter(graph: GraphModule, before: Node, name: str, value: Tensor, like: Tensor) -> Node:
    """Add a parameter in front of a node; ``like`` is any fake tensor."""
    set_parameter(graph, name, value)
    with graph.graph.inserting_before(before):
        node = graph.graph.get_attr(name)
    node.meta = {"val": like.new_empty(value.shape)}
    return node


def change(graph: GraphModule, node: Node, value: Tensor) -> None:
    """Give the parameter that a node reads another value."""
    name: Any = node.target
    set_parameter(graph, name, value)
    node.meta = {**node.meta, "val": node.meta["val"].new_empty(value.shape)}
