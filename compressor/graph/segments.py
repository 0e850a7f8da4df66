"""Cut a captured graph into segments between two of which one token-dependent tensor is live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.kinds.carried import carried_node
from compressor.graph.kinds.encoder_decoder import SOURCE
from compressor.graph.sites import Site, packed_weight_sites, weight_sites


@dataclass(frozen=True)
class Segment:
    """A stretch of the graph between two points where one token-dependent tensor is all that is live."""

    nodes: tuple[Node, ...]  # token-dependent nodes, in order
    sites: tuple[Site, ...]  # dense
    packed: tuple[Site, ...]
    entry: Node | None  # the live tensor at its beginning; None for the first
    exit: Node | None  # the live tensor at its end; None for the last


def segments(graph: GraphModule) -> list[Segment]:
    """Cut the graph into the shortest stretches that hold a linear, dense or packed, each.

    Values that depend on positions, shapes and parameters alone (:func:`shared_nodes`) are available everywhere and
    do not count as live; nor do graph inputs, nor values that only the output reads (new keys and values), nor what is
    carried past layers (:func:`compressor.graph.kinds.carried.carried_node`), such as an encoder's output. Running the
    segments in order with :func:`run_nodes` is running the graph.
    """
    nodes = token_nodes(graph)
    # Packed linears count too, so that the cuts stay where they were as a pass replaces one site after another.
    held = {site.node for site in (*weight_sites(graph), *packed_weight_sites(graph))}
    linears = [i for i, node in enumerate(nodes) if node in held]
    last = linears[-1] if linears else 0  # what follows the last linear belongs to its segment
    cuts, begin = list[tuple[int, Node]](), 0
    for i, node in narrow_points(graph, nodes):
        if i < last and any(begin <= j <= i for j in linears):
            cuts.append((i, node))
            begin = i + 1
    return _cut(graph, nodes, cuts)


def cut_at(graph: GraphModule, points: Sequence[Node]) -> list[Segment]:
    """Cut the graph behind some of the tensors that :func:`narrow_points` names, in dataflow order.

    Raises:
        ValueError: one of them is not the only live tensor anywhere behind the one before it.
    """
    nodes, wanted, cuts = token_nodes(graph), list(points), list[tuple[int, Node]]()
    for i, node in narrow_points(graph, nodes):
        if wanted and node is wanted[0]:
            cuts.append((i, wanted.pop(0)))
    if wanted:
        raise ValueError(f"{wanted[0]} is not the only live tensor behind {cuts[-1][1] if cuts else 'the inputs'}")
    return _cut(graph, nodes, cuts)


def narrow_points(graph: GraphModule, nodes: Sequence[Node]) -> Iterator[tuple[int, Node]]:
    """Yield the places among the token-dependent nodes behind which one tensor is all that is live, and that tensor.

    Args:
        nodes: :func:`token_nodes`.
    """
    index = {node: i for i, node in enumerate(nodes)}
    last_use = [max((index[user] for user in node.users if user in index), default=i) for i, node in enumerate(nodes)]
    beside = carried_node(graph)
    carried = -1 if beside is None else index[beside]
    live: set[int] = set()
    for i in range(len(nodes)):
        live = {j for j in (*live, i) if last_use[j] > i}
        if i > carried:
            live.discard(carried)
        if len(live) == 1:
            node = nodes[next(iter(live))]
            if isinstance(node.meta.get("val"), Tensor | None):  # a tuple of tensors is not one tensor
                yield i, node


def _cut(graph: GraphModule, nodes: list[Node], cuts: Sequence[tuple[int, Node]]) -> list[Segment]:
    sites = {site.node: site for site in weight_sites(graph)}
    packed = {site.node: site for site in packed_weight_sites(graph)}
    result: list[Segment] = []
    begin, entry = 0, None
    for i, exit_node in cuts:
        result.append(_segment(nodes[begin : i + 1], sites, packed, entry, exit_node))
        begin, entry = i + 1, exit_node
    result.append(_segment(nodes[begin:], sites, packed, entry, None))
    return result


def _segment(
    nodes: list[Node],
    sites: dict[Node, Site],
    packed: dict[Node, Site],
    entry: Node | None,
    exit_node: Node | None,
) -> Segment:
    dense, done = (tuple(found[node] for node in nodes if node in found) for found in (sites, packed))
    return Segment(tuple(nodes), dense, done, entry, exit_node)


def shared_nodes(graph: GraphModule) -> list[Node]:
    """List the nodes outside all segments, in order: parameters, and what depends on positions and shapes only."""
    inside = set(token_nodes(graph))
    return [n for n in graph.graph.nodes if n.op not in ("placeholder", "output") and n not in inside]


def token_nodes(graph: GraphModule) -> list[Node]:
    """Find the nodes whose values depend on the tokens (for a plain module: on any input), not on its shape alone."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    info = graph.meta.get("model")
    names = ("pictures", "ids") if info is not None and info.pair is not None else ("ids", SOURCE)
    roots = {node for node in inputs if node.target in names} or set(inputs)
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is torch.ops.aten.sym_size.int and node.args[0].op == "placeholder":
            continue
        if any(source in found or source in roots for source in node.all_input_nodes):
            found[node] = None
    return list(found)
