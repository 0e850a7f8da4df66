"""Take routed linears apart: one linear for each expert, on its own slice of the stored weight.

    routed_linear(x, index, W)      becomes    join_experts(index, [dense_linear(expert_rows(x, index, e), W.e)])

This comes when weights are bound.  Passes then see each expert as a linear (class ``Expert``) that reads the rows of
its tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compressor.capture.experts.every_token import route_experts
from compressor.errors import CaptureError
from compressor.graph.matching import is_parameter
from compressor.graph.provenance import module_path, source_line
from compressor.graph.sites import EXPERT

_aten, _ours = torch.ops.aten, torch.ops.compressor
_PRODUCTS = (_aten.bmm.default, _aten.matmul.default, _aten.baddbmm.default, _aten._grouped_mm.default)
_VIEWS = (_aten.transpose.int, _aten.permute.default, _aten.contiguous.default, _aten.to.dtype)


@dataclass(frozen=True)
class ExpertSlice:
    """Say which slice of a stored tensor is a parameter of one expert.

    Attributes:
        stored: name of the tensor [E, ...].
        expert: along its first dimension.
        transposed: of a weight that is stored as [E, in, out].
    """

    stored: str
    expert: int
    transposed: bool


def route_all(graph: fx.Graph, name: str) -> None:
    """Route experts that do not come through transformers' interface, or refuse them: all would be computed.

    Raises:
        CaptureError: names the module and the line of the product.
    """
    route_experts(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        weight = next((w for w in map(_stored, node.all_input_nodes) if w is not None and is_parameter(w, 3)), None)
        if weight is not None:
            where = " at ".join(filter(None, (module_path(node), source_line(node))))
            raise CaptureError(
                f"{name}: {where or node.name} multiplies {weight.target} {list(weight.meta['val'].shape)} as a whole: "
                "experts that do not come through transformers' interface for experts would all be computed for each "
                "token, and stay dense; capture the part around them as a module with an example of its inputs"
            )


def split_experts(graph: fx.Graph) -> dict[str, ExpertSlice]:
    """Take routed linears apart in place, into one linear for each expert.

    Returns:
        For each parameter of an expert (``<weight>.<number>.weight``, ``.bias``), where it is stored.
    Raises:
        CaptureError: the weight of a routed linear is computed, not stored.
    """
    slices: dict[str, ExpertSlice] = {}
    for node in graph.find_nodes(op="call_function", target=_ours.routed_linear.default):
        _split(graph, node, slices)
    graph.eliminate_dead_code()
    return slices


def _split(graph: fx.Graph, node: fx.Node, slices: dict[str, ExpertSlice]) -> None:
    x, index, weight, bias = (*node.args, None)[:4]
    stored = _stored(weight)
    kept = None if bias is None else _stored(bias)
    if stored is None or (bias is not None and kept is None):
        raise CaptureError(f"{module_path(node) or node.name}: the weights of its experts are computed, not stored")
    transposed = weight is not stored
    stack: dict[str, Any] = node.meta.get("nn_module_stack", {})
    parts = []
    with graph.inserting_before(node):
        for expert in range(weight.meta["val"].shape[0]):  # type: ignore[union-attr]
            site = f"{stored.target}.{expert}"
            meta = {**node.meta, "nn_module_stack": {**stack, site: (site, EXPERT)}}

            def parameter(leaf: str, whole: fx.Node, view: Any, turned: bool, meta: Any = meta, e: int = expert) -> Any:
                name = f"{stored.target}.{e}.{leaf}"
                slices[name] = ExpertSlice(str(whole.target), e, turned)
                made = graph.get_attr(name)
                made.meta = {**meta, "val": view.meta["val"][e]}
                return made

            rows = _call(graph, _ours.expert_rows.default, (x, index, expert), meta)
            given = parameter("weight", stored, weight, transposed)
            added = None if kept is None else parameter("bias", kept, bias, False)
            parts.append(_call(graph, _ours.dense_linear.default, (rows, given, added), meta))
        joined = graph.call_function(_ours.join_experts.default, (index, parts))
    joined.meta = dict(node.meta)
    node.replace_all_uses_with(joined)
    graph.erase_node(node)


def _call(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], meta: dict[str, Any]) -> fx.Node:
    """Call an operator, with its fake result: how many rows an expert gets is known when tokens are."""
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    mode = next(value.fake_mode for value in values if isinstance(value, Tensor) and hasattr(value, "fake_mode"))
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
        result = target(*values)
    node = graph.call_function(target, args)
    node.meta = {**meta, "val": result}
    return node


def _stored(node: Any) -> fx.Node | None:
    """Return the parameter that a node gives, as it is or turned; None where it gives something else."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "get_attr" else None
