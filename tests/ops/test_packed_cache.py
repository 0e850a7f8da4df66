"""Packed caches as operators: what one token stores depends on nothing else, and chunks of a prompt agree."""

from __future__ import annotations

import pytest
import torch

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.formats.cache import CACHE_FORMATS, CacheFormat
from compressor.formats.layouts.packed_cache import dequantize_cache

OPS = torch.ops.compressor
HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 20, 9


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orders(seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(WIDTH, generator=rng) for _ in range(KV_HEADS)]).int()


def attend(name: str, chunks: list[int], permuted: bool = True) -> torch.Tensor:
    """Attention over a prompt that comes in chunks, with the caches stored by hand."""
    q, k, v = normal(2, HEADS, TOKENS, WIDTH), normal(2, KV_HEADS, TOKENS, WIDTH), normal(2, KV_HEADS, TOKENS, WIDTH)
    k_order, v_order = (orders(1), orders(2)) if permuted else (None, None)
    size = CacheFormat.parse(name).row_bytes(WIDTH)
    caches = [torch.zeros(2, KV_HEADS, TOKENS, size, dtype=torch.uint8) for _ in range(2)]
    outputs, first = [], 0
    for count in chunks:
        part = slice(first, first + count)
        new = [OPS.pack_cache(x[:, :, part], o, name) for x, o in ((k, k_order), (v, v_order))]
        position = torch.arange(first, first + count)
        args = (q[:, :, part], *new, *caches, position, 0.3, 6, 5.0, normal(HEADS, seed=3), k_order, v_order, name)
        outputs.append(OPS.packed_attention(*args))
        for cache, rows in zip(caches, new, strict=True):
            cache[:, :, part] = rows
        first += count
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_chunks_of_a_prompt_agree(name: str) -> None:
    whole = attend(name, [TOKENS])
    for chunks in ([1] * TOKENS, [4, 5], [7, 1, 1]):
        assert float((attend(name, chunks) - whole).abs().max()) < 2e-6


@pytest.mark.parametrize("name", ["INT8", "FP8_E4M3"])
def test_an_order_alone_changes_nothing(name: str) -> None:
    """One scale for all of a head's channels: whichever place they have, they are rounded alike."""
    assert float((attend(name, [TOKENS]) - attend(name, [TOKENS], permuted=False)).abs().max()) < 2e-6


def test_attention_is_that_over_the_values_that_are_stored() -> None:
    fmt, order = CacheFormat.parse("INT4_G8"), orders(1)
    q, k = normal(1, HEADS, 5, WIDTH), normal(1, KV_HEADS, 5, WIDTH)
    packed = OPS.pack_cache(k, order, fmt.name)
    places = order.long()[None, :, None].expand(k.shape)
    stored = torch.zeros_like(k).scatter(3, places, dequantize_cache(packed, fmt, WIDTH))
    position, empty = torch.arange(5), packed[:, :, :1]
    got = OPS.packed_attention(q, packed, packed, empty, empty, position, 0.3, 0, 0.0, None, order, order, fmt.name)
    expected = OPS.cached_attention(q, stored, stored, k[:, :, :1], k[:, :, :1], position, 0.3, 0, 0.0, None)
    assert float((got - expected).abs().max()) < 2e-6
    assert float((expected - OPS.cached_attention(q, k, k, k, k, position, 0.3, 0, 0.0, None)).abs().max()) > 1e-2


def test_rows_depend_on_their_own_token_and_head_alone() -> None:
    x, changed = normal(3, KV_HEADS, 4, WIDTH), normal(3, KV_HEADS, 4, WIDTH)
    changed[1, 0, 2] *= 1e6
    for name in CACHE_FORMATS:
        differs = (OPS.pack_cache(x, None, name) != OPS.pack_cache(changed, None, name)).any(-1)
        assert differs.sum() == 1 and bool(differs[1, 0, 2])


@pytest.mark.parametrize("name", ["INT4", "BFP8_G16"])
def test_operators_and_their_fakes_agree(name: str) -> None:
    q, k, order = normal(1, HEADS, 3, WIDTH), normal(1, KV_HEADS, 3, WIDTH), orders(1)
    torch.library.opcheck(OPS.pack_cache.default, (k, order, name), test_utils=("test_schema", "test_faketensor"))
    packed = OPS.pack_cache(k, order, name)
    args = (q, packed, packed, packed, packed, torch.arange(3), 0.3, 0, 0.0, None, order, order, name)
    torch.library.opcheck(OPS.packed_attention.default, args, test_utils=("test_schema",))
