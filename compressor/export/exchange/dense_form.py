"""Give a compressed graph dense operators again, so that it can be held against the model that another program makes.

packed_linear(x, parts, bias)        becomes   dense_linear(x, weight, bias)
packed_embedding(ids, parts)         becomes   embedding(weight, ids)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.capture.normalize import cast_half_embeddings
from compressor.errors import UsageError
from compressor.export.checkpoints.fewer_layers import lists_of
from compressor.export.exchange.coded import Coded, coded
from compressor.formats.cache import DENSE_CACHE
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize_rows
from compressor.graph.model import clone_graph
from compressor.graph.provenance import Stored, describe, owner
from compressor.graph.rewrite import drop_dead_parameters, set_parameter
from compressor.graph.sites import ROUTER, linear_sites
from compressor.host.tensor_files import Spill

_OURS, _EMBEDDING = torch.ops.compressor, torch.ops.aten.embedding.default
_LINEAR, _LOOKED_UP = _OURS.packed_linear.default, _OURS.packed_embedding.default
_ENDS = (".weight", "", "_linear", "_table")
"""Endings by which a parameter's name and that of its packed parts differ."""


def refuse_packed_caches(owner: object, cache_format: str) -> None:
    """Refuse keys and values in fewer bits: their scales are those of tokens, which no layout here has a place for.

    Args:
        owner: the model or bundle, for the message.
        cache_format: name of its caches' format.
    Raises:
        UsageError: they are packed.
    """
    if cache_format != DENSE_CACHE:
        raise UsageError(
            f"{owner}: keeps keys and values as {cache_format}, with a scale for each token and head, which no export "
            "here writes down: kv_cache_scheme of compressed-tensors has stored scales, the same for all tokens; leave "
            "kv_cache out of the recipe"
        )


@dataclass(frozen=True)
class PackedSite:
    """A weight that a graph stores packed.

    Attributes:
        parameter: its name in the captured model, with ``.weight`` at the end as a rule.
        packed: the weight; on the meta device in plans.
        module_class: of the linear that reads it, or Embedding.
        input: what the linear reads; sites with the same one are merged by some programs.
        stored: how the model's folder holds it.
        reads_table: an embedding looks rows of it up.
        rows: of the packed weight, where a tensor of the model's folder holds some of them alone.
    """

    parameter: str
    packed: PackedWeight
    module_class: str
    input: str
    stored: Stored
    reads_table: bool = False
    rows: slice | None = None

    @property
    def module(self) -> str:
        """The module that has the weight."""
        return self.parameter.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        count, columns = self.packed.shape
        return count if self.rows is None else self.rows.stop - self.rows.start, columns

    def coded(self) -> Coded:
        """Take the weight apart."""
        found = coded(self.packed)
        return found if self.rows is None else found.taken(self.rows)

    def pieces(self) -> list[PackedSite]:
        """Return a site for each tensor of the model's folder that has rows of this one, under its name."""
        if not self.stored.joined:
            return [self]
        names = self.stored.names
        count = self.packed.shape[0] // len(names)
        rows = [slice(place * count, (place + 1) * count) for place in range(len(names))]
        return [replace(self, parameter=n, stored=Stored((n,)), rows=r) for n, r in zip(names, rows, strict=True)]


def list_packed(graph: GraphModule) -> list[PackedSite]:
    """List the packed weights of a graph, one for each that is stored.

    Raises:
        UsageError: an operator reads packed weights that no linear or embedding of the model holds.
    """
    stored: Mapping[str, Stored] = graph.meta.get("stored", {})
    found: dict[str, PackedSite] = {}
    for node in graph.graph.nodes:
        if "::packed_" not in getattr(node.target, "name", str)():
            continue
        if node.target not in (_LINEAR, _LOOKED_UP):
            raise UsageError(f"{describe(node)} is {node.target}, which no program's layout has: bundle only")
        base, packed = base_name(node), packed_weight(graph, node)
        parameter = _parameter(base, stored)
        if parameter is None:
            raise UsageError(f"{base}: {packed.format.name}: the model's folder has no such weight: bundle only")
        if parameter in found and node.target is _LINEAR:  # another call, or a tied head
            continue
        table, read = node.target is _LOOKED_UP, str(node.args[0])
        kind = "Embedding" if table else owner(node)[1]
        found[parameter] = PackedSite(parameter, packed, kind, read, stored[parameter], table)
    return list(found.values())


def packed_weight(graph: GraphModule, node: Node) -> PackedWeight:
    """Return the weight of a packed linear, depthwise linear or embedding."""
    args: Any = node.args
    parts, name = args[1], args[2] if node.target is _LOOKED_UP else args[3]
    sizes = (args[3], args[4]) if node.target is _LOOKED_UP else (args[5], args[4])
    held = [graph.get_parameter(part.target).detach() for part in parts]
    return PackedWeight.of(held, Format.parse(name), sizes)


def base_name(node: Node) -> str:
    """Return the name under which the parts of a packed weight lie."""
    parts: Any = node.args[1]
    return str(parts[0].target).removesuffix(".codes").removesuffix(".lower")


def _parameter(base: str, stored: Mapping[str, Stored]) -> str | None:
    names = [f"{base}.weight", base, *(base.removesuffix(end) for end in _ENDS if end and base.endswith(end))]
    return next((name for name in names if name in stored), None)


def dense_form(graph: GraphModule, value: Callable[[PackedSite], Tensor]) -> GraphModule:
    """Return a copy whose packed weights are dense parameters under the model's own names.

    Args:
        value: gives the weight [out, in] of a site; one on the meta device for a plan.
    """
    sites = {site.parameter: site for site in list_packed(graph)}
    stored: Mapping[str, Stored] = graph.meta["stored"]
    graph = clone_graph(graph)
    types: dict[str, torch.dtype] = {}
    for parameter, site in sites.items():
        weight = value(site)
        types[parameter] = weight.dtype
        set_parameter(graph, parameter, weight)
    for node in list(graph.graph.nodes):
        if node.target not in (_LINEAR, _LOOKED_UP):
            continue
        parameter = str(_parameter(base_name(node), stored))
        with graph.graph.inserting_before(node):
            weight_node = graph.graph.get_attr(parameter)
        weight_node.meta["val"] = graph.get_parameter(parameter)
        if node.target is _LINEAR:
            node.target, node.args = _OURS.dense_linear.default, (node.args[0], weight_node, node.args[2])
        else:
            node.target, node.args = _EMBEDDING, (weight_node, node.args[0])
    tables = {name: kind for name, kind in types.items() if sites[name].reads_table}
    known = {node.target: graph.get_parameter(node.target).dtype for node in _table_weights(graph)}
    cast_half_embeddings(graph.graph, {name: tables.get(name, torch.float32) for name in known})
    drop_dead_parameters(graph)
    return graph


def as_loaded(sites: Sequence[PackedSite], dense: GraphModule) -> list[PackedSite]:
    """Return sites under the names that their modules have in the folder: layers behind others that went move up."""
    of_parameters, of_stored = lists_of(dense)
    pieces = [piece for site in sites for piece in site.pieces()]
    lists = [of_parameters if piece.rows is None else of_stored for piece in pieces]
    return [replace(each, parameter=str(its.renamed(each.parameter))) for each, its in zip(pieces, lists, strict=True)]


def routers(dense: GraphModule) -> list[str]:
    """Return the modules in the folder of the linears that choose experts, which have classes of their own."""
    stored, (_, lists) = dense.meta["stored"], lists_of(dense)
    found = [site.weight_name for site in linear_sites(dense) if site.module_class == ROUTER]
    return [str(lists.renamed(name)).removesuffix(".weight") for each in found for name in stored[each].names]


def spilled_value(site: PackedSite, spill: Spill) -> Tensor:
    """Return what a packed weight stands for, float32 [out, in], in a mapped file."""
    place = spill.empty(site.packed.shape, torch.float32)
    for rows, values in dequantize_rows(site.packed):
        place[rows] = values
    return place


def _table_weights(graph: GraphModule) -> list[Any]:
    found = [node.args[0] for node in graph.graph.find_nodes(op="call_function", target=_EMBEDDING)]
    return [node for node in found if isinstance(node, Node) and node.op == "get_attr"]
