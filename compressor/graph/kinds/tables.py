"""Find the tables that embeddings look rows up in, and put packed ones in their place.

A table may be tied: a linear, the model's head as a rule, then multiplies by it, and both read the same bytes.  Packed,
they still do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import GraphModule, Node

from compressor.formats.packing import PackedWeight
from compressor.graph.rewrite import drop_dead_parameters, held_tensor, store_parts
from compressor.graph.sites import Site, is_parameter

_DENSE, _PACKED = torch.ops.compressor.dense_linear.default, torch.ops.compressor.packed_linear.default
_EMBEDDING, _LOOKED_UP = torch.ops.aten.embedding.default, torch.ops.compressor.packed_embedding.default
EMBEDDING_CLASS = "Embedding"


@dataclass(frozen=True)
class Table:
    """One table and all that reads it.

    Attributes:
        site: its name and sizes; ``node`` is the first lookup, ``out_features`` counts the rows, and nothing is tied:
            what else reads the table is below.
        lookups: embeddings.
        linears: those that multiply by the table.
        others: other nodes, which a packed table cannot serve.
    """

    site: Site
    lookups: tuple[Node, ...]
    linears: tuple[Node, ...]
    others: tuple[Node, ...]


def embedding_tables(graph: GraphModule) -> list[Table]:
    """List the dense tables that embeddings read, in dataflow order; constants of a model are none."""
    tables = []
    for weight in graph.graph.find_nodes(op="get_attr"):
        lookups = tuple(user for user in weight.users if user.target is _EMBEDDING and user.args[0] is weight)
        if not lookups or not isinstance(weight.target, str) or not is_parameter(graph, weight):
            continue
        linears = tuple(user for user in weight.users if user.target is _DENSE and user.args[1] is weight)
        others = tuple(user for user in weight.users if user not in lookups and user not in linears)
        rows, width = graph.get_parameter(weight.target).shape
        name = weight.target.removesuffix(".weight")
        ids = cast(Node, lookups[0].args[1])
        if name == weight.target:  # a parameter that a module looks up itself: no other may stand below its name
            name = f"{name}_table"
        site = Site(name, lookups[0], ids, EMBEDDING_CLASS, weight.target, None, width, rows, tied=False)
        tables.append(Table(site, lookups, linears, others))
    return tables


def replace_table(graph: GraphModule, table: Table, packed: PackedWeight) -> None:
    """Make embeddings and tied linears read a packed table, stored once as ``<table>.codes``, ``<table>.scales``...

    The dense table goes, unless other nodes read it.  The module's code stays as it is until ``graph.recompile()``.

    Raises:
        ValueError: the packed table has another shape.
    """
    rows, width = shape = (table.site.out_features, table.site.in_features)
    if packed.shape != shape:
        raise ValueError(f"{table.site.name} is {rows} x {width}, the packed table {packed.shape}")
    first = next(node for node in graph.graph.nodes if node in (*table.lookups, *table.linears))
    with graph.graph.inserting_before(first):
        parts = store_parts(graph, table.site.name, packed)
    name = packed.format.name
    for lookup in table.lookups:
        _replace(graph, _float32(lookup), lookup, _LOOKED_UP, (lookup.args[1], parts, name, rows, width))
    for linear in table.linears:
        _replace(graph, linear, linear, _PACKED, (linear.args[0], parts, linear.args[2], name, width, rows))
    drop_dead_parameters(graph)


def _float32(lookup: Node) -> Node:
    """Return the cast that follows a lookup in a table of half precision; the lookup itself where none does."""
    users = list(lookup.users)
    casts = [user for user in users if user.target is torch.ops.aten.to.dtype and user.args[1:] == (torch.float32,)]
    return casts[0] if len(casts) == len(users) == 1 else lookup


def _replace(graph: GraphModule, old: Node, before: Node, target: object, args: Sequence[object]) -> None:
    with graph.graph.inserting_before(before):
        new = graph.graph.call_function(target, tuple(args))  # type: ignore[arg-type]
    new.meta = dict(old.meta)
    if "nn_module_stack" in before.meta:
        new.meta["nn_module_stack"] = before.meta["nn_module_stack"]
    old.replace_all_uses_with(new)
    for node in dict.fromkeys((old, before)):
        graph.graph.erase_node(node)


def rows_of_tables(graph: GraphModule, left_out: Collection[Node] = ()) -> dict[str, int]:
    """Return, for each stored tensor that only lookups read, the rows of its table: one token reads one of them.

    A table of which the same rows are always read, such as biases of distances, is read whole.

    Args:
        left_out: nodes that read nothing for a token.
    """
    rows: dict[str, int] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        users = [user for user in node.users if user not in left_out]
        if users and all(_reads_rows(user, node) for user in users):
            first = users[0]
            count = first.args[3] if first.target is _LOOKED_UP else held_tensor(graph, str(node.target)).shape[0]
            rows[str(node.target)] = int(cast(int, count))
    return rows


def _reads_rows(user: Node, table: Node) -> bool:
    """Return whether a node looks up rows of a table by indices that are computed."""
    if user.target not in (_EMBEDDING, _LOOKED_UP):
        return False
    ids = cast(Node, user.args[1] if user.target is _EMBEDDING else user.args[0])
    return ids is not table and ids.op != "get_attr"
