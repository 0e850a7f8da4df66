"""A 2-d convolution becomes linears over patches, or depthwise over patches.

A convolution in groups of many outputs becomes a linear for each group.  Where groups are narrow, that would fill up
each to 16 rows: it becomes a depthwise one, over an image in which each pixel is as many pixels as a group has inputs:

    x [N, H, W, groups * in]  ->  [N, H, W * in, groups * out], channel g * out + o of pixel w * in + i being input i
                                  of group g; a kernel in times as wide, at strides in times as long
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compressor.capture.convolution.nodes import (
    ATEN,
    CONV2D,
    CONVOLUTIONS,
    SHARED,
    arguments,
    call,
    change,
    is_own,
    parameter,
    permuted,
    to_first,
    to_last,
)
from compressor.formats.parts import TILE_ROWS
from compressor.graph.rules import why_not

_OPS = torch.ops.compressor
_MOST_TAPS = 128
"""Taps that a depthwise convolution over repeated pixels may have: its kernel is unrolled over them."""


@dataclass
class Conv2d:
    """A 2-d convolution becomes a linear over patches, channels last."""

    graph: GraphModule
    name = "convolution to a linear over patches"

    def pattern(self, node: Node) -> Node | None:
        """Match a convolution of any number of dimensions."""
        return node if getattr(node.target, "overloadpacket", None) in CONVOLUTIONS else None

    def check(self, match: Node) -> str:
        """Ask for linears over patches."""
        return obstacle(match)

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Put permutation, patches, linear and permutation in its place."""
        _, weight, bias, _, _, _, groups = arguments(match)
        y = permuted(self.graph, match, match.args[0], to_last(4))  # type: ignore[arg-type]
        if groups == 1 or _is_by_channel(match):
            y = self._one(match, y, weight, bias)
        else:
            y = self._by_group(match, y, weight, bias, groups)
        match.replace_all_uses_with(permuted(self.graph, match, y, to_first(4)))
        graph.erase_node(match)

    def _one(self, match: Node, y: Node, weight: Node, bias: Node | None) -> Node:
        """Call one linear, or a depthwise one where there are groups."""
        kernel, stride, padding, dilation, groups = _geometry(match)
        change(self.graph, weight, _rows(self.graph, weight))
        if groups == 1:
            return self._linear(match, y, (kernel, stride, padding, dilation), weight, bias)
        rows, columns = weight.meta["val"].shape
        inputs = columns // (kernel[0] * kernel[1])
        if inputs > 1 or rows > groups:
            y = self._repeated(match, y, groups, inputs, rows // groups)
            kernel, stride, padding = ([a, b * inputs] for a, b in (kernel, stride, padding))
        y = call(self.graph, match, _OPS.patches.default, y, kernel, stride, padding, dilation)
        return call(self.graph, match, _OPS.depthwise_linear.default, y, weight, bias)

    def _repeated(self, match: Node, y: Node, groups: int, inputs: int, outputs: int) -> Node:
        """Lay the inputs of a group side by side as pixels, each for all outputs of the group."""
        _, high, wide, _ = y.meta["val"].shape
        y = call(self.graph, match, ATEN.reshape.default, y, [-1, high, wide, groups, inputs])
        y = permuted(self.graph, match, y, [0, 1, 2, 4, 3])
        y = call(self.graph, match, ATEN.unsqueeze.default, y, 5)
        y = call(self.graph, match, ATEN.expand.default, y, [-1, -1, -1, -1, -1, outputs])
        return call(self.graph, match, ATEN.reshape.default, y, [-1, high, wide * inputs, groups * outputs])

    def _by_group(self, match: Node, y: Node, weight: Node, bias: Node | None, groups: int) -> Node:
        """Call a linear for each group, over its own channels, and put the outputs side by side."""
        *geometry, _ = _geometry(match)
        stem, fake = str(weight.target).removesuffix(".weight"), weight.meta["val"]
        rows = _rows(self.graph, weight).chunk(groups)
        each = fake.shape[1]
        shifts = [None] * groups
        if bias is not None:
            shifts = self.graph.get_parameter(str(bias.target)).detach().chunk(groups)  # type: ignore[assignment]
        outputs = []
        for g, (part, shift) in enumerate(zip(rows, shifts, strict=True)):
            x = call(self.graph, match, ATEN.slice.Tensor, y, 3, g * each, (g + 1) * each)
            held = parameter(self.graph, match, f"{stem}.group_{g}.weight", part.contiguous(), fake)
            own = f"{stem}.group_{g}.bias"
            added = None if shift is None else parameter(self.graph, match, own, shift.contiguous(), fake)
            outputs.append(self._linear(match, x, tuple(geometry), held, added))
        return call(self.graph, match, ATEN.cat.default, outputs, 3)

    def _linear(self, match: Node, y: Node, geometry: tuple[Any, ...], weight: Node, bias: Node | None) -> Node:
        """Call a linear over patches; a kernel of one pixel reads the image itself."""
        if geometry[:3] != ([1, 1], [1, 1], [0, 0]):
            y = call(self.graph, match, _OPS.patches.default, y, *geometry)
        return call(self.graph, match, _OPS.dense_linear.default, y, weight, bias)


def obstacle(node: Node) -> str:
    """Return why a convolution is not made of linears over patches; empty where it is."""
    if node.target not in CONV2D:
        return f"{node.target} is not a 2-d convolution"
    x, weight, bias, _, _, _, groups = arguments(node)
    image = x.meta["val"]
    is_fixed = image.dim() == 4 and all(isinstance(n, int) for n in image.shape[1:])
    return why_not(
        (not is_own(weight), SHARED),
        (groups != 1 and bias is not None and not is_own(bias), "its bias is shared or computed"),
        (
            image.dim() != 4 or image.dtype != torch.float32,
            f"its input is not a batch of float32 images: {image.dtype}, {image.dim()} dimensions",
        ),
        (groups != 1 and not is_fixed, "it has groups, and its images have no fixed size"),
    )


def _geometry(node: Node) -> Any:
    """Return kernel, stride, padding and dilation of a 2-d convolution, as of ``patches``, and groups."""
    _, weight, _, stride, padding, dilation, groups = arguments(node)
    kernel = list(weight.meta["val"].shape[2:])
    if isinstance(padding, str):
        padding = [d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return kernel, stride, padding, dilation, groups


def _is_by_channel(node: Node) -> bool:
    """Return whether a convolution in groups is best a depthwise one: its groups fill no tile of rows."""
    (rows, inputs, *kernel), (_, _, _, dilation, groups) = node.args[1].meta["val"].shape, _geometry(node)  # type: ignore[union-attr]
    can_be = inputs == 1 or (dilation[1] == 1 and inputs * kernel[0] * kernel[1] <= _MOST_TAPS)
    return bool(can_be and rows // groups < TILE_ROWS)


def _rows(graph: GraphModule, weight: Node) -> Any:
    """Return the weight [out, in, rows, columns] as [out, rows * columns * in]."""
    held = graph.get_parameter(str(weight.target)).detach()
    return held.permute(to_last(4)).reshape(len(held), -1).contiguous()
