"""Write PyTorch's promotion of types out as casts: kernels compute in the type of the operands that they are given.

int64 * 0.5                 becomes      to(int64, float32) * 0.5
int64 / int64               becomes      to(int64, float32) / to(int64, float32)
int64 < 0.5                 becomes      to(int64, float32) < 0.5
cat(float32, int64)         becomes      cat(float32, to(int64, float32))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compressor.graph.rewrite import call_before
from compressor.graph.rules import why_not

_aten = torch.ops.aten
_COMPARISONS = frozenset({_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge})
_JOINS = frozenset({_aten.cat, _aten.stack})
_UNTAGGED = frozenset({_aten.floor_divide, *_JOINS})  # elementwise, or as such, without PyTorch's tag
_CONDITIONS = {_aten.where: 0, _aten.masked_fill: 1}
"""The argument that chooses, and keeps its type."""


class ExplicitTypes:
    """An elementwise operator, or a concatenation, on tensors of other types than it computes in gets them cast."""

    name = "explicit types"

    def pattern(self, node: fx.Node) -> list[tuple[fx.Node, torch.dtype]] | None:
        """Return what is to be cast, and to which type, with the node itself last; None where nothing is."""
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
            return None
        packet = node.target.overloadpacket
        if packet not in _UNTAGGED and torch.Tag.pointwise not in node.target.tags:
            return None
        given = list(node.args[0]) if packet in _JOINS else list(node.args)  # type: ignore[arg-type]
        if packet in _CONDITIONS:
            del given[_CONDITIONS[packet]]
        computed = _computed_in(packet, given, node.meta["val"].dtype)
        wrong = [x for x in dict.fromkeys(given) if isinstance(x, fx.Node) and _differs(x.meta.get("val"), computed)]
        return [*((x, computed) for x in wrong), (node, computed)] if computed is not None and wrong else None

    def check(self, match: Sequence[tuple[fx.Node, torch.dtype]]) -> str:
        """Ask for real numbers."""
        return why_not((any(x.meta["val"].is_complex() for x, _ in match), "its numbers are complex"))

    def rewrite(self, graph: fx.Graph, match: Sequence[tuple[fx.Node, torch.dtype]]) -> fx.Node:
        """Cast the operands in front of the operator; a condition that is an operand as well stays as it is."""
        *wrong, (node, _) = match
        cast = {x: call_before(graph, node, _aten.to.dtype, x, dtype) for x, dtype in wrong}
        place = _CONDITIONS.get(node.target.overloadpacket)  # type: ignore[union-attr]
        node.args = tuple(
            arg if i == place else fx.node.map_arg(arg, lambda x: cast.get(x, x)) for i, arg in enumerate(node.args)
        )
        return node


def _computed_in(packet: Any, given: Sequence[Any], result: torch.dtype) -> torch.dtype | None:
    """Return the type in which an operator computes; None where its operands may be of any."""
    if packet in _COMPARISONS:
        return torch.result_type(*(x.meta["val"] if isinstance(x, fx.Node) else x for x in given[:2]))
    return None if result == torch.bool else result


def _differs(value: Any, dtype: torch.dtype | None) -> bool:
    return isinstance(value, Tensor) and value.dtype != dtype
