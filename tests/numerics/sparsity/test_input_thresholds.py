"""Thresholds are quantiles; greedy shares meet the budget and are no worse than uniform ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.numerics.sparsity.input_thresholds import MOST_SHARE, Sizes, greedy_shares, skipped


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_thresholds_skip_the_share_that_is_asked_for(share: float) -> None:
    rng = torch.Generator().manual_seed(1)
    rows, norms = torch.randn(200, 32, generator=rng), torch.rand(32, generator=rng) + 0.1
    limits = Sizes(rows, norms).thresholds(share)
    assert skipped(rows, limits) == pytest.approx(share, abs=1 / rows.numel())
    order = (rows.abs() * norms).flatten().sort().values  # what is skipped counts least
    kept = rows.abs() >= limits
    assert share == 0 or (rows.abs() * norms)[kept].min() >= order[round(share * rows.numel())] * (1 - 1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.floats(0.05, MOST_SHARE), st.integers(0, 1000))
def test_greedy_shares(sizes: list[int], share: float, seed: int) -> None:
    costs = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()

    def error(shares: Sequence[float]) -> float:
        return sum(cost * size * part**2 for cost, size, part in zip(costs, sizes, shares, strict=True))

    shares = greedy_shares(sizes, share, error)
    skips = sum(size * part for size, part in zip(sizes, shares, strict=True))
    assert skips == pytest.approx(share * sum(sizes), rel=1e-5)
    assert all(0 <= part <= MOST_SHARE + 1e-9 for part in shares)
    assert error(shares) <= error([share] * len(sizes)) * (1 + 1e-9)


def test_greedy_spares_what_costs_more() -> None:
    shares = greedy_shares([10, 10], 0.4, lambda s: 100 * s[0] ** 2 + s[1] ** 2)
    assert shares[0] == pytest.approx(0, abs=0.11) and shares[1] > 0.7
