"""Intervals of means over text: against scipy, and against the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from missing import skip_or_fail

from compressor.evaluate.mean import BlockMean, Mean

AGREED = torch.ones(500, dtype=torch.float64)


def block_mean(values: np.ndarray, parts: int = 3) -> BlockMean:
    mean = BlockMean()
    for part in np.array_split(values, parts):
        mean.add(torch.from_numpy(part))
    return mean


@pytest.mark.parametrize("count", [70, 2_000, 100_001])
def test_the_interval_is_scipy_s_bootstrap_over_blocks(count: int) -> None:
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        skip_or_fail(error)
    mean = block_mean(np.random.default_rng(1).exponential(size=count))
    expected = bootstrap(
        mean.blocks(), lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis), paired=True, vectorized=True,
        n_resamples=5_000, method="percentile", rng=np.random.default_rng(7),
    )  # fmt: skip
    low, high = expected.confidence_interval
    assert mean.interval == pytest.approx((low, high), abs=0.06 * (high - low))
    assert mean.interval == block_mean(np.concatenate([part.numpy() for part in mean._values]), 11).interval


@pytest.mark.parametrize(("count", "blocks"), [(1, 1), (19, 19), (70, 24), (1_280, 20), (6_400, 100), (200_000, 1_000)])
def test_blocks_cover_the_text(count: int, blocks: int) -> None:
    values = np.random.default_rng(2).random(count)
    sums, counts = block_mean(values, 1).blocks()
    assert len(sums) == blocks and counts.sum() == count
    assert sums.sum() == pytest.approx(values.sum()) and counts.max() - counts[:-1].min(initial=counts.max()) == 0


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    """64 equal numbers in a row are one: the interval covers the truth as often as it says, the independent one not."""
    covered = {"blocks": 0, "independent": 0}
    for seed in range(100):
        values = np.repeat(np.random.default_rng(seed).exponential(size=100), 64)
        independent = Mean()
        independent.add(torch.from_numpy(values))
        for name, (low, high) in (("blocks", block_mean(values).interval), ("independent", independent.interval)):
            covered[name] += low <= 1 <= high
    assert covered["blocks"] >= 88 and covered["independent"] < 40


def test_full_agreement_is_not_certainty() -> None:
    mean = BlockMean()
    mean.add(AGREED)
    low, high = mean.fraction_interval
    assert mean.interval == (1, 1) and high == 1 and 0.98 < low < 1
