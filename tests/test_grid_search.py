"""Searched grids against min-max grids, and against what they promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.formats import Format
from compressor.grid_search import search_grid
from compressor.packing import choose_grid, grid_values, round_to_grid


def error(weight: Tensor, importance: Tensor, grid: tuple[Tensor, Tensor | None], fmt: Format) -> Tensor:
    difference = weight - grid_values(round_to_grid(weight, *grid, fmt), *grid, fmt)
    return difference.square() @ importance


@pytest.mark.parametrize("name", ["W4A16_G32", "W3A16_ASYM_G32", "W2A16_G32", "W8A8", "W4A16_T", "W4A16_ASYM_T",
                                  "BIP1A16_G32", "BIP3A16_G32", "BIP4A16_T", "BAL2A16_G32"])  # fmt: skip
def test_never_worse_than_min_max_and_better_for_few_bits(name: str) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(50, 32, generator=generator), torch.rand(32, generator=generator) + 0.1
    searched = error(weight, importance, search_grid(weight, importance, fmt), fmt)
    plain = error(weight, importance, choose_grid(weight, fmt), fmt)
    if fmt.strategy == "tensor":
        searched, plain = searched.sum(), plain.sum()
    assert (searched <= plain * (1 + 1e-5)).all()
    if fmt.bits < 8:
        assert searched.sum() < 0.97 * plain.sum()


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
