"""The dense linear on a GPU, in lockstep, against PyTorch in float64."""

from __future__ import annotations

import random

import lockstep
import pytest
import torch
from kernel_cases import SPLIT, TOLERANCE, relative_error
from torch.nn.functional import linear

from compressor.codegen.gpu.linear.dense import dense_linear
from compressor.codegen.gpu.linear.kernel import Schedule
from compressor.codegen.gpu.linear.shares import Streaming, Tiling

STORED = {"float16": torch.float16, "uint16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("columns", [512, 199])
def test_storage_types(storage: str, columns: int) -> None:
    """Weights of each type, aligned and ragged, for one token, a few and many."""
    pick, rng = random.Random(storage), torch.Generator().manual_seed(columns)
    rows, has_bias = pick.randint(20, 90), columns == 199
    many = Tiling(2, 1, 2, 1, 2, 3, pick.choice([1, 2]))
    schedule = Schedule(Streaming(4, 3, 4), Streaming(2, 3, 2), Streaming(2, 2, 2, 2), many, many)
    weight = torch.randn(rows, columns, generator=rng).to(STORED[storage])
    bias = torch.randn(rows, generator=rng) if has_bias else None
    kernel = lockstep.build(dense_linear(rows, columns, storage, has_bias, schedule))
    for batch, tokens in [(1, 1), (1, 3), (2, 6), (1, 20)]:
        x = torch.randn(batch, tokens, columns, generator=rng)
        got = lockstep.run(kernel, x, weight, bias, out=(batch, tokens, rows))
        expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert relative_error(got, expected) < (SPLIT if storage == "uint16" else TOLERANCE), tokens


@pytest.mark.parametrize("storage", STORED)
def test_special_floats(storage: str) -> None:
    """Large and small numbers are computed, and what is not finite spreads over its token only."""
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 64, generator=rng).to(STORED[storage])
    kernel = lockstep.build(dense_linear(24, 64, storage, False, Schedule()))
    x = torch.randn(1, 5, 64, generator=rng)
    for token, value in enumerate((float("nan"), float("inf"), 1e36, 1e-40, 0.0)):
        x[0, token, 7] = value
    x[0, 4] = 0.0
    for given in (x, x.repeat(1, 4, 1)):
        got = lockstep.run(kernel, given, weight, out=(1, given.shape[1], 24))
        expected = linear(given.double(), weight.double())
        assert not torch.isfinite(got[0, :2]).any()
        for token in range(2, 5):
            assert relative_error(got[:, token], expected[:, token], 1e-30) < SPLIT, token
