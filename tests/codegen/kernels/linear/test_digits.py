"""Float activations as two digits of eight bits, on ARM under qemu, against a sequential reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import OPS, SPECIAL, TOLERANCE, build, check_special, random_packed, run, special_rows, tolerance

from compressor.codegen import neon
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import digits, packed
from compressor.formats.format import Format
from compressor.formats.packing import dequantize


def rounded(x: torch.Tensor, span: int) -> torch.Tensor:
    """Round activations to multiples of a span's largest, divided by 127 * 255 + 127, and put the digits together."""
    found = np.zeros(x.shape)
    for at in np.ndindex(*x.shape[:-1]):
        for first in range(0, x.shape[-1], span):
            values = x[at][first : first + span].numpy()
            scale = np.abs(values).max() * np.float32(1 / 32512)
            whole = np.rint(values * (np.float32(1) / scale if scale > 1e-30 else np.float32(0)))
            upper = np.rint(whole / 255)
            lower = whole - 255 * upper
            assert np.abs(upper).max() <= 127 and np.abs(lower).max() <= 127
            found[at][first : first + span] = scale.astype(np.float64) * (255 * upper + lower)
    return torch.from_numpy(found)


@pytest.mark.parametrize(("name", "rows", "columns", "span", "isa"), [
    ("W4A16_G128", 48, 300, 128, neon.DOTPROD), ("W8A16", 33, 140, 128, neon.I8MM),
    ("W3A16_ASYM_G32", 20, 69, 32, neon.NEON), ("W8A16_ASYM_G64", 16, 200, 64, neon.DOTPROD),
    ("W2A16_G16_S5", 35, 90, 16, neon.I8MM), ("W4A16_G256", 16, 300, 128, neon.I8MM),
], ids=lambda value: getattr(value, "name", None))  # fmt: skip
def test_products_are_those_of_rounded_activations(name: str, rows: int, columns: int, span: int, isa: Isa) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    weight = random_packed(fmt, rows, columns, rng)
    schedule = packed.gemm_space(-(-rows // 16), 1, fmt, isa)[0]
    kernel = build(packed.packed_linear(rows, columns, fmt, False, isa, schedule), isa)
    x = torch.randn(1, 40, columns, generator=rng)
    x[0, 3], x[0, 5], x[0, 6, 8] = 0, x[0, 5] * 1e-6, 100
    whole = run(kernel, x, *weight.parts.values(), out=(1, 40, rows))
    if "_S" not in name:  # single weights multiply activations as they come
        expected = rounded(x, span) @ dequantize(weight).double().T
        sizes = x.abs().double() @ dequantize(weight).abs().double().T
        assert float(((whole - expected).abs() / sizes.clamp(min=1e-30)).max()) < TOLERANCE
    expected = OPS.packed_linear(x, list(weight.parts.values()), None, name, columns, rows)
    for row in {*range(40)} - {6}:
        error = (whole[0, row] - expected[0, row]).abs().max() / expected[0, row].abs().max().clamp(min=1e-30)
        assert float(error) < tolerance(fmt, isa), row
    # An outlier widens the steps of its span's activations, whose errors it outweighs.
    error = (whole[0, 6] - expected[0, 6]).abs().max() / expected[0, 6].abs().max()
    assert float(error) < 5 * tolerance(fmt, isa)
    for tokens in (1, 2, 7, 9, 32):
        assert torch.equal(run(kernel, x[:, :tokens], *weight.parts.values(), out=(1, tokens, rows)), whole[:, :tokens])


@pytest.mark.parametrize("isa", neon.ISAS.values(), ids=lambda isa: isa.name)
def test_special_floats_of_every_row(isa: Isa) -> None:
    fmt, rng = Format.parse("W4A16_ASYM_G32"), torch.Generator().manual_seed(0)
    weight, x = random_packed(fmt, 16, 70, rng), special_rows(70, rng).repeat(1, 6, 1)
    kernel = build(packed.packed_linear(16, 70, fmt, False, isa, packed.gemm_space(1, 1, fmt, isa)[0]), isa)
    for given in (*x[:, : len(SPECIAL)].split(1, 1), x):
        got = run(kernel, given, *weight.parts.values(), out=(1, given.shape[1], 16))
        expected = OPS.packed_linear(given, list(weight.parts.values()), None, fmt.name, 70, 16)
        check_special(got, expected, tolerance(fmt, isa), isa.name, given)


def test_formats_that_have_digits() -> None:
    names = ["W4A16_G128", "W8A16_G32_P4", "W4A16_S10", "W4A8_G128", "FP6_E2M3_G128", "NF4_G64", "W8A16_B16x1@60"]
    assert [digits.reads(Format.parse(name), neon.DOTPROD) for name in names] == [True] * 3 + [False] * 4
