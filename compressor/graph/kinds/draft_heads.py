"""Add heads that draft further tokens to a decoder's graph, leave them out, and cut them from it.

    ids ----> the token that comes next -> embedding e --.
    x -> ... -> h (last hidden state) -> lm_head -> logits
                |                                        |
                '-> [h, e] -> up -> silu -> k pieces -> down_1 ... down_k -> the same lm_head -> drafts

At a token of position t, whose successor t + 1 is known, head i predicts the token at t + 1 + i.  In the captured graph
the successors are the other tokens of the ids, so that heads are trained, calibrated and packed as all linears are; a
library's entry ``heads`` takes hidden states and successors as inputs.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.kinds.additions import CallBuilder, change_results
from compressor.graph.kinds.halves import half_of, needed_nodes
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.provenance import describe
from compressor.graph.rewrite import drop_dead_parameters, held_tensor
from compressor.graph.sites import PACKED_FORM, linear_sites

NAME = "draft_heads"
"""Name of the module that holds the heads' linears."""
_ATEN, _DENSE = torch.ops.aten, torch.ops.compressor.dense_linear.default
_ROLL, _INDEX, _EMBEDDING = _ATEN.roll.default, _ATEN.index.Tensor, _ATEN.embedding.default
_EACH = (_ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.tanh.default, _ATEN.to.dtype)
"""Operators between the last linear and the logits that treat every number alone."""


class CannotHead(Exception):
    """Says why a graph gets no heads."""


def last_linear(graph: GraphModule) -> Node:
    """Return the linear that makes the logits.

    Raises:
        CannotHead: something else than scaling and capping stands between it and the logits.
    """
    node: Node = graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
    while node.target in _EACH:
        node = cast(Node, node.args[0])
    if node.target not in (_DENSE, PACKED_FORM[_DENSE]):
        raise CannotHead(f"its logits come from {describe(node)}, not from a linear")
    return node


def add_heads(graph: GraphModule, count: int, width: int) -> list[str]:
    """Add heads as a decoder's last output, float32 [B, R, heads, V], and return the names of their weights.

    Their linears are ``draft_heads.up`` [heads * width, 2 * D] and ``draft_heads.<i>.down`` [D, width]; the weights
    have the type of the last linear's, and are on the meta device.

    Args:
        graph: a decoder of one output beside new keys, values and states; it is changed.
        count: of heads.
        width: hidden channels of each.
    Raises:
        CannotHead: says what of the graph stands against it.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind != "decoder":
        raise CannotHead(f"{info.name} is not a decoder")
    if info.draft_heads:
        raise CannotHead("the model has heads already; give the pass once")
    if info.predicts:
        raise CannotHead("a small model predicts its prompts' caches (predict_kv), which drafts do not verify")
    last = last_linear(graph)
    if last.target is not _DENSE:
        raise CannotHead(f"{describe(last)} is packed already; put the pass in front of those that pack it")
    hidden, lookup = cast(Node, last.args[0]), _lookup(graph)
    output = graph.graph.output_node()
    build = CallBuilder(graph, NAME, output, held_tensor(graph, str(cast(Node, last.args[1]).target)).dtype)
    known = build.call(_ROLL, lookup.args[1], [-1], [1])
    if hidden.target is _INDEX:
        known = build.call(_INDEX, known, hidden.args[1])
    e = _float32_lookup(build, lookup, known)
    pair = build.call(_ATEN.cat.default, [hidden, e], -1)
    size = int(hidden.meta["val"].shape[-1])
    inner = build.call(_ATEN.silu.default, build.linear(f"{NAME}.up", pair, count * width, 2 * size))
    states = []
    for head in range(count):
        piece = build.call(_ATEN.slice.Tensor, inner, 2, head * width, (head + 1) * width)
        states.append(build.linear(f"{NAME}.{head}.down", piece, size, width))
    drafts = build.again(last, build.call(_ATEN.stack.default, states, 2))
    results = cast("tuple[Node, ...]", output.args[0])
    output.args = ((*results, drafts),)
    change_results(graph, lambda found: (*found, 0))
    graph.meta["model"] = dataclasses.replace(info, draft_heads=count)
    graph.recompile()
    return build.names


def without_heads(graph: GraphModule) -> GraphModule:
    """Return the graph of the model alone, which shares the parameters; the graph itself if nothing was added to it.

    Predicted caches (:mod:`compressor.graph.kept_tokens.predicted_caches`) are left out as heads are.
    """
    info: ModelInfo = graph.meta["model"]
    if not info.draft_heads and not info.predicts:
        return graph
    plain = clone_graph(graph)
    output = plain.graph.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]
    plain.graph.eliminate_dead_code()
    change_results(plain, lambda found: found[:-1])
    drop_dead_parameters(plain)
    plain.meta["model"] = dataclasses.replace(info, draft_heads=0, predicts=0)
    return plain


def hidden_and_next(graph: GraphModule) -> tuple[Node, Node]:
    """Return what heads read: hidden states float32 [B, R, D] of the model, and tokens int64 [B, R] behind them.

    Raises:
        CannotHead: a pass has let heads read more of the model than one tensor.
    """
    *results, drafts = cast("tuple[Node, ...]", graph.graph.output_node().args[0])
    inside, own = needed_nodes([results[0]], set()), needed_nodes([drafts], set())
    crossing = [
        node
        for node in graph.graph.nodes
        if node in inside and node.op == "call_function" and any(u in own and u not in inside for u in node.users)
    ]
    if len(crossing) != 1:
        raise CannotHead(f"heads read {', '.join(map(describe, crossing)) or 'nothing'} of the model, not one tensor")
    known = next(node for node in graph.graph.nodes if node.target is _ROLL and node in own)
    reader = next(iter(known.users))
    return crossing[0], reader if reader.target is _INDEX else known


def giving_hidden(graph: GraphModule) -> GraphModule:
    """Return the graph of the model alone, with what heads read as a second output.

    Raises:
        CannotHead: as :func:`hidden_and_next`.
    """
    changed = clone_graph(graph)
    hidden, _ = hidden_and_next(changed)
    output = changed.graph.output_node()
    logits, *rest, _ = cast("tuple[Node, ...]", output.args[0])
    output.args = ((logits, hidden, *rest),)
    changed.graph.eliminate_dead_code()
    change_results(changed, lambda found: (found[0], 0, *found[1:-1]))
    drop_dead_parameters(changed)
    changed.meta["model"] = dataclasses.replace(graph.meta["model"], draft_heads=0)
    return changed


def heads_graph(graph: GraphModule) -> GraphModule:
    """Return the heads as a graph of their own: hidden [1, T, D], next tokens [1, T] -> logits [1, T, heads, V]."""
    inputs = dict(zip(hidden_and_next(graph), ("hidden", "next"), strict=True))
    return half_of(graph, inputs, cast("tuple[Node, ...]", graph.graph.output_node().args[0])[-1])


def head_weights(graph: GraphModule) -> list[str]:
    """Return the names of the heads' dense weights."""
    return [site.weight_name for site in linear_sites(graph) if site.name.startswith(f"{NAME}.")]


def _lookup(graph: GraphModule) -> Node:
    """Return the embedding of the tokens."""
    ids = graph.graph.find_nodes(op="placeholder")[0]
    found: list[Node] = [user for user in ids.users if user.target is _EMBEDDING and user.args[1] is ids]
    if len(found) != 1:
        raise CannotHead(f"{len(found)} dense tables are read by its tokens; put the pass in front of those that pack")
    return found[0]


def _float32_lookup(build: CallBuilder, lookup: Node, ids: Node) -> Node:
    """Look other tokens up, in float32."""
    e = build.call(_EMBEDDING, lookup.args[0], ids)
    if cast(Tensor, e.meta["val"]).dtype is not torch.float32:
        e = build.call(_ATEN.to.dtype, e, torch.float32)
    return e
