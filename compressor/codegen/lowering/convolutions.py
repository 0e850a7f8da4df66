"""Fuse convolutions: patches, the packed linear over them and what follows become one operator of the graph.

    patches -> packed_linear               becomes   fused_convolution(x)
    patches -> {depthwise_linear, packed_depthwise}
                                           becomes   fused_convolution(x, is_depthwise)
    packed_linear of images                becomes   fused_convolution(x), of 1 x 1
    fused_convolution -> + y -> relu       becomes   fused_convolution(x, residual=y, is_relu)
    fused_convolution -> relu6             becomes   fused_convolution(x, is_relu, ceiling=6)
    fused_convolution -> fused_convolution becomes   the first stores int8 codes with the scale of the second

The last is for convolutions whose input has a calibrated scale, where nothing else reads that input; so is the third,
for the sake of the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from compressor.codegen.kernels.convolution import depthwise
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import reads_planes, supports
from compressor.codegen.lowering.fused_linear import move_to
from compressor.codegen.lowering.fusion import addition_after, residual_of, why_no_residual
from compressor.formats.format import Format
from compressor.formats.rounded_activations import SMALLEST
from compressor.graph.rules import Outcome, Rule, apply, why_not

_ATEN, _OPS = torch.ops.aten, torch.ops.compressor
_DEPTHWISE = (_OPS.depthwise_linear.default, _OPS.packed_depthwise.default)


_TO_LAST = [0, 2, 3, 1]
_PIXEL = ((1, 1), (1, 1), (0, 0), (1, 1))
"""Kernel, stride, padding and dilation of a convolution of single pixels."""


def fused_convolution(
    x: Tensor,
    parts: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    next_scale: Tensor | None,
    format: str,
    out_features: int,
    geometry: list[list[int]],
    is_relu: bool,
    next_format: str | None,
    ceiling: float | None = None,
    is_depthwise: bool = False,
    is_planar: bool = False,
) -> Tensor:
    """Compute a convolution and what follows it: the definition that the kernel is held to.

    Args:
        x: float32 [N, H, W, C], or int8, as another one returned it.
        parts, bias, format, out_features: as of ``packed_linear``, or where ``is_depthwise`` of ``packed_depthwise``;
            without a format, the only part is the weight of a ``depthwise_linear``.
        is_planar: x is [N, C, H, W].
        residual: float32 [N, H', W', out], added to the outputs.
        is_relu, ceiling: whether outputs are clipped below at zero, and their upper limit.
        next_scale, next_format: the part ``input_scale`` and the format of the convolution that reads the result.
        geometry: kernel, stride, padding, dilation, as of ``patches``.
    Returns:
        float32 [N, H', W', out], with ``next_format`` int8: the codes plus 128, as unsigned bytes.
    """
    if x.dtype == torch.int8:
        x = (x.view(torch.uint8).float() - 128) * _input_scale(parts, format)
    rows = _OPS.patches(x.permute(_TO_LAST) if is_planar else x, *geometry)
    y: Tensor
    if is_depthwise and not format:
        y = _OPS.depthwise_linear(rows, parts[0], bias)
    else:
        product = _OPS.packed_depthwise if is_depthwise else _OPS.packed_linear
        y = product(rows, parts, bias, format, rows.shape[-1] // (out_features if is_depthwise else 1), out_features)
    y = y if residual is None else y + residual
    y = y.clamp(min=0) if is_relu else y
    y = y if ceiling is None else y.clamp(max=ceiling)
    if next_scale is None or next_format is None:
        return y
    act = Format.parse(next_format).activations
    assert act is not None
    inverse = torch.where(next_scale > SMALLEST, 1.0 / next_scale, 0.0)
    codes = torch.round((y * inverse).clamp(-act.max_value, act.max_value))
    return (codes + 128).to(torch.uint8).view(torch.int8)


def _input_scale(parts: Any, format: str) -> Any:
    """Return the part of a packed weight that has the scale of its activations."""
    return parts[list(Format.parse(format).parts(1, 1)).index("input_scale")]


def fuse_convolutions(graph: fx.Graph) -> list[Outcome]:
    """Put :func:`fused_convolution` where it has a kernel, in place, and return what each rule did."""
    rules: list[Rule] = [
        PatchesIntoLinear(),
        PatchesIntoDepthwise(),
        PixelsIntoLinear(),
        AddToOutputs(),
        ReluToOutputs(),
    ]
    outcomes = apply(rules, graph)
    graph.eliminate_dead_code()
    outcomes += apply([RoundForNext(), PlanesIntoConvolution()], graph)
    graph.eliminate_dead_code()
    graph.lint()
    return outcomes


def geometry_of(x: fx.Node, pairs: Any, is_planar: bool = False) -> Geometry | None:
    """Return the geometry of a convolution of images x [N, H, W, C], or None where their size is not fixed."""
    _, high, wide, channels = x.meta["val"].permute(_TO_LAST if is_planar else [0, 1, 2, 3]).shape
    kernel, stride, padding, dilation = (tuple(pair) for pair in pairs)
    is_fixed = all(isinstance(n, int) for n in (high, wide, channels))
    return Geometry((high, wide), channels, kernel, stride, padding, dilation) if is_fixed else None


def reads_groups(linear: fx.Node) -> bool:
    """Tell whether a packed linear will be a convolution whose kernel reads its format: over patches, or of images."""
    given: Any = linear.args
    x, name = given[0], str(given[3])
    if x.target is _OPS.patches.default:
        (x, *pairs), is_image = x.args, True
    else:
        pairs, is_image = list(_PIXEL), x.meta["val"].dim() == 4
    sizes = geometry_of(x, pairs) if is_image else None
    return sizes is not None and not supports(Format.parse(name), sizes)


def bounds_of(node: fx.Node) -> tuple[float | None] | None:
    """Return the upper bound of a relu, in a tuple, None for none; None where the node is not a relu."""
    args: Any = node.args
    if node.target is _ATEN.relu.default:
        return (None,)
    if node.target is _ATEN.relu6.default:
        return (6.0,)
    is_clamp = node.target in (_ATEN.clamp.default, _ATEN.hardtanh.default) and not node.kwargs
    if is_clamp and len(args) == 3 and args[1] == 0 and isinstance(args[2], int | float) and args[2] > 0:
        return (float(args[2]),)
    return None


def _put(graph: fx.Graph, place: fx.Node, args: Any) -> fx.Node:
    """Put :func:`fused_convolution` of some arguments in the place of a node."""
    with graph.inserting_before(place):
        node = graph.call_function(fused_convolution, (*args, *(None, False, False)[len(args) - 10 :]))
    move_to(graph, node, place)
    return node


class PatchesIntoLinear:
    """A packed linear reads images themselves, not rows of patches that are stored first."""

    name = "convolution in one kernel"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match a packed linear over patches."""
        x: Any = node.args[0] if node.target is _OPS.packed_linear.default else None
        return node if x is not None and x.target is _OPS.patches.default else None

    def check(self, match: fx.Node) -> str:
        """Ask for images of fixed size, and for a format that the kernel has."""
        given: Any = match.args
        x, *pairs = given[0].args
        sizes = geometry_of(x, pairs)
        reason = "" if sizes is None else supports(Format.parse(given[3]), sizes)
        return why_not(
            (sizes is None, "the size of the images is not fixed"),
            (
                bool(reason),
                f"the kernel of convolutions does not serve it: {reason}",
            ),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Put the operator in the linear's place."""
        given: Any = match.args
        (patches, parts, bias, name, _, rows), no = given, None
        x, *pairs = patches.args
        args = (x, parts, bias, no, no, name, rows, [list(pair) for pair in pairs], False, no)
        return _put(graph, match, args)


class PatchesIntoDepthwise:
    """A depthwise convolution, dense or packed, reads images themselves."""

    name = "depthwise convolution in one kernel"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match one over patches, as capture writes all of them."""
        x: Any = node.args[0] if node.target in _DEPTHWISE else None
        return node if x is not None and x.target is _OPS.patches.default else None

    def check(self, match: fx.Node) -> str:
        """Ask for images of fixed size, and for a format that the kernel has."""
        given: Any = match.args
        x, *pairs = given[0].args
        fmt = Format.parse(given[3]) if len(given) > 3 else None
        reason = depthwise.supports(fmt, pairs[0][0] * pairs[0][1])
        return why_not((geometry_of(x, pairs) is None, "the size of the images is not fixed"), (bool(reason), reason))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Put the operator in its place."""
        given: Any = match.args
        x, *pairs = given[0].args
        parts, name = (given[1], given[3]) if len(given) > 3 else ([given[1]], "")
        geometry, channels = [list(pair) for pair in pairs], match.meta["val"].shape[-1]
        args = (x, parts, given[2], None, None, name, channels, geometry, False, None, None, True)
        return _put(graph, match, args)


class PixelsIntoLinear:
    """A packed linear of images with one calibrated scale is a convolution of 1 x 1: it may read and write bytes."""

    name = "linear of pixels as a convolution"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match a packed linear of [N, H, W, C]."""
        x: Any = node.args[0] if node.target is _OPS.packed_linear.default else None
        return node if x is not None and x.meta["val"].dim() == 4 else None

    def check(self, match: fx.Node) -> str:
        """Ask for images of fixed size, and for a calibrated scale and a format that the kernel has."""
        x, _, _, name, *_ = match.args
        fmt, sizes = Format.parse(str(name)), geometry_of(x, _PIXEL)  # type: ignore[arg-type]
        return why_not(
            (sizes is None, "the size of the images is not fixed"),
            (fmt.activations is None or fmt.activations.granularity != "tensor", f"{name} has no calibrated scale"),
            (sizes is not None and bool(supports(fmt, sizes)), "the kernel of convolutions does not serve it"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Put the operator in the linear's place."""
        x, parts, bias, name, _, rows = match.args
        pairs = [list(pair) for pair in _PIXEL]
        return _put(graph, match, (x, parts, bias, None, None, name, rows, pairs, False, None))


class AddToOutputs:
    """An addition takes place where the convolution in front of it writes its outputs."""

    name = "addition to a convolution's outputs"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Match a fused convolution and an addition that reads it."""
        addition = addition_after(node) if node.target is fused_convolution else None
        return None if addition is None else (node, addition)

    def check(self, match: tuple[fx.Node, fx.Node]) -> str:
        """Ask for an addition of a tensor of the outputs' shape that is their only reader."""
        return why_no_residual(*match)

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Move the operator to the addition's place, and give it the other term."""
        node, addition = match
        node.args = (*node.args[:3], residual_of(node, addition), *node.args[4:])
        move_to(graph, node, addition)
        return node


class ReluToOutputs:
    """A relu or ReLU6 takes place where the convolution in front of it writes its outputs."""

    name = "relu to a convolution's outputs"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Match a fused convolution and a relu that reads it, bounded above or not."""
        relus = [user for user in node.users if bounds_of(user) is not None]
        return (node, relus[0]) if node.target is fused_convolution and relus else None

    def check(self, match: tuple[fx.Node, fx.Node]) -> str:
        """Ask for a relu that is the outputs' only reader."""
        return why_not((len(match[0].users) > 1, "the relu is not the only reader of the outputs"))

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Move the operator to the relu's place."""
        node, relu = match
        node.args = (*node.args[:8], True, node.args[9], *(bounds_of(relu) or ()), *node.args[11:])
        move_to(graph, node, relu)
        return node


class RoundForNext:
    """A convolution rounds its outputs with the calibrated scale of the convolution that reads them."""

    name = "rounding in the convolution in front"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Match a fused convolution that reads another one."""
        source = node.args[0] if node.target is fused_convolution else None
        reads = isinstance(source, fx.Node) and source.target is fused_convolution
        return (source, node) if reads else None  # type: ignore[return-value]

    def check(self, match: tuple[fx.Node, fx.Node]) -> str:
        """Ask for a calibrated scale, and for outputs that nothing else reads."""
        source, node = match
        act = Format.parse(node.args[5]).activations if node.args[5] else None
        return why_not(
            (len(source.users) > 1, f"{source.name} is also read by others, in float32"),
            (node.args[3] is source, f"{source.name} is also added to the outputs, in float32"),
            (act is None or not act.calibrated, f"{node.args[5] or 'float32'} has no calibrated scale of activations"),
        )

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Give the first convolution the scale and the format of the second."""
        source, node = match
        scale = _input_scale(node.args[1], str(node.args[5]))
        source.args = (*source.args[:4], scale, *source.args[5:9], node.args[5], *source.args[10:])
        source.meta = {**source.meta, "val": source.meta["val"].to(torch.int8)}
        return node


class PlanesIntoConvolution:
    """A convolution of up to four channels reads them as they come, plane by plane."""

    name = "planes read by a convolution"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match a fused convolution of what a permutation makes."""
        x: Any = node.args[0] if node.target is fused_convolution else None
        return node if x is not None and x.target is _ATEN.permute.default and x.args[1] == _TO_LAST else None

    def check(self, match: fx.Node) -> str:
        """Ask for a kernel that does."""
        given: Any = match.args
        sizes = geometry_of(given[0], given[7])
        no_kernel = given[11] or sizes is None or not reads_planes(Format.parse(given[5]), sizes)
        return why_not((no_kernel, "its kernel reads channels that lie side by side"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Take the permutation's input."""
        given: Any = match.args
        match.args = (given[0].args[0], *given[1:12], True)
        return match
