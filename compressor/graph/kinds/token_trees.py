"""Make the graph that verifies drafted tokens from a decoder's: its tokens are of several sequences, each in a tree.

main:   ids [B, S], position [S], keep [R], caches [B, ...]                              -> logits [B, R, V], new rows
verify: ids [1, T], position [T], keep [R], parent, slot, row [T], caches [N, ...]       -> logits [1, R, V], new rows

Only attention lets tokens see each other, so only attention is replaced, by the operators of
:mod:`compressor.ops.tree_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.model import ModelInfo

_OPS, _SIZE = torch.ops.compressor, torch.ops.aten.sym_size.int
TREES = {
    _OPS.cached_attention.default: _OPS.tree_attention.default,
    _OPS.packed_attention.default: _OPS.packed_tree_attention.default,
}
"""Attention over caches -> the same for tokens in trees."""
_INPUTS, _BEFORE = 3, 6  # of a decoder, before its caches; of attention over caches, up to positions
_CACHES = (3, 4)  # of attention over caches


def why_no_trees(graph: GraphModule) -> str:
    """Say why a graph's tokens cannot be verified in trees; an empty text where they can."""
    info: ModelInfo = graph.meta["model"]
    if info.kind == "seq2seq":
        return "an encoder-decoder's tokens also attend to their own source, and are not verified in trees"
    if info.kind != "decoder":
        return "only decoders continue tokens, and this model is none"
    if info.states:
        return (
            "its recurrent layers keep the state of the last token alone, and a rejected draft could not be taken back"
        )
    inputs = graph.graph.find_nodes(op="placeholder")
    for cache in inputs[_INPUTS:]:
        for user in cache.users:
            attends = user.target in TREES and cache in (user.args[place] for place in _CACHES)
            if not attends and not _is_batch(user):
                return f"{user.name} reads the cache {cache.target} outside attention"
    if (node := _reads_positions_together(inputs[1])) is not None:
        return f"{node.name} computes one value of all positions, which are consecutive in a step and not in a tree"
    return "" if len(inputs) > _INPUTS else "it has no attention over a cache"


def tree_graph(graph: GraphModule) -> GraphModule:
    """Return the graph that verifies tokens, which shares the parameters; its arguments are tensors in a row.

    Args:
        graph: a decoder for which :func:`why_no_trees` finds nothing; it stays as it is.
    """
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    ids, position, _, *caches = nodes.find_nodes(op="placeholder")
    with nodes.inserting_before(caches[0]):
        given = [nodes.placeholder(name) for name in ("parent", "slot", "row")]
    with nodes.inserting_before(next(node for node in nodes.nodes if node.op == "call_function")):
        batch = nodes.call_function(_SIZE, (ids, 0))
    batch.meta = {"val": 1}
    for node in given:
        node.meta = dict(position.meta)
    for node in list(nodes.nodes):
        if node.target in TREES:
            node.target, node.args = TREES[node.target], (*node.args[:_BEFORE], *given, *node.args[_BEFORE:])
        elif _is_batch(node) and node.args[0] in caches:
            node.replace_all_uses_with(batch)
            nodes.erase_node(node)
    half = GraphModule(graph, nodes, class_name=type(graph).__name__)
    half.meta.update(graph.meta)
    return half


def _is_batch(node: Node) -> bool:
    """Return whether a node asks for a tensor's first size, which of ids and caches is the batch."""
    arguments: tuple[Any, ...] = node.args
    return node.target is _SIZE and arguments[1] == 0


def _reads_positions_together(position: Node) -> Node | None:
    """Return a node that is computed from positions and constants, and has no value of its own for each; or None."""
    tokens, found = str(position.meta["val"].shape[0]), {position}
    nodes: list[Node] = list(position.graph.nodes)
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        if node.target in TREES or not sources or not found.issuperset(sources):
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            found.add(node)
            if tokens not in map(str, value.shape):
                return node
    return None
