"""Attention, over a cache or with padding: schema, eager definition and fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.ops.register import operator


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunk: int = 0,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Compute causal attention, with the arguments of :func:`cached_attention`.

    Args:
        keys, values: float32 [B, Hkv, T, D], those of positions 0 to ``position[-1]``.
    """
    repeat, length = q.shape[1] // keys.shape[1], keys.shape[2]
    keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
    scores = (q @ keys.transpose(2, 3)) * scale  # [B, H, S, T]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(length, device=q.device)
    distance = position[:, None] - places  # [S, T]
    hidden = distance < 0
    if window:
        hidden = hidden | (distance >= window)
    if chunk:
        hidden = hidden | (places // chunk != position[:, None] // chunk)
    if slopes is not None:
        scores = scores - slopes.view(1, -1, 1, 1) * distance
    if biases is not None:
        scores = scores + biases[distance.clamp(0, len(biases) - 1)].permute(2, 0, 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return (weights @ values).transpose(1, 2).contiguous()


def with_new(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, past: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the ``past`` tokens that caches hold, and of the new ones, [B, Hkv, T, row].

    Operators read ``past`` by ``int`` themselves, which the proof that batch entries are independent looks for.

    Args:
        k, v: [B, Hkv, S, row].
        k_cache, v_cache: [B, Hkv, C, row].
    """
    return torch.cat([k_cache[:, :, :past], k], dim=2), torch.cat([v_cache[:, :, :past], v], dim=2)


@operator("cached_attention")
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
    chunk: int = 0,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of new tokens over a cache and themselves; grouped-query heads share keys in order.

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
        chunk: keys of the query's own chunk of so many positions only; 0 means all.
        slopes: float32 [H], of ALiBi (Press et al. 2022, arXiv 2108.12409): a head's score falls by its slope for each
            position that the key lies back, after the cap; or None.
        biases: float32 [N, H], of relative positions (Raffel et al. 2020, arXiv 1910.10683): what is added to a head's
            score of a key that lies 0 to N - 1 positions back, after the cap; farther keys get the last; or None.
    Returns:
        float32 [B, S, H, D].
    """
    keys, values = with_new(k, v, k_cache, v_cache, int(position[0]))
    return attend(q, keys, values, position, scale, window, softcap, sinks, chunk, slopes, biases)


@cached_attention.register_fake
def outputs(q: Tensor, *_others: object, **_more: object) -> Tensor:
    """Return outputs without values, float32 [B, S, H, D], of queries [B, H, S, D]."""
    batch, heads, sequence, width = q.shape
    return q.new_empty(batch, sequence, heads, width)


@operator("masked_attention")
def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute bidirectional attention with padding, for encoders, and of a decoder over its encoder's output.

    Args:
        q: float32 [B, H, S, D];  k, v: float32 [B, Hkv, N, D]; N is S but for cross-attention.
        mask: float32 [B, N], 1 for a token and 0 for padding; each row keeps at least one token.  None for no padding.
        scale: factor on the scores.
        window: keys no further away than ``window - 1`` positions, on either side; 0 means all.
        bias: float32 [B or 1, H or 1, S or 1, N], added to the scaled scores; or None.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the bias; 0 means none.
    Returns:
        float32 [B, S, H, D]; 0 for a query that sees nothing, which only padding does.
    """
    repeat, length = q.shape[1] // k.shape[1], k.shape[2]
    keys, values = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ keys.transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    places = torch.arange(length, device=q.device)
    hidden = places < 0 if mask is None else mask[:, None, None, :] == 0
    if window:
        distance = places[:, None] - places
        hidden = hidden | (distance.abs() >= window)
        blind = hidden.all(dim=-1, keepdim=True)  # a query of padding around which all is padding
        hidden = hidden & ~blind
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if window:
        weights = weights.masked_fill(blind, 0.0)
    return (weights @ values).transpose(1, 2).contiguous()


masked_attention.register_fake(outputs)
