"""Codes in two planes by GPTQ: against the sequential definition, and better for the upper halves than rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import dequantize, unpack
from compressor.numerics.grids import choose_grid
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.planes import upper_weight
from compressor.passes.gptq import gptq_quantize


def problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Make a weight and the Hessian of correlated inputs of uneven size."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mix
    inputs *= torch.rand(columns, generator=generator) + 0.1
    return weight, 2 / len(inputs) * inputs.T @ inputs


def sequential(weight: Tensor, hessian: Tensor, fmt: Format, damp: float) -> Tensor:
    """Follow the definition column by column and weight by weight; both copies are compensated by what is left of H."""
    H = hessian.double() + damp * hessian.diagonal().double().mean() * torch.eye(len(hessian), dtype=torch.float64)
    fine, coarse, size = weight.double().clone(), weight.double().clone(), fmt.columns(len(H))
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for q in range(len(H)):
        first = q // size * size
        scales, _ = choose_grid(weight[:, first : first + size], fmt)
        Hinv = torch.linalg.inv(H[q:, q:])
        for r, scale in enumerate(scales.double()):

            def errors(code: int, r: int = r, scale: Tensor = scale, q: int = q) -> tuple[Tensor, Tensor]:
                return fine[r, q] - (code - 128) * scale, coarse[r, q] - (code // 16 * 16 + 8 - 128) * scale

            nearest = min(range(256), key=lambda code: abs(errors(code)[0]))
            cell = min(range(16), key=lambda cell: abs(errors(16 * cell)[1]))
            inside = min(range(16 * cell, 16 * cell + 16), key=lambda code: abs(errors(code)[0]))
            best = min((nearest, inside), key=lambda code: 2 * errors(code)[0] ** 2 + errors(code)[1] ** 2)
            codes[r, q], found = best, errors(best)
            fine[r, q:] -= found[0] / Hinv[0, 0] * Hinv[0]
            coarse[r, q:] -= found[1] / Hinv[0, 0] * Hinv[0]
    return codes


@pytest.mark.parametrize("name", ["W8A16_P4", "W8A8_G32_P4"])
def test_codes_are_those_of_the_definition(name: str) -> None:
    weight, hessian = problem(6, 64)
    packed, info = gptq_quantize(
        weight, hessian, Format.parse(name), actorder=False, observer="minmax", dampening_frac=0.01, blocksize=32
    )
    assert info.method == "gptq" and torch.equal(unpack(packed)[0], sequential(weight, hessian, packed.format, 0.01))


def test_upper_halves_have_smaller_errors_than_those_of_rounding() -> None:
    weight, hessian = problem(48, 96)
    fmt = Format.parse("W8A8_G32_P4")

    def loss(found: Tensor) -> float:
        error = weight.double() - found.double()
        return float((error @ hessian.double() * error).sum())

    packed, info = gptq_quantize(weight, hessian, fmt, observer="minmax")
    upper, rounded = (loss(dequantize(upper_weight(found))) for found in (packed, rtn_quantize(weight, fmt)))
    assert upper < 0.6 * rounded and loss(dequantize(packed)) < upper / 4
    whole = (loss(dequantize(packed)) + upper) / loss(torch.zeros_like(weight))
    assert info.error == pytest.approx(whole, rel=1e-6) and info.error < info.rtn_error
