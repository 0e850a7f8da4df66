"""Attention of tokens that form trees behind what several sequences have stored: schema, eager definition and fake.

A tree of drafted tokens is verified in one call (Miao et al. 2024, SpecInfer, arXiv 2305.09781, section 4.2): each
token sees what its sequence has stored, and its own ancestors.  A sequence's tokens need not lie behind one another in
the cache, so that every token of a tree has a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from compressor.ops.attention import attend, outputs
from compressor.ops.packed_cache import packed_attend
from compressor.ops.register import operator


@operator("tree_attention")
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    parent: Tensor,
    slot: Tensor,
    row: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunk: int = 0,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Compute :func:`compressor.ops.attention.cached_attention` for tokens of several sequences, each in a tree.

    Token ``t`` sees virtual keys 0 to ``position[t]``: those before the position of its root are rows of its sequence's
    cache, the others are its ancestors from the root on, and itself.  Windows, chunks and biases look at these places.
    The caches are read only: whoever runs the graph stores ``k`` and ``v`` (the generated kernel writes them in place,
    before any token attends).

    Args:
        q: float32 [1, H, T, D];  k, v: float32 [1, Hkv, T, D].
        k_cache, v_cache: float32 [N, Hkv, C, D], one entry for each sequence.
        position: int64 [T], absolute; that of a token's parent is one less.
        parent: int64 [T], the index of the token before it, smaller than its own; -1 for a root.
        slot: int64 [T], its sequence, an index along N; that of its parent.
        row: int64 [T], where its key and value go in the cache, different for all tokens of a sequence.
        scale, window, softcap, sinks, chunk, slopes, biases: as there.
    Returns:
        float32 [1, T, H, D].
    """
    rest = (scale, window, softcap, sinks, chunk, slopes, biases)
    found = []
    for t, (own, keys, values) in enumerate(_seen(k, v, k_cache, v_cache, position, parent, slot, row)):
        found.append(attend(q[:, :, t : t + 1], keys, values, own, *rest))
    return torch.cat(found, dim=1)


tree_attention.register_fake(outputs)


@custom_op("compressor::packed_tree_attention", mutates_args=())
def packed_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    parent: Tensor,
    slot: Tensor,
    row: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    k_order: Tensor | None,
    v_order: Tensor | None,
    format: str,
) -> Tensor:
    """Compute :func:`tree_attention` over packed keys and values, new ones included.

    Args:
        q: float32 [1, H, T, D].
        k, v: uint8 [1, Hkv, T, row_bytes], from :func:`compressor.ops.packed_cache.pack_cache`.
        k_cache, v_cache: uint8 [N, Hkv, C, row_bytes].
        position, parent, slot, row: as there.
        scale, window, softcap, sinks, k_order, v_order, format: as of
            :func:`compressor.ops.packed_cache.packed_attention`.
    Returns:
        float32 [1, T, H, D].
    """
    rest = (scale, window, softcap, sinks, k_order, v_order, format)
    found = []
    for t, (own, keys, values) in enumerate(_seen(k, v, k_cache, v_cache, position, parent, slot, row)):
        found.append(packed_attend(q[:, :, t : t + 1], keys, values, own, *rest))
    return torch.cat(found, dim=1)


packed_tree_attention.register_fake(outputs)


def _seen(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, parent: Tensor, slot: Tensor, row: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for each token, its position int64 [1], and the keys and values that it may see, [1, Hkv, n, ...]."""
    places = row.tolist()
    stored = []
    for new, cache in ((k, k_cache), (v, v_cache)):
        written = cache.clone()
        written[slot, :, row] = new[0].transpose(0, 1)
        stored.append(written)
    for t in range(len(places)):
        path = [t]
        while (before := int(parent[path[0]])) >= 0:
            path.insert(0, before)
        rows = [*range(int(position[path[0]])), *(places[node] for node in path)]
        keys, values = (cache[int(slot[t])][None, :, rows] for cache in stored)
        yield position[t : t + 1], keys, values
