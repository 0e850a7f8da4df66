"""Learned rounding and its descent against plain definitions, the optimum by exhaustion, and any number of threads."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import unpack
from compressor.formats.weights import ChannelScales
from compressor.numerics.learned_rounding import anneal, descend, learn_rounding, neighbours, spread_values
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.range_search import search_grid

FORMATS = ["W2A16_G32", "W4A16_ASYM_G32", "W3A16_C", "FP4_E2M1_G32", "FP6_E3M2_G32", "NF4_G32", "MXFP4"]


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make a weight, and the Hessian of correlated inputs of uneven size; float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5 + torch.eye(columns)
    inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64) @ mix
    inputs *= torch.rand(columns, generator=generator, dtype=torch.float64) + 0.1
    return weight, inputs.T @ inputs / len(inputs)


def grids(weight: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Nearest codes, scales and zeros on searched grids, some of which have negative scales."""
    ones = torch.ones(weight.shape[1])
    return unpack(rtn_quantize(weight.float(), fmt, lambda group, columns: search_grid(group, ones[columns], fmt)))


def loss(W: Tensor, values: Tensor, H: Tensor) -> float:
    return float((((values - W) @ H) * (values - W)).sum())


def all_values(fmt: Format, scales: Tensor, zeros: Tensor | None, row: int, column: int, columns: int) -> list[float]:
    """Every value that one weight can have."""
    size = fmt.columns(columns)
    group = column // size
    one = slice(row, row + 1)
    grid = (scales[one, group : group + 1], None if zeros is None else zeros[one, group : group + 1])
    alone = fmt if fmt.scale_type != "F16" else Format(fmt.weights, ChannelScales())
    codes = torch.arange(fmt.levels, dtype=torch.uint8)
    return [float(spread_values(code.view(1, 1), *grid, alone)) for code in codes]


@pytest.mark.parametrize("name", FORMATS)
def test_neighbours_are_the_nearest_values_on_both_sides(name: str) -> None:
    fmt, (W, _) = Format.parse(name), problem(3, 64)
    nearest, scales, zeros = grids(W, fmt)
    ends = [all_values(fmt, scales, zeros, row, column, 64) for row, column in ((0, 0), (1, 40))]
    W[0, 0], W[1, 40] = 50.0, -50.0  # what lies beyond the grid has one neighbour
    nearest[0, 0], nearest[1, 40] = ends[0].index(max(ends[0])), ends[1].index(min(ends[1]))
    low, high = (spread_values(c, scales, zeros, fmt) for c in neighbours(W, nearest, scales, zeros, fmt))
    for row, column in itertools.product(range(3), range(0, 64, 5)):
        values = all_values(fmt, scales, zeros, row, column, 64)
        weight = float(W[row, column])
        below, above = [v for v in values if v < weight], [v for v in values if v >= weight]
        assert float(low[row, column]) == (max(below) if below else min(values))
        assert float(high[row, column]) == (min(above) if above else max(values))


def test_annealing_is_the_papers() -> None:
    """Equations 21 to 25, by autograd and pow, under Adam as its paper has it (algorithm 1), in float64."""
    (A, H), steps = problem(5, 20), 100
    generator = torch.Generator().manual_seed(1)
    B = torch.rand(5, 20, generator=generator, dtype=torch.float64)
    start = 2 * torch.randn(5, 20, generator=generator, dtype=torch.float64)  # some where h is cut off
    V = start.clone().requires_grad_()
    m, v = torch.zeros_like(start), torch.zeros_like(start)
    for step in range(steps):
        h = (torch.sigmoid(V) * 1.2 - 0.1).clamp(0, 1)
        lost = (((A + B * h) @ H) * (A + B * h)).sum()
        if step >= 0.2 * steps:
            beta = 20 - 2 * math.floor((step / steps - 0.2) / 0.8 * 10)
            lost = lost + 10.0 * (1 - (2 * h - 1).abs().pow(beta)).sum()
        (slope,) = torch.autograd.grad(lost, V)
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope.square()
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
        V = (V - 0.05 * m_hat / (v_hat.sqrt() + 1e-3)).detach().requires_grad_()
    expected = V.detach()
    torch.testing.assert_close(anneal(A, B, start, 2 * H, steps), expected, rtol=1e-8, atol=1e-8)
    assert (expected - start).abs().max() > 1 and ((expected >= 0) != (start >= 0)).any()


def test_learning_comes_near_the_optimum() -> None:
    """Of all 2^10 roundings of each row."""
    fmt, (W, H) = Format.parse("W3A16_C"), problem(20, 10, seed=3)
    nearest, scales, zeros = unpack(rtn_quantize(W.float(), fmt))
    codes = neighbours(W, nearest, scales, zeros, fmt)
    low, high = (spread_values(c, scales, zeros, fmt) for c in codes)
    choices = torch.tensor(list(itertools.product([0.0, 1.0], repeat=10)), dtype=torch.float64)
    errors = low[:, None] + choices * (high - low)[:, None] - W[:, None]  # [rows, choices, in]
    best = float(((errors @ H) * errors).sum(2).amin(1).sum())
    up = learn_rounding(W, H, low, high, 500)
    learned = loss(W, torch.where(up, high, low), H)
    rounded = loss(W, spread_values(nearest, scales, zeros, fmt), H)
    assert best <= learned < best + 0.2 * (rounded - best)


def swept(W: Tensor, H: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Follow the descent's definition: for each row and weight in turn, the whole row's error for every code."""
    Q = spread_values(codes, scales, zeros, fmt)
    for row in range(len(W)):
        values = [all_values(fmt, scales, zeros, row, column, W.shape[1]) for column in range(W.shape[1])]
        for _ in range(12):
            before = Q[row].clone()
            for column in range(W.shape[1]):
                tries = Q[row].repeat(len(values[column]), 1)
                tries[:, column] = torch.tensor(values[column], dtype=torch.float64)
                errors = tries - W[row]
                errors = ((errors @ H) * errors).sum(1).nan_to_num(math.inf)
                if float(errors.min()) < float(errors[tries[:, column] == Q[row, column]][0]) * (1 - 1e-12):
                    Q[row] = tries[errors.argmin()]
            if torch.equal(before, Q[row]):
                break
    return Q


@pytest.mark.parametrize("name", FORMATS)
def test_descent_equals_its_definition(name: str) -> None:
    fmt, (W, H) = Format.parse(name), problem(2, 72)  # more than a block, and a ragged group
    codes, scales, zeros = grids(W, fmt)
    found = spread_values(descend(W, H, codes, scales, zeros, fmt), scales, zeros, fmt)
    assert torch.equal(found, swept(W, H, codes, scales, zeros, fmt))
    assert loss(W, found, H) < loss(W, spread_values(codes, scales, zeros, fmt), H)


def test_the_number_of_threads_changes_nothing() -> None:
    threads, found = torch.get_num_threads(), []
    fmt, (W, H) = Format.parse("W3A16_G32"), problem(70, 640)
    nearest, scales, zeros = grids(W, fmt)
    low, high = neighbours(W, nearest, scales, zeros, fmt)
    ends = [spread_values(codes, scales, zeros, fmt) for codes in (low, high)]
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            up = learn_rounding(W, H, ends[0], ends[1], 8)
            found.append(descend(W, H, torch.where(up, high, low), scales, zeros, fmt))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
