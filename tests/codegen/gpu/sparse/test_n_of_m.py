"""Linears of N:M on a GPU, in lockstep, against the operator: formats, ragged shapes, prologues, several weights."""

from __future__ import annotations

import random

import lockstep
import pytest
import torch
from kernel_cases import OPS, SPLIT, check_special, random_packed, relative_error, special_rows, typical_output
from torch.nn.functional import silu

from compressor.codegen.gpu.experts.kernel import packed_routed_linear
from compressor.codegen.gpu.linear.kernel import Schedule
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.gpu.sparse.n_of_m import n_of_m_linear, supports
from compressor.codegen.kernels.experts import Routing
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.format import Format

SMALL = Schedule(Streaming(4, 3, 4), *[Streaming(2, 2, 2)] * 2, *[Tiling(1, 1, 2, 2, 1, 2, 2)] * 2)


@pytest.mark.parametrize(
    "name", ["W8A16_2:4", "W4A16_G128_2:4", "W4A16_C_2:8", "W8A16_C_1:8"],
)  # fmt: skip
def test_formats(name: str) -> None:
    fmt, pick = Format.parse(name), random.Random(name)
    assert not supports(fmt)
    rng = torch.Generator().manual_seed(pick.randrange(1 << 30))
    rows, columns = pick.randint(1, 70), 16 * pick.randint(1, 40)
    packed = random_packed(fmt, rows, columns, rng)
    bias = torch.randn(rows, generator=rng) if pick.random() < 0.5 else None
    kernel = lockstep.build(n_of_m_linear([rows], columns, fmt, bias is not None, schedule=SMALL))
    args = (list(packed.parts.values()), bias, fmt.name, columns, rows)
    for batch, tokens in [(1, 1), (1, 3), (3, 5), (1, 23)]:
        x = torch.randn(batch, tokens, columns, generator=rng)
        got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(batch, tokens, rows))
        error = relative_error(got, OPS.packed_linear(x, *args), typical_output(x, packed))
        assert error < SPLIT, (rows, columns, tokens)
    x = special_rows(columns, rng)
    got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(1, x.shape[1], rows))
    check_special(got, OPS.packed_linear(x, *args), SPLIT, (rows, columns), x)


def test_several_weights_share_computed_inputs() -> None:
    rng, fmt, rows = torch.Generator().manual_seed(5), Format.parse("W8A16_2:4"), [33, 16]
    packed = [random_packed(fmt, n, 48, rng) for n in rows]
    kernel = lockstep.build(n_of_m_linear(rows, 48, fmt, False, schedule=SMALL, prologue=Prologue("silu", gated=True)))
    stored = [part for weight in packed for part in weight.parts.values()]
    for tokens in (1, 6, 20):
        gate, up = torch.randn(2, 1, tokens, 48, generator=rng)
        got = kernel(gate, up, *stored, *(torch.full((1, tokens, n), torch.nan) for n in rows))[-2:]
        x = silu(gate) * up
        for weight, found in zip(packed, got, strict=True):
            expected = OPS.packed_linear(x, list(weight.parts.values()), None, fmt.name, 48, weight.shape[0])
            assert relative_error(torch.from_numpy(found), expected) < SPLIT


def test_experts() -> None:
    rng, fmt = torch.Generator().manual_seed(6), Format.parse("W4A16_G32_2:4")
    weights = [random_packed(fmt, 24, 128, rng) for _ in range(3)]
    parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in weights), strict=True)]
    kernel = lockstep.build(packed_routed_linear(Routing(3, 1, False), 24, 128, fmt, False, SMALL))
    for tokens in (1, 7):
        x, index = torch.randn(tokens, 128, generator=rng), torch.arange(tokens)[:, None] % 3
        got = lockstep.run(kernel, x, index, *parts, out=(tokens, 1, 24))
        assert relative_error(got, OPS.packed_routed_linear(x, index, parts, None, fmt.name, 128, 24)) < SPLIT


def test_damaged_numbers_write_nothing_outside() -> None:
    """A row whose numbers name no choice has wrong outputs; other rows have right ones."""
    fmt, rng = Format.parse("W4A16_C_2:8"), torch.Generator().manual_seed(0)
    packed, x = random_packed(fmt, 20, 96, rng), torch.randn(1, 1, 96, generator=rng)
    kernel = lockstep.build(n_of_m_linear([20], 96, fmt, False, schedule=SMALL))
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, fmt.name, 96, 20)
    parts = {key: part.clone() for key, part in packed.parts.items()}
    parts["patterns"][0, :, 3] = -1
    got = lockstep.run(kernel, x, *parts.values(), out=(1, 1, 20))
    wrong = torch.arange(20) == 3
    assert relative_error(got[..., ~wrong], expected[..., ~wrong]) < SPLIT and bool(torch.isfinite(got).all())


def test_patterns_without_a_kernel_are_named() -> None:
    assert "not 3:4; take 2:4" in supports(Format.parse("W8A16_3:4"))
    assert "not 1:2; take 2:4" in supports(Format.parse("W8A16_1:2"))
    assert not supports(Format.parse("W8A16_2:4"))
