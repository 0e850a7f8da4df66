"""The table of rules: each names the operators of a graph that it emits, as PyTorch calls them (``aten::add``)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from torch._ops import OpOverload
from torch.fx import Node

from compressor.errors import UsageError
from compressor.graph.provenance import describe
from compressor.registry import enter, import_files

Rule: TypeAlias = Callable[..., "str | None"]
"""(emitter, node, the operator's arguments in the order of its schema) -> name of the result's tensor.

None where the rule has entered the result with the emitter itself.
"""
RULES: dict[str, Rule] = {}
_SIZES = {
    operator.add: "size::add",
    operator.sub: "size::sub",
    operator.mul: "size::mul",
    operator.floordiv: "size::floordiv",
    operator.neg: "size::neg",
    operator.getitem: "size::getitem",
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule under the names of its operators."""
    return enter(RULES, names)


def load() -> dict[str, Rule]:
    """Import all families, the files of this folder, and return the table."""
    import_files(__name__.rpartition(".")[0])
    return RULES


def operator_name(node: Node) -> str:
    """Return the name under which a call's rule is entered."""
    target: Any = node.target
    return target._schema.name if isinstance(target, OpOverload) else _SIZES.get(target, str(target))


def arguments(node: Node) -> list[Any]:
    """Return a call's arguments in the order of the operator's schema, with its defaults."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return list(node.args)
    given = dict(node.kwargs)
    schema = target._schema.arguments
    return [node.args[i] if i < len(node.args) else given.get(a.name, a.default_value) for i, a in enumerate(schema)]


def refuse(node: Node, why: str) -> UsageError:
    """Return the error that a node cannot be written."""
    return UsageError(f"{describe(node)}: {operator_name(node)}: {why}")
