"""Operators that compute: elementwise, linears, norms, sums and pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.dependencies.axes import Axes, Reading, Rule, is_fixed, shape_of
from compressor.graph.dependencies.labels import Labels
from compressor.graph.provenance import describe

_ATEN, _OPS = torch.ops.aten, torch.ops.compressor


def broadcast(node: Node, reading: Reading) -> Axes:
    """Join entries at the same places of all inputs: elementwise operators."""
    shape = node.meta["val"].shape
    inputs = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    result: Axes = []
    for axis, size in enumerate(shape):
        back = len(shape) - axis
        wide = [one for one in inputs if one.meta["val"].dim() >= back and is_fixed(one.meta["val"].shape[-back])]
        several = [reading.of(one)[-back] if reading.of(one) else None for one in wide]
        found = reading.meet(several, f"{describe(node)} joins it with places that are not channels")
        result.append(found if is_fixed(size) else None)
    return result


def _linear(node: Node, reading: Reading) -> Axes:
    x, weight, bias = node.args
    (out, columns), axes = reading.of(weight), reading.of(x)
    reading.meet([axes[-1], columns], f"{describe(node)} reads places that are not channels")
    _add_bias(node, reading, bias, out)
    return [*axes[:-1], out]


def _depthwise(node: Node, reading: Reading) -> Axes:
    x, weight, bias = node.args
    (out, taps), axes = reading.of(weight), reading.of(x)
    reading.keep([taps], f"{describe(node)} has these taps")
    assert out is not None
    for tap in [None] if axes[-1] is None else axes[-1].reshape(-1, len(out)):
        reading.meet([tap, out], f"{describe(node)} reads places that are not channels")
    _add_bias(node, reading, bias, out)
    return [*axes[:-1], out]


def _add_bias(node: Node, reading: Reading, bias: Any, out: Labels | None) -> None:
    if isinstance(bias, Node):
        reading.meet([reading.of(bias)[-1], out], f"{describe(node)} adds what is not a parameter")


def _patches(node: Node, reading: Reading) -> Axes:
    args: Any = node.args
    batch, _, _, channels = reading.of(args[0])
    rows, columns = args[1]
    return [batch, None, None, None if channels is None else np.tile(channels, rows * columns)]


def _norm(node: Node, reading: Reading) -> Axes:
    axes = reading.of(node.args[0])
    given = node.args[1:] if node.target is _OPS.rms_norm.default else node.args[2:]
    for parameter in given:
        if isinstance(parameter, Node):
            several = [reading.of(parameter)[-1], axes[-1]]
            reading.meet(several, f"{describe(node)} takes the mean over what is not a channel")
    reading.keep_sum(axes[-1:], f"{describe(node)} takes the mean over it")
    return axes


def _embedding(node: Node, reading: Reading) -> Axes:
    rows, columns = reading.of(node.args[0])
    reading.keep([rows], f"{describe(node)} looks its rows up")
    return [*(None for _ in shape_of(node)[:-1]), columns]


def _reduce(node: Node, reading: Reading) -> Axes:
    """Keep the axes that a sum, a mean or a largest value is taken over."""
    args: Any = (*node.args, *(None, False)[len(node.args) - 1 :])
    axes = reading.of(args[0])
    over = range(len(axes)) if args[1] is None else args[1] if isinstance(args[1], list | tuple) else [args[1]]
    gone = {axis % len(axes) for axis in over}
    reading.keep_sum([axes[axis] for axis in gone], f"{describe(node)} is taken over it")
    kept = [None if axis in gone else labels for axis, labels in enumerate(axes)]
    return kept if args[2] else [labels for axis, labels in enumerate(kept) if axis not in gone]


def _softmax(node: Node, reading: Reading) -> Axes:
    axes, over = reading.of(node.args[0]), int(node.args[1])  # type: ignore[arg-type]
    reading.keep_sum([axes[over]], f"{describe(node)} is taken over it")
    return axes


def _pool(node: Node, reading: Reading) -> Axes:
    """Pass batch and channels on; places are not channels."""
    return [*reading.of(node.args[0])[:2], *(None for _ in shape_of(node)[2:])]


COMPUTING: dict[Any, Rule] = {
    _OPS.dense_linear.default: _linear,
    _OPS.depthwise_linear.default: _depthwise,
    _OPS.patches.default: _patches,
    _OPS.rms_norm.default: _norm,
    _ATEN.layer_norm.default: _norm,
    _ATEN.embedding.default: _embedding,
    **dict.fromkeys((_ATEN.mean.dim, _ATEN.sum.dim_IntList, _ATEN.amax.default), _reduce),
    _ATEN.softmax.int: _softmax,
    **dict.fromkeys((_ATEN.max_pool2d.default, _ATEN.avg_pool2d.default, _ATEN.adaptive_avg_pool2d.default), _pool),
    **dict.fromkeys((_ATEN.upsample_nearest2d.vec, _ATEN.upsample_bilinear2d.vec), _pool),
    **dict.fromkeys((_ATEN.to.dtype, _ATEN.contiguous.default, _ATEN.dropout.default), broadcast),
}
"""Operator -> its rule; those that PyTorch calls pointwise are elementwise, too (:func:`broadcast`)."""
