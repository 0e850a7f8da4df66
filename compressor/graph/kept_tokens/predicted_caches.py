"""Add a small model that predicts a decoder's keys and values of a prompt, and cut it from the graph.

    ids -> embedding -> x -> layer 0 -> ... -> layer n - 1 -> logits       keys, values of each layer
                        '-> copy of layer 0 -> ... -> keys, values of the copy of layer e - 1
                                  '---- keys, values of all copies -> two linears for each layer
                                            -> (norm of heads, rotation) -> predicted keys, values of layers 0 ... n - 1

The copies are the auxiliary model: the first ``e`` layers with weights of their own, of which the last ends with its
keys and values.  Linears read what they make before norms of heads and rotation, and what they predict goes through the
layer's own, so that predictors do not depend on positions.  A library's entry ``predict`` computes the predicted rows:

    predict: ids, position, k_cache, v_cache of e layers -> keys of all layers, then values, [2 * n, B, Hkv, S, D]

Its attention uses these caches as scratch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from compressor.graph.caches import AttentionLayer, attention_layers
from compressor.graph.costs import node_costs
from compressor.graph.kinds.additions import CallBuilder, change_results
from compressor.graph.kinds.carried import last_linears
from compressor.graph.kinds.halves import half_of, needed_nodes
from compressor.graph.model import ModelInfo
from compressor.graph.provenance import describe
from compressor.graph.rewrite import held_tensor, set_parameter
from compressor.graph.sites import linear_sites

NAME = "predict_kv"
"""Name of the module that holds the copies and the predictors."""
PREDICT = "predict"
"""Name of the entry."""
_ATEN = torch.ops.aten
_EMBEDDING, _CACHES = _ATEN.embedding.default, 3


class CannotPredict(Exception):
    """Says why no caches can be predicted of a graph."""


def add_prediction(graph: GraphModule, layers: int) -> list[str]:
    """Add the copies of the first layers, and predictors, as a decoder's last output, float32 [2 * n, B, Hkv, S, D].

    Weights of copies are those of the layers, named ``predict_kv.<name>``; predictors are ``predict_kv.<i>.keys`` and
    ``.values``, [channels, 2 * layers * channels], on the meta device.

    Args:
        graph: a decoder of one output beside new keys and values; it is changed.
        layers: how many are copied, from 1; less than all.
    Returns:
        Names of the predictors' weights, keys and values of a layer after another.
    Raises:
        CannotPredict: says what of the graph stands against it.
    """
    info: ModelInfo = graph.meta["model"]
    found = _layers(graph, info)
    if not 1 <= layers < len(found):
        raise CannotPredict(f"{layers} layers: {info.name} has {len(found)}, and a smaller model at least one less")
    makers = [makers_of(graph, layer) for layer in found]
    output = graph.graph.output_node()
    weight = held_tensor(graph, str(cast(Node, makers[0][0].args[1]).target))
    build = CallBuilder(graph, NAME, output, weight.dtype)
    copied = _copy_layers(graph, [node for pair in makers[:layers] for node in pair], output)
    read = build.call(_ATEN.cat.default, copied, -1)
    size = int(read.meta["val"].shape[-1])
    keys, values = list[Node](), list[Node]()
    for index, (layer, (to_keys, to_values)) in enumerate(zip(found, makers, strict=True)):
        for rows, kind, old, wanted in (
            (keys, "keys", to_keys, layer.keys),
            (values, "values", to_values, layer.values),
        ):
            new = build.linear(f"{NAME}.{index}.{kind}", read, int(old.meta["val"].shape[-1]), size)
            rows.append(_again(graph, old, new, wanted, output))
    stacked = build.call(_ATEN.stack.default, [*keys, *values], 0)
    output.args = ((*cast("tuple[Node, ...]", output.args[0]), stacked),)
    change_results(graph, lambda given: (*given, 0))
    graph.meta["model"] = dataclasses.replace(info, predicts=layers)
    graph.recompile()
    return build.names


def _layers(graph: GraphModule, info: ModelInfo) -> list[AttentionLayer]:
    """Return the layers of a decoder whose caches can be predicted, in the order of their caches."""
    if info.kind != "decoder":
        raise CannotPredict(f"{info.name} is not a decoder, whose prompts fill caches")
    if info.predicts:
        raise CannotPredict("its caches are predicted already; give the pass once")
    if info.draft_heads or info.speculates:
        raise CannotPredict("it verifies drafted tokens, which predicted caches do not serve; leave `speculate` out")
    if info.uneven_heads:
        raise CannotPredict(f"the caches of {info.name} have unlike heads; predicted rows all have as many")
    if info.states:
        raise CannotPredict(f"{info.name} has recurrent layers, whose states are not keys and values")
    if info.leaves_early:
        raise CannotPredict("its tokens run fewer blocks by early_exit or skip_decode; leave one of them out")
    found = attention_layers(graph)
    if len(found) != info.layers or [layer.index for layer in found] != list(range(info.layers)):
        raise CannotPredict(
            f"{info.name} has {len(found)} layers with attention over {info.layers} float32 caches; put the pass in "
            "front of kv_cache, and leave swift_kv out"
        )
    if any(node.target is not torch.ops.compressor.cached_attention.default for node in (x.node for x in found)):
        raise CannotPredict("its later layers run wanted tokens alone (swift_kv); leave one of the passes out")
    return found


def makers_of(graph: GraphModule, layer: AttentionLayer) -> tuple[Node, Node]:
    """Return the dense linears that make a layer's keys and values.

    Raises:
        CannotPredict: they are not made by one linear each, or one that is packed.
    """
    sites, found = {site.node for site in linear_sites(graph)}, []
    for what, value in (("keys", layer.keys), ("values", layer.values)):
        linears = last_linears(value)
        if len(linears) != 1:
            named = " and ".join(map(describe, linears)) or "none"
            raise CannotPredict(f"the {what} of {layer.name} are not made by one linear, but by {named}")
        if linears[0] not in sites:
            raise CannotPredict(f"{describe(linears[0])} is packed already; put the pass in front of those that pack")
        found.append(linears[0])
    if found[0] is found[1]:
        raise CannotPredict(f"{describe(found[0])} makes keys together with values; each needs a linear of its own")
    return found[0], found[1]


def _behind(graph: GraphModule, sources: Sequence[Node]) -> set[Node]:
    """Return the nodes that depend on some, and these."""
    found = set(sources)
    for node in graph.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _copy_layers(graph: GraphModule, targets: list[Node], before: Node) -> list[Node]:
    """Copy what targets are computed with behind the embedding, with parameters of its own; return the targets' copies.

    Positions, and what follows from them alone, are shared.
    """
    ids = graph.graph.find_nodes(op="placeholder")[0]
    lookups = [node for node in ids.users if node.target is _EMBEDDING]
    if not lookups:
        raise CannotPredict("its table is packed already; put the pass in front of those that pack")
    inside = (_behind(graph, lookups) & needed_nodes(targets, set())) - set(lookups)
    env, names, parameters = dict[Node, Node](), dict[str, Node](), set(dict(graph.named_parameters()))

    def own(node: Node) -> Node:
        if node in env:
            return env[node]
        if node.op != "get_attr" or str(node.target) not in parameters:
            return node
        name = f"{NAME}.{node.target}"
        if name not in names:
            set_parameter(graph, name, graph.get_parameter(str(node.target)).detach())
            names[name] = graph.graph.get_attr(name)
            names[name].meta = dict(node.meta)
        return names[name]

    with graph.graph.inserting_before(before):
        for node in list(graph.graph.nodes):
            if node in inside:
                env[node] = graph.graph.node_copy(node, own)
                stack: dict[str, Any] = node.meta.get("nn_module_stack", {})
                env[node].meta["nn_module_stack"] = {
                    f"{NAME}.{key}": (f"{NAME}.{path}", kind) for key, (path, kind) in stack.items()
                }
    return [env[node] for node in targets]


def _again(graph: GraphModule, old: Node, new: Node, wanted: Node, before: Node) -> Node:
    """Compute from a linear's new output what was computed from its old one."""
    inside, env = _behind(graph, [old]) & needed_nodes([wanted], set()), {old: new}
    with graph.graph.inserting_before(before):
        for node in list(graph.graph.nodes):
            if node in inside and node is not old:
                env[node] = graph.graph.node_copy(node, lambda source: env.get(source, source))
    return env[wanted]


def prediction(graph: GraphModule) -> Node:
    """Return the node of the predicted rows."""
    found: Node = graph.graph.output_node().args[0][-1]  # type: ignore[index, assignment]
    return found


def prediction_graph(graph: GraphModule) -> GraphModule:
    """Return what predicts as a graph of its own; see the entry ``predict``."""
    info: ModelInfo = graph.meta["model"]
    inputs = graph.graph.find_nodes(op="placeholder")
    keys, values = inputs[_CACHES : _CACHES + info.layers], inputs[_CACHES + info.layers :]
    given = (*inputs[:2], *keys[: info.predicts], *values[: info.predicts])
    return half_of(graph, {node: str(node.target) for node in given}, prediction(graph))


def prediction_weights(graph: GraphModule) -> list[str]:
    """Return the names of all parameters of copies and predictors that are numbers with a point."""
    prefix = f"{NAME}."
    return [name for name, value in graph.named_parameters() if name.startswith(prefix) and value.is_floating_point()]


def prompt_operations(graph: GraphModule, tokens: int) -> tuple[float, float]:
    """Return the multiply-adds of linears and attention for each token of a prompt: predicted, and by the model.

    The last token, whose logits are wanted, is left to the model in both.
    """
    found = [0.0, 0.0]
    results = cast("tuple[Node, ...]", graph.graph.output_node().args[0])
    of_model = needed_nodes(list(results[:-1]), set())
    own = needed_nodes([results[-1]], set())
    for node, cost in node_costs(graph, 1, tokens, rows=1).items():
        if cost.kind in ("linear", "attention"):
            found[0] += cost.flops / 2 if node in own else 0.0
            found[1] += cost.flops / 2 if node in of_model else 0.0
    return found[0] / tokens, found[1] / tokens
