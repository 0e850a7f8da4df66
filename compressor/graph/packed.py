"""Packed linears of a graph: their weights, their biases, and new ones on a tensor's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.graph.sites import Site, call_packed, set_parameter


def packed_weight(graph: GraphModule, site: Site) -> PackedWeight:
    """The weight of one of :func:`compressor.graph.sites.packed_sites`."""
    args: Any = site.node.args
    parts = [graph.get_parameter(node.target).detach() for node in args[1]]
    return PackedWeight.of(parts, Format.parse(str(args[3])), (site.out_features, site.in_features))


def set_bias(graph: GraphModule, site: Site, bias: Tensor) -> None:
    """Give one of :func:`compressor.graph.sites.packed_sites` another bias, float32 [out], or its first: ``<site>.bias``."""
    name = site.bias_name or f"{site.name}.bias"
    set_parameter(graph, name, bias)
    if site.bias_name is None:
        with graph.graph.inserting_before(site.node):
            site.node.update_arg(2, graph.graph.get_attr(name))


def insert_packed(graph: GraphModule, name: str, x: Node, packed: PackedWeight, users: Sequence[Node] = ()) -> None:
    """Send a tensor through a packed linear, stored under ``name``, on its way to all its users or to some of them.

    Args:
        x: float32 [..., n]; the packed weight is [n, n].
        users: none means all.
    """
    with graph.graph.inserting_before(x.next):
        new = call_packed(graph, name, x, packed, None)
    new.meta = {"val": x.meta["val"]}
    x.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and (not users or user in users))
