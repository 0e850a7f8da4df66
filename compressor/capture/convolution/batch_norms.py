"""Fold batch norms into the linear or convolution in front, or make them a product and a sum."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compressor.capture.convolution.nodes import (
    ATEN,
    CONV1D,
    CONV2D,
    CONV3D,
    TRANSPOSED,
    call,
    is_parameter,
    parameter,
    permuted,
    to_first,
    to_last,
)
from compressor.graph.provenance import module_path
from compressor.graph.rewrite import held_tensor, set_parameter
from compressor.graph.rules import why_not

_LINEAR = torch.ops.compressor.dense_linear.default
_NORM = ATEN.batch_norm.default
_NORM_ALONE = ATEN._native_batch_norm_legit_no_training.default  # what export makes of it where others write in place


@dataclass
class BatchNorm:
    """A batch norm with stored statistics is folded into what is in front, or becomes a product and a sum."""

    graph: GraphModule
    name = "batch norm"

    def pattern(self, node: Node) -> Node | None:
        """Match a batch norm."""
        return node if node.target in (_NORM, _NORM_ALONE) else None

    def check(self, match: Node) -> str:
        """Ask for a fixed affine map: stored statistics, and parameters that the graph holds."""
        return why_not((not _is_inference(match), "its statistics are those of the batch, or a parameter is computed"))

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Fold it, or put two operators in its place."""
        _rewrite_batch_norm(self.graph, match)


def _is_inference(node: Node) -> bool:
    """Return whether a batch norm is a fixed affine map: its statistics are stored, its parameters in the graph."""
    gain, shift, *statistics = node.args[1:5]
    held = [*statistics, *(arg for arg in (gain, shift) if arg is not None)]
    return all(is_parameter(arg) for arg in held) and (node.target is _NORM_ALONE or node.args[5] is False)


def _rewrite_batch_norm(graph: GraphModule, node: Node) -> None:
    """Replace ``(x - mean) / sqrt(var + eps) * weight + bias``: scale the weight in front, or multiply and add."""
    args: Any = node.args
    x, gain, shift, mean, variance = args[:5]
    scale = (_held(graph, variance.target) + (args[7] if node.target is _NORM else args[6])).rsqrt()
    scale = scale if gain is None else scale * _held(graph, gain.target)
    offset = -_held(graph, mean.target) * scale
    offset = offset if shift is None else offset + _held(graph, shift.target)
    results = [node] if node.target is _NORM else [user for user in node.users if user.target is operator.getitem]
    folded = _fold(graph, x, scale, offset)
    if folded is None:
        folded = _affine(graph, node, x, scale, offset)
    for result in results:
        result.replace_all_uses_with(folded)
    for gone in dict.fromkeys([*results, node]):
        graph.graph.erase_node(gone)


def _held(graph: GraphModule, name: str) -> Tensor:
    """Return a parameter or buffer in float64, on the meta device where the graph's parameters are."""
    value = held_tensor(graph, name).detach().double()
    return value.to("meta" if any(held.is_meta for held in graph.parameters()) else "cpu")


def _fold(graph: GraphModule, x: Node, scale: Tensor, offset: Tensor) -> Node | None:
    """Fold ``scale * y + offset`` into the linear or convolution that makes x, and return it; None if it cannot be."""
    if x.target not in (*CONV1D, *CONV2D, *CONV3D, *TRANSPOSED, _LINEAR) or len(x.users) > 1:
        return None
    args: Any = x.args
    weight, bias = args[1], args[2] if len(args) > 2 else None
    if not all(is_parameter(arg) and len(arg.users) == 1 for arg in (weight, bias) if arg is not None):
        return None
    if x.target is _LINEAR and x.meta["val"].dim() != 2:
        return None  # the norm is over another dimension
    rows = _held(graph, weight.target)
    shifted = offset.float() if bias is None else (_held(graph, bias.target) * scale + offset).float()
    set_parameter(graph, weight.target, (rows * _of_rows(scale, x, rows)).float())
    if bias is not None:
        set_parameter(graph, bias.target, shifted)
    else:
        name = f"{weight.target.removesuffix('.weight')}.bias"
        x.args = (*args[:2], parameter(graph, x, name, shifted, x.meta["val"]), *args[3:])
    return x


def _of_rows(scale: Tensor, x: Node, rows: Tensor) -> Tensor:
    """Return a scale [out] as the weight's rows lie: transposed convolutions have [in, out / groups, ...]."""
    if x.target not in TRANSPOSED:
        return scale.view(-1, *[1] * (rows.dim() - 1))
    groups: Any = x.args[6] if len(x.args) > 6 else 1
    each = scale.view(groups, 1, -1).expand(groups, len(rows) // groups, -1)
    return each.reshape(*rows.shape[:2], *[1] * (rows.dim() - 2))


def _affine(graph: GraphModule, node: Node, x: Node, scale: Tensor, offset: Tensor) -> Node:
    """Apply the map as a product and a sum over the last dimension."""
    dims = x.meta["val"].dim()
    name = module_path(node) or node.name
    y = permuted(graph, node, x, to_last(dims))
    for target, leaf, value in ((ATEN.mul.Tensor, "scale", scale), (ATEN.add.Tensor, "shift", offset)):
        held = parameter(graph, node, f"{name}.{leaf}", value.float(), x.meta["val"])
        y = call(graph, node, target, y, held)
    return permuted(graph, node, y, to_first(dims))
