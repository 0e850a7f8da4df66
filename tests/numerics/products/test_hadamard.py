"""Orthogonal matrices: against scipy's and the definition, even entries, and the same bits on any number of threads."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from compressor.numerics.products.hadamard import factors, is_hadamard, random_signs, rotate


def product(width: int) -> Tensor:
    return reduce(torch.kron, factors(width), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("width", [1, 2, 8, 64, 512])
def test_powers_of_two_are_sylvesters(width: int) -> None:
    expected = torch.tensor(hadamard(width), dtype=torch.float64) / width**0.5
    assert torch.allclose(product(width), expected, atol=1e-14, rtol=0)
    assert is_hadamard(width)


@pytest.mark.parametrize(("width", "even"), [
    (12, True), (20, True), (28, True), (36, True), (60, True), (104, True), (576, True), (896, True),  # Paley's
    (3, False), (10, False), (52, False), (92, False), (100, False),  # Hartley's
])  # fmt: skip
def test_other_widths_are_orthogonal_and_spread_evenly(width: int, even: bool) -> None:
    matrix = product(width)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(width, dtype=torch.float64), atol=1e-13, rtol=0)
    assert torch.allclose(matrix[:, 0], torch.tensor(width**-0.5, dtype=torch.float64), atol=1e-14, rtol=0)
    assert is_hadamard(width) == even
    largest = float(matrix.abs().max()) * width**0.5
    assert largest == pytest.approx(1) if even else largest < 2**0.5 + 1e-12


@pytest.mark.parametrize(("width", "blocks"), [(1, 3), (16, 1), (64, 2), (12, 4), (24, 1), (10, 3), (7, 1)])
def test_rotation_is_the_product_with_the_whole_matrix(width: int, blocks: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x, signs = torch.randn(5, 2, width * blocks, generator=rng), random_signs(width * blocks, rng)
    R = torch.diag(signs) @ torch.kron(torch.eye(blocks, dtype=torch.float64), product(width))
    assert torch.allclose(rotate(x, signs, width), x.double() @ R, atol=1e-13, rtol=0)
    assert set(signs.tolist()) <= {1.0, -1.0}
    assert rotate(x.to("meta"), signs, width).shape == x.shape


def test_an_outlier_is_spread_over_all_channels() -> None:
    x = torch.zeros(1, 256)
    x[0, 77] = 16.0
    spread = rotate(x, random_signs(256, torch.Generator().manual_seed(0)), 256).abs()
    assert torch.allclose(spread, torch.ones_like(spread), atol=1e-12, rtol=0)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            rng, signs = torch.Generator().manual_seed(0), torch.ones(2048, dtype=torch.float64)
            found.append([rotate(torch.randn(301, n, generator=rng), signs[:n], w) for n, w in (
                (2048, 2048), (896, 896), (70, 10), (300, 100),
            )])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
