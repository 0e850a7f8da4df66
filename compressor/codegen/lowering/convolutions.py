"""Fuse convolutions: patches, the packed linear over them and what follows become one operator of the graph.

    patches -> packed_linear               becomes   fused_convolution(x)
    fused_convolution -> + y -> relu       becomes   fused_convolution(x, residual=y, is_relu)
    fused_convolution -> fused_convolution becomes   the first stores int8 codes with the scale of the second

The last is for convolutions whose input has a calibrated scale, where nothing else reads that input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import supports
from compressor.codegen.lowering.fused_linear import move_to
from compressor.codegen.lowering.fusion import addition_after, residual_of, why_no_residual
from compressor.formats.format import Format
from compressor.formats.rounded_activations import SMALLEST
from compressor.graph.rules import Outcome, apply, why_not

_ATEN, _OPS = torch.ops.aten, torch.ops.compressor


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
) -> Tensor:
    """Compute a convolution and what follows it: the definition that the kernel is held to.

    Args:
        x: float32 [N, H, W, C], or int8, as another one returned it.
        parts, bias, format, out_features: as of ``packed_linear``.
        residual: float32 [N, H', W', out], added to the outputs.
        next_scale, next_format: the part ``input_scale`` and the format of the convolution that reads the result.
        geometry: kernel, stride, padding, dilation, as of ``patches``.
    Returns:
        float32 [N, H', W', out], with ``next_format`` int8: the codes plus 128, as unsigned bytes.
    """
    if x.dtype == torch.int8:
        x = (x.view(torch.uint8).float() - 128) * parts[-1]
    rows = _OPS.patches(x, *geometry)
    y: Tensor = _OPS.packed_linear(rows, parts, bias, format, rows.shape[-1], out_features)
    y = y if residual is None else y + residual
    y = y.clamp(min=0) if is_relu else y
    if next_scale is None or next_format is None:
        return y
    act = Format.parse(next_format).activations
    assert act is not None
    inverse = torch.where(next_scale > SMALLEST, 1.0 / next_scale, 0.0)
    codes = torch.round((y * inverse).clamp(-act.max_value, act.max_value))
    return (codes + 128).to(torch.uint8).view(torch.int8)


def fuse_convolutions(graph: fx.Graph) -> list[Outcome]:
    """Put :func:`fused_convolution` where it has a kernel, in place, and return what each rule did."""
    outcomes = apply([PatchesIntoLinear(), AddToOutputs(), ReluToOutputs()], graph)
    graph.eliminate_dead_code()
    outcomes += apply([RoundForNext()], graph)
    graph.lint()
    return outcomes


def geometry_of(x: fx.Node, pairs: Any) -> Geometry | None:
    """Return the geometry of a convolution of images x [N, H, W, C], or None where their size is not fixed."""
    _, high, wide, channels = x.meta["val"].shape
    kernel, stride, padding, dilation = (tuple(pair) for pair in pairs)
    is_fixed = all(isinstance(n, int) for n in (high, wide, channels))
    return Geometry((high, wide), channels, kernel, stride, padding, dilation) if is_fixed else None


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
        (patches, parts, bias, name, _, rows), no = match.args, None
        assert isinstance(patches, fx.Node)
        x, *pairs = patches.args
        args: Any = (x, parts, bias, no, no, name, rows, [list(pair) for pair in pairs], False, no)  # type: ignore[arg-type]
        with graph.inserting_before(match):
            node = graph.call_function(fused_convolution, args)
        move_to(graph, node, match)
        return node


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
    """A relu takes place where the convolution in front of it writes its outputs."""

    name = "relu to a convolution's outputs"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Match a fused convolution and a relu that reads it."""
        relus = [user for user in node.users if user.target is _ATEN.relu.default]
        return (node, relus[0]) if node.target is fused_convolution and relus else None

    def check(self, match: tuple[fx.Node, fx.Node]) -> str:
        """Ask for a relu that is the outputs' only reader."""
        return why_not((len(match[0].users) > 1, "the relu is not the only reader of the outputs"))

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Move the operator to the relu's place."""
        node, relu = match
        node.args = (*node.args[:8], True, node.args[9])
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
        act = Format.parse(str(node.args[5])).activations
        return why_not(
            (len(source.users) > 1, f"{source.name} is also read by others, in float32"),
            (node.args[3] is source, f"{source.name} is also added to the outputs, in float32"),
            (act is None or not act.calibrated, f"{node.args[5]} has no calibrated scale of activations"),
        )

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Give the first convolution the scale and the format of the second."""
        source, node = match
        parts: Any = node.args[1]
        source.args = (*source.args[:4], parts[-1], *source.args[5:9], node.args[5])
        source.meta = {**source.meta, "val": source.meta["val"].to(torch.int8)}
        return node
