"""Find attention that is written out in an exported graph.

    matmul(softmax(f(matmul(q, k^T))), v)         q, k^T, v behind any views; f adds, scales, masks

Both products may be batched over batch and heads as one dimension.  PyTorch's own operator counts as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compressor.graph.matching import shape_of

_aten = torch.ops.aten
CONTRACTIONS = frozenset({_aten.matmul.default, _aten.bmm.default, _aten.baddbmm.default})
_SOFTMAX = frozenset({_aten.softmax.int, _aten._softmax.default, _aten._safe_softmax.default})
SAME = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.expand.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.to.dtype,
        _aten._to_copy.default,
        _aten.alias.default,
        _aten.dropout.default,
        _aten.unsqueeze.default,
    }
)
"""Operators that show the same numbers in another shape."""
_TURNS = frozenset({_aten.transpose.int, _aten.permute.default, _aten.t.default})


@dataclass(frozen=True)
class WrittenOut:
    """Attention that is written out.

    Attributes:
        output: the second product, [B, H, S, Dv] or [B H, S, Dv].
        scores: what the softmax is taken of.
        product: the first product, queries by keys.
        queries: [B, H, S, D].
        keys: [B, H, D, S] or [B, Hkv, D, S], the second factor; not stripped of anything.
        values: the second factor of the output.
    """

    output: fx.Node
    scores: fx.Node
    product: fx.Node
    queries: fx.Node
    keys: fx.Node
    values: fx.Node

    @property
    def is_fused(self) -> bool:
        """Tell whether it is one call of PyTorch's operator; scores and product are that call too."""
        return self.product is self.output


def written_out(graph: fx.Graph) -> Iterator[WrittenOut]:
    """Yield the places, in the graph's order."""
    node: Any
    weights: Any
    for node in list(graph.nodes):
        if node.target is _aten.scaled_dot_product_attention.default:
            yield WrittenOut(node, node, node, *node.args[:3])
        if node.target not in (_aten.matmul.default, _aten.bmm.default):
            continue
        weights = strip(node.args[0])
        if weights.target not in _SOFTMAX or weights.args[1] not in (-1, weights.args[0].meta["val"].dim() - 1):
            continue
        scores = weights.args[0]
        product = _product(scores)
        if product is None:
            continue
        q, k = _factors(product)
        queries = _of_rank_4(q)
        if queries is not None:
            yield WrittenOut(node, scores, product, queries, k, node.args[1])


def strip(node: Any, turns: bool = False) -> fx.Node:
    """Return the node in front of operators that only change a shape, and of transpositions if asked."""
    while node.target in SAME or (turns and node.target in _TURNS):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _factors(product: Any) -> tuple[Any, Any]:
    """Return what a contraction multiplies."""
    q, k = product.args[1:3] if product.target is _aten.baddbmm.default else product.args[:2]
    return q, k


def _product(scores: fx.Node) -> fx.Node | None:
    """Return the nearest contraction of two tensors that vary with batch and tokens; breadth first."""
    queue, seen = [scores], {scores}
    while queue:
        node = queue.pop(0)
        if node.target in CONTRACTIONS:
            q, k = _factors(node)
            rows, columns = shape_of(q.meta["val"])[-2], shape_of(k.meta["val"])[-1]
            if rows == columns and not rows.isdigit():
                return node
        for source in node.all_input_nodes:
            if source not in seen and isinstance(source.meta.get("val"), torch.Tensor):
                seen.add(source)
                queue.append(source)
    return None


def _of_rank_4(node: Any) -> fx.Node | None:
    """Return the tensor [B, H, S, D] that a factor shows, which may merge its first two dimensions."""
    width = node.meta["val"].shape[-1]
    while node.meta["val"].dim() != 4:
        if node.target not in SAME:
            return None
        node = node.args[0]
    shape = node.meta["val"].shape
    fits = isinstance(shape[1], int) and isinstance(shape[3], int) and shape[3] == width
    return node if fits else None


def turned(node: Any) -> fx.Node | None:
    """Return the tensor [B, H, S, D] of which a second factor [B, H, D, S] is the transpose, if it is one."""
    while node.target in SAME:
        node = node.args[0]
    last = {node.meta["val"].dim() - 1, node.meta["val"].dim() - 2}
    permuted = node.target is _aten.permute.default and list(node.args[1]) in ([0, 1, 3, 2], [0, 2, 1])
    swapped = node.target is _aten.transpose.int and {d % node.meta["val"].dim() for d in node.args[1:]} == last
    return _of_rank_4(node.args[0]) if permuted or swapped else None
