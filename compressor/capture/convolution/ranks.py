"""Convolutions of 1 and 3 dimensions, and of uneven padding, become 2-d ones that are padded evenly.

conv1d [N, C, L]                 becomes   conv2d of [N, C, 1, L]
conv3d [N, C, D, H, W]           becomes   conv2d of [N * D', C * depth taps, H, W]: each plane of the output
                                           reads as many planes as the kernel is deep, side by side as channels
`same` of an even kernel         becomes   a pad, then a convolution without padding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compressor.capture.convolution.nodes import (
    ATEN,
    CONV1D,
    CONV2D,
    CONV3D,
    SHARED,
    arguments,
    call,
    change,
    is_own,
    permuted,
    to_first,
    to_last,
)
from compressor.graph.rules import why_not
from compressor.ops.patches import outputs


@dataclass
class UnevenPadding:
    """A convolution that pads one side more than the other is one without padding behind a pad."""

    graph: GraphModule
    name = "uneven padding as a pad"

    def pattern(self, node: Node) -> Node | None:
        """Match `same` of a kernel that spans an even number of places."""
        if node.target not in (CONV1D[1], CONV2D[1], CONV3D[1]):
            return None
        _, _, _, _, padding, dilation, _ = arguments(node, node.meta["val"].dim() - 2)
        return node if padding == "same" and any(span % 2 for span in _spans(node, dilation)) else None

    def check(self, match: Node) -> str:
        """Ask for nothing: it is what PyTorch does."""
        return ""

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Pad the larger half behind, as PyTorch does."""
        x, weight, bias, stride, _, dilation, groups = arguments(match, match.meta["val"].dim() - 2)
        pads = [n for span in reversed(_spans(match, dilation)) for n in (span // 2, span - span // 2)]
        padded = call(self.graph, match, ATEN.constant_pad_nd.default, x, pads, 0.0)
        match.args = (padded, weight, bias, stride, "valid", dilation, groups)


@dataclass
class Conv1d:
    """A 1-d convolution becomes a 2-d one over images of height 1."""

    graph: GraphModule
    name = "convolution of rows as one of images"

    def pattern(self, node: Node) -> Node | None:
        """Match a 1-d convolution."""
        return node if node.target in CONV1D else None

    def check(self, match: Node) -> str:
        """Ask for a batch of float32 rows, and a stored weight that nothing else reads."""
        return why_not_images(match)

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Give weight and input a height of 1, and take it off the output."""
        x, weight, bias, stride, padding, dilation, groups = arguments(match, 1)
        change(self.graph, weight, self.graph.get_parameter(weight.target).detach().unsqueeze(2))
        rows = call(self.graph, match, ATEN.unsqueeze.default, x, 2)
        pads = padding if isinstance(padding, str) else [0, *padding]
        target = CONV2D[CONV1D.index(match.target)]
        y = call(self.graph, match, target, rows, weight, bias, [1, *stride], pads, [1, *dilation], groups)
        match.replace_all_uses_with(call(self.graph, match, ATEN.squeeze.dim, y, 2))
        graph.erase_node(match)


@dataclass
class Conv3d:
    """A 3-d convolution becomes a 2-d one over planes."""

    graph: GraphModule
    name = "convolution of volumes as one of planes"

    def pattern(self, node: Node) -> Node | None:
        """Match a 3-d convolution."""
        return node if node.target in CONV3D else None

    def check(self, match: Node) -> str:
        """Ask for a batch of float32 volumes of fixed size, and a stored weight that nothing else reads."""
        return why_not_images(match)

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Gather planes, convolve them, and put the outputs in order."""
        x, weight, bias, stride, padding, dilation, groups = arguments(match, 3)
        _, channels, deep, high, wide = x.meta["val"].shape
        depth = weight.meta["val"].shape[2]
        if isinstance(padding, str):
            padding = [span // 2 if padding == "same" else 0 for span in _spans(match, dilation)]
        planes = outputs(deep, depth, stride[0], padding[0], dilation[0])
        y = permuted(self.graph, match, x, to_last(5))
        if padding[0]:
            y = call(self.graph, match, ATEN.constant_pad_nd.default, y, [0] * 6 + [padding[0]] * 2, 0.0)
        last = (planes - 1) * stride[0] + 1
        taps = [
            call(self.graph, match, ATEN.slice.Tensor, y, 1, t * dilation[0], t * dilation[0] + last, stride[0])
            for t in range(depth)
        ]
        y = call(self.graph, match, ATEN.stack.default, taps, 5)
        y = call(self.graph, match, ATEN.reshape.default, y, [-1, high, wide, channels * depth])
        held = self.graph.get_parameter(weight.target).detach()
        change(self.graph, weight, held.reshape(len(held), -1, *held.shape[3:]))
        y = permuted(self.graph, match, y, to_first(4))
        args = (weight, bias, stride[1:], padding[1:], dilation[1:], groups)
        y = permuted(self.graph, match, call(self.graph, match, CONV2D[0], y, *args), to_last(4))
        y = call(self.graph, match, ATEN.reshape.default, y, [-1, planes, *y.meta["val"].shape[1:]])
        match.replace_all_uses_with(permuted(self.graph, match, y, to_first(5)))
        graph.erase_node(match)


def why_not_images(node: Node) -> str:
    """Return why a convolution of 1 or 3 dimensions does not become a 2-d one; empty for others."""
    if node.target not in (*CONV1D, *CONV3D):
        return ""
    x, weight = node.args[:2]
    value, dims = x.meta["val"], 1 if node.target in CONV1D else 3  # type: ignore[union-attr]
    is_fixed = dims == 1 or all(isinstance(n, int) for n in value.shape[1:])
    return why_not(
        (value.dim() != dims + 2 or value.dtype != torch.float32, "its input is not a float32 batch"),
        (not is_own(weight), SHARED),
        (not is_fixed, "the size of its volumes is not fixed"),
    )


def _spans(node: Node, dilation: Any) -> list[int]:
    """Return how far the kernel reaches beyond one place, along each dimension."""
    sizes = node.args[1].meta["val"].shape[2:]  # type: ignore[union-attr]
    return [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
