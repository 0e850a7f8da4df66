"""Put biases of distances in the place of biases for pairs of tokens.

    cached_attention(..., bias [1, H, S, S])     bias = permute(embedding(weight, buckets(key - query)))
        becomes  cached_attention(..., embedding(weight, buckets of 0, 1, ... N - 1))

A model computes its bias for the tokens of one call, among which those in the cache are not.  What it depends on is the
distance alone, and from some distance on all are alike: that is looked at, over all pairs of 1,024 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from compressor.capture.recognition.evaluator import Evaluator
from compressor.errors import CaptureError
from compressor.graph.provenance import module_path, source_line

_aten = torch.ops.aten
_CACHED, _MASKED = torch.ops.compressor.cached_attention.default, torch.ops.compressor.masked_attention.default
_PLACES = {_CACHED: 12, _MASKED: 6}
"""Where each operator has its bias."""
_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default})
_LONGEST = 1024  # tokens that are looked at
_CHECKED = 96  # tokens of which the whole bias is compared


def replace_pair_biases(graph: fx.Graph, evaluator: Evaluator) -> dict[str, Tensor]:
    """Rewrite the biases of a decoder's attention in place, and leave out those that are 0.

    Args:
        evaluator: without inputs; it gets them here.
    Returns:
        New constants of the graph, by name: the bucket of each distance.
    Raises:
        CaptureError: a bias depends on something else than the distance.
    """
    constants, made = dict[str, Tensor](), dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        place = _PLACES.get(node.target)
        bias = node.args[place] if place is not None and len(node.args) > place else None
        if not isinstance(bias, fx.Node):
            continue
        if bias.target in _ZEROS:  # what T5 adds in cross-attention
            node.update_arg(place, None)
        elif node.target is _CACHED:
            if bias not in made:
                made[bias] = _of_distances(graph, bias, node, evaluator, constants)
            node.update_arg(place, made[bias])
    if made:
        graph.eliminate_dead_code()
        graph.lint()
    return constants


def _of_distances(
    graph: fx.Graph, bias: fx.Node, reader: fx.Node, evaluator: Evaluator, constants: dict[str, Tensor]
) -> fx.Node:
    """Return a lookup of the biases of all distances, [N, H], in front of the first operator that reads it."""
    lookup = _lookup(bias)
    reason = "they are not looked up in one table"
    if lookup is not None:
        weight, indices = lookup.args[:2]
        buckets = _buckets(graph, indices, evaluator)
        reason = "they depend on more than the distance of the key, or still change beyond 512 tokens"
        if buckets is not None and _agrees(graph, bias, weight, buckets, evaluator):
            name = next((n for n, t in constants.items() if torch.equal(t, buckets)), f"buckets_{len(constants)}")
            constants[name] = buckets
            held: Any = weight.meta["val"]
            with graph.inserting_before(reader):
                at = graph.create_node("get_attr", name)
                at.meta = {**lookup.meta, "val": held.new_empty(len(buckets), dtype=torch.int64)}
                found = graph.call_function(_aten.embedding.default, (weight, at))
            found.meta = {**lookup.meta, "val": held.new_empty(len(buckets), held.shape[1])}
            return found
    where = " at ".join(filter(None, (module_path(reader), source_line(bias))))
    raise CaptureError(f"{where or reader.name} adds biases to its scores that no operator here computes: {reason}")


def _lookup(bias: fx.Node) -> Any:
    """Return the only embedding that a bias is computed from; None if there are none or several."""
    queue, seen = [bias], {bias}
    while queue:
        for source in queue.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                queue.append(source)
    found = [node for node in seen if node.target is _aten.embedding.default]
    return found[0] if len(found) == 1 else None


def _buckets(graph: fx.Graph, indices: fx.Node, evaluator: Evaluator) -> Tensor | None:
    """Return the row of the table for each distance, int64 [N], until they change no more; None if that is not so."""
    evaluator.inputs = _inputs(graph, _LONGEST)
    try:
        found = evaluator(indices, {})
    except KeyError:  # it depends on other inputs
        return None
    if found.shape != (_LONGEST, _LONGEST):
        return None
    falling: Tensor = found[-1].flip(0)  # of the distances 0, 1, ... from the last query
    distance = torch.arange(_LONGEST)[:, None] - torch.arange(_LONGEST)
    if not bool((found == falling[distance.clamp(min=0)])[distance >= 0].all()):
        return None
    end = int((falling != falling[-1]).sum()) + 1
    if end > _LONGEST // 2 or bool((falling[end - 1 :] != falling[-1]).any()):
        return None
    return falling[:end].to(torch.int64, copy=True)


def _agrees(graph: fx.Graph, bias: fx.Node, weight: fx.Node, buckets: Tensor, evaluator: Evaluator) -> bool:
    """Return whether the bias is what the rows give, bit for bit, with random numbers for the table."""
    evaluator.inputs = _inputs(graph, _CHECKED)
    written = evaluator(bias, {}).float()
    rows = evaluator(weight, {})[buckets].float()  # [N, H]
    distance = torch.arange(_CHECKED)[:, None] - torch.arange(_CHECKED)
    expected = rows[distance.clamp(0, len(buckets) - 1)].permute(2, 0, 1)[None]
    seen = distance >= 0
    return written.shape == expected.shape and torch.equal(written[..., seen], expected[..., seen])


def _inputs(graph: fx.Graph, length: int) -> dict[str, Any]:
    """Return the tokens and their positions from 0; a bias needs no other input."""
    ids, position = (node.name for node in graph.find_nodes(op="placeholder")[:2])
    return {ids: torch.zeros(1, length, dtype=torch.int64), position: torch.arange(length)}
