"""Depthwise convolutions over patches, dense and packed: schema, eager definition and fake kernel.

A row of patches (:func:`compressor.ops.patches.patches`) holds each channel once a tap; an output reads those of its
own channel.  The weight is [channels, taps], one row a channel, so that what rounds rows of linears rounds it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize_rows
from compressor.formats.rounded_activations import round_activations
from compressor.ops.linear import packed_outputs
from compressor.ops.register import operator


@operator("depthwise_linear")
def depthwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sum, for each channel, its taps times its row of the weight, in float32.

    Args:
        x: float32 [..., taps * channels], the channels of a tap side by side.
        weight: float32, float16 or bfloat16 [channels, taps].
        bias: float32 [channels] or None.
    Returns:
        float32 [..., channels].
    """
    y = _taps_product(x, weight.float())
    return y if bias is None else y + bias


@depthwise_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def depthwise_product(x: Tensor, packed: PackedWeight) -> Tensor:
    """Compute what ``packed_depthwise`` does, but for the bias, in the float type of x; a row of patches is rounded as
    a token's is.
    """
    values = torch.cat([values for _, values in dequantize_rows(packed)])
    rounded = round_activations(x, packed.format.activations, packed.parts.get("input_scale"))
    return _taps_product(rounded, values.to(x.dtype))


@operator("packed_depthwise")
def packed_depthwise(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    """Apply a ``depthwise_linear`` whose weight is stored packed (:mod:`compressor.formats.format` has the layout).

    Args:
        x: float32 [..., taps * channels]; rounded first where the format says so (:func:`round_activations`).
        parts: of the weight, as in :class:`compressor.formats.packing.PackedWeight`.
        bias: float32 [channels] or None.
        in_features, out_features: taps and channels.
    """
    packed = PackedWeight.of(parts, Format.parse(format), (out_features, in_features))
    y = depthwise_product(x, packed)
    return y if bias is None else y + bias


packed_depthwise.register_fake(packed_outputs)


def _taps_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``sum over taps of x[..., tap, channel] * weight[channel, tap]``."""
    channels, taps = weight.shape
    return (x.reshape(*x.shape[:-1], taps, channels) * weight.t()).sum(-2)
