"""Attention of tokens in trees against attention of one token behind a cache in which its path lies in order."""

from __future__ import annotations

import random

import pytest
import torch
from token_trees import path_to, random_trees

import compressor.ops  # noqa: F401  (registers the operators)

OPS = torch.ops.compressor
HEADS, KV_HEADS, WIDTH, CAPACITY = 4, 2, 12, 30


@pytest.mark.parametrize("packed", [False, True])
def test_each_token_sees_what_is_stored_and_its_own_path(packed: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    stored, counts = (0, 9, 3), (6, 5, 1)
    trees = random_trees(random.Random(0), stored, counts)
    position, parent, slot, _ = trees
    q, k, v = (torch.randn(1, n, 12, WIDTH, generator=rng) for n in (HEADS, KV_HEADS, KV_HEADS))
    caches = [torch.randn(3, KV_HEADS, CAPACITY, WIDTH, generator=rng) for _ in range(2)]
    sinks, settings = torch.randn(HEADS, generator=rng), (0.3, 4, 2.0)
    if packed:
        order = torch.stack([torch.randperm(WIDTH, generator=rng) for _ in range(KV_HEADS)]).int()
        k, v, *caches = (OPS.pack_cache(x, order, "INT8") for x in (k, v, *caches))
        one, all_, rest = OPS.packed_attention, OPS.packed_tree_attention, (sinks, order, order, "INT8")
    else:
        biases = torch.randn(3, HEADS, generator=rng)
        one, all_, rest = OPS.cached_attention, OPS.tree_attention, (sinks, 5, sinks.abs(), biases)
    kept = [cache.clone() for cache in caches]
    found = all_(q, k, v, *caches, *trees, *settings, *rest)
    assert found.shape == (1, 12, HEADS, WIDTH)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, kept, strict=True))  # whoever runs it writes
    for t in range(12):
        path, base = path_to(parent.tolist(), t), stored[int(slot[t])]
        assert int(position[t]) == base + len(path) - 1
        own = [cache[int(slot[t])][None].clone() for cache in caches]
        for cache, new in zip(own, (k, v), strict=True):
            cache[:, :, base : base + len(path) - 1] = new[:, :, path[:-1]]
        given = [x[:, :, t : t + 1] for x in (q, k, v)]
        alone = one(*given, *own, position[t : t + 1], *settings, *rest)
        assert torch.equal(alone[0, 0], found[0, t])
