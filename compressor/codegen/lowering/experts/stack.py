"""Put experts that passes saw one by one into one call again, with their stored parts behind each other.

    join_experts(index, [packed_linear(expert_rows(x, index, e), parts e)])
                            becomes    packed_routed_linear(x, index, [E, ...] of each part)

Experts of one weight may be stored in several formats, or some of them dense: then there is one call for each format,
to which the experts of the others are -1, and the sum of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import CompressorError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import delete_parameter, set_parameter
from compressor.host.tensor_files import Spill, release

_ours = torch.ops.compressor
_DENSE, _PACKED = _ours.dense_linear.default, _ours.packed_linear.default


@dataclass(frozen=True)
class _Kind:
    """The experts of one weight that are stored alike.

    Attributes:
        format: of the packed weights; empty where they are dense.
        experts: their numbers, in order.
        linears: their calls.
    """

    format: str
    experts: list[int]
    linears: list[Node]


def has_experts(graph: GraphModule) -> bool:
    """Return whether a graph holds experts one by one."""
    return bool(graph.graph.find_nodes(op="call_function", target=_ours.join_experts.default))


def as_lowered(graph: GraphModule) -> GraphModule:
    """Return a graph as kernels see it: itself, or a copy whose experts are stacked (its parameters may be meta)."""
    if not has_experts(graph):
        return graph
    copied = clone_graph(graph)
    stack_experts(copied)
    return copied


def stack_experts(graph: GraphModule, spill: Spill | None = None) -> None:
    """Stack all experts of a graph in place; nothing happens where it has none.

    Memory for one weight's parts is needed at a time: what was stacked is dropped.

    Args:
        spill: where stacked weights lie; None keeps them in memory.
    Raises:
        CompressorError: a pass put something else in the place of an expert's linear.
    """
    for join in graph.graph.find_nodes(op="call_function", target=_ours.join_experts.default, sort=True):
        _stack(graph, join, spill)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _stack(graph: GraphModule, join: Node, spill: Spill | None) -> None:
    arguments: Any = join.args
    index, linears = arguments
    kinds = _kinds(linears)
    x, site = linears[0].args[0].args[0], _site(linears[0])
    total: Any = None
    with graph.graph.inserting_before(join):
        for number, kind in enumerate(kinds):
            name, chosen = site, index
            if len(kinds) > 1:
                name = f"{site}.kind{number}"
                chosen = _local(graph, f"{name}_experts", index, kind.experts, len(linears))
            call = _call(graph, name, x, chosen, kind, spill)
            call.meta = dict(join.meta)
            total = call if total is None else graph.graph.call_function(torch.ops.aten.add.Tensor, (total, call))
            total.meta = dict(join.meta)
    join.replace_all_uses_with(total)
    graph.graph.erase_node(join)
    for linear in linears:
        _erase(graph, linear)


def _kinds(linears: Sequence[Node]) -> list[_Kind]:
    """Group the experts by the way they are stored."""
    found: dict[Any, _Kind] = {}
    for expert, linear in enumerate(linears):
        rows: Any = linear.args[0]
        if linear.target not in (_DENSE, _PACKED) or rows.target is not _ours.expert_rows.default:
            raise CompressorError(
                f"{linear.name}: a pass put another operator than a linear in the place of an expert, for which there "
                "is no kernel; leave experts out of it with `ignore: Expert`"
            )
        stored: Any = linear.args[1]
        fmt = str(linear.args[3]) if linear.target is _PACKED else ""
        key = fmt or stored.target.rpartition(".")[2]
        kind = found.setdefault(key, _Kind(fmt, [], []))
        kind.experts.append(expert)
        kind.linears.append(linear)
    return list(found.values())


def _site(linear: Any) -> str:
    """Return the name of the weight of all experts, from a parameter ``<weight>.<number>.<part>``."""
    stored = linear.args[1] if linear.target is _DENSE else linear.args[1][0]
    return str(stored.target).rpartition(".")[0].rpartition(".")[0]


def _local(graph: GraphModule, name: str, index: Node, experts: Sequence[int], count: int) -> Node:
    """Renumber the experts of a kind; all others are -1."""
    table = torch.full((count,), -1, dtype=torch.int64)
    table[list(experts)] = torch.arange(len(experts))
    path, _, leaf = name.rpartition(".")
    graph.get_submodule(path).register_buffer(leaf, table)
    read = graph.graph.get_attr(name)
    return graph.graph.call_function(torch.ops.aten.index.Tensor, (read, [index]))


def _call(graph: GraphModule, name: str, x: Node, index: Node, kind: _Kind, spill: Spill | None) -> Node:
    """Call the routed linear of the experts of a kind, over their stacked parameters."""

    def stacked(nodes: Sequence[Node], leaf: str) -> Node:
        tensors = [graph.get_parameter(str(node.target)).detach() for node in nodes]
        set_parameter(graph, f"{name}.{leaf}", _stacked(tensors, spill))
        return graph.graph.get_attr(f"{name}.{leaf}")

    every: list[Any] = [linear.args for linear in kind.linears]
    biases = [args[2] for args in every]
    width = int(every[0][5]) if kind.format else int(kind.linears[0].meta["val"].shape[-1])
    bias = _bias(graph, f"{name}.bias", biases, width)
    if not kind.format:
        weight = stacked([args[1] for args in every], "weight")
        return graph.graph.call_function(_ours.routed_linear.default, (x, index, weight, bias))
    leaves = [node.target.rpartition(".")[2] for node in every[0][1]]
    parts = [stacked([args[1][i] for args in every], leaf) for i, leaf in enumerate(leaves)]
    rest = every[0][3:]
    return graph.graph.call_function(_ours.packed_routed_linear.default, (x, index, parts, bias, *rest))


def _bias(graph: GraphModule, name: str, biases: Sequence[Node | None], width: int) -> Node | None:
    """Stack biases, zeros for experts without; None where no expert has one."""
    held = [None if node is None else graph.get_parameter(str(node.target)).detach() for node in biases]
    some = next((value for value in held if value is not None), None)
    if some is None:
        return None
    filled = [some.new_zeros(width) if value is None else value for value in held]
    set_parameter(graph, name, torch.stack(filled))
    return graph.graph.get_attr(name)


def _stacked(tensors: Sequence[Tensor], spill: Spill | None) -> Tensor:
    """Copy tensors of one shape behind each other."""
    first, shape = tensors[0], (len(tensors), *tensors[0].shape)
    if first.is_meta or spill is None:
        return torch.stack(list(tensors))
    held = spill.empty(shape, first.dtype)
    for place, tensor in zip(held, tensors, strict=True):
        place.copy_(tensor)
    release([held, *tensors])
    return held


def _erase(graph: GraphModule, linear: Node) -> None:
    """Remove an expert's linear, its rows, and its parameters."""
    sources = linear.all_input_nodes
    graph.graph.erase_node(linear)
    for source in sources:
        if source.users:
            continue
        name = str(source.target)
        graph.graph.erase_node(source)
        if source.op == "get_attr":
            delete_parameter(graph, name)
