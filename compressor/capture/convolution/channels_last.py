"""Keep channels last between convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compressor.capture.convolution.nodes import ATEN, call, permuted, to_first, to_last
from compressor.graph.rules import why_not


class DropPermutes:
    """A permutation of channels to the end drops out behind one to the front."""

    name = "permutations dropped"

    def pattern(self, node: Node) -> Node | None:
        """Match the pair."""
        return node if _is_permute(node, to_last) and _is_permute(node.args[0], to_first) else None

    def check(self, match: Node) -> str:
        """Ask for nothing: the pair never has an effect."""
        return ""

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Let the readers read what the pair reads; dead nodes are dropped at the end."""
        source: Any = match.args[0]
        match.replace_all_uses_with(source.args[0])


@dataclass
class ChannelsLast:
    """An element-wise operator between convolutions reads images whose channels are last."""

    graph: GraphModule
    name = "element-wise operator with channels last"

    def pattern(self, node: Node) -> Node | None:
        """Match an element-wise operator of which an input was permuted to channels first."""
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return node if pointwise and any(_is_permute(arg, to_first) for arg in node.args) else None

    def check(self, match: Node) -> str:
        """Ask for images alone as inputs."""
        read = [arg for arg in match.args if isinstance(arg, Node)]
        values, rank = [arg.meta["val"] for arg in read], match.meta["val"].dim()
        return why_not(
            (len(read) < len(match.all_input_nodes), "it reads tensors in a list or by keyword"),
            (any(not isinstance(x, Tensor) or x.dim() != rank for x in values), "an input is not an image [N, C, ...]"),
        )

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Permute the inputs that have channels first, and the output instead."""
        read, rank = [arg for arg in match.args if isinstance(arg, Node)], match.meta["val"].dim()
        last: dict[Any, Any] = {
            arg: arg.args[0] if _is_permute(arg, to_first) else permuted(self.graph, match, arg, to_last(rank))
            for arg in read
        }
        args = tuple(last[arg] if isinstance(arg, Node) else arg for arg in match.args)
        y = call(self.graph, match, match.target, *args)
        y.kwargs = match.kwargs
        match.replace_all_uses_with(permuted(self.graph, match, y, to_first(rank)))


@dataclass
class MeanOfPixels:
    """A mean over pixels reads images whose channels are last: these stay beside each other, and no image is moved."""

    graph: GraphModule
    name = "mean of pixels with channels last"

    def pattern(self, node: Node) -> Node | None:
        """Match a mean of images that were permuted to channels first."""
        is_mean = node.target is ATEN.mean.dim and bool(node.args[1])
        return node if is_mean and _is_permute(node.args[0], to_first) else None

    def check(self, match: Node) -> str:
        """Ask for all pixels of an image, and for nothing else."""
        read: Any = match.args
        rank = read[0].meta["val"].dim()
        over = sorted(dim % rank for dim in read[1])
        return why_not((over != [*range(2, rank)] or bool(match.kwargs), "it is not the mean of an image's pixels"))

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Take the mean over the permutation's input; where dimensions are kept, permute it instead."""
        given: Any = match.args
        read, _, *keeps = given
        rank = read.meta["val"].dim()
        y = call(self.graph, match, ATEN.mean.dim, read.args[0], [*range(1, rank - 1)], *keeps)
        match.replace_all_uses_with(permuted(self.graph, match, y, to_first(rank)) if any(keeps) else y)


def _is_permute(node: Any, order: Callable[[int], list[int]]) -> bool:
    """Return whether a node permutes images of pixels in two dimensions or more."""
    is_call = isinstance(node, Node) and node.target is ATEN.permute.default
    return is_call and len(node.args[1]) > 3 and node.args[1] == order(len(node.args[1]))
