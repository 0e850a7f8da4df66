"""Put an attention operator in the place of a written-out one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from compressor.capture.recognition.written_out import SAME, WrittenOut
from compressor.graph.matching import shape_of

_aten = torch.ops.aten
_TOLERANCE = 1e-4  # of the largest number: float32 sums in another order


def agree(written: Tensor, ours: Tensor) -> str:
    """Return how two results differ; empty if they agree.

    Args:
        written: [B, H, S, D] or [B H, S, D].
        ours: [B, S, H, D].
    """
    expected = written.reshape(ours.transpose(1, 2).shape)
    error = float((ours.transpose(1, 2) - expected).abs().max() / expected.abs().max())
    if error < _TOLERANCE:
        return ""
    return f"on random numbers it differs from softmax(q k^T * scale + bias) v by {error:.2g} of the largest"


def replace(graph: fx.Graph, place: WrittenOut, target: Any, args: tuple[Any, ...]) -> str:
    """Call an operator whose result is [B, S, H, D] in place of the second product.

    Returns:
        Why it cannot be put there; empty if it has been.
    """
    old = place.output
    with graph.inserting_before(old):
        new = graph.call_function(target, args)
        new.meta = {**old.meta, "val": target(*fx.node.map_arg(args, lambda node: node.meta["val"]))}
        heads = graph.call_function(_aten.transpose.int, (new, 1, 2))
        heads.meta = {**old.meta, "val": new.meta["val"].transpose(1, 2)}
    shown = shape_of(heads.meta["val"])
    if shape_of(old.meta["val"]) == shown:
        old.replace_all_uses_with(heads)
    else:
        for user in list(old.users):
            if user.target not in SAME or shape_of(user.meta["val"]) != shown:
                return f"{user.name} reads its result as {shape_of(old.meta['val'])}, heads and batch as one dimension"
            user.replace_all_uses_with(heads)
            graph.erase_node(user)
    for user in list(heads.users):  # batch and heads merged, and taken apart again
        for again in list(user.users) if user.target in SAME else []:
            if again.target in SAME and shape_of(again.meta["val"]) == shown:
                again.replace_all_uses_with(heads)
                graph.erase_node(again)
        if not user.users:
            graph.erase_node(user)
    for user in list(heads.users):
        back = user.target is _aten.permute.default and list(user.args[1]) == [0, 2, 1, 3]  # type: ignore[arg-type]
        if back or (user.target is _aten.transpose.int and sorted(user.args[1:]) == [1, 2]):  # type: ignore[type-var]
            user.replace_all_uses_with(new)
            graph.erase_node(user)
        elif user.target is _aten.view.default:
            user.target = _aten.reshape.default  # the product lay in memory in the order of its dimensions
    for node in (heads, old):  # PyTorch's own operator may draw random numbers, and would not go as dead code
        if not node.users:
            graph.erase_node(node)
    return ""
