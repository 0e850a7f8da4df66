"""A transposed convolution becomes a convolution that makes all phases of the outputs, put in order.

Along one dimension, output ``s q + r - p`` of stride s and padding p reads input ``q - m`` by tap ``r + s m``: for each
of the s phases r a convolution of the inputs, whose taps are every s-th one, backwards.  All phases read the same
inputs, so they are one convolution, with s times as many outputs:

    conv_transpose(x) [N, C, L]   becomes   conv(x) [N, out * s, q] -> reshape, permute -> slice, from p on

Where s does not divide the kernel, the last taps of some phases are zeros, which are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.functional import pad

from compressor.capture.convolution.nodes import (
    ATEN,
    CONV1D,
    CONV2D,
    CONV3D,
    SHARED,
    TRANSPOSED,
    call,
    change,
    is_own,
    permuted,
    spread,
    to_first,
    to_last,
)
from compressor.graph.rules import why_not


@dataclass
class Transposed:
    """A transposed convolution becomes a convolution and an order of its outputs."""

    graph: GraphModule
    name = "transposed convolution as one of all phases"

    def pattern(self, node: Node) -> Node | None:
        """Match a transposed convolution."""
        return node if node.target in TRANSPOSED else None

    def check(self, match: Node) -> str:
        """Ask for images of fixed size, and for phases that read inputs side by side."""
        return why_not_phases(match)

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Put a convolution, a reshape, a permutation and slices in its place."""
        dims = TRANSPOSED[match.target]
        x, weight, bias, stride, padding, more, groups, dilation = _arguments(match)
        kernel, sizes = weight.meta["val"].shape[2:], match.meta["val"].shape[2:]
        taps = [_taps(*each) for each in zip(kernel, stride, padding, more, dilation, strict=True)]
        held = self.graph.get_parameter(weight.target).detach()
        change(self.graph, weight, _phases(held, groups, stride, taps))
        if bias is not None:
            shifts = self.graph.get_parameter(bias.target).detach()
            change(self.graph, bias, shifts.repeat_interleave(prod(stride)))
        pads = [d * (t - 1) for d, t in zip(dilation, taps, strict=True)]
        target = (CONV1D, CONV2D, CONV3D)[dims - 1][0]
        y = call(self.graph, match, target, x, weight, bias, [1] * dims, pads, dilation, groups)
        counts, rank = list(y.meta["val"].shape[2:]), dims + 2
        y = permuted(self.graph, match, y, to_last(rank))
        y = call(self.graph, match, ATEN.reshape.default, y, [-1, *counts, match.meta["val"].shape[1], *stride])
        order = [0, *(i for k in range(dims) for i in (1 + k, rank + k)), rank - 1]
        y = permuted(self.graph, match, y, order)
        whole = [n * s for n, s in zip(counts, stride, strict=True)]
        y = call(self.graph, match, ATEN.reshape.default, y, [-1, *whole, match.meta["val"].shape[1]])
        for k in range(dims):
            if (padding[k], sizes[k]) != (0, whole[k]):
                y = call(self.graph, match, ATEN.slice.Tensor, y, 1 + k, padding[k], padding[k] + sizes[k])
        match.replace_all_uses_with(permuted(self.graph, match, y, to_first(rank)))
        graph.erase_node(match)


def why_not_phases(node: Node) -> str:
    """Return why a transposed convolution does not become an ordinary one; empty for others."""
    if node.target not in TRANSPOSED:
        return ""
    x, weight, bias, stride, _, _, _, dilation = _arguments(node)
    value = x.meta["val"]
    mixed = any(s > 1 and d > 1 for s, d in zip(stride, dilation, strict=True))
    return why_not(
        (not is_own(weight), SHARED),
        (bias is not None and not is_own(bias), "its bias is shared or computed"),
        (value.dim() != len(stride) + 2 or value.dtype != torch.float32, "its input is not a float32 batch"),
        (mixed, "it is transposed with stride and dilation, so its phases read inputs apart"),
        (not all(isinstance(n, int) for n in value.shape[1:]), "it is transposed, and its input has no fixed size"),
    )


def _arguments(node: Node) -> Any:
    """Return input, weight, bias, strides, paddings, output paddings, groups, dilations; each of all dimensions."""
    given: tuple[Any, ...] = node.args
    dims = TRANSPOSED[node.target]
    x, weight, bias, stride, padding, more, groups, dilation = given + (None, 1, 0, 0, 1, 1)[len(given) - 2 :]
    stride, padding, more, dilation = (spread(each, dims) for each in (stride, padding, more, dilation))
    return x, weight, bias, stride, padding, more, groups, dilation


def _taps(kernel: int, stride: int, padding: int, more: int, dilation: int) -> int:
    """Return the taps of a phase: enough for the last outputs, which may read no input at all."""
    reached = max(dilation * (kernel - 1), dilation * (kernel - 1) + more - padding)
    return max(-(-kernel // stride), -(-(reached + 1) // stride) if dilation == 1 else -(-reached // dilation) + 1)


def _phases(weight: Tensor, groups: int, stride: list[int], taps: list[int]) -> Tensor:
    """Return the weight [in, out / groups, kernel...] as the convolution's, [out * phases, in / groups, taps...]."""
    inputs, each, *kernel = weight.shape
    dims = len(kernel)
    fill = [
        n for s, t, k in zip(reversed(stride), reversed(taps), reversed(kernel), strict=True) for n in (0, s * t - k)
    ]
    held = pad(weight, fill).reshape(
        groups, inputs // groups, each, *(n for s, t in zip(stride, taps, strict=True) for n in (t, s))
    )
    phases, places = [4 + 2 * k for k in range(dims)], [3 + 2 * k for k in range(dims)]
    held = held.permute(0, 2, *phases, 1, *places).flip([dims + 3 + k for k in range(dims)])
    return held.reshape(groups * each * prod(stride), inputs // groups, *taps).contiguous()
