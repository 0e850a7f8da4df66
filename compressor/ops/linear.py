"""Linears, dense and packed: schema, eager definition and fake kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import linear

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, coded_rows, dequantize_rows, float_part
from compressor.formats.rounded_activations import round_activations, without_small
from compressor.ops.register import operator

_PIECE = 256  # products that are summed at once


@custom_op("compressor::dense_linear", mutates_args=())
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` in the type of x, whatever float type the weight is stored in.

    Args:
        x: float32 [..., in].
        weight: float32, float16 or bfloat16 [out, in].
        bias: float32 [out] or None.
    """
    return linear(x, weight.to(x.dtype), bias)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dX = dY W, dW = dY^T X and db, the sum of dY."""
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias = ctx.needs_input_grad
    dy = gradient.reshape(-1, weight.shape[0])
    dx = _in_pieces(dy, weight.to(x.dtype)).view(x.shape) if for_x else None
    dw = _in_pieces(dy.t(), x.reshape(-1, weight.shape[1])).to(weight.dtype) if for_weight else None
    return dx, dw, dy.sum(0) if for_bias else None


def _in_pieces(A: Tensor, B: Tensor) -> Tensor:
    """Return A @ B, with the same bits on 1, 2 and 4 threads: a long sum would be divided among them."""
    found = A.new_zeros(len(A), B.shape[1])
    for first in range(0, len(B), _PIECE):
        piece = slice(first, first + _PIECE)
        found.addmm_(A[:, piece], B[piece])
    return found


dense_linear.register_autograd(_gradients, setup_context=_keep)


@dense_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def packed_product(x: Tensor, packed: PackedWeight) -> Tensor:
    """Compute ``x @ W.T`` as the format does, in the float type of x, with one piece of W in memory at a time.

    Where activations are rounded, what the weight stores as floats is multiplied by them as they were; input columns
    that it stores whole take no part in the rounding.

    Args:
        x: float [..., in].
    """
    act, parts = packed.format.activations, packed.parts
    if act is None:
        x = without_small(x, parts.get("thresholds"))
        return torch.cat([x @ values.to(x.dtype).T for _, values in dequantize_rows(packed)], dim=-1)
    columns = parts.get("float_columns")
    plain = x if columns is None else x.index_fill(-1, columns.long(), 0.0)
    rounded = round_activations(plain, act, parts.get("input_scale"))
    pieces = []
    for rows, values in coded_rows(packed):
        y, floats = rounded @ values.to(x.dtype).T, float_part(packed, rows)
        pieces.append(y if floats is None else y + x @ floats.to(x.dtype).T)
    return torch.cat(pieces, dim=-1)


@operator("packed_linear")
def packed_linear(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    """Apply a linear whose weight is stored packed (:mod:`compressor.formats.format` has the layout).

    Args:
        x: float32 [..., in]; rounded first where the format says so (:func:`round_activations`).
        parts: of the weight, as in :class:`compressor.formats.packing.PackedWeight`.
        bias: float32 [out] or None.
    """
    y = packed_product(x, PackedWeight.of(parts, Format.parse(format), (out_features, in_features)))
    return y if bias is None else y + bias


@packed_linear.register_fake
def packed_outputs(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    """Return outputs without values, for every operator of these arguments that keeps the leading dimensions."""
    return x.new_empty(*x.shape[:-1], out_features)
