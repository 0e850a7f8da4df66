"""Cut a captured graph into segments between two of which one token-dependent tensor is live."""

from __future__ import annotations

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
    nodes = _token_nodes(graph)
    index = {node: i for i, node in enumerate(nodes)}
    last_use = [max((index[user] for user in node.users if user in index), default=i) for i, node in enumerate(nodes)]
    sites = {site.node: site for site in weight_sites(graph)}
    packed = {site.node: site for site in packed_weight_sites(graph)}
    # Packed linears count too, so that the cuts stay where they were as a pass replaces one site after another.
    linears = [i for i, node in enumerate(nodes) if node in sites or node in packed]
    result: list[Segment] = []
    beside = carried_node(graph)
    carried = -1 if beside is None else index[beside]
    live: set[int] = set()
    begin, entry = 0, None
    for i in range(linears[-1] if linears else 0):  # what follows the last linear belongs to its segment
        live = {j for j in (*live, i) if last_use[j] > i}
        if i > carried:
            live.discard(carried)
        if len(live) != 1 or not any(begin <= j <= i for j in linears):
            continue
        exit_node = nodes[next(iter(live))]
        if not isinstance(exit_node.meta.get("val"), Tensor | None):
            continue  # a tuple of tensors is not one tensor
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
    inside = set(_token_nodes(graph))
    return [n for n in graph.graph.nodes if n.op not in ("placeholder", "output") and n not in inside]


def _token_nodes(graph: GraphModule) -> list[Node]:
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
