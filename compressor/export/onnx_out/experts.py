"""Rules for mixtures of experts: each expert's linears multiply the rows of its tokens, and no others.

top_k           TopK, whose equal elements come in the order of their places too
gather          GatherElements
expert_rows     Equal -> NonZero -> Gather; once for all linears of an expert
join_experts    ScatterND of all experts' rows into zeros
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from compressor.export.onnx_out.emitter import Emitter
from compressor.export.onnx_out.rules import rule


@rule("compressor::top_k")
def top_k(e: Emitter, _: Node, x: Node, k: int) -> str:
    """Emit the places of the largest elements.  ONNX leaves the place of NaN open."""
    return e.several(2, "TopK", e.of(x), e.constant([k]))[1]


@rule("aten::gather")
def gather(e: Emitter, _: Node, x: Node, axis: int, index: Node, *__: Any) -> str:
    """Emit the elements at places along a dimension, such as the weights of a token's experts."""
    return e.add("GatherElements", e.of(x), e.of(index), axis=axis)


@rule("compressor::expert_rows")
def expert_rows(e: Emitter, _: Node, x: Node, index: Node, expert: int) -> str:
    """Emit the rows that an expert reads."""
    places = _places(e, index, expert)
    if x.meta["val"].dim() == 3:
        return e.add("GatherND", e.of(x), places)
    tokens = e.add("Gather", places, e.constant(0), axis=1)
    return e.add("Gather", e.of(x), tokens, axis=0)


def _places(e: Emitter, index: Node, expert: int) -> str:
    """Return where tokens name an expert, int64 [rows, 2]: the token, and the place among its experts."""
    key = "rows of expert", index, expert
    if key not in e.memo:
        named = e.add("Equal", e.of(index), e.of(expert, index.meta["val"]))
        e.memo[key] = e.add("Transpose", e.add("NonZero", named), perm=[1, 0])
    return str(e.memo[key])


@rule("compressor::join_experts")
def join_experts(e: Emitter, node: Node, index: Node, parts: Sequence[Any]) -> str:
    """Emit what experts made of their rows, in the places of these."""
    shape = e.add("Concat", e.add("Shape", e.of(index)), e.constant([int(node.meta["val"].shape[-1])]), axis=0)
    zeros = e.add("Expand", e.constant(0.0, "float32"), shape)
    places = e.add("Concat", *(_places(e, index, expert) for expert in range(len(parts))), axis=0)
    return e.add("ScatterND", zeros, places, e.add("Concat", *(e.of(part) for part in parts), axis=0))
