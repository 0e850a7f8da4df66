"""Put ``masked_attention`` in the place of attention that an encoder writes out.

    scores = add(mul(matmul(q, k^T), c), bias)       becomes  masked_attention(q, k, v, mask, c, bias)

The biases stay as the graph computes them: relative positions, or products of queries with positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compressor.capture.recognition.evaluator import Evaluator
from compressor.capture.recognition.replace import agree, replace
from compressor.capture.recognition.written_out import SAME, WrittenOut, strip, turned, written_out
from compressor.errors import CaptureError
from compressor.graph.matching import shape_of
from compressor.graph.provenance import module_path, source_line

_aten = torch.ops.aten
_HIDDEN = -1e4  # a score below is that of a hidden key


def recognize_encoder(graph: fx.Graph, evaluator: Evaluator) -> int:
    """Rewrite every written-out attention of an encoder in place.

    Args:
        graph: of (ids, mask) -> hidden states, traced without a mask from transformers' interface.
        evaluator: without inputs; it gets them here.
    Returns:
        How many there are.
    Raises:
        CaptureError: some place computes something else.
    """
    mask, count = graph.find_nodes(op="placeholder")[1], 0
    for place in written_out(graph):
        where = " at ".join(filter(None, (module_path(place.output), source_line(place.output))))
        scale, biases, hides, reason = _scale_and_biases(place, evaluator)
        turned_keys, factor = _unscaled(place.keys, evaluator)
        keys, values = _heads(graph, turned_keys, True), _heads(graph, place.values, False)
        if not reason and (keys is None or values is None):
            reason = "its keys or values are no [batch, heads, tokens, channels]"
        if not reason:
            bias = _sum(graph, place, biases)
            args = (place.queries, keys, values, mask, scale * factor, 0, bias)
            reason = _differs(place, args, evaluator, hides)
            reason = reason or replace(graph, place, torch.ops.compressor.masked_attention.default, args)
        if reason:
            raise CaptureError(f"{where or place.output.name}: attention that no operator here computes: {reason}")
        count += 1
    return count


def _scale_and_biases(place: WrittenOut, evaluator: Evaluator) -> tuple[float, list[tuple[fx.Node, float]], bool, str]:
    """Walk from the scores to the product.

    Returns:
        The factor on the product, what is added with its factor, whether the scores of some keys are put out, and why
        the walk ended early, empty if it did not.
    """
    node, scale, biases, hides = place.scores, 1.0, list[tuple[fx.Node, float]](), False
    while node is not place.product:
        given: tuple[Any, ...] = node.args
        if (node.target in SAME and shape_of(node.meta["val"]) == shape_of(given[0].meta["val"])) or (
            node.target in SAME and not biases
        ):
            node = given[0]
        elif node.target in (_aten.mul.Tensor, _aten.div.Tensor):
            inner, by = given[:2] if _leads_to(given[0], place.product) else given[1::-1]
            number = _number(by, evaluator)
            if number is None or (inner is not given[0] and node.target is _aten.div.Tensor):
                return scale, biases, hides, f"{node.name} multiplies its scores by numbers that are computed"
            scale = scale * number if node.target is _aten.mul.Tensor else scale / number
            node = inner
        elif node.target in (_aten.add.Tensor, _aten.sub.Tensor) and not node.kwargs:
            sign = 1.0 if node.target is _aten.add.Tensor else -1.0
            inner, bias = given if _leads_to(given[0], place.product) else given[::-1]
            if isinstance(bias, int | float):  # the same for all keys does not change a softmax
                node = inner
                continue
            if not isinstance(bias, fx.Node) or (inner is not given[0] and sign < 0):
                return scale, biases, hides, f"{node.name} adds {bias} to its scores"
            biases.append((bias, sign * scale))
            node = inner
        elif node.target is _aten.masked_fill.Scalar and given[2] < _HIDDEN:
            node, hides = given[0], True
        else:
            return scale, biases, hides, f"{node.target} changes its scores"
    if node.target is _aten.baddbmm.default:
        return scale, biases, hides, f"{node.name} adds to its product"
    return scale, biases, hides, ""


def _leads_to(node: Any, product: fx.Node) -> bool:
    """Return whether a node is computed from the product."""
    queue, seen = [node], set[fx.Node]()
    while queue:
        current = queue.pop()
        if current is product:
            return True
        if isinstance(current, fx.Node) and current not in seen:
            seen.add(current)
            queue.extend(current.all_input_nodes)
    return False


def _number(value: Any, evaluator: Evaluator) -> float | None:
    """Return a factor as a number, where it is one."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, fx.Node) or value.meta["val"].numel() != 1:
        return None
    evaluator.inputs = {}
    try:
        return float(evaluator(value, {}))
    except KeyError:  # it depends on the inputs
        return None


def _unscaled(node: Any, evaluator: Evaluator) -> tuple[Any, float]:
    """Return what a factor is without numbers that multiply all of it, and their product."""
    total = 1.0
    while (scaled := strip(node)).target in (_aten.mul.Tensor, _aten.div.Tensor):
        number = _number(scaled.args[1], evaluator)
        if number is None:
            break
        total = total * number if scaled.target is _aten.mul.Tensor else total / number
        node = scaled.args[0]
    return node, total


def _heads(graph: fx.Graph, node: Any, is_turned: bool) -> fx.Node | None:
    """Return a factor as [B, H, S, D]; keys come as [B, H, D, S]."""
    if is_turned:
        found = turned(node)
        if found is not None:
            return found
    while node.meta["val"].dim() != 4:
        if node.target not in SAME:
            return None
        node = node.args[0]
    if not is_turned:
        return node  # type: ignore[no-any-return]
    with graph.inserting_after(node):
        new = graph.call_function(_aten.transpose.int, (node, 2, 3))
    new.meta = {**node.meta, "val": node.meta["val"].transpose(2, 3)}
    return new


def _sum(graph: fx.Graph, place: WrittenOut, biases: list[tuple[fx.Node, float]]) -> fx.Node | None:
    """Add up what is added to the scores, [B or 1, H or 1, S or 1, S]; None for nothing."""
    total, heads = None, int(place.queries.meta["val"].shape[1])

    def call(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(place.output):
            made = graph.call_function(target, args)
        value = target(*fx.node.map_arg(args, lambda node: node.meta["val"]))
        made.meta = {**place.output.meta, "val": value}
        return made

    for node, factor in biases:
        term = node if factor == 1.0 else call(_aten.mul.Tensor, node, factor)
        if term.meta["val"].dim() == 3 and shape_of(term.meta["val"])[0] not in (
            "1",
            str(heads),
        ):  # batch and heads as one
            sizes = [call(_aten.sym_size.int, term, axis) for axis in (1, 2)]
            term = call(_aten.reshape.default, term, [-1, heads, *sizes])
        while term.meta["val"].dim() < 4:
            term = call(_aten.unsqueeze.default, term, 0)
        total = term if total is None else call(_aten.add.Tensor, total, term)
    return total


def _differs(place: WrittenOut, args: tuple[Any, ...], evaluator: Evaluator, hides: bool) -> str:
    """Return how the operator and the written-out form differ on random numbers; empty if they agree.

    Args:
        hides: the written-out form hides keys; it must be those of padding.
    """
    batch, length = 2, 7
    ids, mask = place.output.graph.find_nodes(op="placeholder")
    numbers = torch.Generator().manual_seed(1)
    kept = torch.ones(batch, length)
    if hides:
        kept[1, 4:] = 0
    evaluator.inputs = {ids.name: torch.randint(3, 5, (batch, length), generator=numbers), mask.name: kept}
    given = {
        x: torch.randn(batch, int(x.meta["val"].shape[1]), length, int(x.meta["val"].shape[3]), generator=numbers)
        for x in args[:3]
    }
    q, k, v = (given[x] for x in args[:3])
    # A key whose transpose was made here is not what the written-out form reads.
    source = args[1].args[0] if args[1].target is _aten.transpose.int and not args[1].users else None
    cut = {node: value for node, value in given.items() if node is not args[1] or source is None}
    if source is not None:
        cut[source] = k.transpose(2, 3)
    bias = None if args[6] is None else evaluator(args[6], cut)
    ours = torch.ops.compressor.masked_attention(q, k, v, kept, args[4], 0, bias)
    written = evaluator(place.output, cut).reshape(ours.transpose(1, 2).shape)
    rows = kept.bool()[:, None, :, None]  # what a query of padding gets is nobody's concern
    return agree(written.masked_fill(~rows, 0.0), ours.masked_fill(~rows.transpose(1, 2), 0.0))
