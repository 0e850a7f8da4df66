"""Kernels of packed caches against the eager operators: every format, ragged heads, both instruction sets.

A kernel for an instruction set that this machine lacks is skipped with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from kernel_cases import build, check_special, normal, orders, special_attention

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.attention import packed as packed_cache
from compressor.codegen.targets import x86
from compressor.formats.cache import CacheFormat
from compressor.formats.layouts.packed_cache import dequantize_cache

OPS = torch.ops.compressor
TOLERANCE = 3e-6  # of the largest output; both sides round float32 sums in different orders


def run(kernel: Any, *operands: Any, out: torch.Tensor) -> torch.Tensor:
    """Call with torch operands (None is left out) and TVM's, the output last."""
    result = tvm.runtime.tensor(out.numpy())
    given = [x for x in operands if x is not None]
    kernel(*(tvm.runtime.tensor(x.contiguous().numpy()) if isinstance(x, torch.Tensor) else x for x in given), result)
    return torch.from_numpy(result.numpy())


@pytest.mark.parametrize(
    ("name", "width", "permuted"),
    [("INT8", 64, False), ("INT4_G8", 37, True), ("FP8", 12, True), ("BFP8_G16", 40, False), ("BFP4_G32", 80, True)],
)
def test_packed_rows_are_those_of_the_operator_byte_for_byte(name: str, width: int, permuted: bool) -> None:
    fmt, kv_heads = CacheFormat.parse(name), 2
    x = normal(2, kv_heads, 40, width, seed=1) * normal(2, kv_heads, 40, 1, seed=2).mul(4).exp()
    x[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-38, 3e38, 1e-7, 1e9])[:, None] * x[0, 0, :6].sign()
    x[0, 1, 0, ::3] = 0.5 * torch.arange(len(x[0, 1, 0, ::3]))  # ties
    order = orders(kv_heads, width, 3) if permuted else None
    kernel = build(packed_cache.pack_cache(kv_heads, width, fmt, permuted), x86.AVX512_VNNI)
    expected = OPS.pack_cache(x, order, name)
    assert torch.equal(run(kernel, x, order, out=torch.full_like(expected, 77)), expected)
    for wrong in (float("nan"), float("inf")):
        x[1, 1, 1, width // 2] = wrong
        got = run(kernel, x, order, out=torch.zeros_like(expected))
        read = values_of(got, order, fmt, width)
        assert not bool(torch.isfinite(read[1, 1, 1, width // 2]))
        assert bool(torch.isfinite(read[0]).all())


def values_of(rows: torch.Tensor, order: torch.Tensor | None, fmt: CacheFormat, width: int) -> torch.Tensor:
    values = dequantize_cache(rows, fmt, width)
    if order is None:
        return values
    return torch.zeros_like(values).scatter(3, order.long()[None, :, None].expand(values.shape), values)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "width", "window", "softcap", "has_sinks", "permuted", "isa"),
    [
        ("INT8", 8, 4, 8, 0, 0.0, False, False, x86.AVX2),
        ("INT8_G32", 4, 2, 80, 3, 0.0, False, True, x86.AVX512_VNNI),
        ("INT4", 4, 4, 64, 0, 2.0, False, False, x86.AVX512_VNNI),
        ("INT4_G8", 6, 1, 13, 5, 0.0, True, True, x86.AVX2),
        ("FP8", 6, 2, 12, 5, 0.0, True, False, x86.AVX512_VNNI),
        ("FP8_E4M3_G16", 2, 2, 32, 0, 3.0, False, True, x86.AVX2),
        ("BFP8_G16", 4, 2, 40, 0, 0.0, False, True, x86.AVX512_VNNI),
        ("BFP4_G16", 4, 1, 64, 4, 0.0, True, True, x86.AVX512_VNNI),
    ],
)
def test_packed_attention(
    name: str,
    heads: int,
    kv_heads: int,
    width: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    permuted: bool,
    isa: Isa,
) -> None:
    fmt, scale = CacheFormat.parse(name), 0.3
    func = packed_cache.packed_attention(heads, kv_heads, width, scale, window, softcap, has_sinks, fmt, permuted)
    kernel = build(func, isa)
    sinks = normal(heads, seed=9) if has_sinks else None
    k_order, v_order = (orders(kv_heads, width, seed) if permuted else None for seed in (1, 2))
    for past, new in [(0, 1), (0, 5), (7, 20), (37, 3), (0, 33), (3, 70), (60, 41)]:  # above 32 in blocks
        old = [OPS.pack_cache(normal(2, kv_heads, 101, width, seed=seed), None, name) for seed in (3, 4)]
        k, v = (OPS.pack_cache(normal(2, kv_heads, new, width, seed=seed), None, name) for seed in (5, 6))
        q, position = normal(2, heads, new, width, seed=7) * 4, torch.arange(past, past + new)
        caches = [tvm.runtime.tensor(cache.numpy()) for cache in old]
        out = torch.full((2, new, heads, width), float("nan"))
        got = run(kernel, q, k, v, *caches, position, sinks, k_order, v_order, out=out)
        args = (q, k, v, *old, position, scale, window, softcap, sinks, k_order, v_order, name)
        expected = OPS.packed_attention(*args)
        assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE
        for cache, written, fresh in zip(old, caches, (k, v), strict=True):
            cache[:, :, past : past + new] = fresh
            assert torch.equal(torch.from_numpy(written.numpy()), cache)  # written where it must be and nowhere else
    generator = torch.Generator().manual_seed(0)
    counts = (3,) if window else (3, 35)  # PyTorch multiplies what a window hides by 0, and has NaN there
    for q, k, v in (one for n in counts for one in special_attention(heads, kv_heads, n, width, generator)):
        new = q.shape[2]
        k, v = (OPS.pack_cache(x, order, name) for x, order in ((k, k_order), (v, v_order)))
        old = [torch.zeros(1, kv_heads, new, k.shape[-1], dtype=k.dtype) for _ in range(2)]
        position, out = torch.arange(new), torch.full((1, new, heads, width), float("nan"))
        got = run(kernel, q, k, v, *map(torch.clone, old), position, sinks, k_order, v_order, out=out)
        args = (q, k, v, *old, position, scale, window, softcap, sinks, k_order, v_order, name)
        check_special(got, OPS.packed_attention(*args), TOLERANCE, name)
