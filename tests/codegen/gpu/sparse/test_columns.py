"""Linears that leave columns out on a GPU, in lockstep, against the operator: formats, shapes, tokens, damaged bits."""

from __future__ import annotations

import random

import lockstep
import pytest
import torch
from kernel_cases import (
    OPS,
    SPLIT,
    TOLERANCE,
    check_special,
    random_packed,
    relative_error,
    special_rows,
    typical_output,
)
from torch.nn.functional import silu

from compressor.codegen.gpu.experts.kernel import supports as experts
from compressor.codegen.gpu.linear.kernel import Schedule
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.gpu.sparse.columns import column_blocks_linear, supports
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.format import Format

SMALL = Schedule(Streaming(2, 2, 4), *[Streaming(1, 3, 2)] * 2, *[Tiling(1, 1, 2, 2, 1, 2, 2)] * 2)


@pytest.mark.parametrize(
    "name", ["W8A8_B16x1@80", "W4A8_ASYM_G64_B16x1@50", "W4A16_G64_B16x1@70", "W3A16_ASYM_C_B16x1@30",
             "W8A8_B32x64@60"],
)  # fmt: skip
def test_formats(name: str) -> None:
    fmt, pick = Format.parse(name), random.Random(name)
    assert not supports(fmt)
    rng = torch.Generator().manual_seed(pick.randrange(1 << 30))
    rows, columns = pick.randint(1, 70), pick.randint(20, 2500)
    packed = random_packed(fmt, rows, columns, rng)
    bias = torch.randn(rows, generator=rng) if pick.random() < 0.5 else None
    kernel = lockstep.build(column_blocks_linear([rows], columns, fmt, bias is not None, schedule=SMALL))
    args = (list(packed.parts.values()), bias, fmt.name, columns, rows)
    for batch, tokens in [(1, 1), (1, 3), (3, 7)]:
        x = torch.randn(batch, tokens, columns, generator=rng)
        x[0, 0] *= 0.0 if tokens == 3 else 1.0  # a token of zeros has no scale
        got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(batch, tokens, rows))
        error = relative_error(got, OPS.packed_linear(x, *args), typical_output(x, packed))
        assert error < (TOLERANCE if fmt.integer_products else SPLIT), (rows, columns, tokens)
    x = special_rows(columns, rng)
    got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(1, x.shape[1], rows))
    check_special(got, OPS.packed_linear(x, *args), SPLIT, (rows, columns), x)


def test_several_weights_share_computed_inputs() -> None:
    rng, fmt, rows = torch.Generator().manual_seed(5), Format.parse("W8A16_B16x1@60"), [33, 16]
    packed = [random_packed(fmt, n, 90, rng) for n in rows]
    prologue = Prologue("silu", gated=True)
    kernel = lockstep.build(column_blocks_linear(rows, 90, fmt, False, schedule=SMALL, prologue=prologue))
    stored = [part for weight in packed for part in weight.parts.values()]
    for tokens in (1, 9):
        gate, up = torch.randn(2, 1, tokens, 90, generator=rng)
        got = kernel(gate, up, *stored, *(torch.full((1, tokens, n), torch.nan) for n in rows))[-2:]
        x = silu(gate) * up
        for weight, found in zip(packed, got, strict=True):
            expected = OPS.packed_linear(x, list(weight.parts.values()), None, fmt.name, 90, weight.shape[0])
            assert relative_error(torch.from_numpy(found), expected) < SPLIT


def test_wrong_bits_write_nothing_outside() -> None:
    """A tile that says that it keeps all columns, or none, has wrong outputs; other tiles have right ones."""
    fmt, rng = Format.parse("W8A8_B16x1@80"), torch.Generator().manual_seed(0)
    packed, x = random_packed(fmt, 48, 200, rng), torch.randn(1, 1, 200, generator=rng)
    kernel = lockstep.build(column_blocks_linear([48], 200, fmt, False, schedule=SMALL))
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, fmt.name, 200, 48)
    for wrong in (255, 0):
        parts = {name: part.clone() for name, part in packed.parts.items()}
        parts["kept"][1] = wrong
        got = lockstep.run(kernel, x, *parts.values(), out=(1, 1, 48))
        right = torch.arange(48) // 16 != 1
        assert relative_error(got[..., right], expected[..., right]) < TOLERANCE
        assert bool(torch.isfinite(got).all()) and bool((got[..., ~right] == 0).all()) == (wrong == 0)


def test_formats_without_a_kernel_are_named() -> None:
    assert "blocks of 32x4 are of convolutions" in supports(Format.parse("W8A8_STATIC_B32x4@30"))
    assert "no tables of values for each row, as LUT4_G64" in supports(Format.parse("LUT4_G64_B16x1@60"))
    assert "experts on a GPU do not leave columns out" in experts(Format.parse("W8A8_B16x1@60"))
