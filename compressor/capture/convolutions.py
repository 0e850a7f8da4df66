"""Rewrite convolutions as linears over patches, and fold batch norms into what is in front of them.

    conv2d(x) [N, C, H, W]             becomes   permute -> patches -> dense_linear -> permute
    a depthwise one                    becomes   permute -> patches -> depthwise_linear -> permute
    conv1d(x) [N, C, L]                becomes   unsqueeze -> conv2d -> squeeze: an image of height 1
    linear or conv2d -> batch_norm     becomes   linear or conv2d, its weight and bias scaled
    batch_norm elsewhere               becomes   permute -> mul -> add -> permute
    permute -> relu -> permute         becomes   relu: channels stay last between convolutions

The weight becomes [out, kernel rows * kernel columns * in], so that every pass, format and kernel of linears serves it;
that of a depthwise one [channels, kernel rows * kernel columns].
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compressor.graph.provenance import module_path
from compressor.graph.rewrite import drop_dead_parameters, held_tensor, set_parameter
from compressor.graph.rules import Outcome, apply, why_not

_ATEN, _OPS = torch.ops.aten, torch.ops.compressor
_CONVOLUTIONS = (
    _ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d, _ATEN.conv_transpose1d, _ATEN.conv_transpose2d, _ATEN.conv_transpose3d,
    _ATEN.convolution,
)  # fmt: skip
_CONV2D = (_ATEN.conv2d.default, _ATEN.conv2d.padding)
_CONV1D: dict[Any, Any] = {_ATEN.conv1d.default: _CONV2D[0], _ATEN.conv1d.padding: _CONV2D[1]}
_NORM = _ATEN.batch_norm.default
_NORM_ALONE = _ATEN._native_batch_norm_legit_no_training.default  # what export makes of it where others write in place
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_TO_LAST, _TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def rewrite_convolutions(graph: GraphModule) -> list[Outcome]:
    """Fold batch norms, rewrite convolutions, and let element-wise operators keep the channels last; in place.

    Batch norms that cannot be folded become a product and a sum.  Convolutions that are not linears over patches stay
    as they are; :func:`dense_convolutions` names them.

    Returns:
        What each rule did.
    """
    outcomes = apply([BatchNorm(graph)], graph.graph)
    outcomes += apply([Conv1d(graph)], graph.graph)
    outcomes += apply([Conv2d(graph)], graph.graph)
    outcomes += apply([DropPermutes(), ChannelsLast(graph)], graph.graph)
    for node in graph.graph.nodes:
        if node.target in _VIEWS:  # permuted images have other strides than the model's, which no view takes
            node.target = _ATEN.reshape.default
    drop_dead_parameters(graph)
    graph.graph.lint()
    return outcomes


def dense_convolutions(graph: GraphModule) -> list[str]:
    """List the convolutions that stay as they are, a line each with the reason."""
    found = []
    for node in graph.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS:
            name = module_path(node) or node.name
            found.append(f"{name}: stays dense: {_obstacle(node) or 'its weight is shared or computed'}")
    return found


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


@dataclass
class Conv1d:
    """A 1-d convolution becomes a 2-d one over images of height 1."""

    graph: GraphModule
    name = "convolution of rows as one of images"

    def pattern(self, node: Node) -> Node | None:
        """Match a 1-d convolution."""
        return node if node.target in _CONV1D else None

    def check(self, match: Node) -> str:
        """Ask for a batch of float32 rows, and a stored weight that nothing else reads."""
        x, weight = match.args[:2]
        value = x.meta["val"]  # type: ignore[union-attr]
        return why_not(
            (value.dim() != 3 or value.dtype != torch.float32, "its input is not a batch of float32 rows"),
            (not (_is_parameter(weight) and len(weight.users) == 1), "its weight is shared or computed"),
        )

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Give weight and input a height of 1, and take it off the output."""
        x, weight, bias, stride, padding, dilation, groups = _arguments(match)
        held = self.graph.get_parameter(weight.target).detach().unsqueeze(2)
        set_parameter(self.graph, weight.target, held)
        weight.meta = {**weight.meta, "val": weight.meta["val"].unsqueeze(2)}
        rows = _call(self.graph, match, _ATEN.unsqueeze.default, (x, 2), x.meta["val"].unsqueeze(2))
        pads = padding if isinstance(padding, str) else [0, padding[1]]
        args = (rows, weight, bias, [1, stride[1]], pads, [1, dilation[1]], groups)
        y = _call(self.graph, match, _CONV1D[match.target], args, match.meta["val"].unsqueeze(2))
        match.replace_all_uses_with(_call(self.graph, match, _ATEN.squeeze.dim, (y, 2), match.meta["val"]))
        graph.erase_node(match)


@dataclass
class Conv2d:
    """A 2-d convolution becomes a linear over patches, channels last."""

    graph: GraphModule
    name = "convolution to a linear over patches"

    def pattern(self, node: Node) -> Node | None:
        """Match a convolution of any number of dimensions."""
        return node if getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS else None

    def check(self, match: Node) -> str:
        """Ask for one linear over patches."""
        return _obstacle(match)

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Put permutation, patches, linear and permutation in its place."""
        _rewrite_conv2d(self.graph, match)


class DropPermutes:
    """A permutation of channels to the end drops out behind one to the front."""

    name = "permutations dropped"

    def pattern(self, node: Node) -> Node | None:
        """Match the pair."""
        return node if _is_permute(node, _TO_LAST) and _is_permute(node.args[0], _TO_FIRST) else None

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
        return node if pointwise and any(_is_permute(arg, _TO_FIRST) for arg in node.args) else None

    def check(self, match: Node) -> str:
        """Ask for images alone as inputs."""
        read = [arg for arg in match.args if isinstance(arg, Node)]
        values = [arg.meta["val"] for arg in read]
        return why_not(
            (len(read) < len(match.all_input_nodes), "it reads tensors in a list or by keyword"),
            (any(not isinstance(x, Tensor) or x.dim() != 4 for x in values), "an input is not an image [N, C, H, W]"),
        )

    def rewrite(self, graph: Graph, match: Node) -> None:
        """Permute the inputs that have channels first, and the output instead."""
        read = [arg for arg in match.args if isinstance(arg, Node)]
        last: dict[Any, Any] = {
            arg: arg.args[0] if _is_permute(arg, _TO_FIRST) else _permuted(self.graph, match, arg, _TO_LAST)
            for arg in read
        }
        args = tuple(last[arg] if isinstance(arg, Node) else arg for arg in match.args)
        y = _call(self.graph, match, match.target, args, match.meta["val"].permute(_TO_LAST))
        y.kwargs = match.kwargs
        match.replace_all_uses_with(_permuted(self.graph, match, y, _TO_FIRST))


def _obstacle(node: Node) -> str:
    """Return why a convolution is not a linear over patches; empty where it is one."""
    if node.target not in _CONV2D:
        return f"{node.target} is not a 2-d convolution"
    x, weight, _, _, padding, dilation, groups = _arguments(node)
    if groups != 1 and not _is_depthwise(weight, groups):
        return f"each of its {groups} groups reads other channels, so it is not one linear over patches"
    if not (_is_parameter(weight) and len(weight.users) == 1):
        return "its weight is shared or computed"
    if x.meta["val"].dim() != 4 or x.meta["val"].dtype != torch.float32:
        return f"its input is not a batch of float32 images: {x.meta['val'].dtype}, {x.meta['val'].dim()} dimensions"
    if groups != 1 and not all(isinstance(n, int) for n in x.meta["val"].shape[1:]):
        return "it is depthwise, and its images have no fixed size"
    spans = [d * (k - 1) for d, k in zip(dilation, weight.meta["val"].shape[2:], strict=True)]
    if padding == "same" and any(span % 2 for span in spans):
        return "`same` pads one side more than the other for a kernel of even size"
    return ""


def _arguments(node: Node) -> Any:
    """Return input, weight, bias, and two strides, paddings (or a word) and dilations, groups; of rows both alike."""
    given: tuple[Any, ...] = node.args
    x, weight, bias, stride, padding, dilation, groups = given + (None, 1, 0, 1, 1)[len(given) - 2 :]
    return x, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups


def _is_depthwise(weight: Any, groups: int) -> bool:
    """Return whether each channel has one output, of itself alone."""
    return isinstance(weight, Node) and tuple(weight.meta["val"].shape[:2]) == (groups, 1)


def _pair(value: Any) -> Any:
    """Return two numbers, of which one may stand for both; a word as it is."""
    values = [value] if isinstance(value, int) else value
    return [*values, *values] if len(values) == 1 else values


def _is_parameter(node: Any) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.op == "get_attr"


def _call(graph: GraphModule, before: Node, target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
    """Add a call in front of a node, whose provenance it gets."""
    with graph.graph.inserting_before(before):
        node = graph.graph.call_function(target, args)
    node.meta = {**before.meta, "val": value}
    return node


def _permuted(graph: GraphModule, before: Node, x: Node, order: list[int]) -> Node:
    return _call(graph, before, _ATEN.permute.default, (x, order), x.meta["val"].permute(order))


def _parameter(graph: GraphModule, before: Node, name: str, value: Tensor, like: Tensor) -> Node:
    """Add a parameter in front of a node; ``like`` is any fake tensor."""
    set_parameter(graph, name, value)
    with graph.graph.inserting_before(before):
        node = graph.graph.get_attr(name)
    node.meta = {"val": like.new_empty(value.shape)}
    return node


def _rewrite_conv2d(graph: GraphModule, node: Node) -> None:
    x, weight, bias, stride, padding, dilation, groups = _arguments(node)
    rows, _, *kernel = weight.meta["val"].shape
    linear = _OPS.dense_linear.default if groups == 1 else _OPS.depthwise_linear.default
    if isinstance(padding, str):
        padding = [d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    last = graph.get_parameter(weight.target).detach().permute(_TO_LAST).reshape(rows, -1)
    set_parameter(graph, weight.target, last.contiguous())
    weight.meta = {**weight.meta, "val": weight.meta["val"].new_empty(last.shape)}
    y = _permuted(graph, node, x, _TO_LAST)
    if groups != 1 or (kernel, stride, padding) != ([1, 1], [1, 1], [0, 0]):
        geometry = (kernel, stride, padding, dilation)
        y = _call(graph, node, _OPS.patches.default, (y, *geometry), _OPS.patches(y.meta["val"], *geometry))
    value = y.meta["val"].new_empty(*y.meta["val"].shape[:-1], rows)
    y = _call(graph, node, linear, (y, weight, bias), value)
    node.replace_all_uses_with(_permuted(graph, node, y, _TO_FIRST))
    graph.graph.erase_node(node)


def _is_permute(node: Any, order: list[int]) -> bool:
    return isinstance(node, Node) and node.target is _ATEN.permute.default and node.args[1] == order


def _is_inference(node: Node) -> bool:
    """Return whether a batch norm is a fixed affine map: its statistics are stored, its parameters in the graph."""
    gain, shift, *statistics = node.args[1:5]
    held = [*statistics, *(arg for arg in (gain, shift) if arg is not None)]
    return all(_is_parameter(arg) for arg in held) and (node.target is _NORM_ALONE or node.args[5] is False)


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
    if x.target not in (*_CONV2D, *_CONV1D, _OPS.dense_linear.default) or len(x.users) > 1:
        return None
    args: Any = x.args
    weight, bias = args[1], args[2] if len(args) > 2 else None
    if not all(_is_parameter(arg) and len(arg.users) == 1 for arg in (weight, bias) if arg is not None):
        return None
    if x.target is _OPS.dense_linear.default and x.meta["val"].dim() != 2:
        return None  # the norm is over another dimension
    rows = _held(graph, weight.target)
    shifted = offset.float() if bias is None else (_held(graph, bias.target) * scale + offset).float()
    set_parameter(graph, weight.target, (rows * scale.view(-1, *[1] * (rows.dim() - 1))).float())
    if bias is not None:
        set_parameter(graph, bias.target, shifted)
    else:
        name = f"{weight.target.removesuffix('.weight')}.bias"
        x.args = (*args[:2], _parameter(graph, x, name, shifted, x.meta["val"]), *args[3:])
    return x


def _affine(graph: GraphModule, node: Node, x: Node, scale: Tensor, offset: Tensor) -> Node:
    """Apply the map as a product and a sum over the last dimension."""
    dims = x.meta["val"].dim()
    name = module_path(node) or node.name
    y = _permuted(graph, node, x, [0, *range(2, dims), 1])
    for target, leaf, value in ((_ATEN.mul.Tensor, "scale", scale), (_ATEN.add.Tensor, "shift", offset)):
        held = _parameter(graph, node, f"{name}.{leaf}", value.float(), x.meta["val"])
        y = _call(graph, node, target, (y, held), y.meta["val"])
    return _permuted(graph, node, y, [0, dims - 1, *range(1, dims - 1)])
