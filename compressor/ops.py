"""Our torch custom operators (namespace ``compressor``): schema, fake kernel and eager reference.

The eager reference defines what each operator means; every generated kernel is tested against it.
Importing this module registers the operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import linear

from compressor.activations_rounding import round_activations
from compressor.formats import Format
from compressor.packing import PackedWeight, dequantize


@custom_op("compressor::dense_linear", mutates_args=())
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in float32, whatever float type the weight is stored in.

    Args:
        x: float32 [..., in].
        weight: float32, float16 or bfloat16 [out, in].
        bias: float32 [out] or None.
    """
    return linear(x, weight.float(), bias)


@dense_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@custom_op("compressor::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    tensor_scale: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    """A linear whose weight is stored packed (:mod:`compressor.formats` has the layout).

    Args:
        x: float32 [..., in]; rounded first where the format says so (:func:`round_activations`).
        codes, scales, zeros, tensor_scale, input_scale: as in :class:`compressor.packing.PackedWeight`.
        bias: float32 [out] or None.
    """
    fmt = Format.parse(format)
    weight = dequantize(PackedWeight(codes, scales, zeros, fmt, (out_features, in_features), tensor_scale))
    return linear(round_activations(x, fmt.activations, input_scale), weight, bias)


@packed_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    tensor_scale: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@custom_op("compressor::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: float32 [..., D].
        weight: float32 [D].
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("compressor::cached_attention", mutates_args=())
def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of new tokens over a cache and themselves; grouped-query heads share keys in order.

    Query ``i`` sits at absolute position ``position[0] + i``.  It sees the first ``position[0]`` cache entries
    and new keys up to its own.  The caches are read only: whoever runs the graph stores ``k`` and ``v`` (the
    generated kernel writes them in place).

    Args:
        q: float32 [B, H, S, D];  k, v: float32 [B, Hkv, S, D].
        k_cache, v_cache: float32 [B, Hkv, T, D], T >= position[0].
        position: int64 [S], consecutive.
        scale: factor on the scores.
        window: keys no further back than ``window - 1`` positions; 0 means all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 means none.
        sinks: float32 [H], one extra logit a head that takes part in the softmax only; or None.
    Returns:
        float32 [B, S, H, D].
    """
    past, heads = int(position[0]), q.shape[1]
    keys = torch.cat([k_cache[:, :, :past], k], dim=2).repeat_interleave(heads // k.shape[1], dim=1)
    values = torch.cat([v_cache[:, :, :past], v], dim=2).repeat_interleave(heads // v.shape[1], dim=1)
    scores = (q @ keys.transpose(2, 3)) * scale  # [B, H, S, past + S]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = position[:, None] - torch.arange(past + k.shape[2])  # [S, past + S]
    hidden = distance < 0
    if window:
        hidden = hidden | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : past + k.shape[2]]
    return (weights @ values).transpose(1, 2).contiguous()


@cached_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, sequence, width = q.shape
    return q.new_empty(batch, sequence, heads, width)


@custom_op("compressor::masked_attention", mutates_args=())
def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Bidirectional attention with padding, for encoders.

    Args:
        q: float32 [B, H, S, D];  k, v: float32 [B, Hkv, S, D].
        mask: float32 [B, S], 1 for a token and 0 for padding; each row keeps at least one token.
        scale: factor on the scores.
    Returns:
        float32 [B, S, H, D].
    """
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ keys.transpose(2, 3)) * scale
    scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values).transpose(1, 2).contiguous()


@masked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, sequence, width = q.shape
    return q.new_empty(batch, sequence, heads, width)
