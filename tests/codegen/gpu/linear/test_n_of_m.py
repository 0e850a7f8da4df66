"""Linears of N:M on a GPU, in lockstep, against the operator: formats, ragged shapes, prologues, several weights."""

from __future__ import annotations

import random

import lockstep
import pytest
import torch
from kernel_cases import OPS, SPLIT, check_special, random_packed, relative_error, special_rows, typical_output
from torch.nn.functional import silu

from compressor.codegen.gpu.experts.packed import packed_routed_linear
from compressor.codegen.gpu.linear.packed import Schedule, fused_linear, supports
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.kernels.experts import Routing
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.format import Format

SMALL = Schedule(Streaming(4, 3, 4), Streaming(2, 2, 2), Tiling(1, 1, 2, 2, 1, 2, 2))


@pytest.mark.parametrize(
    "name", ["W8A16_2:4", "W4A16_G128_2:4", "W4A16_G32_2:4", "W8A16_G64_1:4", "W4A16_C_2:8", "W8A16_4:8", "W4A16_C_1:8",
             "W8A16_C_1:16"],
)  # fmt: skip
def test_formats(name: str) -> None:
    fmt, pick = Format.parse(name), random.Random(name)
    assert not supports(fmt)
    rng = torch.Generator().manual_seed(pick.randrange(1 << 30))
    rows, columns = pick.randint(1, 70), 16 * pick.randint(1, 40)
    packed = random_packed(fmt, rows, columns, rng)
    bias = torch.randn(rows, generator=rng) if pick.random() < 0.5 else None
    kernel = lockstep.build(fused_linear([rows], columns, fmt, bias is not None, SMALL))
    args = (list(packed.parts.values()), bias, fmt.name, columns, rows)
    for batch, tokens in [(1, 1), (1, 3), (3, 5), (1, 23)]:
        x = torch.randn(batch, tokens, columns, generator=rng)
        got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(batch, tokens, rows))
        error = relative_error(got, OPS.packed_linear(x, *args), typical_output(x, packed))
        assert error < SPLIT, (rows, columns, tokens)
    x = special_rows(columns, rng)
    got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(1, x.shape[1], rows))
    check_special(got, OPS.packed_linear(x, *args), SPLIT, (rows, columns), x)
