"""Attention kernels against the eager operators: several tokens and one, ragged shapes, every layout."""

from __future__ import annotations

import pytest
import torch
import tvm
from kernel_cases import OPS, TOLERANCE, build, check_special, relative_error, run, special_attention

from compressor.codegen.kernels.attention import cached as attention
from compressor.codegen.targets import x86


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "has_sinks"),
    [(8, 4, 8, 0, 0.0, False), (4, 2, 64, 3, 0.0, False), (4, 4, 32, 0, 2.0, False), (6, 1, 12, 5, 0.0, True)],
)
def test_cached_attention(heads: int, kv_heads: int, width: int, window: int, softcap: float, has_sinks: bool) -> None:
    rng = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    kernel = build(attention.cached_attention(heads, kv_heads, width, 0.3, window, softcap, has_sinks), x86.AVX512_VNNI)
    sinks = normal(heads) if has_sinks else None
    for past, new in [(0, 1), (0, 5), (5, 1), (7, 20), (37, 3), (0, 90), (50, 43)]:
        k_cache, v_cache = normal(2, kv_heads, 100, width), normal(2, kv_heads, 100, width)
        q, k, v = normal(2, heads, new, width) * 4, normal(2, kv_heads, new, width), normal(2, kv_heads, new, width)
        position = torch.arange(past, past + new)
        caches = [tvm.runtime.tensor(t.numpy()) for t in (k_cache, v_cache)]
        out = tvm.runtime.tensor(torch.full((2, new, heads, width), float("nan")).numpy())
        rest = [tvm.runtime.tensor(t.numpy()) for t in (position, sinks) if t is not None]
        kernel(*(tvm.runtime.tensor(t.numpy()) for t in (q, k, v)), *caches, *rest, out)
        expected = OPS.cached_attention(q, k, v, k_cache, v_cache, position, 0.3, window, softcap, sinks)
        assert relative_error(torch.from_numpy(out.numpy()), expected) < TOLERANCE
        for cache, got, fresh in zip((k_cache, v_cache), caches, (k, v), strict=True):
            cache[:, :, past : past + new] = fresh
            assert torch.equal(torch.from_numpy(got.numpy()), cache)  # written where it must be and nowhere else
    for new in (1, 40) if not window else (1, 3):  # PyTorch multiplies infinity behind the window by 0, which is NaN
        for q, k, v in special_attention(heads, kv_heads, new, width, rng):
            caches = [torch.zeros(1, kv_heads, 50, width) for _ in range(2)]
            position = torch.arange(new)
            got = run(kernel, q, k, v, *caches, position, sinks, out=(1, new, heads, width))
            expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, window, softcap, sinks)
            check_special(got, expected, TOLERANCE, (new, softcap))


@pytest.mark.parametrize(
    ("width", "kv_heads", "tokens_first"),
    [
        (32, 4, (False, False, False)),
        (32, 4, (True, True, True)),
        (12, 2, (False, True, False)),
        (5, 1, (True, False, True)),
    ],
)
def test_masked_attention_ignores_padding(width: int, kv_heads: int, tokens_first: tuple[bool, ...]) -> None:
    """Padding at the end of one text and, more than a block of keys, at the beginning of another."""
    kernel = build(attention.masked_attention(4, kv_heads, width, 0.2, tokens_first), x86.AVX2)
    rng = torch.Generator().manual_seed(width)
    for length in (1, 9, 33, 70, 150):
        q = torch.randn(3, 4, length, width, generator=rng)
        k, v = (torch.randn(3, kv_heads, length, width, generator=rng) for _ in range(2))
        mask = torch.ones(3, length)
        mask[1, (length + 1) // 2 :] = 0
        mask[2, : length // 2] = 0
        given = [
            x.transpose(1, 2).contiguous() if first else x for x, first in zip((q, k, v), tokens_first, strict=True)
        ]
        got = run(kernel, *given, mask, out=(3, length, 4, width))
        assert relative_error(got, OPS.masked_attention(q, k, v, mask, 0.2)) < TOLERANCE
    for q, k, v in special_attention(4, kv_heads, 9, width, rng):
        given = [
            x.transpose(1, 2).contiguous() if first else x for x, first in zip((q, k, v), tokens_first, strict=True)
        ]
        got = run(kernel, *given, torch.ones(1, 9), out=(1, 9, 4, width))
        check_special(got, OPS.masked_attention(q, k, v, torch.ones(1, 9), 0.2), TOLERANCE, width)


@pytest.mark.parametrize(
    ("chunk", "has_slopes", "distances"), [(8, False, 0), (0, True, 0), (5, True, 0), (0, False, 9), (0, True, 200)]
)
def test_chunks_and_biases_of_distances(chunk: int, has_slopes: bool, distances: int) -> None:
    heads, kv_heads, width = 6, 3, 12
    kernel = build(
        attention.cached_attention(heads, kv_heads, width, 0.3, 0, 0.0, False, chunk, has_slopes, distances),
        x86.AVX512_VNNI,
    )
    rng = torch.Generator().manual_seed(chunk)
    slopes = torch.rand(heads, generator=rng) if has_slopes else None
    biases = torch.randn(distances, heads, generator=rng) if distances else None
    flat = None if biases is None else biases.flatten()
    for past, new in [(0, 1), (5, 1), (7, 20), (37, 3), (50, 43)]:
        caches = [torch.randn(2, kv_heads, 100, width, generator=rng) for _ in range(2)]
        q = torch.randn(2, heads, new, width, generator=rng) * 2
        k, v = (torch.randn(2, kv_heads, new, width, generator=rng) for _ in range(2))
        position = torch.arange(past, past + new)
        expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, 0, 0.0, None, chunk, slopes, biases)
        got = run(kernel, q, k, v, *caches, position, slopes, flat, out=(2, new, heads, width))
        assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("window", "own", "softcap"),
    [(3, None, 0.0), (0, (True, True, True), 0.0), (5, (False, True, True), 2.0), (0, (True, False, False), 0.0)],
)
def test_windows_and_biases_of_encoders(window: int, own: tuple[bool, bool, bool] | None, softcap: float) -> None:
    """Padding at the end of one text and at the beginning of another, where a window shows padding alone."""
    kernel = build(attention.masked_attention(4, 2, 16, 0.2, (False,) * 3, window, own, softcap), x86.AVX512_VNNI)
    rng = torch.Generator().manual_seed(window)
    for length in (1, 9, 70):
        q = torch.randn(3, 4, length, 16, generator=rng)
        k, v = (torch.randn(3, 2, length, 16, generator=rng) for _ in range(2))
        mask = torch.ones(3, length)
        mask[1, (length + 1) // 2 :] = 0
        mask[2, : length // 2] = 0
        sizes = (3, 4, length)
        bias = (
            torch.randn(*(n if each else 1 for n, each in zip(sizes, own, strict=True)), length, generator=rng)
            if own
            else None
        )
        got = run(kernel, q, k, v, mask, None if bias is None else bias.flatten(), out=(3, length, 4, 16))
        assert relative_error(got, OPS.masked_attention(q, k, v, mask, 0.2, window, bias, softcap)) < TOLERANCE
