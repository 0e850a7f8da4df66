"""Kernels of packed caches in lockstep against the eager operators: every format, ragged heads, permuted channels."""

from __future__ import annotations

import lockstep
import numpy as np
import pytest
import torch
from kernel_cases import OPS, SPLIT, TOLERANCE, check_special, normal, orders, relative_error, special_attention
from lockstep import build, run

from compressor.codegen.gpu.attention import packed
from compressor.formats.cache import CacheFormat
from compressor.formats.layouts.packed_cache import dequantize_cache


@pytest.mark.parametrize(
    ("name", "width", "permuted"),
    [("INT8", 300, False), ("INT4_G8", 37, True), ("FP8", 12, True), ("BFP8_G16", 40, False), ("BFP4_G32", 80, True)],
)
def test_packed_rows_are_those_of_the_operator_byte_for_byte(name: str, width: int, permuted: bool) -> None:
    fmt, kv_heads = CacheFormat.parse(name), 2
    x = normal(2, kv_heads, 12, width, seed=1) * normal(2, kv_heads, 12, 1, seed=2).mul(4).exp()
    x[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-38, 3e38, 1e-7, 1e9])[:, None] * x[0, 0, :6].sign()
    x[0, 1, 0, ::3] = 0.5 * torch.arange(len(x[0, 1, 0, ::3]))  # ties
    order = orders(kv_heads, width, 3) if permuted else None
    kernel = build(packed.pack_cache(kv_heads, width, fmt, permuted))
    expected = OPS.pack_cache(x, order, name)
    assert (kernel(x, order, np.full(expected.shape, 77, np.uint8))[-1] == expected.numpy()).all()
    for wrong in (float("nan"), float("inf")):
        x[1, 1, 1, width // 2] = wrong
        rows = torch.from_numpy(kernel(x, order, np.zeros(expected.shape, np.uint8))[-1])
        finite = dequantize_cache(rows, fmt, width).isfinite()
        assert bool(finite[0].all()) and not bool(finite[1, 1, 1].all())


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "width", "window", "softcap", "has_sinks", "permuted"),
    [
        ("INT8", 8, 4, 8, 0, 0.0, False, False),
        ("INT8_G32", 4, 2, 80, 3, 0.0, False, True),
        ("INT4", 4, 4, 64, 0, 2.0, False, False),
        ("INT4_G8", 6, 1, 13, 5, 0.0, True, True),
        ("FP8", 6, 2, 12, 5, 0.0, True, False),
        ("FP8_E4M3_G16", 2, 2, 32, 0, 3.0, False, True),
        ("BFP8_G16", 4, 2, 40, 0, 0.0, False, True),
        ("BFP4_G16", 4, 1, 64, 4, 0.0, True, True),
    ],
)
def test_packed_attention(
    name: str, heads: int, kv_heads: int, width: int, window: int, softcap: float, has_sinks: bool, permuted: bool
) -> None:
    fmt, scale = CacheFormat.parse(name), width**-0.5
    kernel = build(packed.packed_attention(heads, kv_heads, width, scale, window, softcap, has_sinks, fmt, permuted))
    sinks = normal(heads, seed=9) if has_sinks else None
    k_order, v_order = (orders(kv_heads, width, seed) if permuted else None for seed in (1, 2))
    for past, new, capacity in [(0, 1, 40), (150, 1, 200), (7, 20, 40)]:
        old = [OPS.pack_cache(normal(2, kv_heads, capacity, width, seed=seed), None, name) for seed in (3, 4)]
        k, v = (OPS.pack_cache(normal(2, kv_heads, new, width, seed=seed), None, name) for seed in (5, 6))
        q, position = normal(2, heads, new, width, seed=7) * 4, torch.arange(past, past + new)
        out = np.full((2, new, heads, width), np.nan, np.float32)
        results = kernel(q, k, v, *old, position, sinks, k_order, v_order, out)
        expected = OPS.packed_attention(
            q, k, v, *old, position, scale, window, softcap, sinks, k_order, v_order, name
        )  # fmt: skip
        assert relative_error(torch.from_numpy(results[-1]), expected) < (TOLERANCE if new == 1 else SPLIT)
        for cache, written, fresh in zip(old, results[3:5], (k, v), strict=True):
            cache[:, :, past : past + new] = fresh
            assert (written == cache.numpy()).all()  # written where it must be and nowhere else


@pytest.mark.parametrize("name", ["INT8", "BFP4_G16"])
def test_special_floats_in_a_packed_cache(name: str) -> None:
    kernel = build(packed.packed_attention(4, 2, 16, 0.3, 0, 0.0, False, CacheFormat.parse(name), False))
    for new in (1, 3):
        for q, k, v in special_attention(4, 2, new, 16, torch.Generator().manual_seed(0)):
            k, v = (OPS.pack_cache(x, None, name) for x in (k, v))
            old = [torch.zeros(1, 2, 3, k.shape[-1], dtype=k.dtype) for _ in range(2)]
            position = torch.arange(new)
            got = run(kernel, q, k, v, *old, position, out=(1, new, 4, 16))
            args = (q, k, v, *old, position, 0.3, 0, 0.0, None, None, None, name)
            check_special(got, OPS.packed_attention(*args), TOLERANCE if new == 1 else SPLIT, name)


def test_it_is_cuda_too() -> None:
    func = packed.packed_attention(32, 8, 128, 0.3, 0, 0.0, False, CacheFormat.parse("INT4"), True)
    for kernel in (func, packed.pack_cache(8, 128, CacheFormat.parse("FP8"), True)):
        report = lockstep.compile.ptxas_report(build(kernel).text)
        assert "0 bytes spill stores" in report
