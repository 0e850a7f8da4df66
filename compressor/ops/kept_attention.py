"""Attention of some of the new tokens to all of them: schema, eager definition and fake kernel.

Layers whose keys and values are made without their own outputs need queries of those tokens only whose outputs are
wanted (Qiao et al. 2024, SwiftKV, arXiv 2410.03960, section 3.1).
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from compressor.ops.attention import attend, outputs, with_new
from compressor.ops.packed_cache import packed_attend
from compressor.ops.register import operator


@operator("kept_attention")
def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    keep: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunk: int = 0,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Compute :func:`compressor.ops.attention.cached_attention` of chosen new tokens, over a cache and all new tokens.

    Query ``i`` sits at ``position[keep[i]]``, and sees the cache and new keys up to its own place.

    Args:
        q: float32 [B, H, R, D], of the chosen tokens;  k, v: float32 [B, Hkv, S, D], of all.
        k_cache, v_cache, position: as there.
        keep: int64 [R], indices along S, from 0 to S - 1, in any order.
        scale, window, softcap, sinks, chunk, slopes, biases: as there.
    Returns:
        float32 [B, R, H, D].
    """
    keys, values = with_new(k, v, k_cache, v_cache, int(position[0]))
    return attend(q, keys, values, position[keep], scale, window, softcap, sinks, chunk, slopes, biases)


@custom_op("compressor::packed_kept_attention", mutates_args=())
def packed_kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    keep: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    k_order: Tensor | None,
    v_order: Tensor | None,
    format: str,
) -> Tensor:
    """Compute :func:`kept_attention` over packed keys and values, new ones included.

    Args:
        q: float32 [B, H, R, D].
        k, v, k_cache, v_cache, k_order, v_order, format: as of
            :func:`compressor.ops.packed_cache.packed_attention`.
        position, keep, scale, window, softcap, sinks: as of :func:`kept_attention`.
    Returns:
        float32 [B, R, H, D].
    """
    keys, values = with_new(k, v, k_cache, v_cache, int(position[0]))
    return packed_attend(q, keys, values, position[keep], scale, window, softcap, sinks, k_order, v_order, format)


kept_attention.register_fake(outputs)
packed_kept_attention.register_fake(outputs)
