"""Attention kernels in lockstep against the eager operators: several tokens and one, ragged shapes, every layout."""

from __future__ import annotations

from typing import Any

import lockstep
import numpy as np
import pytest
import torch
from kernel_cases import OPS, SPLIT, TOLERANCE, check_special, relative_error, special_attention
from lockstep import build, run

from compressor.codegen.gpu.attention import kernels


def close(new: int) -> float:
    """Return how close outputs of so many tokens are: several go through tensor cores."""
    return TOLERANCE if new == 1 else SPLIT


def check_cached(
    kernel: Any, heads: int, kv_heads: int, width: int, window: int, softcap: float, has_sinks: bool, lengths: Any
) -> None:
    rng = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    sinks = normal(heads) if has_sinks else None
    for past, new, capacity in lengths:
        caches = [torch.full((2, kv_heads, capacity, width), float("nan")) for _ in range(2)]
        for cache in caches:
            cache[:, :, :past] = normal(2, kv_heads, past, width)
        q, k, v = normal(2, heads, new, width) * 4, normal(2, kv_heads, new, width), normal(2, kv_heads, new, width)
        position = torch.arange(past, past + new)
        out = np.full((2, new, heads, width), np.nan, np.float32)
        results = kernel(q, k, v, *caches, position, sinks, out)
        expected = OPS.cached_attention(q, k, v, *caches, position, width**-0.5, window, softcap, sinks)
        assert relative_error(torch.from_numpy(results[-1]), expected) < close(new), (past, new, capacity)
        for cache, got, fresh in zip(caches, results[3:5], (k, v), strict=True):
            cache[:, :, past : past + new] = fresh
            assert cache.numpy().tobytes() == got.tobytes()  # written where it must be and nowhere else


LENGTHS = [(0, 1, 40), (5, 1, 40), (300, 1, 700), (699, 1, 700), (0, 5, 40), (7, 70, 130), (90, 3, 100)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "has_sinks"),
    [(8, 4, 8, 0, 0.0, False), (4, 2, 128, 3, 0.0, False), (2, 2, 80, 0, 2.0, False), (9, 1, 12, 70, 0.0, True),
     (2, 1, 5, 0, 0.0, False), (1, 1, 320, 0, 0.0, True), (8, 1, 512, 0, 0.0, False)],
)  # fmt: skip
def test_cached_attention(heads: int, kv_heads: int, width: int, window: int, softcap: float, has_sinks: bool) -> None:
    kernel = build(kernels.cached_attention(heads, kv_heads, width, width**-0.5, window, softcap, has_sinks))
    lengths = LENGTHS if width < 80 else [(5, 1, 40), (7, 17, 40)]  # a thread's work is the same, and there is more
    check_cached(kernel, heads, kv_heads, width, window, softcap, has_sinks, lengths)


def test_the_last_row_of_a_cache_with_as_many_parts_as_there_are() -> None:
    kernel = build(kernels.cached_attention(8, 4, 8, 8**-0.5, 0, 0.0, False))
    check_cached(kernel, 8, 4, 8, 0, 0.0, False, [(12287, 1, 12288)])


@pytest.mark.parametrize("exponent", [-90, 20, 90])
def test_numbers_that_no_float16_holds(exponent: int) -> None:
    """Queries, keys and values of very different sizes, within a row as well."""
    kernel, rng = build(kernels.cached_attention(4, 2, 36, 0.2, 0, 0.0, False)), torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, n, 40, 36, generator=rng) for n in (4, 2, 2))
    q, k, v = torch.ldexp(q, torch.tensor(exponent)), torch.ldexp(k, torch.tensor(-exponent)), v * 1e30
    for x in (q, k, v):
        x[..., ::3] *= 1e-4
    caches, position = [torch.zeros(1, 2, 50, 36) for _ in range(2)], torch.arange(40)
    got = run(kernel, q, k, v, *caches, position, out=(1, 40, 4, 36))
    expected = OPS.cached_attention(q, k, v, *caches, position, 0.2, 0, 0.0, None)
    assert relative_error(got, expected) < SPLIT


def test_special_floats_in_a_cache() -> None:
    kernel, rng = build(kernels.cached_attention(4, 2, 12, 0.3, 0, 0.0, False)), torch.Generator().manual_seed(1)
    for new in (1, 9):
        for q, k, v in special_attention(4, 2, new, 12, rng):
            caches = [torch.zeros(1, 2, 50, 12) for _ in range(2)]
            position = torch.arange(new)
            got = run(kernel, q, k, v, *caches, position, out=(1, new, 4, 12))
            expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, 0, 0.0, None)
            check_special(got, expected, close(new), new)


@pytest.mark.parametrize(
    ("chunk", "has_slopes", "distances"), [(8, False, 0), (0, True, 0), (5, True, 0), (0, False, 9), (0, True, 200)]
)
def test_chunks_and_biases_of_distances(chunk: int, has_slopes: bool, distances: int) -> None:
    heads, kv_heads, width = 6, 3, 12
    kernel = build(kernels.cached_attention(heads, kv_heads, width, 0.3, 0, 0.0, False, chunk, has_slopes, distances))
    rng = torch.Generator().manual_seed(chunk)
    slopes = torch.rand(heads, generator=rng) if has_slopes else None
    biases = torch.randn(distances, heads, generator=rng) if distances else None
    flat = None if biases is None else biases.flatten()
    for past, new in [(0, 1), (99, 1), (7, 20), (50, 33)]:
        caches = [torch.randn(2, kv_heads, 100, width, generator=rng) for _ in range(2)]
        q = torch.randn(2, heads, new, width, generator=rng) * 2
        k, v = (torch.randn(2, kv_heads, new, width, generator=rng) for _ in range(2))
        position = torch.arange(past, past + new)
        expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, 0, 0.0, None, chunk, slopes, biases)
        got = run(kernel, q, k, v, *caches, position, slopes, flat, out=(2, new, heads, width))
        assert relative_error(got, expected) < close(new)


def padded(length: int) -> torch.Tensor:
    """Return a mask with padding at the end of one text, and at the beginning of another."""
    mask = torch.ones(3, length)
    mask[1, (length + 1) // 2 :] = 0
    mask[2, : length // 2] = 0
    return mask


@pytest.mark.parametrize(
    ("width", "kv_heads", "tokens_first"),
    [(32, 4, (False, False, False)), (32, 4, (True, True, True)), (5, 1, (True, False, True))],
)
def test_masked_attention_ignores_padding(width: int, kv_heads: int, tokens_first: tuple[bool, ...]) -> None:
    kernel = build(kernels.masked_attention(4, kv_heads, width, 0.2, tokens_first))
    rng = torch.Generator().manual_seed(width)

    def given(*rows: torch.Tensor) -> list[torch.Tensor]:
        return [x.transpose(1, 2).contiguous() if first else x for x, first in zip(rows, tokens_first, strict=True)]

    for length in (1, 33, 140):
        q = torch.randn(3, 4, length, width, generator=rng)
        k, v = (torch.randn(3, kv_heads, length, width, generator=rng) for _ in range(2))
        got = run(kernel, *given(q, k, v), padded(length), out=(3, length, 4, width))
        assert relative_error(got, OPS.masked_attention(q, k, v, padded(length), 0.2)) < SPLIT
    for q, k, v in special_attention(4, kv_heads, 9, width, rng):
        got = run(kernel, *given(q, k, v), torch.ones(1, 9), out=(1, 9, 4, width))
        check_special(got, OPS.masked_attention(q, k, v, torch.ones(1, 9), 0.2), SPLIT, width)


@pytest.mark.parametrize(
    ("window", "own", "softcap"),
    [(3, None, 0.0), (0, (True, True, True), 0.0), (5, (False, True, True), 2.0), (0, (True, False, False), 0.0)],
)
def test_windows_and_biases_of_encoders(window: int, own: tuple[bool, bool, bool] | None, softcap: float) -> None:
    """A window may show padding alone."""
    kernel = build(kernels.masked_attention(4, 2, 16, 0.2, (False,) * 3, window, own, softcap))
    rng = torch.Generator().manual_seed(window)
    for length in (1, 9, 70):
        q = torch.randn(3, 4, length, 16, generator=rng)
        k, v = (torch.randn(3, 2, length, 16, generator=rng) for _ in range(2))
        bias = None
        if own:
            shape = [n if each else 1 for n, each in zip((3, 4, length), own, strict=True)]
            bias = torch.randn(*shape, length, generator=rng)
        flat = None if bias is None else bias.flatten()
        got = run(kernel, q, k, v, padded(length), flat, out=(3, length, 4, 16))
        expected = OPS.masked_attention(q, k, v, padded(length), 0.2, window, bias, softcap)
        assert relative_error(got, expected) < SPLIT


@pytest.mark.parametrize(("heads", "kv_heads", "width", "softcap"), [(4, 4, 16, 0.0), (6, 2, 12, 3.0)])
def test_cross_attention(heads: int, kv_heads: int, width: int, softcap: float) -> None:
    rng = torch.Generator().manual_seed(width)
    kernel = build(kernels.cross_attention(heads, kv_heads, width, 0.3, softcap))
    for new, length in [(1, 1), (1, 7), (1, 200), (5, 3), (40, 130)]:
        q = torch.randn(2, heads, new, width, generator=rng) * 4
        k, v = (torch.randn(2, kv_heads, length, width, generator=rng) for _ in range(2))
        mask = torch.ones(2, length)
        mask[1, : length // 3], mask[0, length - length // 2 :] = 0, 0
        got = run(kernel, q, k, v, mask, out=(2, new, heads, width))
        assert relative_error(got, OPS.masked_attention(q, k, v, mask, 0.3, softcap=softcap)) < close(new)
        batch = [run(kernel, *(x[i : i + 1] for x in (q, k, v, mask)), out=(1, new, heads, width)) for i in (0, 1)]
        assert torch.equal(torch.cat(batch), got)  # no entry of a batch sees another


def test_it_is_cuda_too() -> None:
    report = lockstep.compile.ptxas_report(build(kernels.cached_attention(32, 8, 128, 0.3, 0, 0.0, False)).text)
    assert report.count("0 bytes spill stores") == 4
