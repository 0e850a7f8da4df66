"""Our torch custom operators (namespace ``compressor``): schema, fake kernel and eager reference.

The eager reference defines what each operator means, its gradients included; every generated kernel is tested against
it.  Importing this module registers the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import linear, pad

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, coded_rows, dequantize_rows, float_part
from compressor.formats.rounded_activations import round_activations

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def _operator(name: str) -> Callable[[Callable[..., Tensor]], CustomOpDef]:
    """Register a function as an operator whose gradients are the function's own, by running it again."""

    def register(function: Callable[..., Tensor]) -> CustomOpDef:
        operator = custom_op(f"compressor::{name}", mutates_args=())(function)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.inputs = inputs

        def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed is True]
            inputs = list(ctx.inputs)
            with torch.enable_grad():
                for i in wanted:
                    inputs[i] = inputs[i].detach().requires_grad_()
                found = torch.autograd.grad(function(*inputs), [inputs[i] for i in wanted], gradient)
            by_place = dict(zip(wanted, found, strict=True))
            return tuple([None] * len(x) if _are_tensors(x) else by_place.get(i) for i, x in enumerate(inputs))

        operator.register_autograd(backward, setup_context=keep)
        return operator

    return register


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], Tensor)


@_operator("dense_linear")
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


def packed_product(x: Tensor, packed: PackedWeight) -> Tensor:
    """``x @ W.T`` as the format computes it, in the float type of x, with one piece of W in memory at a time.

    Where activations are rounded, what the weight stores as floats is multiplied by them as they were; input columns
    that it stores whole take no part in the rounding.

    Args:
        x: float [..., in].
    """
    fed, parts = packed.format.activations, packed.parts
    if fed is None:
        return torch.cat([x @ values.to(x.dtype).T for _, values in dequantize_rows(packed)], dim=-1)
    columns = parts.get("float_columns")
    plain = x if columns is None else x.index_fill(-1, columns.long(), 0.0)
    rounded = round_activations(plain, fed, parts.get("input_scale"))
    pieces = []
    for rows, values in coded_rows(packed):
        y, floats = rounded @ values.to(x.dtype).T, float_part(packed, rows)
        pieces.append(y if floats is None else y + x @ floats.to(x.dtype).T)
    return torch.cat(pieces, dim=-1)


@_operator("packed_linear")
def packed_linear(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    """A linear whose weight is stored packed (:mod:`compressor.formats.format` has the layout).

    Args:
        x: float32 [..., in]; rounded first where the format says so (:func:`round_activations`).
        parts: of the weight, as in :class:`compressor.formats.packing.PackedWeight`.
        bias: float32 [out] or None.
    """
    y = packed_product(x, PackedWeight.of(parts, Format.parse(format), (out_features, in_features)))
    return y if bias is None else y + bias


@packed_linear.register_fake
def _(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    format: str,
    in_features: int,
    out_features: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@_operator("patches")
def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """What each output of a 2-d convolution reads, as a row: the convolution is a linear over these rows.

    Args:
        x: float32 [N, H, W, C].
        kernel, stride, padding, dilation: two each, of rows and columns; zeros are padded on both sides.
    Returns:
        float32 [N, H', W', kernel rows * kernel columns * C], with H' = (H + 2 * padding - dilation * (kernel - 1) - 1)
        // stride + 1.
    """
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    rows, columns = (
        outputs(n, *args) for n, *args in zip(x.shape[1:3], kernel, stride, padding, dilation, strict=True)
    )
    padded = pad(x, (0, 0, pw, pw, ph, ph))
    pieces = [
        padded[:, i * dh : i * dh + (rows - 1) * sh + 1 : sh, j * dw : j * dw + (columns - 1) * sw + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    return torch.cat(pieces, dim=-1)


@patches.register_fake
def _(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    rows, columns = (
        outputs(n, *args) for n, *args in zip(x.shape[1:3], kernel, stride, padding, dilation, strict=True)
    )
    return x.new_empty(x.shape[0], rows, columns, kernel[0] * kernel[1] * x.shape[3])


def outputs(size: Any, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    """Outputs of a convolution along one dimension; ``size`` may be symbolic."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@_operator("rms_norm")
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


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The arithmetic of causal attention, with the arguments of :func:`cached_attention`.

    Args:
        keys, values: float32 [B, Hkv, T, D], those of positions 0 to ``position[-1]``.
    """
    repeat, length = q.shape[1] // keys.shape[1], keys.shape[2]
    keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
    scores = (q @ keys.transpose(2, 3)) * scale  # [B, H, S, T]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = position[:, None] - torch.arange(length)  # [S, T]
    hidden = distance < 0
    if window:
        hidden = hidden | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return (weights @ values).transpose(1, 2).contiguous()


@_operator("cached_attention")
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
    past = int(position[0])
    keys, values = torch.cat([k_cache[:, :, :past], k], dim=2), torch.cat([v_cache[:, :, :past], v], dim=2)
    return attend(q, keys, values, position, scale, window, softcap, sinks)


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


@_operator("masked_attention")
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
