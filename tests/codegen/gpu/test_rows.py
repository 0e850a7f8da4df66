"""Kernels of rows on a CPU in lockstep, against the eager operators: ragged widths, special floats, every format."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from kernel_cases import OPS, TOLERANCE, check_special, random_packed, relative_error, special_norm, special_rows
from lockstep import build, run

from compressor.codegen.gpu import rows
from compressor.formats.format import Format


@pytest.mark.parametrize("width", [7, 64, 172, 2500])
def test_norms(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    weight, bias = torch.randn(width, generator=rng), torch.randn(width, generator=rng)
    rms = build(rows.norm(width, 1e-5, False, False))
    layer = build(rows.norm(width, 1e-5, True, True))
    for tokens in (1, 3):
        x = torch.randn(2, tokens, width, generator=rng) * 5 + 1
        assert relative_error(run(rms, x, weight, out=x.shape), OPS.rms_norm(x, weight, 1e-5)) < TOLERANCE
        expected = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5)
        assert relative_error(run(layer, x, weight, bias, out=x.shape), expected) < TOLERANCE
    x = special_rows(width, rng)
    check_special(run(rms, x, weight, out=x.shape), special_norm(x, weight, None, False), TOLERANCE, "rms_norm")
    expected = special_norm(x, weight, bias, True)
    check_special(run(layer, x, weight, bias, out=x.shape), expected, TOLERANCE, "layer_norm")


@pytest.mark.parametrize(("dtype", "storage"), [(torch.bfloat16, "uint16"), (torch.float16, "float16")])
def test_embedding(dtype: torch.dtype, storage: str) -> None:
    table = torch.randn(50, 140, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([[0, 49, 7], [3, 3, 1]])
    got = run(build(rows.embedding(50, 140, storage)), table, ids, out=(2, 3, 140))
    assert torch.equal(got, table.float()[ids])


@pytest.mark.parametrize(
    "name", ["W8A16", "W4A16_G64", "W3A16_ASYM_G32", "W6A16_C", "NF4_G64", "MXFP4", "NVFP4", "FP8_E4M3", "LUT3",
             "FP6_E2M3_G128", "LUT4_G64", "W5A16_T"],
)  # fmt: skip
def test_packed_embedding(name: str) -> None:
    fmt, pick = Format.parse(name), random.Random(name)
    rng = torch.Generator().manual_seed(len(name))
    count, width = pick.choice([5, 16, 33]), pick.choice([4, 31, 130, 321])
    packed = random_packed(fmt, count, width, rng)
    parts = list(packed.parts.values())
    kernel = build(rows.packed_embedding(count, width, fmt))
    for shape in ((1, 1), (3, 5)):
        ids = torch.randint(count, shape, generator=rng)
        got = run(kernel, ids, *parts, out=(*shape, width))
        torch.testing.assert_close(got, OPS.packed_embedding(ids, parts, name, count, width), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [13, 100])
def test_top_k(n: int) -> None:
    kernel = build(rows.top_k(n, 4))
    x = torch.randn(6, n, generator=torch.Generator().manual_seed(4))
    x[1] = x[1].round()  # ties: the first comes first
    x[2, 5], x[3, :], x[4, 7:] = float("nan"), -float("inf"), float("nan")
    got = kernel(x, np.full((len(x), 4), -1, np.int64))[-1]
    assert torch.equal(torch.from_numpy(got), OPS.top_k(x, 4))
