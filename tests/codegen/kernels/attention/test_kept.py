"""Kernels of kept tokens: against the eager operators, and bit by bit against a token that is alone in its step."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import OPS, TOLERANCE, build, call_in_place, normal, orders, relative_error

from compressor.codegen.isa import INDEPENDENT_ROWS, Isa
from compressor.codegen.kernels.attention import cached, kept, packed
from compressor.codegen.targets import x86
from compressor.formats.cache import CacheFormat

CASES = [  # tokens before, new ones, and which are kept
    (0, 1, [0]),
    (9, 1, [0]),
    (7, 20, [19]),
    (0, 6, [4, 0, 4, 2]),
    (37, 40, [*range(32)]),
    (3, 70, [*range(69, -1, -2)]),  # 35 of them, from behind
    (5, 90, [*range(90)]),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "has_sinks", "chunk", "has_slopes", "distances", "isa"),
    [
        (8, 4, 32, 0, 0.0, False, 0, False, 0, x86.AVX512_VNNI),
        (4, 2, 64, 3, 0.0, False, 0, False, 0, x86.AVX2),
        (6, 1, 12, 5, 2.0, True, 0, False, 0, x86.AVX512_VNNI),
        (6, 3, 8, 0, 0.0, False, 5, True, 9, x86.AVX512_VNNI),
    ],
)
def test_kept_tokens(
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
    settings = (0.3, window, softcap)
    sizes = (heads, kv_heads, width, *settings, has_sinks, chunk, has_slopes, distances)
    kernel, single = build(kept.kept_attention(*sizes), isa), build(cached.cached_attention(*sizes), isa)
    sinks, slopes = (normal(heads, seed=i) if given else None for i, given in enumerate((has_sinks, has_slopes)))
    biases = normal(distances, heads, seed=3) if distances else None
    more = [sinks, slopes, None if biases is None else biases.flatten()]
    for past, new, chosen in CASES:
        caches = [normal(2, kv_heads, 100, width, seed=i) for i in (4, 5)]
        q, k, v = normal(2, heads, new, width, seed=6) * 3, *(normal(2, kv_heads, new, width, seed=i) for i in (7, 8))
        position, keep = torch.arange(past, past + new), torch.tensor(chosen)
        rows, given = q[:, :, keep], [cache.clone() for cache in caches]
        expected = OPS.kept_attention(rows, k, v, *caches, position, keep, *settings, sinks, chunk, slopes, biases)
        got = call_in_place(kernel, [rows, k, v, position, keep, *more], given, expected)
        assert relative_error(got, expected) < TOLERANCE, (past, new)
        for cache, fresh, written in zip(caches, (k, v), given, strict=True):
            cache[:, :, position] = fresh
            assert torch.equal(written, cache), "written where it must be and nowhere else"
        for i, r in enumerate(chosen[:3] if len(chosen) <= INDEPENDENT_ROWS else ()):
            one = [x[:, :, r : r + 1] for x in (q, k, v)]
            alone = call_in_place(single, [*one, position[r : r + 1], *more], given, expected[:, :1])
            assert torch.equal(got[:, i : i + 1], alone), (past, new, r)


@pytest.mark.parametrize(("name", "permuted", "isa"), [("INT8", False, x86.AVX2), ("BFP4_G8", True, x86.AVX512_VNNI)])
def test_kept_tokens_over_packed_caches(name: str, permuted: bool, isa: Isa) -> None:
    heads, kv_heads, width, settings, fmt = 4, 2, 24, (0.3, 6, 0.0), CacheFormat.parse(name)
    sizes = (heads, kv_heads, width, *settings, True, fmt, permuted)
    kernel, single = build(kept.packed_kept_attention(*sizes), isa), build(packed.packed_attention(*sizes), isa)
    sinks = normal(heads, seed=0)
    chosen = [orders(kv_heads, width, i) if permuted else None for i in (1, 2)]
    for past, new, kept_tokens in CASES[1:]:
        caches = [OPS.pack_cache(normal(2, kv_heads, 100, width, seed=i), None, name) for i in (4, 5)]
        fresh = [OPS.pack_cache(normal(2, kv_heads, new, width, seed=i), None, name) for i in (7, 8)]
        q, position, keep = (
            normal(2, heads, new, width, seed=6),
            torch.arange(past, past + new),
            torch.tensor(kept_tokens),
        )
        rows, given = q[:, :, keep], [cache.clone() for cache in caches]
        expected = OPS.packed_kept_attention(rows, *fresh, *caches, position, keep, *settings, sinks, *chosen, name)
        got = call_in_place(kernel, [rows, *fresh, position, keep, sinks, *chosen], given, expected)
        assert relative_error(got, expected) < TOLERANCE, (past, new)
        for cache, row, written in zip(caches, fresh, given, strict=True):
            cache[:, :, position] = row
            assert torch.equal(written, cache)
        for i, r in enumerate(kept_tokens[:3] if len(kept_tokens) <= INDEPENDENT_ROWS else ()):
            one = [x[:, :, r : r + 1] for x in (q, *fresh)]
            alone = call_in_place(single, [*one, position[r : r + 1], sinks, *chosen], given, expected[:, :1])
            assert torch.equal(got[:, i : i + 1], alone), (past, new, r)
