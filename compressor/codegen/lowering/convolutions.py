"""Convolutions in one piece: patches, the packed linear over them and what follows it become one operator of the graph.

A convolution whose input's scale is calibrated rounds all of it with that scale.  Where nothing else reads the input,
the convolution in front rounds it as it writes it, and it is stored in bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import takes_convolution
from compressor.codegen.lowering.fusion import addition_behind
from compressor.formats.format import Format
from compressor.formats.rounded_activations import SMALLEST

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
    """What the operator means.

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
    fed = Format.parse(next_format).activations
    assert fed is not None
    inverse = torch.where(next_scale > SMALLEST, 1.0 / next_scale, 0.0)
    codes = torch.round((y * inverse).clamp(-fed.largest, fed.largest))
    return (codes + 128).to(torch.uint8).view(torch.int8)


def fuse_convolutions(graph: fx.Graph) -> None:
    """Put :func:`fused_convolution` where it has a kernel, in place."""
    fused = [node for linear in list(graph.nodes) if (node := _fuse(graph, linear)) is not None]
    graph.eliminate_dead_code()
    for node in fused:
        _round_early(node)
    graph.lint()


def geometry_of(x: fx.Node, pairs: Any) -> Geometry | None:
    """The geometry of a convolution of images x [N, H, W, C]; None where their size is not fixed."""
    _, high, wide, channels = x.meta["val"].shape
    kernel, stride, padding, dilation = (tuple(pair) for pair in pairs)
    is_fixed = all(isinstance(n, int) for n in (high, wide, channels))
    return Geometry((high, wide), channels, kernel, stride, padding, dilation) if is_fixed else None


def _fuse(graph: fx.Graph, linear: fx.Node) -> fx.Node | None:
    """Replace a packed linear over patches, and the sum and relu behind it."""
    given: Any = linear.args
    if linear.target is not _OPS.packed_linear.default or given[0].target is not _OPS.patches.default:
        return None
    (x, *geometry), (_, parts, bias, name, _, rows) = given[0].args, given
    sizes = geometry_of(x, geometry)
    if sizes is None or not takes_convolution(Format.parse(name), sizes):
        return None
    addition, residual = addition_behind(linear)
    last = addition or linear
    user = _only_user(last)
    is_relu = user is not None and user.target is _ATEN.relu.default
    last = user if is_relu and user is not None else last
    with graph.inserting_before(last):
        args = (x, parts, bias, residual, None, name, rows, [list(pair) for pair in geometry], is_relu, None)
        node = graph.call_function(fused_convolution, args)
    node.meta = dict(last.meta)
    last.replace_all_uses_with(node)
    return node


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _round_early(node: fx.Node) -> None:
    """Let the convolution in front round what this one, and nothing else, reads."""
    source: Any = node.args[0]
    fed = Format.parse(str(node.args[5])).activations
    if source.target is not fused_convolution or _only_user(source) is not node or node.args[3] is source:
        return
    if fed is None or not fed.calibrated:
        return
    parts: Any = node.args[1]
    source.args = (*source.args[:4], parts[-1], *source.args[5:9], node.args[5])
    source.meta = {**source.meta, "val": source.meta["val"].to(torch.int8)}
