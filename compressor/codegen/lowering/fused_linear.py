"""The node that stands for one kernel of packed linears, and how linears are replaced by it.

    x -> q_proj, x -> k_proj      becomes      fused_linear([x], weights=[q, k]) -> getitem(0), getitem(1)

The kernels of all targets but webgpu take it; only the converter knows what to do with it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.format import Format

LINEAR = torch.ops.compressor.packed_linear.default
_OWN_PREPARATION = {
    "tensor_scale": "a scale of the whole tensor",
    "input_scale": "a calibrated scale of activations",
    "float_columns": "columns in float16",
    "thresholds": "thresholds of its inputs",
}
"""Parts of a weight that prepare its activations, which other weights cannot share."""


def fused_linear(
    inputs: list[Any],
    vectors: list[Any],
    weights: list[tuple[list[Any], Any, int]],
    residual: Any,
    prologue: Prologue | None,
    format_name: str,
    columns: int,
) -> Any:
    """Stand in the graph for one kernel, which the converter generates; never called.

    Args:
        inputs: float32 [..., columns]: the activations, or what ``prologue`` computes them from.
        vectors: float32 [columns]: a norm's weight and bias.
        weights: stored parts, bias or None, and rows of each.
        residual: float32 [..., rows], added to the only weight's outputs, or None.
    """
    raise NotImplementedError


def groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the packed linears of each kernel, in the graph's order."""
    shared: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is LINEAR:
            shared.setdefault(kernel_key(node), []).append(node)
    yield from shared.values()


def kernel_key(linear: fx.Node) -> tuple[Any, ...]:
    """Return what linears of one kernel have in common: input, format, columns, and whether there is a bias."""
    x, _, bias, format_name, columns, _ = linear.args
    return (x, format_name, columns, bias is None, linear if own_preparation(linear) else None)


def own_preparation(linear: fx.Node) -> str:
    """Return why a linear cannot share prepared activations; empty if it can."""
    _, _, _, format_name, columns, rows = linear.args
    stored = Format.parse(str(format_name)).parts(rows, columns)  # type: ignore[arg-type]
    return next((why for part, why in _OWN_PREPARATION.items() if part in stored), "")


def mates(linears: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the linears that the kernel of the first can compute."""
    key = kernel_key(linears[0])
    return [node for node in linears if kernel_key(node) == key]


def kernel(graph: fx.Graph, linears: Sequence[fx.Node]) -> fx.Node:
    """Replace linears that share a kernel by :func:`fused_linear`, without prologue and residual."""
    x, _, _, format_name, columns, _ = linears[0].args
    weights = [(node.args[1], node.args[2], node.args[5]) for node in linears]
    with graph.inserting_before(linears[0]):
        args: Any = ([x], [], weights, None, None, format_name, columns)
        call = graph.call_function(fused_linear, args)
        several = len(linears) > 1
        outputs = [graph.call_function(operator.getitem, (call, i)) for i in range(len(linears))] if several else [call]
    for old, new in zip(linears, outputs, strict=True):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    return call


def move_to(graph: fx.Graph, call: fx.Node, last: fx.Node) -> None:
    """Let a node, which computes what ``last`` does as well, take its place."""
    last.prepend(call)
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    graph.erase_node(last)


def alike(one: fx.Node, other: object) -> bool:
    """Return whether both are float32 tensors of the same shape, symbolic sizes included."""
    if not isinstance(other, fx.Node):
        return False
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first.dtype == second.dtype == torch.float32 and [*map(str, first.shape)] == [*map(str, second.shape)]
