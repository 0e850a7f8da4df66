"""Write a captured module whose weights are not packed as a program of torch.export (``.pt2``), of PyTorch's operators.

patches -> dense_linear [out, taps * in]             becomes   conv2d, weight [out, in, rows, columns]
patches -> depthwise_linear [channels, taps]         becomes   conv2d in groups of one
other operators of ours                              become    what they are defined as
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import conv2d, linear, scaled_dot_product_attention

from compressor.capture.archive.program import archive_module
from compressor.capture.export import reexport
from compressor.errors import UsageError, VerificationError
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.provenance import describe
from compressor.graph.rewrite import drop_dead_parameters, held_tensor, set_parameter

_OURS = torch.ops.compressor
_PATCHES, _DENSE, _DEPTHWISE = _OURS.patches.default, _OURS.dense_linear.default, _OURS.depthwise_linear.default
_ATTENTION = _OURS.masked_attention.default
_TOLERANCE = 1e-4  # of the largest output: convolutions sum in another order


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight if weight.dtype == x.dtype else weight.to(x.dtype), bias)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Convolve images with the channels last, float32 [N, H, W, C]."""
    weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)
    y = conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, dilation, groups)
    return y.permute(0, 2, 3, 1)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend without window and cap (:func:`_is_special`)."""
    if mask is not None:  # 0 hides a key
        hiding = torch.zeros_like(mask).masked_fill(mask == 0, torch.finfo(mask.dtype).min)[:, None, None, :]
        bias = hiding if bias is None else bias + hiding
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return scaled_dot_product_attention(q, keys, values, bias, scale=scale).transpose(1, 2)


_DEFINITIONS: Mapping[Any, Callable[..., Tensor]] = {
    _DENSE: _linear,
    _OURS.rms_norm.default: _rms_norm,
    _ATTENTION: _attention,
}


@dataclass(frozen=True)
class ProgramForm:
    """Write a graph as a program."""

    words = "a program of torch.export"

    def write(self, file: Path, graph: GraphModule) -> None:
        """See :func:`write_program`."""
        write_program(file, graph)


def plan_program(graph: GraphModule) -> ProgramForm:
    """Ask whether a graph can be a program; weights are not read.

    Raises:
        UsageError: it has operators that are not PyTorch's; it says ``bundle only``.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind != "module":
        raise UsageError(
            f"bundle only: {info.name} is not a plain module, and its caches and masks are ours: name a folder for a "
            "Hugging Face checkpoint"
        )
    copied = _with_convolutions(graph)
    for node in copied.graph.nodes:
        name = getattr(node.target, "name", str)()
        if name.startswith("compressor::") and node.target not in _DEFINITIONS:
            raise UsageError(f"bundle only: {describe(node)} is {name}, which PyTorch does not have")
        if node.target is _ATTENTION and _is_special(node):
            raise UsageError(f"bundle only: {describe(node)} is an attention with a window or capped scores")
    return ProgramForm()


def _is_special(attention: Node) -> bool:
    """Return whether an attention has a window or capped scores."""
    names = ("q", "k", "v", "mask", "scale", "window", "bias", "softcap")
    given = {**dict(zip(names, attention.args, strict=False)), **attention.kwargs}
    return bool(given.get("window")) or bool(given.get("softcap"))


def write_program(file: Path, graph: GraphModule) -> None:
    """Write a graph as a file, read that again without running anything in it, and compare the outputs.

    Raises:
        VerificationError: the file computes something else.
    """
    copied = _with_convolutions(graph)
    for node in copied.graph.nodes:
        node.target = _DEFINITIONS.get(node.target, node.target)
    copied.recompile()
    torch.export.save(reexport(copied), file)
    example, _ = graph.meta["inputs"]
    again, _, _ = archive_module(file)
    with torch.no_grad():
        wanted, found = _outputs(graph(*example)), _outputs(again(*example))
    if len(wanted) != len(found):
        raise VerificationError(f"checkpoint: the program returns {len(found)} tensors, and the graph {len(wanted)}")
    for one, other in zip(wanted, found, strict=True):
        error, largest = float((one - other).abs().max()), float(one.abs().max())
        if not error <= _TOLERANCE * largest:
            raise VerificationError(f"checkpoint: outputs of the program differ by {error:.3g}, of {largest:.3g}")


def _outputs(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return list(result.values()) if isinstance(result, dict) else list(result)


def _with_convolutions(graph: GraphModule) -> GraphModule:
    """Return a copy whose linears over patches are convolutions.

    Raises:
        UsageError: one of them has no weight of its own.
    """
    graph = clone_graph(graph)
    for node in list(graph.graph.nodes):
        patches = node.args[0] if node.target in (_DENSE, _DEPTHWISE) else None
        if not isinstance(patches, Node) or patches.target is not _PATCHES:
            continue
        _, weight, bias = cast(tuple[Node, Node, Any], node.args)
        if weight.op != "get_attr" or len(weight.users) > 1:
            raise UsageError(f"bundle only: the weight of {describe(node)} is shared or computed")
        images, kernel, stride, padding, dilation = cast(tuple[Any, ...], patches.args)
        held = held_tensor(graph, str(weight.target))
        is_depthwise = node.target is _DEPTHWISE
        inputs = 1 if is_depthwise else held.shape[1] // (kernel[0] * kernel[1])
        set_parameter(
            graph, str(weight.target), held.reshape(len(held), *kernel, inputs).permute(0, 3, 1, 2).contiguous()
        )
        weight.meta["val"] = weight.meta["val"].new_empty(len(held), inputs, *kernel)
        node.target = _convolution
        node.args = (images, weight, bias, stride, padding, dilation, len(held) if is_depthwise else 1)
    drop_dead_parameters(graph)
    return graph
