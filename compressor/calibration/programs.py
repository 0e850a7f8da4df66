"""Write a stretch of a graph as plain data, and run it where the graph is not: what jobs of other processes get.

    nodes a -> b -> c, c wanted    [{"name": "b", "target": "aten.add.Tensor", "args": [{"$node": "a"}, 1]}, ...]

Names of nodes are those of the graph, so inputs are told by them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

import compressor.ops  # noqa: F401  (registers the operators)

Program = list[dict[str, Any]]
"""Calls in order, as JSON has them."""
_NODE, _TORCH = "$node", "$torch"
_CONSTANTS = (torch.device, torch.dtype, torch.layout, torch.memory_format)


def write_program(nodes: Sequence[Node]) -> tuple[Program, list[Node]]:
    """Return calls as plain data, and the nodes outside that they read, which are the program's inputs.

    Args:
        nodes: calls of functions, in order.
    Raises:
        TypeError: an argument is not plain data.
    """
    inside, read = set(nodes), dict[Node, None]()
    program = []
    for node in nodes:
        read.update(dict.fromkeys(source for source in node.all_input_nodes if source not in inside))
        arguments = {"args": _written(list(node.args)), "kwargs": _written(dict(node.kwargs))}
        program.append({"name": node.name, "target": _target_name(node), **arguments})
    return program, list(read)


@torch.no_grad()
def run_program(program: Program, values: Mapping[str, Any], wanted: str) -> Any:
    """Return the value of one node; each other value is freed after its last use.

    Args:
        values: of the inputs, by the names of their nodes.
    """
    last: dict[str, int] = {}
    for place, call in enumerate(program):
        last |= dict.fromkeys(_names([call["args"], call["kwargs"]]), place)
    known = dict(values)
    for place, call in enumerate(program):
        arguments, named = (_read(call[kind], known) for kind in ("args", "kwargs"))
        known[call["name"]] = _function(call["target"])(*arguments, **named)
        if call["name"] == wanted:
            return known[wanted]
        for name in _names([call["args"], call["kwargs"]]):
            if last[name] == place:
                known.pop(name, None)
    raise KeyError(wanted)


def _target_name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops:{target}"
    return f"{target.__module__}:{target.__qualname__}"


@functools.cache
def _function(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = torch.ops if module == "torch.ops" else importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _written(value: Any) -> Any:
    if isinstance(value, Node):
        return {_NODE: value.name}
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _written(one) for name, one in value.items()}
    if isinstance(value, _CONSTANTS):
        return {_TORCH: [type(value).__name__, str(value).removeprefix("torch.")]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r:.80} in a graph is not plain data")


def _read(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_read(one, known) for one in value]
    if not isinstance(value, Mapping):
        return value
    if _NODE in value:
        return known[value[_NODE]]
    if _TORCH in value:
        kind, name = value[_TORCH]
        return torch.device(name) if kind == "device" else getattr(torch, name)
    return {name: _read(one, known) for name, one in value.items()}


def _names(value: Any) -> list[str]:
    """Return the nodes that arguments name."""
    if isinstance(value, list):
        return [name for one in value for name in _names(one)]
    if not isinstance(value, Mapping):
        return []
    return [value[_NODE]] if _NODE in value else [name for one in value.values() for name in _names(one)]
