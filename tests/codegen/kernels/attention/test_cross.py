"""Attention over a source against the eager operator: one token and several, padding anywhere, shared heads."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import OPS, TOLERANCE, build, relative_error, run

from compressor.codegen.kernels.attention.cross import cross_attention
from compressor.codegen.targets import x86


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "softcap", "isa"),
    [(4, 4, 16, 0.0, x86.AVX512_VNNI), (6, 2, 12, 0.0, x86.AVX2), (4, 2, 16, 3.0, x86.AVX512_VNNI)],
)
def test_cross_attention(heads: int, kv_heads: int, width: int, softcap: float, isa: object) -> None:
    rng = torch.Generator().manual_seed(width)
    kernel = build(cross_attention(heads, kv_heads, width, 0.3, softcap), isa)
    for new, length in [(1, 1), (1, 7), (1, 70), (5, 3), (40, 130)]:
        q = torch.randn(2, heads, new, width, generator=rng) * 4
        k, v = (torch.randn(2, kv_heads, length, width, generator=rng) for _ in range(2))
        mask = torch.ones(2, length)
        mask[1, : length // 3], mask[0, length - length // 2 :] = 0, 0
        got = run(kernel, q, k, v, mask, out=(2, new, heads, width))
        assert relative_error(got, OPS.masked_attention(q, k, v, mask, 0.3, softcap=softcap)) < TOLERANCE
        batch = [run(kernel, *(x[i : i + 1] for x in (q, k, v, mask)), out=(1, new, heads, width)) for i in (0, 1)]
        assert torch.equal(torch.cat(batch), got)  # no entry of a batch sees another
