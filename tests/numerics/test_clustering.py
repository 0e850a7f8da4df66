"""Weighted k-means in one dimension: against dynamic programming over all clusterings, and its laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError
from compressor.numerics.clustering import cluster


def loss(x: torch.Tensor, w: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (w.double() * (x[:, :, None] - values[:, None]).double().abs().amin(-1).square()).sum(1)


def least_loss(x: list[float], w: list[float], levels: int) -> float:
    """Of all ways to cut the sorted values into stretches, each rounded to its weighted mean."""
    pairs = sorted(zip(x, w, strict=True))

    def one(i: int, j: int) -> float:
        mass = sum(w for _, w in pairs[i:j])
        mean = sum(x * w for x, w in pairs[i:j]) / mass if mass else 0.0
        return sum(w * (x - mean) ** 2 for x, w in pairs[i:j])

    best = [0.0] + [math.inf] * len(x)
    for _ in range(levels):
        best = [0.0] + [min(best[i] + one(i, j) for i in range(j)) for j in range(1, len(x) + 1)]
    return best[-1]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 14), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_few_weights_get_the_best_values_there_are(columns: int, levels: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(2, columns, generator=rng), torch.rand(2, columns, generator=rng) ** 3
    values = cluster(x, w, levels)
    for row in range(2):
        least = least_loss(x[row].tolist(), w[row].tolist(), levels)
        rounding = float(w[row].sum()) * (float(x.abs().max()) * 2.0**-11) ** 2  # values are float16
        found = float(loss(x, w, values)[row])
        assert found <= least * (1 + 1e-3) + 4 * rounding + 2 * math.sqrt(least * rounding)
    assert bool((values.diff(dim=1) >= 0).all()) and torch.equal(values, values.half().float())


def test_many_normal_weights_come_near_the_best_quantiser() -> None:
    """Max 1960, table I: the least mean squared error of a normal variable with 4, 8 and 16 values."""
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    for levels, least in ((4, 0.1175), (8, 0.03454), (16, 0.009497)):
        mean = float(loss(x, torch.ones_like(x), cluster(x, torch.ones_like(x), levels)).mean()) / 4096
        assert mean == pytest.approx(least, rel=0.03)


def test_it_is_no_worse_than_what_it_starts_from() -> None:
    rng = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, 300, generator=rng), torch.rand(20, 300, generator=rng) ** 4
    plain = cluster(x, torch.ones_like(x), 8)
    weighted = cluster(x, w, 8, plain)
    assert bool((loss(x, w, weighted) <= loss(x, w, plain)).all())
    assert float(loss(x, w, weighted).sum()) < 0.9 * float(loss(x, w, plain).sum())


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 6e4])
def test_adversarial_rows(size: float) -> None:
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * size
    x[0], x[1], x[2, 3:] = 0.0, size, 0.0
    w = torch.ones_like(x)
    w[3], w[4, 7:] = 0.0, 0.0
    values = cluster(x, w, 4)
    assert bool(torch.isfinite(values).all())
    assert not bool(values[0].any())
    assert bool((loss(x, torch.ones_like(x), values)[1:3] <= 200 * (size * 2.0**-10 + 2.0**-25) ** 2).all())
    for bad in (float("nan"), float("inf"), 7e4):
        x[5, 5] = bad
        with pytest.raises(CompressorError, match="NaN, inf"):
            cluster(x, w, 4)
