"""Find the later layers of a decoder: the residual stream in front of each, and the linears that it attends with.

entry -> norm -> linear -> (norm of heads, rotation) -> keys      what is followed, for each later layer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from compressor.graph.caches import AttentionLayer, attention_layers
from compressor.graph.kinds.carried import KEPT, carried_node, last_linears
from compressor.graph.model import ModelInfo
from compressor.graph.provenance import describe
from compressor.graph.segments import segments
from compressor.graph.sites import Site, is_parameter, linear_sites, packed_sites

_NORMS = (torch.ops.compressor.rms_norm.default, torch.ops.aten.layer_norm.default)


class CannotKeep(ValueError):
    """Says which part of a graph stands in the way of running kept tokens alone."""


@dataclass(frozen=True)
class LaterLayer:
    """A layer with attention, as its dataflow shows it.

    Attributes:
        attention: its operator.
        entry: the residual stream in front of it, float32 [B, S, C].
        norm: of the stream, which the linears read; None where they read the stream itself.
        queries, keys, values: the last linears on the way to each.
    """

    attention: AttentionLayer
    entry: Node
    norm: Node | None
    queries: tuple[Site, ...]
    keys: Site
    values: Site

    @property
    def name(self) -> str:
        """Name of its module."""
        return self.attention.name


def decoder_layers(graph: GraphModule) -> list[AttentionLayer]:
    """List the layers with attention of a decoder that may run kept tokens alone.

    Raises:
        CannotKeep: the model is of another kind, or its layers keep something else than keys and values of their own.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind != "decoder":
        raise CannotKeep(f"{info.name} is not a decoder, whose layers alone read earlier tokens from caches")
    if any(node.target in KEPT for node in graph.graph.nodes):
        raise CannotKeep("later layers run kept tokens alone already; give the pass once")
    if info.states:
        raise CannotKeep(f"{info.name} has recurrent layers, whose states need all tokens")
    layers = attention_layers(graph)
    if len(layers) < 2:
        why = f"its caches are packed ({info.cache_format}); put it in front of kv_cache" if info.layers else "no layer"
        raise CannotKeep(f"{info.name} has {len(layers)} layers with attention over float32 caches: {why}")
    if len({layer.index for layer in layers}) < len(layers):
        first = next(layer for i, layer in enumerate(layers) if layer.index in {x.index for x in layers[:i]})
        raise CannotKeep(f"{first.name} shares another layer's keys and values already")
    return layers


def later_layers(graph: GraphModule, after: int) -> list[LaterLayer]:
    """Follow the dataflow of all layers but the first ``after``.

    Args:
        after: from 1.
    Raises:
        CannotKeep: names a layer that is not understood.
    """
    layers = decoder_layers(graph)
    return list(_followed(graph, layers[after:]))


def _followed(graph: GraphModule, layers: Sequence[AttentionLayer]) -> Iterator[LaterLayer]:
    cuts = segments(graph)
    sites, packed = {site.node: site for site in linear_sites(graph)}, {site.node for site in packed_sites(graph)}
    for layer in layers:
        entry = next(cut.entry for cut in cuts if layer.node in cut.nodes)
        if entry is None:
            raise CannotKeep(f"{layer.name} reads other tensors beside the residual stream")
        found = {}
        for what, value in (("queries", layer.queries), ("keys", layer.keys), ("values", layer.values)):
            linears = last_linears(value, entry)
            if entry in linears:
                raise CannotKeep(f"the {what} of {layer.name} read the residual stream without a linear between")
            if not linears or (len(linears) > 1 and what != "queries"):
                raise CannotKeep(f"the {what} of {layer.name} are not made by one linear, but {_named(linears)}")
            for node in linears:
                if node in packed:
                    raise CannotKeep(f"{describe(node)} is packed already; put the pass in front of those that pack")
                if node not in sites or sites[node].tied:
                    raise CannotKeep(f"the weight of {describe(node)} is computed, or read elsewhere too")
            found[what] = tuple(sites[node] for node in linears)
        (keys,), (values,), queries = found["keys"], found["values"], found["queries"]
        if {keys.node, values.node} & {site.node for site in queries} or keys.node is values.node:
            raise CannotKeep(f"{keys.name} makes keys together with queries or values; each needs a linear of its own")
        yield LaterLayer(layer, entry, _norm(graph, layer, keys, values, entry), queries, keys, values)


def attention_weights(graph: GraphModule) -> tuple[list[Site], list[str]]:
    """List what attention of kept tokens is made with, in a graph whose later layers run these alone.

    Returns:
        The linears of queries, keys and values, in order, and the names of their parameters and of those of the norm
        that keys and values are made of.
    """
    sites = {site.node: site for site in linear_sites(graph)}
    attentions = [node for node in graph.graph.nodes if node.target in KEPT]
    values = [cast(Node, value) for node in attentions for value in node.args[:3]]
    nodes = sorted({node for value in values for node in last_linears(value)})
    source = carried_node(graph)
    makers = [*nodes, *([source] if source is not None and source.target in _NORMS else [])]
    given: list[Any] = [arg for node in makers for arg in node.args[1:]]
    read = [str(arg.target) for arg in given if is_parameter(graph, arg)]
    return [sites[node] for node in nodes], list(dict.fromkeys(read))


def _norm(graph: GraphModule, layer: AttentionLayer, keys: Site, values: Site, entry: Node) -> Node | None:
    """Return the norm between the residual stream and the linears."""
    if keys.input is not values.input:
        raise CannotKeep(f"{keys.name} and {values.name} read different tensors")
    if keys.input is entry:
        return None
    norm, args = keys.input, cast(tuple[Any, ...], keys.input.args)
    if norm.target not in _NORMS or args[0] is not entry:
        raise CannotKeep(
            f"{layer.name} makes keys of {describe(norm)}, which is neither the residual stream nor its norm"
        )
    odd = [arg for arg in args[1:] if isinstance(arg, Node) and not is_parameter(graph, arg)]
    if odd:
        raise CannotKeep(f"{describe(norm)} has a weight that is computed: {describe(odd[0])}")
    return norm


def _named(nodes: Sequence[Node]) -> str:
    return " and ".join(map(describe, nodes)) or "by none"
