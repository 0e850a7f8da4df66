"""Attention: which heads of queries, keys, values and caches are one channel, and products of matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.dependencies.axes import Axes, Reading, Rule, is_fixed, shape_of
from compressor.graph.dependencies.labels import Labels
from compressor.graph.provenance import describe

_ATEN, _OPS = torch.ops.aten, torch.ops.compressor
_CACHED = (_OPS.cached_attention.default, _OPS.kept_attention.default)
_CACHES, _ROWS = ("k_cache", "v_cache"), ("k", "v")
_PER_HEAD = {"sinks": -1, "slopes": -1, "biases": -1, "bias": -3, "attn_mask": -3}
"""Argument of an attention operator -> its axis of query heads."""


def _named(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def cached_heads(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Yield the inputs and outputs of a decoder that hold keys and values, with their axis of heads."""
    for node in graph.nodes:
        if node.target in _CACHED:
            args = _named(node)
            yield from ((args[name], 1) for name in (*_CACHES, *_ROWS))


def _ours(node: Node, reading: Reading) -> Axes:
    """Return the axes of [B, S, H, D]."""
    batch, heads, _, _ = _attended(node, reading, "q", _ROWS)
    return [batch, None, heads, None]


def _pytorchs(node: Node, reading: Reading) -> Axes:
    """Return the axes of [..., H, S, D]."""
    return _attended(node, reading, "query", ("key", "value"))


def _attended(node: Node, reading: Reading, query: str, rows: tuple[str, str]) -> Axes:
    """Join the heads that belong together, and return the axes of the queries."""
    args, reason = _named(node), f"{describe(node)} compares by it"
    sources = [args[name] for name in (*rows, *_CACHES) if name in args]
    for one in (args[query], *sources):
        reading.keep(reading.of(one)[-2:], reason)
    axes, shared = reading.of(args[query]), [reading.of(one)[-3] for one in sources]
    heads, count = axes[-3], shape_of(sources[0])[-3]
    if reading.by_query:
        reading.keep(shared, f"{describe(node)} shares it among query heads, which alone go")
        if heads is not None and len(heads) == count:
            reading.keep([heads], f"{describe(node)} has one query head for each head of keys")
    else:
        of_groups = [None] if heads is None else list(heads.reshape(count, -1).T)
        reading.meet([*of_groups, *shared], f"{describe(node)} has one head of keys only, or no channels for heads")
    for name, axis in _PER_HEAD.items():
        one = args.get(name)
        if isinstance(one, Node) and len(shape_of(one)) >= -axis and is_fixed(one.meta["val"].shape[axis]):
            reading.meet([reading.of(one)[axis], heads], f"{describe(node)} adds what is not made of heads")
    if heads is not None:
        reading.heads.append((heads, count))
    return [*axes[:-2], None, None]


def _matmul(node: Node, reading: Reading) -> Axes:
    """Join what is summed over, and the batches of matrices, which are heads."""
    x, y = node.args
    xs, ys, reason = reading.of(x), reading.of(y), f"{describe(node)} multiplies it by what is not a channel"
    if min(len(xs), len(ys)) < 2:
        reading.keep([*xs, *ys], reason)
        return [None] * len(shape_of(node))
    reading.meet([xs[-1], ys[-2]], reason)
    batches: Axes = []
    for back in range(len(shape_of(node)), 2, -1):
        wide = [axes[-back] for one, axes in ((x, xs), (y, ys)) if _is_wide(one, back)]
        found = reading.meet(wide, reason)
        if found is not None:
            reading.heads.append((found, len(found)))
            if reading.by_query:
                reading.keep([found], f"{describe(node)} has one query head for each head of keys")
        batches.append(found)
    return [*batches, xs[-2], ys[-1]]


def _is_wide(source: Any, back: int) -> bool:
    value: Tensor = source.meta["val"]
    return value.dim() >= back and is_fixed(value.shape[-back])


def why_unequal(heads: Labels, count: int, gone: Any) -> str:
    """Say why an attention cannot lose these heads; empty if it can: each group that is left has as many of them."""
    left = (~gone[heads]).reshape(count, -1).sum(1)
    if not left.any():
        return "an attention would lose its last head"
    return "" if len({*left[left > 0].tolist()}) == 1 else "groups of an attention would have different query heads"


ATTENTION: dict[Any, Rule] = {
    **dict.fromkeys((*_CACHED, _OPS.masked_attention.default), _ours),
    _ATEN.scaled_dot_product_attention.default: _pytorchs,
    **dict.fromkeys((_ATEN.matmul.default, _ATEN.bmm.default), _matmul),
}
"""Operator -> its rule."""
