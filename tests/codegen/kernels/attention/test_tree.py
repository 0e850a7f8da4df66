"""Kernels of trees of tokens: against the eager operators, and bit by bit against single tokens."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_cases import OPS, TOLERANCE, build, call_in_place, normal, orders, relative_error, run
from token_trees import path_to, random_trees

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.attention import cached, packed, tree
from compressor.codegen.targets import x86
from compressor.formats.cache import CacheFormat

CAPACITY = 90
FORESTS = [((0,), (1,)), ((5, 0, 17), (4, 3, 6)), ((70, 33), (20, 0)), ((2, 3, 1), (1, 1, 1))]


def in_order(cache: torch.Tensor, slot: int, base: int, rows: list[int]) -> torch.Tensor:
    """Return a sequence's cache as if the last rows had been stored behind the first ``base``."""
    moved = torch.full_like(cache[:1], 77)
    moved[:, :, :base] = cache[slot : slot + 1, :, :base]
    moved[:, :, base : base + len(rows)] = cache[slot : slot + 1, :, rows]
    return moved


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "has_sinks", "chunk", "has_slopes", "distances", "isa"),
    [
        (8, 4, 8, 0, 0.0, False, 0, False, 0, x86.AVX512_VNNI),
        (4, 2, 64, 3, 0.0, False, 0, False, 0, x86.AVX2),
        (6, 1, 12, 5, 2.0, True, 0, False, 0, x86.AVX512_VNNI),
        (6, 3, 32, 0, 0.0, False, 5, True, 9, x86.AVX512_VNNI),
    ],
)
def test_a_token_of_a_tree_has_the_bits_of_a_token_alone(
    heads: int,
    kv_heads: int,
    width: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    chunk: int,
    has_slopes: bool,
    distances: int,
    isa: Isa,
) -> None:
    settings = (heads, kv_heads, width, 0.3, window, softcap, has_sinks, chunk, has_slopes, distances)
    kernel, alone = build(tree.tree_attention(*settings), isa), build(cached.cached_attention(*settings), isa)
    sinks = normal(heads, seed=1) if has_sinks else None
    slopes = normal(heads, seed=2).abs() if has_slopes else None
    biases = normal(distances, heads, seed=3) if distances else None
    flat = None if biases is None else biases.flatten()
    pick = random.Random(width)
    for number, (stored, counts) in enumerate(FORESTS):
        trees = random_trees(pick, stored, counts, chain=number == 2)
        position, parent, slot, row = trees
        tokens = len(position)
        q = normal(1, heads, tokens, width, seed=4) * 4
        k, v = normal(1, kv_heads, tokens, width, seed=5), normal(1, kv_heads, tokens, width, seed=6)
        before = [normal(len(stored), kv_heads, CAPACITY, width, seed=seed) for seed in (7, 8)]
        rest = (0.3, window, softcap, sinks, chunk, slopes, biases)
        expected = OPS.tree_attention(q, k, v, *before, *trees, *rest)
        caches = [cache.clone() for cache in before]
        given = [q, k, v, *trees, *(x for x in (sinks, slopes, flat) if x is not None)]
        got = call_in_place(kernel, given, caches, torch.full((1, tokens, heads, width), float("nan")))
        assert relative_error(got, expected) < TOLERANCE
        for cache, old, new in zip(caches, before, (k, v), strict=True):
            old[slot, :, row] = new[0].transpose(0, 1)
            assert torch.equal(cache, old)  # written where it must be and nowhere else
        for t in range(tokens):
            path = path_to(parent.tolist(), t)
            base, rows = int(position[path[0]]), row[path].tolist()
            held = [in_order(cache, int(slot[t]), base, rows[:-1]) for cache in caches]
            own = [x[:, :, t : t + 1].contiguous() for x in (q, k, v)]
            one = run(alone, *own, *held, position[t : t + 1], sinks, slopes, flat, out=(1, 1, heads, width))
            assert torch.equal(one[0, 0], got[0, t]), (stored, t)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "width", "window", "has_sinks", "permuted", "isa"),
    [
        ("INT8", 8, 4, 8, 0, False, False, x86.AVX2),
        ("INT4_G8", 6, 1, 13, 5, True, True, x86.AVX512_VNNI),
        ("FP8", 6, 2, 12, 0, False, True, x86.AVX512_VNNI),
    ],
)
def test_packed_caches(
    name: str, heads: int, kv_heads: int, width: int, window: int, has_sinks: bool, permuted: bool, isa: Isa
) -> None:
    fmt = CacheFormat.parse(name)
    settings = (heads, kv_heads, width, 0.3, window, 0.0, has_sinks, fmt, permuted)
    kernel, alone = build(tree.packed_tree_attention(*settings), isa), build(packed.packed_attention(*settings), isa)
    sinks = normal(heads, seed=1) if has_sinks else None
    order = [orders(kv_heads, width, seed) if permuted else None for seed in (2, 3)]
    last = [x for x in (sinks, *order) if x is not None]
    pick = random.Random(width)
    for stored, counts in FORESTS[:3]:
        trees = random_trees(pick, stored, counts)
        position, parent, slot, row = trees
        tokens = len(position)
        q = normal(1, heads, tokens, width, seed=4)
        k, v = (OPS.pack_cache(normal(1, kv_heads, tokens, width, seed=5 + i), o, name) for i, o in enumerate(order))
        before = [
            OPS.pack_cache(normal(len(stored), kv_heads, CAPACITY, width, seed=7 + i), o, name)
            for i, o in enumerate(order)
        ]
        expected = OPS.packed_tree_attention(q, k, v, *before, *trees, 0.3, window, 0.0, sinks, *order, name)
        caches = [cache.clone() for cache in before]
        empty = torch.full((1, tokens, heads, width), float("nan"))
        got = call_in_place(kernel, [q, k, v, *trees, *last], caches, empty)
        assert relative_error(got, expected) < TOLERANCE
        for t in range(tokens):
            path = path_to(parent.tolist(), t)
            held = [in_order(cache, int(slot[t]), int(position[path[0]]), row[path[:-1]].tolist()) for cache in caches]
            own = [x[:, :, t : t + 1] for x in (q, k, v)]
            given = [*own, position[t : t + 1], *last]
            one = call_in_place(alone, given, held, torch.full((1, 1, heads, width), float("nan")))
            assert torch.equal(one[0, 0], got[0, t]), (stored, t)
