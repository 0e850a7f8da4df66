"""The linear that skips inputs against its operator in float64: ragged shapes, formats, tokens, special numbers."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import OPS, WIDTHS, build, random_packed, relative_error, run

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.skipping.linear import skipping_linear
from compressor.formats.format import Format
from compressor.formats.packing import skip_inputs

CLOSE = 2e-6  # of the largest output: sums in float32


@pytest.mark.parametrize("isa", WIDTHS, ids=lambda isa: isa.name)
@pytest.mark.parametrize(("name", "rows", "columns"), [
    ("W8A16", 16, 40), ("W8A16", 1100, 96), ("W8A16_G64", 100, 160), ("W4A16_G32", 48, 97), ("W4A16_C", 600, 64),
])  # fmt: skip
def test_skipping_linear(name: str, rows: int, columns: int, isa: Isa) -> None:
    rng = torch.Generator().manual_seed(rows)
    packed = skip_inputs(random_packed(Format.parse(name), rows, columns, rng), torch.rand(columns, generator=rng))
    parts, has_bias = list(packed.parts.values()), rows % 3 == 1
    bias = torch.randn(rows, generator=rng) if has_bias else None
    kernel = build(skipping_linear([rows], columns, packed.format, has_bias, isa), isa)
    for shape in ((1, 1), (1, 2), (1, 7), (3, 5)):  # alone, few by blocks of two and four, and as many as a prompt
        x = torch.randn(*shape, columns, generator=rng)
        given = (x.double(), parts, None if bias is None else bias.double())
        expected = OPS.packed_linear(*given, packed.format.name, columns, rows)
        got = run(kernel, x, *parts, bias, out=(*shape, rows))
        assert relative_error(got, expected) < CLOSE
        for m in range(shape[1]):  # a token has the bits that it has alone
            alone = run(kernel, x[-1:, m : m + 1].contiguous(), *parts, bias, out=(1, 1, rows))
            assert torch.equal(got[-1:, m : m + 1], alone)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_is_skipped(share: float) -> None:
    isa, rng = WIDTHS[0], torch.Generator().manual_seed(3)
    limits = torch.full((70,), 100.0 * share)
    packed = skip_inputs(random_packed(Format.parse("W8A16"), 50, 70, rng), limits)
    kernel = build(skipping_linear([50], 70, packed.format, False, isa), isa)
    for tokens in (1, 7):
        x = torch.randn(1, tokens, 70, generator=rng)
        expected = OPS.packed_linear(x.double(), list(packed.parts.values()), None, packed.format.name, 70, 50)
        got = run(kernel, x, *packed.parts.values(), out=(1, tokens, 50))
        assert bool((got == 0).all()) if share else relative_error(got, expected) < CLOSE


@pytest.mark.parametrize("tokens", [1, 3])
def test_nan_and_infinity_are_not_skipped(tokens: int) -> None:
    isa, rng = WIDTHS[0], torch.Generator().manual_seed(4)
    packed = skip_inputs(random_packed(Format.parse("W4A16_G32"), 40, 64, rng), torch.full((64,), 0.5))
    kernel = build(skipping_linear([40], 64, packed.format, False, isa), isa)
    for value in (float("nan"), float("inf")):
        x = torch.randn(1, tokens, 64, generator=rng)
        x[0, tokens - 1, 33] = value
        expected = OPS.packed_linear(x, list(packed.parts.values()), None, packed.format.name, 64, 40)
        got = run(kernel, x, *packed.parts.values(), out=(1, tokens, 40))
        assert torch.equal(torch.isfinite(got), torch.isfinite(expected))
        assert torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("tokens", [1, 4])
def test_inputs_are_computed_and_a_residual_added(tokens: int) -> None:
    isa, rng, name = WIDTHS[0], torch.Generator().manual_seed(5), "W8A16"
    packed = skip_inputs(random_packed(Format.parse(name), 33, 48, rng), torch.rand(48, generator=rng))
    gated = Prologue("silu", gated=True)
    func = skipping_linear([33], 48, packed.format, False, isa, prologue=gated, has_residual=True)
    gate, up = torch.randn(2, 1, tokens, 48, generator=rng)
    residual = torch.randn(1, tokens, 33, generator=rng)
    got = run(build(func, isa), gate, up, *packed.parts.values(), residual, out=(1, tokens, 33))
    x = torch.nn.functional.silu(gate.double()) * up.double()
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, packed.format.name, 48, 33) + residual
    assert relative_error(got, expected) < CLOSE
