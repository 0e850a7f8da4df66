"""Packed key-value caches: schema, eager definition and fake kernel.

As in :mod:`compressor.ops.linear`, the eager reference defines what each operator means.  New keys and values are
packed before anything reads them: tokens of one call attend to each other as later calls will see them, so that
    prompts,
continued prompts and single tokens agree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from compressor.formats.cache import CacheFormat
from compressor.formats.layouts import packed_cache as packing_cache
from compressor.ops.attention import attend, outputs, with_new


@custom_op("compressor::pack_cache", mutates_args=())
def pack_cache(x: Tensor, order: Tensor | None, format: str) -> Tensor:
    """Quantise keys or values to rows of a cache, each token and head alone.

    Args:
        x: float32 [B, Hkv, S, D].
        order: int32 [Hkv, D]: which channel is stored at each place of a head's row; None keeps them as they are.
        format: name of a :class:`compressor.formats.cache.CacheFormat`.
    Returns:
        uint8 [B, Hkv, S, row_bytes].
    """
    fmt = CacheFormat.parse(format)
    x = x if order is None else x.gather(3, order.long()[None, :, None].expand(x.shape))
    return packing_cache.pack_cache(*packing_cache.quantize_cache(x, fmt), fmt)


@pack_cache.register_fake
def _(x: Tensor, order: Tensor | None, format: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], CacheFormat.parse(format).row_bytes(x.shape[-1]), dtype=torch.uint8)


def packed_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    k_order: Tensor | None,
    v_order: Tensor | None,
    format: str,
) -> Tensor:
    """Compute causal attention over packed rows, with the arguments of :func:`packed_attention`.

    Args:
        keys, values: uint8 [B, Hkv, T, row_bytes], those of positions 0 to ``position[-1]``.
    """
    fmt, width = CacheFormat.parse(format), q.shape[3]
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (packing_cache.dequantize_cache(rows, fmt, width).to(q.dtype) for rows in (keys, values))
    if k_order is not None:
        q = q.gather(3, k_order.long().repeat_interleave(repeat, dim=0)[None, :, None].expand(q.shape))
    out = attend(q, keys, values, position, scale, window, softcap, sinks)
    if v_order is None:
        return out
    back = torch.argsort(v_order, dim=1).repeat_interleave(repeat, dim=0)
    return out.gather(3, back[None, None].expand(out.shape))


@custom_op("compressor::packed_attention", mutates_args=())
def packed_attention(
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
    k_order: Tensor | None,
    v_order: Tensor | None,
    format: str,
) -> Tensor:
    """Compute :func:`compressor.ops.attention.cached_attention` over packed keys and values, new ones included.

    Args:
        q: float32 [B, H, S, D].
        k, v: uint8 [B, Hkv, S, row_bytes], from :func:`pack_cache`.
        k_cache, v_cache: uint8 [B, Hkv, T, row_bytes], T >= position[0].
        position, scale, window, softcap, sinks: as there.
        k_order, v_order: as :func:`pack_cache` was given; queries and outputs are permuted to match.
        format: of the caches.
    Returns:
        float32 [B, S, H, D].
    """
    keys, values = with_new(k, v, k_cache, v_cache, int(position[0]))
    return packed_attend(q, keys, values, position, scale, window, softcap, sinks, k_order, v_order, format)


packed_attention.register_fake(outputs)
