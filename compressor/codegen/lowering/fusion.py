"""What one kernel of packed linears can do at once: a rewrite of the captured graph, before TVM's importer reads it.

Packed linears that read the same tensor become one call with several weights, whose activations are prepared once.
What computes that tensor joins them where they alone read it: a norm, or an activation function with or without a
factor.  An addition joins the linear in front of it, where it alone reads that linear.  Each such group becomes one
node that calls :func:`fused_linear`, which :mod:`compressor.codegen.lowering.converters` turns into a call of one
kernel.

What a group shares is the prepared activations, so formats whose preparation needs a part of the weight (a calibrated
scale, a scale of the tensor, columns in float16) stay alone, and those that read activations a second time (single
weights in float16, columns in float16) take their input as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from compressor.codegen.kernels.linear.prologue import Kind, Prologue
from compressor.formats.format import Format

_OPS, _ATEN = torch.ops.compressor, torch.ops.aten
_LINEAR = _OPS.packed_linear.default
_ELEMENTWISE: dict[Any, Kind] = {
    _ATEN.silu.default: "silu",
    _ATEN.gelu.default: "gelu",
    _ATEN.relu.default: "relu",
}


def fused_linear(
    inputs: list[Any],
    vectors: list[Any],
    weights: list[tuple[list[Any], Any, int]],
    residual: Any,
    prologue: Prologue | None,
    format_name: str,
    columns: int,
) -> Any:
    """Stands in the graph for one kernel; only the converter knows what to do with it.

    Args:
        inputs: float32 [..., columns]: the activations, or what ``prologue`` computes them from.
        vectors: float32 [columns]: a norm's weight and bias.
        weights: stored parts, bias or None, and rows of each.
        residual: float32 [..., rows], added to the only weight's outputs, or None.
    """
    raise NotImplementedError


def fuse(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place."""
    for linears in list(groups(graph)):
        x, format_name, columns = linears[0].args[0], linears[0].args[3], linears[0].args[4]
        assert isinstance(x, fx.Node)
        inputs, vectors, prologue, covered = _prologue(x, linears, Format.parse(str(format_name)))
        addition, residual = addition_behind(linears[0]) if len(linears) == 1 else (None, None)
        if len(linears) == 1 and prologue is None and residual is None:
            continue
        weights = [(node.args[1], node.args[2], node.args[5]) for node in linears]
        first, replaced = addition or linears[0], [addition] if addition is not None else linears
        with graph.inserting_before(first):
            args: Any = (inputs, vectors, weights, residual, prologue, format_name, columns)
            call = graph.call_function(fused_linear, args)
            outputs = [call] if len(linears) == 1 else [_item(graph, call, i) for i in range(len(linears))]
        for old, new in zip(replaced, outputs, strict=True):
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
        for node in [*([addition] if addition is not None else []), *linears, *covered]:
            graph.erase_node(node)


def _item(graph: fx.Graph, call: fx.Node, index: int) -> fx.Node:
    return graph.call_function(operator.getitem, (call, index))


def groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Packed linears in the graph's order, those together that share a kernel."""
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not _LINEAR:
            continue
        x, _, bias, format_name, columns, rows = node.args
        stored = Format.parse(format_name).parts(rows, columns)
        alone = {"tensor_scale", "input_scale", "float_columns"} & set(stored)
        found.setdefault((x, format_name, columns, bias is None, node if alone else None), []).append(node)
    yield from found.values()


def _prologue(
    x: fx.Node, linears: Sequence[fx.Node], fmt: Format
) -> tuple[list[fx.Node], list[fx.Node], Prologue | None, list[fx.Node]]:
    """Inputs, vectors and function of what computes ``x``, and the nodes it stands for, the last first."""
    alone: tuple[list[fx.Node], list[fx.Node], None, list[fx.Node]] = [x], [], None, []
    if set(x.users) != set(linears) or fmt.outlier_percent or fmt.float_columns:
        return alone
    args: Any = x.args
    if x.target is _OPS.rms_norm.default:
        return [args[0]], [args[1]], Prologue("rms_norm", eps=args[2]), [x]
    if x.target is _ATEN.layer_norm.default:
        source, shape, weight, bias, eps = [*args, *(None, None, 1e-5)[len(args) - 2 :]][:5]
        if len(shape) == 1 and weight is not None:
            vectors = [weight] if bias is None else [weight, bias]
            return [source], vectors, Prologue("layer_norm", eps=eps, has_bias=bias is not None), [x]
    if (kind := _activation(x)) is not None:
        return [args[0]], [], Prologue(kind), [x]
    if x.target is _ATEN.mul.Tensor:
        for inner, other in (args, args[::-1]):
            kind = _activation(inner)
            if kind is not None and len(inner.users) == 1 and _alike(inner, other):
                return [inner.args[0], other], [], Prologue(kind, gated=True), [x, inner]
    return alone


def _activation(node: Any) -> Kind | None:
    """The activation function that a node computes, on float32."""
    if not isinstance(node, fx.Node) or node.target not in _ELEMENTWISE or not _alike(node, node.args[0]):
        return None
    kind = _ELEMENTWISE[node.target]
    return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else kind


def addition_behind(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The addition that alone reads ``node``, and the other tensor it reads, which has the same shape."""
    for user in node.users if len(node.users) == 1 else ():
        terms = [term for term in user.args if term is not node]
        if user.target is _ATEN.add.Tensor and not user.kwargs and len(terms) == 1 and _alike(node, terms[0]):
            return user, terms[0]  # type: ignore[return-value]
    return None, None


def _alike(one: fx.Node, other: object) -> bool:
    """Whether both are float32 tensors of the same shape, symbolic sizes included."""
    if not isinstance(other, fx.Node):
        return False
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first.dtype == second.dtype == torch.float32 and [*map(str, first.shape)] == [*map(str, second.shape)]
