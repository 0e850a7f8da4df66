"""Rules for attention, by operators of the standard; keys and values of earlier tokens are inputs."""

from __future__ import annotations

import torch
from torch.fx import Node

from compressor.export.onnx_out.emitter import Emitter
from compressor.export.onnx_out.rules import rule

_FLOAT = torch.empty(0, device="meta")


@rule("compressor::cached_attention")
def cached_attention(
    e: Emitter,
    node: Node,
    q: Node,
    k: Node,
    v: Node,
    k_cache: Node,
    v_cache: Node,
    position: Node,
    scale: float,
    window: int,
    softcap: float,
    sinks: Node | None,
    chunk: int = 0,
    slopes: Node | None = None,
    biases: Node | None = None,
) -> str:
    """Emit attention over earlier tokens and new ones; what a cache holds then is one of the model's results."""
    keys, values = (
        e.memo.setdefault(("present", cache), e.add("Concat", e.of(cache), e.of(new), axis=2))
        for cache, new in ((k_cache, k), (v_cache, v))
    )
    scores = _scores(e, q, keys, int(k.meta["val"].shape[1]), scale, softcap)
    distance, hidden = _causal(e, e.of(position), keys, window, chunk)
    heads, groups = int(q.meta["val"].shape[1]), int(k.meta["val"].shape[1])
    by_head = [groups, heads // groups, 1, 1]
    if slopes is not None:
        factors = e.add("Reshape", e.of(slopes, _FLOAT), e.constant(by_head))
        scores = e.add("Sub", scores, e.add("Mul", factors, e.cast(distance, torch.float32)))
    if biases is not None:
        last = e.constant(int(biases.meta["val"].shape[0]) - 1)
        rows = e.add("Gather", e.of(biases, _FLOAT), e.add("Clip", distance, e.constant(0), last))
        added = e.add("Transpose", rows, perm=[2, 0, 1])
        whole = e.add("Concat", e.constant(by_head[:2]), e.add("Shape", added, start=1), axis=0)
        scores = e.add("Add", scores, e.add("Reshape", added, whole))
    scores = e.add("Add", scores, hidden)
    weights = _softmax(e, scores, sinks, by_head)
    return _outputs(e, weights, values, heads, int(v.meta["val"].shape[3]))


def _scores(e: Emitter, q: Node, keys: str, groups: int, scale: float, softcap: float) -> str:
    """Emit scores [B, groups, heads of a group, S, T]."""
    heads, width = int(q.meta["val"].shape[1]), int(q.meta["val"].shape[3])
    scaled = e.add("Mul", e.of(q), e.constant(scale, "float32"))
    grouped = e.add("Reshape", scaled, e.constant([0, groups, heads // groups, -1, width]))
    turned = e.add("Unsqueeze", e.add("Transpose", keys, perm=[0, 1, 3, 2]), e.constant([2]))
    scores = e.add("MatMul", grouped, turned)
    if softcap:
        cap = e.constant(softcap, "float32")
        scores = e.add("Mul", e.add("Tanh", e.add("Div", scores, cap)), cap)
    return scores


def _causal(e: Emitter, position: str, keys: str, window: int, chunk: int) -> tuple[str, str]:
    """Emit how far keys lie back, int64 [S, T], and minus infinity where a key is not seen; once for all layers."""
    key = "causal", window, chunk
    if key not in e.memo:
        if "distance" not in e.memo:
            length = e.add("Squeeze", e.dimension(keys, 2))
            places = e.add("Range", e.constant(0), length, e.constant(1))
            rows = e.add("Unsqueeze", position, e.constant([1]))
            e.memo["distance"] = e.add("Sub", rows, places), places, rows
        distance, places, rows = e.memo["distance"]
        hidden = e.add("Less", distance, e.constant(0))
        if window:
            hidden = e.add("Or", hidden, e.add("GreaterOrEqual", distance, e.constant(window)))
        if chunk:
            own = e.add("Equal", *(e.add("Div", x, e.constant(chunk)) for x in (places, rows)))
            hidden = e.add("Or", hidden, e.add("Not", own))
        e.memo[key] = distance, _minus_infinity(e, hidden)
    found: tuple[str, str] = e.memo[key]
    return found


def _minus_infinity(e: Emitter, hidden: str) -> str:
    return e.add("Where", hidden, e.constant(-float("inf"), "float32"), e.constant(0.0, "float32"))


def _softmax(e: Emitter, scores: str, sinks: Node | None, by_head: list[int]) -> str:
    if sinks is None:
        return e.add("Softmax", scores, axis=-1)
    sizes = e.add("Shape", scores, start=0, end=4)
    one = e.add("Concat", sizes, e.constant([1]), axis=0)
    extra = e.add("Expand", e.add("Reshape", e.of(sinks, _FLOAT), e.constant([*by_head, 1])), one)
    weights = e.add("Softmax", e.add("Concat", scores, extra, axis=-1), axis=-1)
    return e.add("Slice", weights, e.constant([0]), e.constant([-1]), e.constant([-1]))


def _outputs(e: Emitter, weights: str, values: str, heads: int, width: int) -> str:
    """Emit the weighted sums of values, [B, S, heads, width]."""
    summed = e.add("MatMul", weights, e.add("Unsqueeze", values, e.constant([2])))
    joined = e.add("Reshape", summed, e.constant([0, heads, -1, width]))
    return e.add("Transpose", joined, perm=[0, 2, 1, 3])


@rule("compressor::masked_attention")
def masked_attention(
    e: Emitter,
    node: Node,
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None,
    scale: float,
    window: int = 0,
    bias: Node | None = None,
    softcap: float = 0.0,
) -> str:
    """Emit attention in both directions, with padding."""
    heads, groups = int(q.meta["val"].shape[1]), int(k.meta["val"].shape[1])
    scores = _scores(e, q, e.of(k), groups, scale, softcap)
    if bias is not None:
        sizes = bias.meta["val"].shape
        grouped = [groups, heads // groups] if sizes[1] == heads else [1, 1]
        if heads == groups:  # a dimension of one behind the heads
            added = e.add("Unsqueeze", e.of(bias), e.constant([2]))
        else:
            shape = e.add("Shape", e.of(bias))
            ends = [e.add("Slice", shape, e.constant([a]), e.constant([b])) for a, b in ((0, 1), (2, 4))]
            whole = e.add("Concat", ends[0], e.constant(grouped), ends[1], axis=0)
            added = e.add("Reshape", e.of(bias), whole)
        scores = e.add("Add", scores, added)
    hidden, blind = _hidden(e, mask, e.of(k), window)
    if hidden:
        scores = e.add("Add", scores, hidden)
    weights = e.add("Softmax", scores, axis=-1)
    if blind:
        weights = e.add("Where", blind, e.constant(0.0, "float32"), weights)
    return _outputs(e, weights, e.of(v), heads, int(v.meta["val"].shape[3]))


def _hidden(e: Emitter, mask: Node | None, keys: str, window: int) -> tuple[str, str]:
    """Emit minus infinity where a key is hidden, and which queries see nothing; empty names where there is neither."""
    key = "hidden", mask, window
    if key in e.memo:
        found: tuple[str, str] = e.memo[key]
        return found
    hidden = blind = ""
    if mask is not None:
        padding = e.add("Equal", e.of(mask), e.constant(0.0, "float32"))
        hidden = e.add("Unsqueeze", padding, e.constant([1, 2, 3]))  # [B, 1, 1, 1, N]
    if window:
        places = e.add("Range", e.constant(0), e.add("Squeeze", e.dimension(keys, 2)), e.constant(1))
        distance = e.add("Abs", e.add("Sub", e.add("Unsqueeze", places, e.constant([1])), places))
        far = e.add("GreaterOrEqual", distance, e.constant(window))
        hidden = e.add("Or", hidden, far) if hidden else far
        if mask is not None:
            seen = e.add("ReduceMax", e.cast(e.add("Not", hidden), torch.float32), e.constant([-1]), keepdims=1)
            blind = e.add("Equal", seen, e.constant(0.0, "float32"))
            hidden = e.add("And", hidden, e.add("Not", blind))
    if hidden:
        hidden = _minus_infinity(e, hidden)
    e.memo[key] = hidden, blind
    return hidden, blind
