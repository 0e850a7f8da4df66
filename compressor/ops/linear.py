"""Linears, dense and packed: schema, eager definition and fake kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, coded_rows, dequantize_rows, float_part
from compressor.formats.rounded_activations import round_activations, without_small
from compressor.ops.register import operator


@operator("dense_linear")
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` in the type of x, whatever float type the weight is stored in.

    Args:
        x: float32 [..., in].
        weight: float32, float16 or bfloat16 [out, in].
        bias: float32 [out] or None.
    """
    return linear(x, weight.to(x.dtype), bias)


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
