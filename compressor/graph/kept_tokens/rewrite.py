"""Rewrite a decoder so that its later layers run kept tokens alone.

    x [B, S, C], behind the early layers
      |-> kv_norm -> linears of layer n, n + 1, ... -> keys, values [B, Hkv, S, D] -> caches
      '-> x[keep] [B, R, C] -> layer n: kept_attention, network -> layer n + 1 -> ... -> logits [B, R, V]

Keys and values stay where they stood, so that they are made just in front of the first attention that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from compressor.graph.caches import drop_unread_caches
from compressor.graph.kept_tokens.layers import CannotKeep, LaterLayer
from compressor.graph.kept_tokens.sharing import average, groups
from compressor.graph.provenance import describe
from compressor.graph.rewrite import drop_dead_parameters, held_tensor, set_parameter
from compressor.graph.segments import segments

_KEPT = torch.ops.compressor.kept_attention.default
_INDEX, _SIZE = torch.ops.aten.index.Tensor, torch.ops.aten.sym_size.int
_NORM = "kv_norm"


def keep_tokens(graph: GraphModule, layers: Sequence[LaterLayer], share: int = 1) -> dict[Node, Node]:
    """Rewrite a graph in place; its inputs and outputs lose the caches of layers that share another's.

    Args:
        layers: all from some layer on (:func:`compressor.graph.kept_tokens.layers.later_layers`).
        share: neighbouring layers that read the keys and values of the first of them.
    Returns:
        By nodes of all tokens, which may be gone, those that compute the same of kept tokens.
    Raises:
        CannotKeep: names what reads tokens in another way, or layers that cannot share; the graph is half rewritten.
    """
    sources = dict[Node, LaterLayer]()  # attention -> the layer whose keys and values it reads
    for group in groups(layers, share):
        average(graph, group)
        sources |= {layer.attention.node: group[0] for layer in group}
    _normalise_once(graph, layers)
    kept = _Kept(graph, layers[0].entry, sources)
    output = graph.graph.output_node()
    output.args = ((kept.logits(), *output.args[0][1:]),)  # type: ignore[index, misc]
    drop_unread_caches(graph)
    drop_dead_parameters(graph)
    graph.recompile()
    return kept.copies


def _normalise_once(graph: GraphModule, layers: Sequence[LaterLayer]) -> None:
    """Let keys and values of all layers read one norm of the first one's stream, with parameters of its own."""
    first = layers[0]
    source = first.entry
    if (norm := first.norm) is not None:
        args: list[Any] = [first.entry, *norm.args[1:]]
        with graph.graph.inserting_after(first.entry):
            source = graph.graph.call_function(norm.target, tuple(args), norm.kwargs)  # type: ignore[arg-type]
        source.meta = dict(norm.meta)
        for place, old in enumerate(args):
            if place and isinstance(old, Node):
                name = f"{_NORM}.{str(old.target).rpartition('.')[2]}"
                set_parameter(graph, name, graph.get_parameter(str(old.target)).detach().clone())
                with graph.graph.inserting_before(old):
                    own = graph.graph.get_attr(name)
                own.meta = dict(old.meta)
                source.update_arg(place, own)
    for layer in layers:
        if (layer.norm is None) is not (first.norm is None):
            raise CannotKeep(f"{layer.name} has a norm in front of its keys where {first.name} has none, or none")
        for site in (layer.keys, layer.values):
            site.node.update_arg(0, source)


class _Kept:
    """Copies of nodes that compute on kept tokens alone.

    Args:
        entry: the residual stream, float32 [B, S, C], of which kept tokens are taken.
        sources: attention of each later layer -> the layer whose keys and values it reads.
    """

    def __init__(self, graph: GraphModule, entry: Node, sources: dict[Node, LaterLayer]) -> None:
        self.graph, self.entry, self.sources = graph, entry, sources
        ids, self.position, self.keep = graph.graph.find_nodes(op="placeholder")[:3]
        self.mode = ids.meta["val"].fake_mode
        cuts = segments(graph)
        begin = next(i for i, cut in enumerate(cuts) if cut.entry is entry)
        self.early = {node for cut in cuts[:begin] for node in cut.nodes}
        self.copies: dict[Node, Node] = {}
        self.sized = {_of_tokens(node) for node in (ids, self.position)}
        self._take(self.position, (self.position, [self.keep]))
        self._take(ids, (ids, [None, self.keep]))
        self._take(entry, (entry, [None, self.keep]))

    def logits(self) -> Node:
        """Copy what the logits need, in order, and return them, float32 [B, R, V]."""
        result: Node = self.graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
        needed, ahead = set[Node](), [result]
        while ahead:
            node = ahead.pop()
            if node in needed or node in self.copies:
                continue
            needed.add(node)
            ahead += [source for source in node.all_input_nodes if source not in self._made(node)]
        for node in list(self.graph.graph.nodes):
            if node in needed and node.op != "output":
                self.copies[node] = self._copy(node)
        return self.copies[result]

    def _made(self, node: Node) -> list[Any]:
        """Return the keys and values that an attention reads of all tokens."""
        return [*node.args[1:3]] if node in self.sources else []

    def _copy(self, node: Node) -> Node:
        """Return a node's twin on kept tokens; itself where tokens do not count."""
        if node in self.early:
            raise CannotKeep(f"later layers read {describe(node)} beside the residual stream")
        if node.op != "call_function":
            return node
        if node.target is _SIZE and (node.args[0], node.args[1]) in self.sized:
            return self._call(node, _SIZE, (self.keep, 0))
        if node.target is _INDEX and self.keep in node.args[1]:  # type: ignore[operator]
            if list(node.args[1]) != [None, self.keep]:  # type: ignore[arg-type]
                raise CannotKeep(f"{describe(node)} picks kept tokens along another axis than the second")
            return self.copies[node.args[0]]  # type: ignore[index]
        if node in self.sources:
            return self._attention(node)
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: self.copies.get(source, source))
        if (args, kwargs) == (node.args, node.kwargs):
            return node
        if self.keep in node.all_input_nodes:
            raise CannotKeep(f"{describe(node)} reads which tokens are kept")
        return self._call(node, node.target, args, kwargs)

    def _attention(self, node: Node) -> Node:
        """Copy an attention, which reads the keys and values of all tokens, and positions of all."""
        source = self.sources[node].attention
        queries, rest = self.copies[node.args[0]], list(node.args[6:])  # type: ignore[index]
        made = (source.keys, source.values, *source.node.args[3:5])
        return self._call(node, _KEPT, (queries, *made, self.position, self.keep, *rest))

    def _take(self, of: Node, args: tuple[Any, ...]) -> None:
        with self.graph.graph.inserting_before(_after(of)):
            self.copies[of] = taken = self.graph.graph.call_function(_INDEX, args)
        taken.meta = {**of.meta, "val": self._value(_INDEX, args, {})}

    def _call(self, twin: Node, target: Any, args: Any, kwargs: Any = None) -> Node:
        with self.graph.graph.inserting_before(twin):
            node = self.graph.graph.call_function(target, args, kwargs or {})
        node.meta = {**twin.meta, "val": self._value(target, args, kwargs or {})}
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        with self.mode:
            given = map_arg((args, kwargs), self._known)
            return target(*given[0], **given[1])

    def _known(self, node: Node) -> Any:
        if (value := node.meta.get("val")) is not None:
            return value
        held = held_tensor(self.graph, str(node.target))  # of a parameter that an earlier pass has added
        return torch.empty(held.shape, dtype=held.dtype)


def _of_tokens(node: Node) -> tuple[Node, int]:
    """Return an input, and the axis of its tokens."""
    value: Tensor = node.meta["val"]
    return node, value.dim() - 1


def _after(node: Node) -> Node:
    """Return the first node behind another one and all inputs."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place
