"""Decays that are computed from one parameter alone are computed once, when a model is captured.

    selective_scan(x, dt, transpose(neg(exp(A_log))), ...)      becomes      selective_scan(x, dt, decays, ...)

A step of one token would otherwise take as many exponentials for them as for the scan.  The parameter that is stored
has the place of the one that it comes from, and the name ``decays``; no pass packs either.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch.fx import GraphModule

from compressor.graph.rewrite import set_parameter

_DECAYS = {torch.ops.compressor.selective_scan.default: 2, torch.ops.compressor.wkv.default: 2}


def store_decays(graph: GraphModule) -> None:
    """Replace in place; parameters that nothing reads any more stay, for the caller to drop."""
    for node in list(graph.graph.nodes):
        place = _DECAYS.get(node.target) if node.op == "call_function" else None
        steps = [] if place is None else _steps(node.args[place])
        if len(steps) < 2 or place is None:
            continue
        source, *calls = steps
        path, _, _ = str(source.target).rpartition(".")
        name = f"{path}.decays" if path else "decays"
        with torch.no_grad():
            value: Any = graph.get_parameter(str(source.target)).detach()
            for before, call in zip(steps, calls, strict=False):
                target = cast(torch._ops.OpOverload, call.target)
                value = target(*(value if arg is before else arg for arg in call.args), **call.kwargs)
        set_parameter(graph, name, value.contiguous())
        with graph.graph.inserting_before(node):
            stored = graph.graph.get_attr(name)
        stored.meta = {**node.args[place].meta, "val": source.meta["val"].new_empty(value.shape)}
        node.update_arg(place, stored)


def _steps(node: Any) -> list[fx.Node]:
    """Return a parameter and the operators that compute a node from it, in order; nothing if it reads more."""
    steps = [node]
    while steps[0].op == "call_function" and len(steps[0].all_input_nodes) == 1:
        steps.insert(0, steps[0].all_input_nodes[0])
    return steps if steps[0].op == "get_attr" and steps[0].meta["val"].is_floating_point() else []
