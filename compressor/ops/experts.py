"""Experts, of which each token takes a few: schema, eager definition and fake kernel.

A routed linear has one weight for each expert.  Passes see it taken apart, so that each expert is a linear like any
other (:mod:`compressor.capture.experts.split`):

    routed_linear(x, index, weight [E, out, in])   is   join_experts(index, [dense_linear(expert_rows(x, index, e),
                                                                             weight[e]) for e in range(E)])

and kernels see it whole again (:mod:`compressor.codegen.lowering.experts.stack`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import linear

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.ops.linear import packed_product
from compressor.ops.register import operator


@custom_op("compressor::top_k", mutates_args=())
def top_k(x: Tensor, k: int) -> Tensor:
    """Return the places of the k largest elements of each row, the largest first; of equal ones the first comes first.

    NaN counts as larger than any number.  PyTorch's own topk leaves the order of equal elements open.

    Args:
        x: float32 [..., n].
    Returns:
        int64 [..., k].
    """
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


@top_k.register_fake
def _(x: Tensor, k: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], k), dtype=torch.int64)


@operator("expert_rows")
def expert_rows(x: Tensor, index: Tensor, expert: int) -> Tensor:
    """Return the rows that an expert reads, in the order of tokens.

    Args:
        x: float32 [T, in], or [T, K, in] where each of a token's experts reads a row of its own.
        index: int64 [T, K], the experts of each token.
    Returns:
        float32 [rows, in], as many as ``index`` names the expert.
    """
    token, place = torch.where(index == expert)
    return x[token] if x.dim() == 2 else x[token, place]


@expert_rows.register_fake
def _(x: Tensor, index: Tensor, expert: int) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[-1])


@custom_op("compressor::join_experts", mutates_args=())
def join_experts(index: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Put what experts made of their rows in the places that the rows come from.

    Args:
        index: int64 [T, K], the experts of each token.
        parts: of each expert, float32 [rows, out], in the order of :func:`expert_rows`.
    Returns:
        float32 [T, K, out].
    """
    out = parts[0].new_zeros(*index.shape, parts[0].shape[-1])
    for expert, rows in enumerate(parts):
        out[index == expert] = rows
    return out


@join_experts.register_fake
def _(index: Tensor, parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(*index.shape, parts[0].shape[-1])


def _keep_index(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.index, ctx.count = inputs[0], len(inputs[1])


def _join_backward(ctx: Any, gradient: Tensor) -> tuple[None, list[Tensor]]:
    return None, [gradient[ctx.index == expert] for expert in range(ctx.count)]


join_experts.register_autograd(_join_backward, setup_context=_keep_index)


@operator("routed_linear")
def routed_linear(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply to each token's rows the linears of its experts, in float32, whatever float type weights are stored in.

    Args:
        x: float32 [T, in], or [T, K, in] where each of a token's experts reads a row of its own.
        index: int64 [T, K], the experts of each token; -1 for none, whose outputs are zeros.
        weight: float32, float16 or bfloat16 [E, out, in].
        bias: float32 [E, out] or None.
    Returns:
        float32 [T, K, out].
    """

    def apply(rows: Tensor, expert: int) -> Tensor:
        return linear(rows, weight[expert].to(x.dtype), None if bias is None else bias[expert].to(x.dtype))

    return _routed(x, index, weight.shape[0], weight.shape[1], apply)


@routed_linear.register_fake
def _(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*index.shape, weight.shape[1])


@operator("packed_routed_linear")
def packed_routed_linear(
    x: Tensor,
    index: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    """Apply to each token's rows the packed linears of its experts.

    Args:
        x: float32 [T, in], or [T, K, in] where each of a token's experts reads a row of its own; rounded first where
            the format says so.
        index: int64 [T, K], the experts of each token; -1 for none, whose outputs are zeros.
        parts: those of :class:`compressor.formats.packing.PackedWeight`, of all experts behind each other: [E, ...].
        bias: float32 [E, out] or None.
    Returns:
        float32 [T, K, out].
    """
    fmt, shape = Format.parse(format), (out_features, in_features)

    def apply(rows: Tensor, expert: int) -> Tensor:
        y = packed_product(rows, PackedWeight.of([part[expert] for part in parts], fmt, shape))
        return y if bias is None else y + bias[expert]

    return _routed(x, index, parts[0].shape[0], out_features, apply)


@packed_routed_linear.register_fake
def _(
    x: Tensor,
    index: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    return x.new_empty(*index.shape, out_features)


def _routed(
    x: Tensor, index: Tensor, experts: int, out_features: int, apply: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Show each expert the rows that are routed to it, and put its outputs [rows, out] into their places."""
    out = x.new_zeros(*index.shape, out_features)
    for expert in range(experts):
        token, place = torch.where(index == expert)
        if len(token):
            out[token, place] = apply(x[token] if x.dim() == 2 else x[token, place], expert)
    return out
