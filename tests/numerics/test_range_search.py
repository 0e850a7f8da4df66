"""Searched grids against min-max grids, and against what they promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.numerics.grids import choose_grid, grid_values, round_to_grid
from compressor.numerics.range_search import search_grid


def error(weight: Tensor, importance: Tensor, grid: tuple[Tensor, Tensor | None], fmt: Format) -> Tensor:
    difference = weight - grid_values(round_to_grid(weight, *grid, fmt), *grid, fmt)
    return difference.square() @ importance


@pytest.mark.parametrize("name", [
    "W4A16_G32", "W3A16_ASYM_G32", "W2A16_G32", "W8A8", "W4A16_T", "W4A16_ASYM_T", "W4A16_B32", "BIP1A16_G32",
    "BIP3A16_G32", "BIP4A16_T", "BAL2A16_G32",
])  # fmt: skip
def test_never_worse_than_min_max_and_better_for_few_bits(name: str) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(50, 32, generator=generator), torch.rand(32, generator=generator) + 0.1
    searched = error(weight, importance, search_grid(weight, importance, fmt), fmt)
    plain = error(weight, importance, choose_grid(weight, fmt), fmt)
    rows = fmt.grid_rows(len(weight))
    searched, plain = (torch.stack([part.sum() for part in each.split(rows)]) for each in (searched, plain))
    assert (searched <= plain * (1 + 1e-5)).all()
    if fmt.bits < 8:
        assert searched.sum() < 0.97 * plain.sum()


@pytest.mark.parametrize("name", ["W3A16_G32", "W2A16_ASYM_G32", "FP4_E2M1_G32", "W4A16_T", "W4A16_ASYM_T"])
def test_with_a_matrix_the_grid_is_the_best_of_all_that_are_tried(name: str) -> None:
    fmt, generator = Format.parse(name), torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(21, 27, generator=generator), torch.randn(40, 27, generator=generator)
    weight *= torch.rand(21, 1, generator=generator)
    inputs += 2 * inputs[:, :1]
    hessian = inputs.t() @ inputs

    def loss(grid: tuple[Tensor, Tensor | None]) -> Tensor:
        """Of each row, with what the search adds to the diagonal."""
        difference = (weight - grid_values(round_to_grid(weight, *grid, fmt), *grid, fmt)).double()
        matrix = hessian.double() + 1e-3 * hessian.diagonal().double().mean() * torch.eye(27, dtype=torch.float64)
        each = ((difference @ matrix) * difference).sum(1)
        return each.sum()[None] if fmt.strategy == "tensor" else each

    tried = [loss(choose_grid(weight, fmt))]
    rows = weight.reshape(1, -1).expand(21, -1) if fmt.strategy == "tensor" else weight
    for percent in (100, *range(40, 121, 2)):
        if fmt.symmetric:
            top = fmt.element.max_value if fmt.element else fmt.zero_point
            extreme = rows.gather(1, rows.abs().argmax(1, keepdim=True))[:, 0]
            scale = (extreme * (percent / 100 / top)).half().float()
            tried += [loss((sign * scale, None)) for sign in (1, -1)]
        else:
            ends = torch.stack([rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)], 1) * (percent / 100)
            scale = ((ends[:, 1] - ends[:, 0]) / (fmt.levels - 1)).half().float()
            tried.append(loss((scale, torch.round(-ends[:, 0] / scale).clamp(0, fmt.levels - 1).to(torch.uint8))))
    found = loss(search_grid(weight, hessian, fmt))
    torch.testing.assert_close(found, torch.stack(tried).amin(0), rtol=2e-4, atol=0)
    assert found.sum() < 0.97 * tried[0].sum()


def test_a_diagonal_matrix_is_no_worse_than_its_diagonal() -> None:
    fmt, generator = Format.parse("W3A16_G32"), torch.Generator().manual_seed(0)
    weight, importance = torch.randn(50, 32, generator=generator), torch.rand(32, generator=generator) + 0.1
    finer = error(weight, importance, search_grid(weight, torch.diag(importance), fmt), fmt)
    coarser = error(weight, importance, search_grid(weight, importance, fmt), fmt)
    assert finer.sum() < coarser.sum() and (finer <= 1.02 * coarser).all()


def test_the_largest_weight_is_met_whatever_its_sign() -> None:
    weight = torch.tensor([[8.0, -7, 1], [-8.0, 7, 1]])
    scales, zeros = search_grid(weight, torch.ones(3), Format.parse("W4A16_C"))
    assert torch.equal(scales, torch.tensor([-1.0, 1.0], dtype=torch.float16))
    assert zeros is None


def test_of_one_bit_the_mean_size_is_found() -> None:
    """The least squares of +-a: a is the mean of |w| (Rastegari et al. 2016, eq. 6); tries are 6% apart."""
    weight, fmt = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)), Format.parse("BIP1A16_C")
    scales, _ = search_grid(weight, torch.ones(128), fmt)
    assert torch.allclose(scales / 2, weight.abs().mean(1), rtol=0.035)


def test_zeros_without_any_importance_give_a_usable_grid() -> None:
    scales, _ = search_grid(torch.zeros(3, 8), torch.zeros(8), Format.parse("W4A16_C"))
    assert torch.equal(scales, torch.ones(3, dtype=torch.float16))
    scales, _ = search_grid(torch.zeros(3, 8), torch.zeros(8, 8), Format.parse("W4A16_C"))
    assert torch.equal(scales, torch.ones(3, dtype=torch.float16))
